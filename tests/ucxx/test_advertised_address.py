"""Where slot hosts say that they are."""

import json
import shutil
import subprocess
import sys

import pytest

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.transports.ucxx.host import advertised_address as published
from asyncdp.transports.ucxx.host.advertised_address import advertised_address
from tests.ucxx.hosts import _can_unshare, hosted

needs_namespace = pytest.mark.skipif(
    not _can_unshare() or shutil.which("ip") is None, reason="no network namespace can be had"
)


@pytest.mark.parametrize(
    ("bind", "publish", "told"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("10.0.0.7", "", "10.0.0.7"),
        ("node7.example", "", "node7.example"),
        ("0.0.0.0", "gateway.example", "gateway.example"),
        ("127.0.0.1", "10.0.0.7", "10.0.0.7"),
        ("0.0.0.0", "", "10.1.2.3"),
    ],
)
def test_what_is_published(monkeypatch: pytest.MonkeyPatch, bind: str, publish: str, told: str) -> None:
    """What was told; else what it listens at; of a wildcard this machine's own address."""
    monkeypatch.setattr(published, "node_address", lambda: "10.1.2.3")
    assert advertised_address(bind, publish) == told


@pytest.mark.parametrize(
    ("own", "bind", "publish", "named"),
    [
        ("", "0.0.0.0", "", "bind 0.0.0.0"),
        ("10.1.2.3", "::", "", "IPv6"),
        ("2001:db8::7", "0.0.0.0", "", "IPv4"),
        ("10.1.2.3", "127.0.0.1", "0.0.0.0", "publish 0.0.0.0"),
    ],
)
def test_an_address_that_leads_nowhere_is_not_published(
    monkeypatch: pytest.MonkeyPatch, own: str, bind: str, publish: str, named: str
) -> None:
    """The error names the setting that has to say one."""
    monkeypatch.setattr(published, "node_address", lambda: own)
    with pytest.raises(DataPlaneUnavailable, match=named) as caught:
        advertised_address(bind, publish)
    assert not caught.value.retryable


@pytest.mark.anyio
async def test_a_host_on_loopback_says_loopback() -> None:
    """Nothing that others cannot reach is told to them unless somebody asked for it."""
    async with hosted() as host:
        assert host.report().address == "127.0.0.1"


HOST = """
import anyio, json
from asyncdp.errors import DataPlaneUnavailable
from tests.ucxx.hosts import hosted

async def main():
    try:
        async with hosted(bind="0.0.0.0") as host:
            print(json.dumps(host.report().address))
    except DataPlaneUnavailable as err:
        print(json.dumps(str(err)))

anyio.run(main)
"""


def _on_wildcard(*setup: str) -> str:
    """What a host on 0.0.0.0 publishes, or why it does not, in a namespace with these links and no others."""
    script = " && ".join([*setup, 'exec "$@"'])
    command = ["unshare", "-rn", "sh", "-c", script, "sh", sys.executable, "-c", HOST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    told: str = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('"')))  # among its log
    return told


@needs_namespace
@pytest.mark.slow
def test_a_wildcard_is_published_as_the_address_of_the_machine() -> None:
    """Listening everywhere, it says the address that the routes choose, and where there is none, that."""
    own = "ip addr add 10.77.0.5/24 dev lo"
    told = _on_wildcard("ip link set lo up", own, "ip route add default via 10.77.0.1 dev lo")
    assert told == "10.77.0.5"


@needs_namespace
@pytest.mark.slow
def test_a_wildcard_without_an_address_is_an_error_in_words() -> None:
    """With nothing but loopback there is no address for others, and the error says which setting wants one."""
    told = _on_wildcard("ip link set lo up")
    assert told.startswith("bind 0.0.0.0 listens everywhere")
    assert "publish" in told


STRANGER = """
import anyio, json
from asyncdp.errors import DataPlaneError
from asyncdp.transports.ucxx.wire.handshake import Secret
from asyncdp.transports.ucxx.host.host import Host
from tests.ucxx.hosts import pool_of, settings

async def main():
    told = {}
    for host_secret, client_secret in (("", ""), ("s", ""), ("s", "t"), ("s", "s")):
        host = Host(settings(bind="0.0.0.0"), None, Secret(host_secret))
        report = await host.start()
        for address in ("127.0.0.1", report.address):
            with pool_of(secret=Secret(client_secret)) as pool:
                try:
                    async with pool.use(address, report.ports[0]) as connection:
                        await connection.ask()
                    said = "let in"
                except DataPlaneError as err:
                    said = f"{type(err).__name__}: {err}"
            told[f"{host_secret}|{client_secret}|{address}"] = said
        await host.stop()
    print(json.dumps(told))

anyio.run(main)
"""


@needs_namespace
@pytest.mark.slow
def test_who_is_let_in_from_where() -> None:
    """Without a secret the host's own machine, by loopback; with one whoever has it; all others are told why not."""
    setup = "ip link set lo up; ip addr add 10.77.0.5/24 dev lo; ip route add default via 10.77.0.1 dev lo"
    command = ["unshare", "-rn", "sh", "-c", f'{setup}; exec "$@"', "sh", sys.executable, "-c", STRANGER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert told.pop("||127.0.0.1") == "let in"
    assert "set ASYNCDP_SECRET on both sides" in told.pop("||10.77.0.5")
    assert {told.pop(f"s|s|{address}") for address in ("127.0.0.1", "10.77.0.5")} == {"let in"}
    assert len(told) == 4
    assert all("the secret is not this host's" in said for said in told.values())
