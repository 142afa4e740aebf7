"""A model of the directory at sizes that nobody can start here: one Valkey, or a cluster of them, under many clients.

A Valkey runs functions in one thread: a call costs it a fixed time, a time a row, and where rows are looked up in a
large partition something for each doubling of it. These are fitted to measured points (:func:`fit`). Clients that pause
between their calls wait in one queue a server (:func:`closed`: the exact mean value analysis of such a network;
:func:`simulate`: the same, event by event, which also tells the slowest calls). A cluster keeps all keys of a partition
on one node, that of the hash slot of its name (:func:`fullest`).
"""

from __future__ import annotations

import heapq
import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from benchmarks._results import Table

__all__ = [
    "Cost",
    "Load",
    "Point",
    "Step",
    "closed",
    "costs_of",
    "fit",
    "fullest",
    "hash_slot",
    "hosts_for",
    "parse",
    "partitions_for",
    "shares_of",
    "simulate",
]

#: Rows of a partition from which on doublings are counted.
SMALL: Final = 1_000
#: The model is fitted to partitions of at most so many rows.
FITTED: Final = 16_000
SLOTS: Final = 16384
#: Of a server's time, so much may be used: above it queues grow without bound.
USED: Final = 0.7


@dataclass(frozen=True)
class Cost:
    """Seconds of a call, of each of its rows, and of each row for each doubling of the partition beyond 1,000 rows."""

    call: float
    row: float
    doubling: float = 0.0

    def seconds(self, rows: int, size: int) -> float:
        """Return what a call of so many rows takes in a partition of so many."""
        return self.call + rows * (self.row + self.doubling * _doublings(size))


def _doublings(size: int) -> float:
    return math.log2(max(size, SMALL) / SMALL)


def fit(points: Sequence[tuple[int, int, float]]) -> Cost:
    """Fit a cost to points of (rows, size, seconds), by least squares of the relative errors; no part is negative.

    Raises:
        ValueError: There are fewer points than parts.
    """
    if len(points) < 2:
        raise ValueError(f"{len(points)} points are too few to fit a cost to")
    columns = np.array([(1.0, rows, rows * _doublings(size)) for rows, size, _ in points])
    seconds = np.array([took for *_, took in points])
    use = [at for at in range(3) if columns[:, at].any()]
    while True:
        found, *_ = np.linalg.lstsq(columns[:, use] / seconds[:, None], np.ones(len(points)), rcond=None)
        if found.min() >= 0 or len(use) == 1:
            break
        del use[int(found.argmin())]
    parts = dict(zip(use, (float(value) for value in found), strict=True))
    return Cost(parts.get(0, 0.0), parts.get(1, 0.0), parts.get(2, 0.0))


class Point(NamedTuple):
    """What a measured work says in its name: a verb of so many rows beside so many."""

    verb: str
    rows: int
    size: int


def parse(name: str) -> Point | None:
    """Read a name such as ``claim 256 beside 1000, server``; ``None``: it is of another kind."""
    found = re.match(r"(\w+) (\d+) beside (\d+)(, server)?$", name)
    return found and Point(found[1], int(found[2]), int(found[3]))


def costs_of(tables: Sequence[Table], most: int, *, server: bool = True) -> dict[str, Cost]:
    """Return the cost of each verb by partitions of at most ``most`` rows.

    Args:
        tables: Of a run of the benchmark ``directory``.
        most: Larger partitions are left out: the fit is checked against them.
        server: What the thread of the server was busy; else what the caller waited.
    """
    found: dict[str, list[tuple[int, int, float]]] = {}
    for table in tables:
        for name, seconds in table.seconds.items():
            point = parse(name)
            if point and point.size <= most and name.endswith(", server") == server:
                found.setdefault(point.verb, []).append((point.rows, point.size, statistics.median(seconds)))
    return {verb: fit(chosen) for verb, chosen in found.items()}


