"""Users of the server who may do less than everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncdp.calls import RegisterPartition
from tests.ucxx.test_directory import op, put

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def worker(server: EmbeddedServer, connect: Callable[..., Directory]) -> Directory:
    """A client whose user may use no channels: what Valkey gives a new user by itself."""
    admin = connect()
    await admin._link.command("ACL", "SETUSER", "nochannels", "on", ">pw", "resetchannels", "~*", "+@all")
    return connect(f"unix://nochannels:pw@{server.folder / 'valkey.sock'}")


async def test_what_was_done_is_no_error_where_notices_may_not_be_sent(worker: Directory) -> None:
    """A notice only saves others a look: a mutation whose notice is refused has happened, and says so."""
    await worker.register(RegisterPartition("p", ("x",), 64, ("t",)))
    await put(worker, ["a"])
    batch = await worker.claim(op("claim"), "p", "t", ["x"], 1, 1, "me")
    assert batch.meta.sample_ids == ["a"]
    await worker.abandon("p", "claim")
    assert (await worker.clear(op(), "p", ["a"])).count == 1


async def test_who_may_not_hear_notices_looks_by_itself(
    worker: Directory, connect: Callable[..., Directory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits no longer than it was told, and finds what was put meanwhile; it asks once to hear, not at each look."""
    monkeypatch.setattr("asyncdp.transports.ucxx.directory.notices.CONFIRM_S", 60.0)
    await worker.register(RegisterPartition("p", ("x",), 64, ("t",)))
    with anyio.fail_after(5):
        assert (await worker.claim(op(), "p", "t", ["x"], 1, 1, "me", wait_s=0.2)).meta.size == 0
    asked = (await worker._link.command("INFO", "commandstats")).decode().split("cmdstat_subscribe:")[1]

    async def soon() -> None:
        await anyio.sleep(0.05)
        await put(connect(), ["a"])

    async with anyio.create_task_group() as group:
        group.start_soon(soon)
        with anyio.fail_after(10):
            assert (await worker.claim(op(), "p", "t", ["x"], 1, 1, "me", wait_s=9)).meta.sample_ids == ["a"]
    again = (await worker._link.command("INFO", "commandstats")).decode().split("cmdstat_subscribe:")[1]
    assert asked.split("rejected_calls=")[1].split(",")[0] == again.split("rejected_calls=")[1].split(",")[0]
