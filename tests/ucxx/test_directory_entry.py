"""A slot host and the directory in Valkey, together."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import HostRef, Publish, SlotRef
from tests.ucxx.hosts import hosted, pool_of, put_over, ref_of, spawned
from tests.ucxx.segments import rows

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio


async def publish(directory: "Directory", refs: Any, ids: tuple[str, ...]) -> Any:
    """Make slots of float rows the content of samples."""
    from asyncdp.transports.ucxx.directory import OperationId

    specs = rows(1).observed()
    nbytes = {"a": (32,) * len(ids)}
    return await directory.publish(
        OperationId(f"publish-{ids[0]}", 30.0), Publish(ids, "p", refs, None, specs, nbytes), "me"
    )


async def register(directory: "Directory") -> None:
    """Declare a partition."""
    await directory.register(RegisterPartition("p", ("a",), 10, ()))


async def test_a_host_is_found_and_what_is_nobody_s_is_taken_back(connect: "Callable[..., Directory]") -> None:
    """Its report is in the directory; what was published is kept, unpublished and cleared rows go, by that clock."""
    from asyncdp.transports.ucxx.client.directory_entry import HostEntry
    from asyncdp.transports.ucxx.directory import OperationId

    directory = connect()
    await register(directory)
    async with hosted(HostEntry(directory), grace_s=1.0, beat_s=0.02) as host:
        (info,) = await directory.hosts()
        assert (info.ref, info.arena, info.alive) == (ref_of(host.report()), host.arena.name, True)
        here, table = info.ref, host.service.table
        kept: list[SlotRef] = []
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                for op in ("kept", "lost"):
                    made = await connection.reserve(here, op, ("a",), [32, 32], 0, ttl_s=0.01, wait_s=0, lane=False)
                    slot, generation, _, _ = made.grants[0]
                    refs = (SlotRef(here, slot, generation, ("a",), range(2), range(2)),)
                    await connection.write(here, op, refs, rows(2))
                    kept = kept or list(refs)
        await publish(directory, kept, ("s", "t"))
        async with asyncio.timeout(60):
            while list(table.slots) != [kept[0].slot]:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.02)
            slot = table.slots[kept[0].slot]
            assert slot.live(host.arena)[:, 0].tolist() == [1, 1]
            await directory.clear(OperationId("clear", 30.0), "p", ("s",))
            while slot.live(host.arena)[:, 0].tolist() != [0, 1]:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
    assert not await directory.hosts()


@pytest.mark.slow
async def test_a_killed_host_comes_back_with_its_rows(
    server: "EmbeddedServer", connect: "Callable[..., Directory]", namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process: known by the directory's URL from the environment; the same epoch after the kill."""
    monkeypatch.setenv("ASYNCDP_DIRECTORY", server.url)
    directory = connect()
    await register(directory)
    name = f"killed-{os.getpid()}"
    with spawned(namespace, host_id=name) as host, pool_of() as pool:
        async with pool.use("127.0.0.1", host.ref.ports[0]) as connection:
            refs = await put_over(connection, host.ref, "op", rows(1, fill=6.0))
        await publish(directory, refs, ("s",))
        host.signal(signal.SIGKILL)
        await host.gone()
        with spawned(namespace, host_id=name) as again:
            located = await directory.locate("p", ("s",), ("a",), None)
            assert located.refs[0].host.epoch == host.ref.epoch == again.ref.epoch
            assert (await directory.hosts())[0].ref == again.ref
            async with pool.use("127.0.0.1", again.ref.ports[0]) as connection:
                part = (await connection.read(again.ref, located.refs)).parts[0]
            assert part.block.columns["a"].values.eq(6.0).all()  # type: ignore[attr-defined]


async def test_a_host_runs_without_torch(
    connect: "Callable[..., Directory]", server: "EmbeddedServer", namespace: str
) -> None:
    """To ask which of its rows are live does not import torch, 128 MiB and seconds in which the host stands still."""
    from asyncdp.transports.ucxx.directory import OperationId

    directory = connect()
    await register(directory)
    here = HostRef("h", 3, ())
    await publish(directory, (SlotRef(here, 5, 7, ("a",), range(2), range(2)),), ("s", "t"))
    await directory.clear(OperationId("clear", 30.0), "p", ["s"])
    program = f"""
import asyncio, sys
from asyncdp.transports.ucxx.client.directory_entry import HostEntry
from asyncdp.transports.ucxx.directory import Directory, DirectorySettings
import asyncdp.transports.ucxx.host.main
async def main():
    directory = Directory({server.url!r}, settings=DirectorySettings(namespace={namespace!r}))
    print(await HostEntry(directory).live("h", 3), "torch" in sys.modules)
    await directory.close()
asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "{(5, 7): {1}} False"
