"""The model of the directory at sizes: against what is known without it."""

import math

import pytest

from benchmarks._scale import (
    Cost,
    closed,
    fit,
    fullest,
    hash_slot,
    hosts_for,
    partitions_for,
    shares_of,
    simulate,
)


def test_a_fit_finds_the_costs_that_made_the_points() -> None:
    """Also where one part is nothing."""
    for cost in (Cost(2e-4, 3e-6, 1e-7), Cost(1e-4, 5e-6)):
        points = [(rows, size, cost.seconds(rows, size)) for rows in (1, 256) for size in (1024, 4096, 65536)]
        found = fit(points)
        assert [found.call, found.row, found.doubling] == pytest.approx([cost.call, cost.row, cost.doubling], abs=1e-12)


def test_no_cost_is_negative() -> None:
    """Where larger partitions happened to be faster, size costs nothing; and one point is no fit."""
    assert fit([(256, 1024, 1.1e-3), (256, 65536, 1.0e-3), (1, 1024, 1e-4)]).doubling == 0
    with pytest.raises(ValueError, match="1 points"):
        fit([(1, 1, 1.0)])


def test_few_clients_wait_for_nobody_and_many_share_one_server() -> None:
    """One has the whole server, a thousand wait for all others: the laws of a closed network."""
    assert closed(1, 0.0, [0.001]).mean_s == pytest.approx(0.001)
    many = closed(1000, 1.0, [0.002])
    assert many.rate == pytest.approx(500, rel=1e-6)  # no more than the server has time for
    assert many.mean_s == pytest.approx(1000 / 500 - 1.0, rel=1e-6)
    assert closed(1000, 1.0, [0.0005, 0.0005]).rate > 990  # two servers of half the work each have time left


def test_the_simulation_and_the_analysis_agree() -> None:
    """On the rate, full or not; on latency where the server is full. They differ between: service times do not vary."""
    for clients in (10, 1000):
        played, told = simulate(clients, 0.5, 0.002, [1.0]), closed(clients, 0.5, [0.002])
        assert played.rate == pytest.approx(told.rate, rel=0.05)
    assert simulate(1000, 0.5, 0.002, [1.0]).mean_s == pytest.approx(told.mean_s, rel=0.05)
    assert played.p99_s >= played.mean_s
    two = simulate(1000, 0.5, 0.002, [0.5, 0.5])
    assert two.rate == pytest.approx(closed(1000, 0.5, [0.001, 0.001]).rate, rel=0.05)


@pytest.mark.parametrize(
    ("key", "slot"), [("123456789", 12739), ("a{foo}b", hash_slot("foo")), ("{}x", hash_slot("{}x"))]
)
def test_hash_slots_are_those_of_the_cluster(key: str, slot: int) -> None:
    """The check value of CRC16 XMODEM is 0x31C3, 12739; only what stands in the first braces counts."""
    assert hash_slot(key) == slot


def test_partitions_spread_over_nodes() -> None:
    """One partition lies on one node; many are spread evenly enough, and their shares are all of them."""
    assert fullest(1, 4) == 4
    assert sum(shares_of(64, 4)) == pytest.approx(1)
    for nodes in (2, 4, 16):
        assert fullest(partitions_for(nodes), nodes) <= 1.25
        assert partitions_for(nodes) >= nodes
    assert partitions_for(1) == 1


def test_what_is_needed_follows_from_time_and_memory() -> None:
    """Whichever asks for more."""
    assert hosts_for(1000, 1e6, 10_000, 1e9, 1e10) == 10
    assert hosts_for(10_000, 1e6, 10, 1e9, 1e10) == math.ceil(2 / 0.7)
