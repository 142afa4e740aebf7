"""Many who connect and say nothing, and what is told of them: clients are let in, the log is bounded and harmless."""

import asyncio
import contextlib
import errno
import io
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import structlog

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.transports.ucxx.host import port as ports
from asyncdp.transports.ucxx.host import session as sessions
from asyncdp.transports.ucxx.host.limits.endpoint_tokens import Claims
from asyncdp.transports.ucxx.host.limits.eviction import source_of, to_evict
from asyncdp.transports.ucxx.host.limits.pending_connections import PendingConnections
from asyncdp.transports.ucxx.host.operator_log import Seldom, log_to
from asyncdp.transports.ucxx.host.ucx_watchdog import most_sessions
from asyncdp.transports.ucxx.slots.writer_process import this_machine, this_process
from asyncdp.transports.ucxx.wire import control as controls
from asyncdp.transports.ucxx.wire.control import Control
from asyncdp.transports.ucxx.wire.handshake import Secret, authenticate, greet
from asyncdp.transports.ucxx.wire.messages import Answer, Read, SlotRows, Welcome, pack_frame, unpack_body
from tests.ucxx.hosts import SECRET, hosted, pool_of, put_over, ref_of
from tests.ucxx.segments import rows

pytestmark = pytest.mark.anyio
LOCAL = "127.0.0.1"
LIBRARIES = ("asyncio", "ucx", "ucxx")


@pytest.fixture
def logged() -> Iterator[None]:
    """Leave logging as it was."""
    loggers, raises = [logging.getLogger(name) for name in LIBRARIES], logging.raiseExceptions
    filters, config = [list(logger.filters) for logger in loggers], structlog.get_config()
    yield
    for logger, before in zip(loggers, filters, strict=True):
        logger.filters[:] = before
    logging.raiseExceptions = raises
    structlog.configure(**config)


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)


async def test_silent_connections_do_not_keep_clients_out() -> None:
    """A10: however many strangers hold a connection, 96 are kept, and who proves itself at once is let in."""
    async with hosted(greeting_s=60.0) as host:
        here = ref_of(host.report())
        silent = [await asyncio.open_connection(LOCAL, here.ports[0]) for _ in range(200)]
        for _ in range(3):
            with pool_of() as pool:
                async with asyncio.timeout(60), pool.use(LOCAL, here.ports[0]) as connection:
                    assert (await connection.ask())["epoch"] == here.epoch
        assert len(host._sessions) <= 3
        assert len(host._pending_connections._pending) <= 96
        said = []
        for _ in range(150):
            said.append(await asyncio.open_connection(LOCAL, here.ports[0]))
            said[-1][1].write(b"ADPW")
        await until(lambda: len(host._strangers) >= 96)
        with pool_of() as pool:
            async with asyncio.timeout(20), pool.use(LOCAL, here.ports[0]) as connection:
                assert (await connection.ask())["epoch"] == here.epoch
        assert len(host._strangers) <= 96
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
    for name in LIBRARIES:  # they format what differs into their texts
        records = [logging.LogRecord(name, 40, "", 0, f"error {n} at a listener", None, None) for n in range(100)]
        assert sum(bool(logging.getLogger(name).filter(record)) for record in records) == 20
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


async def _enter(port: int) -> Control:
    """A client that was let in and reads nothing from now on; its kernel takes few bytes."""
    sock, control, loop = socket.socket(), Control(), asyncio.get_running_loop()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(0.0)
    await loop.sock_connect(sock, (LOCAL, port))
    await loop.create_connection(lambda: control, sock=sock)
    await authenticate(control, SECRET, this_machine(), this_process(), b"c" * 16)
    control._transport.pause_reading()
    return control


