"""The commands of the command line attach to a plane on TransferQueue by a config file, without Ray."""

import json
from pathlib import Path

import anyio.to_thread
import pytest

from asyncdp import Client
from tests.cli.test_real_planes import fill, use

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.anyio
async def test_on_transfer_queue(tq_plane: Client, tmp_path: Path) -> None:
    """Each command, from an event loop of its own."""
    file = tmp_path / "plane.json"
    file.write_text(json.dumps(tq_plane.attach_config()))
    await fill(tq_plane)
    await anyio.to_thread.run_sync(use, file)
