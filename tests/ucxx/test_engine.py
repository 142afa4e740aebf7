import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from asyncdp.errors import DataPlaneClosed, DataPlaneUnsupported
from asyncdp.transports.ucxx.wire.engine import Engine
from tests.ucxx.hosts import needs_ucx

pytestmark = [pytest.mark.anyio, *needs_ucx()]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Engine, Any, Any]]:
    """Give an engine with both ends of a connection to itself."""
    engine = Engine(devices="lo")
    arrived: asyncio.Future[Any] = engine.loop.create_future()
    port = engine.listen(arrived.set_result)
    near = engine.connect("127.0.0.1", port)
    token = np.arange(16, dtype=np.uint8)
    sent = engine.send_token(near, token)
    far = await arrived
    got = np.zeros(16, np.uint8)
    await engine.receive_token(far, got).wait()
    await sent.wait()
    assert np.array_equal(got, token)
    yield engine, near, far
    engine.abandon(near)
    engine.abandon(far)
    await engine.close()


@pytest.mark.parametrize("size", [1, 1000, 100_000, 5 << 20])
async def test_messages_come_whole(pair: tuple[Engine, Any, Any], size: int) -> None:
    """Small ones at once, large ones by rendezvous; sent before or after the receive was posted."""
    engine, near, far = pair
    sent = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    for receive_first in (True, False):
        got, tag = np.zeros(size, np.uint8), engine.next_tag()
        if receive_first:
            receiving, sending = engine.receive(far, tag, got), engine.send(near, tag, sent)
        else:
            sending = engine.send(near, tag, sent)
            await asyncio.sleep(0.01)
            receiving = engine.receive(far, tag, got)
        await receiving.wait()
        await sending.wait()
        assert np.array_equal(got, sent)
    assert engine.under_way == 0


async def test_a_receive_that_was_given_up_stays_pinned_until_ucx_is_done(pair: tuple[Engine, Any, Any]) -> None:
    """T3: cancelled and its buffer dropped by everybody else: held until the request has ended, then let go."""
    engine, _, far = pair
    got = np.zeros(1 << 20, np.uint8)
    operation = engine.receive(far, engine.next_tag(), got)
    waiting = asyncio.ensure_future(operation.wait())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.under_way == 1
    assert operation.keep is not None
    engine.abandon(far)
    assert await engine.drained()
    assert operation.ended.done()
    assert operation.keep is None


async def test_many_cancels_in_mid_transfer(pair: tuple[Engine, Any, Any]) -> None:
    """Each gives the connection up; nothing crashes, nothing stays under way."""
    engine, _, _ = pair
    accepted: asyncio.Queue[Any] = asyncio.Queue()
    port = engine.listen(accepted.put_nowait)
    for number in range(20):
        near = engine.connect("127.0.0.1", port)
        await engine.send_token(near, np.zeros(16, np.uint8)).wait()
        far = await accepted.get()
        await engine.receive_token(far, np.zeros(16, np.uint8)).wait()
        tag = engine.next_tag()
        sending = engine.send(near, tag, np.ones(8 << 20, np.uint8))
        receiving = asyncio.ensure_future(engine.receive(far, tag, np.zeros(8 << 20, np.uint8)).wait())
        await asyncio.sleep(0.0002 * number)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        engine.abandon(far)
        engine.abandon(near)
        del sending
    assert await engine.drained()


async def test_an_error_of_the_line_is_raised(pair: tuple[Engine, Any, Any]) -> None:
    """The peer gives the connection up while a receive waits."""
    engine, near, far = pair
    operation = engine.receive(far, engine.next_tag(), np.zeros(100, np.uint8))
    await asyncio.sleep(0.01)
    engine.abandon(near)
    async with asyncio.timeout(60):
        (err,) = await asyncio.gather(operation.wait(), return_exceptions=True)
    assert type(err).__name__.startswith("UCXX")


async def test_an_engine_at_rest_does_not_poll(pair: tuple[Engine, Any, Any]) -> None:
    """A receive waits: no processor time."""
    engine, _, far = pair
    operation = engine.receive(far, engine.next_tag(), np.zeros(100, np.uint8))
    await asyncio.sleep(0.1)
    spent = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - spent < 0.5  # polling takes all of the second
    engine.abandon(far)
    await engine.drained()
    assert operation.completed


async def test_memory_that_cannot_be_received_into_is_refused(pair: tuple[Engine, Any, Any]) -> None:
    """Read-only and strided arrays: UCX would overwrite them without a word."""
    engine, _, far = pair
    frozen = np.zeros(10, np.uint8)
    frozen.flags.writeable = False
    for wrong in (frozen, np.zeros(20, np.uint8)[::2]):
        with pytest.raises(ValueError, match="writable, contiguous"):
            engine.receive(far, engine.next_tag(), wrong)


async def test_a_closed_engine_says_so() -> None:
    """Twice is fine; afterwards nothing can be posted."""
    engine = Engine(devices="lo")
    await engine.close()
    await engine.close()
    with pytest.raises(DataPlaneClosed):
        engine.connect("127.0.0.1", 1)


def test_one_engine_per_loop_and_again_in_the_next() -> None:
    """T9: asyncio.run twice in one process."""

    async def once() -> None:
        await Engine(devices="lo").close()

    asyncio.run(once())
    asyncio.run(once())


async def test_in_a_process_that_was_forked_after_use_it_says_so(pair: tuple[Engine, Any, Any]) -> None:
    """T9: there every connect would time out; the parent goes on."""
    engine, near, far = pair
    child = os.fork()
    if not child:
        code = 1
        try:
            Engine(devices="lo")
        except DataPlaneUnsupported as err:
            code = 0 if "fork" in str(err) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222 - it ends at once
    tag, got = engine.next_tag(), np.zeros(4, np.uint8)
    receiving, sending = engine.receive(far, tag, got), engine.send(near, tag, np.ones(4, np.uint8))
    await receiving.wait()
    await sending.wait()
    assert got.tolist() == [1] * 4


GARBAGE = """
import os, gc
gc.disable()
os.register_at_fork(after_in_child=gc.collect)  # registered first, so it runs before any hook of asyncdp
import asyncio
import numpy as np
from asyncdp.transports.ucxx.wire.engine import Engine

async def main():
    engine = Engine(devices="lo")
    arrived = engine.loop.create_future()
    near = engine.connect("127.0.0.1", engine.listen(arrived.set_result))
    await engine.send_token(near, np.zeros(16, np.uint8)).wait()
    far = await arrived
    await engine.receive_token(far, np.zeros(16, np.uint8)).wait()
    await engine.close()
    cycle = [near, far]
    cycle.append(cycle)

asyncio.run(main())
child = os.fork()
if not child:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
gc.collect()
"""


def test_a_child_that_collects_garbage_destroys_no_connection_of_its_parent() -> None:
    """T9: UCX's destructors act on epoll descriptors that both share; the parent's UCX would then end it by SIGABRT."""
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("lane", ["auto", "off"])
def test_ucx_is_loaded_when_a_client_that_needs_it_is_opened(lane: str) -> None:
    """Not in its first read, of which loading would take half a second; and not at all where shared memory may do."""
    config = {"enabled": True, "impl": "ucxx", "controller_address": "unix:///nowhere", "ucxx": {"lane": lane}}
    program = f"""
import sys
from asyncdp.transports.ucxx import UCXXTransport
UCXXTransport({config!r}, bootstrap=False)
print("ucxx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(lane == "off")
