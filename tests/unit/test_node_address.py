import importlib
import ipaddress
import socket
from typing import Any

import pytest

from asyncdp.node_address import node_address

module = importlib.import_module("asyncdp.node_address")


def route(monkeypatch: pytest.MonkeyPatch, *routed: str, named: tuple[str, ...] = ()) -> None:
    """Have the routing table and the host's name say these addresses."""
    monkeypatch.setattr(module, "_routed", lambda: iter(routed))

    def resolve(*_: Any, **__: Any) -> list[Any]:
        family = lambda text: socket.AF_INET6 if ":" in text else socket.AF_INET  # noqa: E731
        return [(family(text), socket.SOCK_DGRAM, 17, "", (text, 0)) for text in named]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_it_is_an_address_of_this_machine_or_empty() -> None:
    """What it returns here can be bound to."""
    found = node_address()
    if found:
        family = socket.AF_INET6 if ":" in found else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((found, 0))


@pytest.mark.parametrize(
    "useless", ["127.0.0.1", "127.8.9.1", "169.254.7.7", "::1", "fe80::1", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1"]
)
def test_loopback_and_link_local_are_never_published(monkeypatch: pytest.MonkeyPatch, useless: str) -> None:
    """Empty, rather than an address that leads the reader to himself or nowhere."""
    route(monkeypatch, useless, named=(useless,))
    assert node_address() == ""


def test_mapped_loopback_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPv4 address in an IPv6 one is judged by what it is."""
    route(monkeypatch, "::ffff:127.0.0.1", "::ffff:10.0.0.5")
    assert node_address() == "::ffff:10.0.0.5"


def test_the_routing_table_comes_before_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many hosts resolve their own name to a loopback address."""
    route(monkeypatch, "10.1.2.3", named=("127.0.1.1", "10.9.9.9"))
    assert node_address() == "10.1.2.3"


def test_without_a_route_the_name_counts_ipv4_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a default route still has an address."""
    route(monkeypatch, named=("2001:db8::7", "127.0.1.1", "10.9.9.9"))
    assert node_address() == "10.9.9.9"


def test_no_network_at_all_is_an_empty_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a socket nor the resolver works: empty, no exception."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError

    monkeypatch.setattr(socket, "socket", broken)
    monkeypatch.setattr(socket, "getaddrinfo", broken)
    assert node_address() == ""


def test_a_private_address_is_routable() -> None:
    """A cluster's machines reach each other by private addresses."""
    assert ipaddress.ip_address("192.168.3.4").is_private
    assert module._is_routable("192.168.3.4")
    assert not module._is_routable("no address")