async def test_a_client_that_does_not_take_its_reply_is_let_go_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """U21: its connection is reset, and nothing that it did not take is kept: neither by the host nor by the kernel."""
    monkeypatch.setattr(sessions, "_TAKES_S", 0.1)
    monkeypatch.setattr(sessions, "_TAKES_BYTES", 1 << 40)
    async with hosted(arena_bytes=32 << 20, max_slot_bytes=16 << 20, inline_bytes=8 << 20) as host:
        here, streams = ref_of(host.report()), host._ports[0]._streams
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                (ref,) = await put_over(connection, here, "op", rows(1, 7 << 18))
        await until(lambda: not host._sessions)
        control = await _enter(here.ports[0])
        stream = next(stream for stream in streams if not stream.lost)
        await control.send(Read([("a",)], [SlotRows(ref.slot, ref.generation, 0, 0, 1)], 0, here.epoch))
        await until(lambda: stream._full)
        await until(lambda: not host._sessions)
        for _ in range(3):
            await asyncio.sleep(0)
        assert stream._transport.get_write_buffer_size() == 0
        control._transport.resume_reading()
        await until(lambda: control.lost)
        assert isinstance(control.why, ConnectionResetError)


async def test_a_stream_that_is_closed_in_order_ends_though_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """U21: what was sent before may be taken for some seconds, not for ever."""
    monkeypatch.setattr(controls, "_CLOSES_S", 0.1)
    served: list[Control] = []
    server = await asyncio.get_running_loop().create_server(lambda: Control(served.append), LOCAL, 0)
    with socket.create_connection(server.sockets[0].getsockname()) as silent:
        await until(lambda: bool(served))
        served[0]._transport.write(bytes(32 << 20))
        served[0].close()
        served[0].close()
        assert not served[0].lost
        await until(lambda: served[0].lost)
        await until(lambda: served[0]._transport.get_write_buffer_size() == 0)
        assert silent.fileno() >= 0
    server.close()


class Nowhere:
    """A transport whose socket tells no address."""

    aborted = False

    def get_extra_info(self, name: str) -> None:
        """Tell nothing."""

    def abort(self) -> None:
        """Be closed."""
        self.aborted = True

    close = abort


@pytest.mark.parametrize(
    ("peer", "served"),
    [("127.0.0.1", True), ("::1", True), ("", False), ("10.9.9.9", False), ("fe80::1%eth0", False), ("a name", False)],
)
async def test_without_a_secret_only_who_is_known_to_be_local_is_served(peer: str, *, served: bool) -> None:
    """A1: a peer of an unknown address is not local; nothing of a request that it sent along is looked at."""
    sent: list[bytes] = []
    transport = Nowhere()
    transport.write = sent.append  # type: ignore[attr-defined]
    secret, control = Secret(""), Control(challenge=b"h" * 32, peer_address=(peer, 4711))
    control.connection_made(transport)  # type: ignore[arg-type]
    control.data_received(pack_frame(Answer(b"n" * 32, secret.proof(b"client", b"h" * 32, b"n" * 32), b"c" * 16)))
    welcome = Welcome(b"\0" * 32, "h", 1, "", "", 0, b"t" * 16, 1.0, 0)
    if served:
        await greet(control, secret, lambda: welcome)
    else:
        with pytest.raises(DataPlaneUnavailable, match="its own machine only"):
            await greet(control, secret, lambda: welcome)
    assert isinstance(unpack_body(sent[0][12:]), Welcome) is served
    control.end()


