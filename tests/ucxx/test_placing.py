from collections import Counter
from dataclasses import replace
from random import Random

import pytest

pytest.importorskip("redis", reason="needs the extra ucxx")
from asyncdp.transports.ucxx.client.placing import FULL_S, Placing
from asyncdp.transports.ucxx.directory import HostInfo

GIB = 1 << 30


def host(name: str, used: float = 0.0, boot_id: str = "here", **keys: object) -> HostInfo:
    """A host with an arena of 1 GiB."""
    load = int(used * GIB)
    told = HostInfo(name, 1, "127.0.0.1", (1,), free_bytes=GIB - load, load=float(load), boot_id=boot_id, age_s=0.5)
    return replace(told, **keys)  # type: ignore[arg-type]


def first(placing: Placing, *hosts: HostInfo, now: float = 0.0, seed: int = 0) -> str:
    """Who gets the next put."""
    return placing.order(hosts, "here", now, Random(seed))[0].id


def test_hosts_that_are_used_alike_take_turns() -> None:
    """Of many puts each of three hosts gets its third, although one is used a little less."""
    placing = Placing()
    got = Counter(first(placing, host("a", 0.26), host("b", 0.3), host("c", 0.27)) for _ in range(30))
    assert set(got.values()) == {10}


def test_clients_do_not_all_begin_with_the_same_host() -> None:
    """A hundred clients that put once each spread over the hosts."""
    got = Counter(first(Placing(), host("a"), host("b"), seed=seed) for seed in range(100))
    assert min(got.values()) > 20


def test_a_near_host_is_better_than_an_empty_one() -> None:
    """Its payload never leaves the machine."""
    assert first(Placing(), host("far", 0.0, "there"), host("near", 0.8)) == "near"


@pytest.mark.parametrize("used", [0.98, 1.0])
def test_a_host_without_space_is_left_for_one_that_has_some(used: float) -> None:
    """A put at a full host would wait, however near that is; it is tried when nothing else is left."""
    ordered = Placing().order([host("far", 0.5, "there"), host("near", used)], "here", 0.0, Random(0))
    assert [found.id for found in ordered] == ["far", "near"]


def test_of_near_hosts_the_less_used_goes_first() -> None:
    """By how much of its own arena each uses, not by bytes."""
    small = host("small", free_bytes=GIB // 16, load=float(GIB // 16))
    placing = Placing()
    assert [first(placing, small, host("large", 0.2)) for _ in range(5)] == ["large"] * 5


def test_what_was_reserved_since_the_heartbeat_counts() -> None:
    """Between two heartbeats one client alone could fill the host that was the least used."""
    placing = Placing()
    hosts = [host("a", 0.0), host("b", 0.5)]
    got = []
    for _ in range(20):
        got.append(first(placing, *hosts))
        placing.reserved(got[-1], GIB // 16)
    assert got[:8] == ["a"] * 8
    assert set(got[8:]) == {"a", "b"}
    beaten = [replace(hosts[0], age_s=0.1), replace(hosts[1], age_s=0.1)]  # all of it was cleared meanwhile
    assert first(placing, *beaten) == "a"


def test_a_host_that_said_it_is_full_is_left_alone_for_a_while() -> None:
    """Its heartbeat may be a second old; afterwards it is asked again."""
    placing = Placing()
    hosts = [host("a", 0.1), host("b", 0.6)]
    assert first(placing, *hosts) == "a"
    placing.full("a", 10.0)
    assert first(placing, *hosts, now=10.0 + 0.9 * FULL_S) == "b"
    assert first(placing, *hosts, now=10.0 + 1.1 * FULL_S) == "a"


def test_a_new_host_joins_the_turns_where_they_are() -> None:
    """It does not get every put until it has had as many as the others."""
    placing = Placing()
    for _ in range(50):
        first(placing, host("a"), host("b"))
    got = Counter(first(placing, host("a"), host("b"), host("c")) for _ in range(30))
    assert got["c"] <= 12


def test_nobody_is_no_error() -> None:
    """The caller says so in its own words; news of hosts that are gone change nothing."""
    placing = Placing()
    assert placing.order([], "here", 0.0, Random(0)) == []
    placing.full("gone", 0.0)
    placing.reserved("gone", 1)
