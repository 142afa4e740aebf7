"""Many who connect and say nothing, and what is told of them: clients are let in, the log is bounded and harmless."""

import asyncio
import contextlib
import errno
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import structlog

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.transports.ucxx.host import port as ports
from asyncdp.transports.ucxx.host.operator_log import Seldom, log_to
from asyncdp.transports.ucxx.host.ucx_watchdog import most_sessions
from tests.ucxx.hosts import hosted, pool_of, ref_of

pytestmark = pytest.mark.anyio
LOCAL = "127.0.0.1"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Hosts are asyncio's."""
    return "asyncio"


@pytest.fixture
def logged() -> Iterator[None]:
    """Leave logging as it was."""
    asyncios, raises = logging.getLogger("asyncio"), logging.raiseExceptions
    filters, config = list(asyncios.filters), structlog.get_config()
    yield
    asyncios.filters[:] = filters
    logging.raiseExceptions = raises
    structlog.configure(**config)


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)


async def test_silent_connections_do_not_keep_clients_out() -> None:
    """A10: however many strangers hold a connection, 64 are kept, and who proves itself at once is let in."""
    async with hosted(greeting_s=60.0) as host:
        here = ref_of(host.report())
        silent = [await asyncio.open_connection(LOCAL, here.ports[0]) for _ in range(200)]
        for _ in range(3):
            with pool_of() as pool:
                async with asyncio.timeout(60), pool.use(LOCAL, here.ports[0]) as connection:
                    assert (await connection.ask())["epoch"] == here.epoch
        assert len(host._sessions) <= 3
        assert len(host._pending_connections._pending) <= 64
        said = [await asyncio.open_connection(LOCAL, here.ports[0]) for _ in range(100)]
        for _, writer in said:
            writer.write(b"ADPW")
        await until(lambda: len(host._strangers) >= 64)
        with pool_of() as pool:
            async with asyncio.timeout(20), pool.use(LOCAL, here.ports[0]) as connection:
                assert (await connection.ask())["epoch"] == here.epoch
        assert len(host._strangers) <= 64
        for _, writer in silent + said:
            writer.close()


async def test_who_says_nothing_is_let_go() -> None:
    """A10: after ``greeting_s``, when it hangs up, and when its port is closed; nothing of it stays."""
    async with hosted(greeting_s=0.2) as host:
        here = ref_of(host.report())
        reader, writer = await asyncio.open_connection(LOCAL, here.ports[0])
        async with asyncio.timeout(20):
            challenge = await reader.read()  # until the host closes it
        assert challenge.startswith(b"ADPW")
        writer.close()
    async with hosted(greeting_s=60.0) as host:
        here, pending = ref_of(host.report()), host._pending_connections._pending
        made = [await asyncio.open_connection(LOCAL, port) for port in here.ports for _ in range(3)]
        await until(lambda: len(pending) == len(made))
        made[0][1].close()
        await until(lambda: len(pending) == len(made) - 1)
        host.fail_port(1)
        await until(lambda: len(pending) == len(made) - 4)
        for _, writer in made:
            writer.close()
        await until(lambda: not pending)
    assert host._pending_connections._timer is None


