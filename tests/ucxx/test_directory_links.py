"""How the directory is reached: TLS, users of an ACL, servers that are too old, URLs that are none."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio
import pytest

from asyncdp import stack
from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import Publish
from asyncdp.errors import DataPlaneBadRequest, DataPlaneUnavailable, DataPlaneUnsupported

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio
Connect = Callable[..., "Directory"]


def mutation(name: str) -> Any:
    """Name a mutation."""
    from asyncdp.transports.ucxx.directory import OperationId

    return OperationId(name, 10.0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for localhost, ``s.crt``, and that of who vouches for it, ``ca.crt``."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the program openssl, which is not here")
    folder = tmp_path_factory.mktemp("tls")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    new = "req -newkey rsa:2048 -nodes -subj"
    for command in (
        f"{new} /CN=ca -x509 -days 2 -keyout ca.key -out ca.crt",
        f"{new} /CN=localhost -keyout s.key -out s.csr",
        "x509 -req -in s.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out s.crt",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


class Relay:
    """Carries connections on.

    Attributes:
        port: On loopback.
        open: Connections whose clients have not closed them.
        deaf: Whether it swallows what clients say from now on.
    """

    def __init__(self, onwards: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]) -> None:
        self.port = 0
        self.open = 0
        self.deaf = False
        self._onwards = onwards
        self._back: set[asyncio.Future[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        near, far = await self._onwards()
        back = asyncio.ensure_future(self._carry(near, writer, client=False))
        self._back.add(back)
        await self._carry(reader, far, client=True)
        self.open -= 1

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not (client and self.deaf):
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()

    @asynccontextmanager
    async def listening(self, context: ssl.SSLContext | None = None) -> AsyncIterator[Self]:
        """Listen on loopback."""
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield self
            await self.all_closed()
        finally:
            listener.close()
            await asyncio.gather(listener.wait_closed(), *self._back)

    async def all_closed(self) -> None:
        """Wait until no client has a connection."""
        with anyio.fail_after(60):
            while self.open:  # noqa: ASYNC110 - what is looked at has no event
                await anyio.sleep(0.01)


@asynccontextmanager
async def tunnel(server: "EmbeddedServer", certificates: Path) -> AsyncIterator[Relay]:
    """Something that speaks TLS before a server that has none, as stunnel does."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "s.crt", certificates / "s.key")
    made = Relay(lambda: asyncio.open_unix_connection(server.folder / "valkey.sock"))
    async with made.listening(context):
        yield made


async def user(connect: Connect, server: "EmbeddedServer", name: str, *rules: str) -> None:
    """Make a user of an ACL."""
    await connect(server.url)._link.command("ACL", "SETUSER", name, "reset", "on", ">pw", "~*", "&*", *rules)


async def test_a_user_over_tls(server: "EmbeddedServer", connect: Connect, certificates: Path) -> None:
    """rediss:// with a user of an ACL and a certificate that is checked: all verbs work, and close leaves nothing."""
    await user(connect, server, "tls", "+@all", "-@dangerous", "+info")
    async with tunnel(server, certificates) as door:
        directory = connect(f"rediss://tls:pw@localhost:{door.port}/0?ssl_ca_certs={certificates / 'ca.crt'}")
        await directory.register(RegisterPartition("p", (), 1, ("t",)))
        await directory.publish(mutation("put"), Publish(("a", "b"), "p", (), ({"k": 1},) * 2, {}), "me")
        waits = asyncio.ensure_future(directory.claim(mutation("c"), "p", "t", [], 3, 3, "me", wait_s=60.0))
        await directory.publish(mutation("more"), Publish(("c",), "p", (), ({"k": 1},), {}), "me")
        assert (await waits).meta.sample_ids == ["a", "b", "c"]  # the notice came over TLS as well
        assert (await directory.clear(mutation("clear"), "p", ["a"])).count == 1
        await directory.close()