async def test_the_address_of_a_peer_is_that_of_the_accept() -> None:
    """A1: a peer that resets its connection at once takes its address from the socket, not from the stream."""
    made: list[Control] = []
    pending = PendingConnections(60.0)
    with socket.create_server((LOCAL, 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        sock, address = listening.accept()
        pending.enter(sock, made.append, address)
        peer.sendall(pack_frame(Answer(b"n" * 32, b"p" * 32)))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.recv(500)
        peer.close()
        await until(lambda: bool(made) or not (pending._pending or pending._entering))
        for control in made:
            assert control.peer_address == address
            control.end()


def test_who_makes_room_is_of_the_source_that_has_the_most() -> None:
    """A10: an address, a network of IPv6, loopback: whoever is alone at its own is not the one."""
    assert len({source_of(peer) for peer in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")}) == 1
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:2") != source_of("2001:db8:0:1::1")
    assert len({source_of(peer) for peer in ("10.0.0.1", "10.0.0.2", "fe80::1%eth0", "", "127.0.0.1")}) == 5
    crowd = [(f"s{number}", "10.0.0.9") for number in range(9)] + [(f"t{number}", "10.0.0.8") for number in range(8)]
    chosen = {to_evict(dict([("honest", "10.0.0.1"), *crowd])) for _ in range(300)}
    assert chosen == {"s0", "s1"}  # now this, now that, so no client can be aimed at; the youngest stay
    assert to_evict({"a": "10.0.0.1", "b": "10.0.0.2"}) == "a"


async def test_strangers_elsewhere_do_not_cut_off_a_client_that_is_slow() -> None:
    """A10: hundreds that connect between its challenge and its answer do not close it."""
    made: list[Control] = []
    pending = PendingConnections(60.0)
    with socket.create_server((LOCAL, 0)) as listening:

        def comes(address: str) -> socket.socket:
            peer = socket.create_connection(listening.getsockname())
            sock, _ = listening.accept()
            pending.enter(sock, made.append, (address, 4711))
            return peer

        honest = comes("10.0.0.1")
        strangers = [comes("10.6.6.6") for _ in range(200)]
        assert len(pending._pending) <= 96
        honest.sendall(b"ADPW")
        await until(lambda: bool(made))
        assert made[0].peer == "10.0.0.1"
        made[0].end()
        pending.clear()
        for sock in (honest, *strangers):
            sock.close()


async def test_sessions_of_strangers_elsewhere_do_not_cut_off_a_client() -> None:
    """A10: the same among those that have said something and not proved themselves."""
    async with hosted(greeting_s=60.0) as host:

        def comes(address: str) -> Nowhere:
            transport, control = Nowhere(), Control(host._serve, b"h" * 32, (address, 4711))
            control.connection_made(transport)  # type: ignore[arg-type]
            return transport

        honest = comes("10.0.0.1")
        for _ in range(200):
            comes("10.6.6.6")
        assert len(host._strangers) <= 96
        await asyncio.sleep(0)
        assert not honest.aborted


async def test_silent_ucx_connections_make_room_for_the_next() -> None:
    """A10: of 64 without a token the oldest is closed, so a client that connects later can show its own."""

    class Received:
        def __init__(self, *, shown: bool) -> None:
            self._shown = shown

        async def wait(self) -> None:
            if not self._shown:
                await asyncio.get_running_loop().create_future()

    class Engine:
        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()
            self.abandoned: list[int] = []
            self.shows: dict[int, bytes] = {}

        def abandon(self, endpoint: int) -> None:
            self.abandoned.append(endpoint)

        def receive_token(self, endpoint: int, buffer: Any) -> Received:
            buffer[:] = list(self.shows.get(endpoint, b"\0" * 16))
            return Received(shown=endpoint in self.shows)

    engine: Any = Engine()
    claims = Claims(engine, 60.0)
    for number in range(70):
        claims.accept(number)
        await asyncio.sleep(0)
    token, arrived = claims.give()
    engine.shows[1000] = token
    claims.accept(1000)
    async with asyncio.timeout(20):
        assert await arrived == 1000
    await asyncio.sleep(0.01)
    claims.accept(1001)  # the one that has shown its token is not among those that make room
    await asyncio.sleep(0.01)
    assert engine.abandoned == list(range(7))
    await claims.close()
    assert not claims._tasks


@pytest.mark.usefixtures("logged")
def test_what_a_peer_sent_cannot_write_lines_of_its_own() -> None:
    """A10: control characters of texts are removed, and long ones are cut."""
    out = io.StringIO()
    log_to(out)
    structlog.get_logger().warning("a peer", why="\x1b[31mred\nERROR a line\r\u2028of its own" + "x" * 5000)
    assert "\x1b" not in out.getvalue()
    assert len(out.getvalue().splitlines()) == 1
    assert len(out.getvalue()) < 1500
