"""The commands of the command line attach to a plane on TransferQueue by a config file, without Ray."""

import json
from pathlib import Path

import anyio.to_thread
import pytest

from asyncdp import Client
from tests.cli import faulty_planes
from tests.cli.test_real_planes import check, fill, use
from tests.transfer_queue.servers import Servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.anyio
async def test_on_transfer_queue(tq_plane: Client, tmp_path: Path) -> None:
    """Each command, from an event loop of its own."""
    file = tmp_path / "plane.json"
    file.write_text(json.dumps(tq_plane.attach_config()))
    await fill(tq_plane)
    await anyio.to_thread.run_sync(use, file)


def test_each_command_says_what_is_wrong_with_a_plane_in_trouble(servers: Servers) -> None:
    """A controller that is paused or killed, a unit that is killed: in a line, in time, with the code that fits."""
    check(list(faulty_planes.transfer_queue(servers)))