class Step(NamedTuple):
    """What a step of training asks of the directory for 256 samples: published, claimed, located and removed once."""

    seconds: float

    @classmethod
    def of(cls, tables: Sequence[Table], size: int = 100_000, rows: int = 256) -> Step:
        """Return the server's seconds for a step, beside so many rows."""
        costs = costs_of(tables, FITTED)
        return cls(sum(costs[verb].seconds(rows, size) for verb in ("publish", "claim", "locate", "clear")))


class Load(NamedTuple):
    """What many clients feel: calls a second of all, mean seconds of a call, and the second slowest of a hundred."""

    rate: float
    mean_s: float
    p99_s: float = math.nan


def closed(clients: int, think_s: float, demands: Sequence[float]) -> Load:
    """Return throughput and mean latency where each client thinks, calls, waits for the answer, and begins again.

    Args:
        clients: How many.
        think_s: Seconds between an answer and the next call, on the average; what a client does itself is part of it.
        demands: By server, the seconds that a call needs of it on the average: its time by how often it is asked.
    """
    queues = [0.0] * len(demands)
    rate = mean = 0.0
    for number in range(1, clients + 1):
        waits = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        mean = sum(waits)
        rate = number / (think_s + mean)
        queues = [rate * wait for wait in waits]
    return Load(rate, mean)


def simulate(
    clients: int, think_s: float, service_s: float, shares: Sequence[float], *, calls: int = 20_000, seed: int = 0
) -> Load:
    """Play so many calls, the first tenth of which is not counted; each takes ``service_s`` of one server.

    Args:
        clients: How many.
        think_s: Mean seconds between an answer and the next call, distributed exponentially.
        service_s: Seconds of a server for a call.
        shares: By server, how much of the calls goes to it.
        calls: How many are played.
        seed: Of the random numbers.
    """
    drawn = random.Random(seed)
    free = [0.0] * len(shares)
    pause = lambda: drawn.expovariate(1 / think_s) if think_s else 0.0  # noqa: E731
    ready = [pause() for _ in range(clients)]
    heapq.heapify(ready)
    took, began, now = [], 0.0, 0.0
    for number in range(calls):
        now = heapq.heappop(ready)
        (server,) = drawn.choices(range(len(shares)), shares)
        end = free[server] = max(now, free[server]) + service_s
        heapq.heappush(ready, end + pause())
        if number == calls // 10:
            began, took = now, []
        took.append(end - now)
    took.sort()
    return Load(len(took) / (now - began), sum(took) / len(took), took[len(took) * 99 // 100])


# -- a cluster


def hash_slot(key: str) -> int:
    """Return the hash slot of a key: CRC16 (XMODEM) of what stands in its first braces, where there are some."""
    begin = key.find("{")
    end = key.find("}", begin + 1)
    tag = key[begin + 1 : end] if begin >= 0 and end > begin + 1 else key
    crc = 0
    for byte in tag.encode():
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc % SLOTS


def shares_of(partitions: int, nodes: int) -> list[float]:
    """Return by node the share of equally busy partitions ``p0``, ``p1``, ... that lie on it, by their hash slots."""
    held = [0] * nodes
    for number in range(partitions):
        held[hash_slot(f"asyncdp:{{p{number}}}:") * nodes // SLOTS] += 1
    return [count / partitions for count in held]


def fullest(partitions: int, nodes: int) -> float:
    """Return how many times its fair share the fullest node has."""
    return max(shares_of(partitions, nodes)) * nodes


# -- how many of what


def partitions_for(nodes: int, within: float = 1.25) -> int:
    """Return the least number of partitions, a power of two, whose fullest node has at most so many times its share."""
    count = 1
    while fullest(count, nodes) > within:
        count *= 2
    return count


def hosts_for(rows_s: float, payload: float, samples: int, host_bytes: float, host_bytes_s: float) -> int:
    """Return how many slot hosts a load needs, each byte being written once and read once.

    Args:
        rows_s: Samples put and read a second.
        payload: Bytes of a sample.
        samples: Rows that are there at once.
        host_bytes: Arena of a host.
        host_bytes_s: Bytes a second that a host takes or gives.
    """
    return max(1, math.ceil(samples * payload / host_bytes), math.ceil(2 * rows_s * payload / (host_bytes_s * USED)))