async def test_a_call_cut_off_over_tls_leaves_no_connection(
    server: "EmbeddedServer", connect: Connect, certificates: Path
) -> None:
    """It ends with the call, not when its peer has said goodbye as well."""
    await user(connect, server, "cut", "+@all")
    async with (
        tunnel(server, certificates) as door,
        Relay(lambda: asyncio.open_connection("127.0.0.1", door.port)).listening() as relay,
    ):
        directory = connect(f"rediss://cut:pw@localhost:{relay.port}?ssl_ca_certs={certificates / 'ca.crt'}")
        await directory.ping()
        assert relay.open == 1
        relay.deaf = True
        with anyio.move_on_after(0.05):
            await directory.ping()
        await relay.all_closed()
        relay.deaf = False
        await directory.ping()
        await directory.close()


async def test_a_server_that_nobody_vouches_for(server: "EmbeddedServer", connect: Connect, certificates: Path) -> None:
    """Its certificate is refused, nothing is sent, and the error says why, without the password."""
    async with tunnel(server, certificates) as door:
        directory = connect(f"rediss://:hidden@localhost:{door.port}")
        with pytest.raises(ConnectionRefusedError, match=r"(?i)certificate") as caught:
            await directory.ping()
        assert "hidden" not in str(caught.value)


async def test_a_user_who_may_not_call_functions(server: "EmbeddedServer", connect: Connect) -> None:
    """Refused by the server, told as a bad request by the layers."""
    from redis.exceptions import NoPermissionError

    from asyncdp.transports.ucxx.directory import ERROR_TABLE

    await user(connect, server, "weak", "+@all", "-@scripting")
    directory = connect(f"unix://weak:pw@{server.folder / 'valkey.sock'}")
    with pytest.raises(NoPermissionError) as caught:
        await directory.ping()
    assert type(dict(ERROR_TABLE)["NoPermissionError"](str(caught.value))) is DataPlaneBadRequest


@pytest.fixture
async def old(server: "EmbeddedServer") -> "AsyncIterator[EmbeddedServer]":
    """A server without functions, as Redis was before version 7."""
    del server  # its extras are there
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    class Old(EmbeddedServer):
        """Knows no functions."""

        def _configure(self) -> Path:
            config = super()._configure()
            config.write_text(config.read_text() + 'rename-command FCALL ""\nrename-command FUNCTION ""\n')
            return config

    made = Old()
    await made.start()
    yield made
    await made.stop()


def config_of(url: str) -> dict[str, Any]:
    """A client's config."""
    return {
        "enabled": True,
        "impl": "ucxx",
        "backend": "valkey",
        "storage_capacity": 10,
        "num_storage_units": 1,
        "claim_meta_poll_interval_s": 0.1,
        "controller_address": url,
    }


async def test_a_server_that_is_too_old_is_named(old: "EmbeddedServer") -> None:
    """Every verb of a client says which server it is and what is needed, and does not try again and again."""
    from asyncdp.transports.ucxx import UCXXTransport

    client = stack(UCXXTransport(config_of(old.url), bootstrap=False))
    where = str(old.folder / "valkey.sock")
    for verb in (client.ping, lambda: client.depth("p"), lambda: client.register_partition("p", ["x"], 1, ["t"])):
        with pytest.raises(DataPlaneUnsupported, match=r"Valkey \d+\.\d+.*Redis 7") as caught:
            await verb()
        assert where in str(caught.value)
        assert old._password not in str(caught.value)
        assert not caught.value.retryable
    await client.close()


async def test_a_server_that_is_not_there_is_named() -> None:
    """Refused: unavailable, with its address and without the password."""
    pytest.importorskip("redis", reason="needs the extra ucxx")
    from asyncdp.transports.ucxx import UCXXTransport

    client = stack(UCXXTransport(config_of("redis://:hidden@127.0.0.1:1/0"), bootstrap=False))
    with pytest.raises(DataPlaneUnavailable, match=r"127\.0\.0\.1:1") as caught:
        await client.ping(timeout_s=1.0)
    assert "hidden" not in str(caught.value)
    await client.close()