async def test_a_port_accepts_again_when_there_are_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: a connection for which there is no descriptor is told of, and accepted later; the host serves on."""
    monkeypatch.setattr(ports, "_AGAIN_S", 0.05)
    async with hosted() as host:
        here, refused = ref_of(host.report()), 0
        accept = ports.socket.socket.accept

        def fails(self: Any) -> Any:
            nonlocal refused
            refused += 1
            if refused <= 2:
                raise OSError(errno.EMFILE, "too many open files")
            return accept(self)

        monkeypatch.setattr(ports.socket.socket, "accept", fails)
        with pool_of() as pool:
            async with asyncio.timeout(20), pool.use(LOCAL, here.ports[0]) as connection:
                assert (await connection.ask())["epoch"] == here.epoch
        assert refused > 2


async def test_sessions_are_as_many_as_there_are_descriptors_for() -> None:
    """A10: beyond that a connection is refused at once; when one ends, the next is served."""
    assert 16 <= most_sessions() <= 1 << 20
    async with hosted() as host:
        host._most_sessions = 4
        here = ref_of(host.report())
        async with AsyncExitStack() as held:
            pool = held.enter_context(pool_of(per_port=8))
            made = [await held.enter_async_context(pool.use(LOCAL, here.ports[0])) for _ in range(4)]
            with pytest.raises(DataPlaneUnavailable):
                async with pool.use(LOCAL, here.ports[0]):
                    pass
            assert (await made[0].ask())["epoch"] == here.epoch
            made[0].spend()
            await until(lambda: len(host._sessions) < 4)
            async with pool.use(LOCAL, here.ports[0]) as connection:
                await connection.ask()
            for one in made:
                one.spend()


async def test_work_of_the_host_that_ends_is_told_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: a heartbeat whose own report of a failure fails is not the last one."""
    from asyncdp.transports.ucxx.host import host as hosts

    monkeypatch.setattr(hosts, "_AGAIN_S", 0.01)
    async with hosted(beat_s=0.01) as host:
        beats, failing = 0, True

        async def beat(report: Any) -> float:
            del report
            nonlocal beats
            beats += 1
            if failing:
                raise RuntimeError("no descriptor")
            return 0.0

        class Broken:
            def __getattr__(self, name: str) -> Any:
                raise OSError("the log cannot be written")

        monkeypatch.setattr(host._directory, "beat", beat)
        log, host._log = host._log, Broken()
        await until(lambda: beats >= 5)
        host._log, failing, before = log, False, beats
        await until(lambda: beats >= before + 3)


def test_lines_of_a_kind_are_bounded_and_counted() -> None:
    """A10: twenty in ten seconds; then what was left out is told with the next; other kinds are told meanwhile."""
    now = 0.0
    seldom = Seldom(lambda: now)
    told = [seldom.left_out("a connection was closed") for _ in range(1000)]
    assert told[:20] == [0] * 20
    assert set(told[20:]) == {None}
    assert seldom.left_out("a heartbeat failed") == 0
    now = 11.0
    assert seldom.left_out("a connection was closed") == 980
    assert seldom.left_out("a connection was closed") == 0
    told = [seldom.left_out("a connection was closed") for _ in range(18)]
    with pytest.raises(structlog.DropEvent):
        seldom(None, "info", {"event": "a connection was closed"})


def fails(log: Any, text: str) -> None:
    """Log an exception."""
    try:
        int(text)
    except ValueError:
        log.exception("a failure")


@pytest.mark.usefixtures("logged")
def test_the_log_of_an_operator_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: a closed file, a renderer that fails, a library that floods: who logs goes on."""
    out = io.StringIO()
    log_to(out)
    log = structlog.get_logger("asyncdp.ucxx").bind(host="h")
    for number in range(100):
        log.warning("a stranger", number=number)
    fails(log, "shown")
    assert out.getvalue().count("a stranger") == 20
    assert "ValueError: invalid" in out.getvalue()
    records = [logging.LogRecord("asyncio", 40, "", 0, "socket.accept() failed", None, None) for _ in range(100)]
    asyncios = logging.getLogger("asyncio")
    assert sum(bool(asyncios.filter(record)) for record in records) == 20
    monkeypatch.setattr(structlog.dev, "plain_traceback", lambda *_: 1 / 0)
    log_to(out)
    fails(structlog.get_logger(), "hidden")
    assert "a failure (ZeroDivisionError" in out.getvalue()
    out.close()
    structlog.get_logger().error("nobody reads this")
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w")
    log_to(broken)
    structlog.get_logger().error("nobody reads this either")
    with contextlib.suppress(BrokenPipeError):  # what could not be written is tried once more
        broken.close()