@pytest.mark.parametrize("url", ["http://:hidden@h:1", "redis://:hidden@h:port/0", "nonsense"])
def test_a_url_that_is_none(url: str) -> None:
    """ValueError, which names the key and not the password."""
    pytest.importorskip("redis", reason="needs the extra ucxx")
    from asyncdp.transports.ucxx import UCXXTransport

    with pytest.raises(ValueError, match="controller_address") as caught:
        UCXXTransport(config_of(url), bootstrap=False)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://plane:hunter2/secret@127.0.0.1:6399",
        "redis://plane:1234/hunter2@127.0.0.1:6399",
        "redis://:1234?hunter2@127.0.0.1:6399",
        "rediss://plane:hun#ter2@127.0.0.1:1",
        "rediss://plane:12#hunter2@127.0.0.1:1",
        "redis://plane:hunt@er2/hunter2@127.0.0.1:1",
        "redis://plane:hu[hunter2]er@127.0.0.1:1",
        "redis://plane:hunter2\u2100@127.0.0.1:1",
        "redis://plane:hunter2@127.0.0.1:port",
        "redis://plane:hunter2@127.0.0.1:99999",
        "redis://plane:hunter2@[::1",
        "redis://plane:hunter2@127.0.0.1:1/hunter2",
        "redis://plane:hunter2@127.0.0.1:1?socket_timeout=hunter2",
        "unix://plane:hunter2/x@/run/valkey.sock",
        "unix://plane:hunter2@",
        "plane:hunter2@127.0.0.1",
        "hunter2",
        "http://plane:hunter2@127.0.0.1",
    ],
)
def test_an_error_of_a_url_tells_nothing_of_its_password(url: str) -> None:
    """Nor do the errors that led to it: a character that is not escaped makes the rest a port, a path or an option."""
    from asyncdp.transports.ucxx.directory import Directory, DirectorySettings

    with pytest.raises(ValueError, match=r"^controller_address: ") as raised:
        Directory(url, settings=DirectorySettings(namespace="x"))
    told = str(raised.value)
    assert "hun" not in told
    assert "er2" not in told
    assert (raised.value.__cause__, raised.value.__context__) == (None, None)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1",
        "redis://user:p%2Fw%23@127.0.0.1:1/3",
        "redis://:p@ss@[::1]:1",
        "rediss://u:p@name.example:6380/?ssl_check_hostname=true",
        "unix:///run/a@b.sock",
        "unix://u:p@/run/valkey.sock?db=1",
    ],
)
def test_urls_that_can_be_used_are_taken(url: str) -> None:
    """With and without user, port, number and options."""
    from asyncdp.transports.ucxx.directory import Directory, DirectorySettings

    Directory(url, settings=DirectorySettings(namespace="x"))


async def test_an_error_of_a_url_names_the_setting_of_whoever_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot host has it in its environment or as an option; ``controller_address`` is a key of clients."""
    from asyncdp.cli.start.serving import CannotServe, Serving, serve_host
    from asyncdp.transports.ucxx.directory.server.acl import install_functions
    from asyncdp.transports.ucxx.host import main as host_main
    from asyncdp.transports.ucxx.host.settings import HostSettings

    monkeypatch.setattr(host_main, "log_for_operators", lambda: None)
    monkeypatch.setattr(host_main, "many_descriptors", lambda: None)
    url = "redis://h:0"
    with pytest.raises(ValueError, match=r"^ASYNCDP_DIRECTORY: a port"):
        await host_main.serve(HostSettings("h"), url, "n")
    with pytest.raises(ValueError, match=r"^--directory: a port"):
        await install_functions(url, "n")
    serving = Serving("n", {"host_id": "h"}, None, json_line=False)
    with pytest.raises(CannotServe, match=r"^--directory: a port"):
        await asyncio.to_thread(serve_host, serving, url, 0.0)
