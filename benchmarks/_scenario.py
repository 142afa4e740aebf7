"""What a scenario is given: it says what to measure, and all else is done here.

A scenario is a file ``benchmarks/<name>.py``. The first line of its docstring is its title; its coroutine
``measure(bench, *, option=default)`` sets up a plane and calls :meth:`Bench.measure` for each case. Options appear on
the command line as ``--option``, with the type of their default. ``NAMESPACE = True`` beside it runs it in a network
namespace of its own, which a scenario needs that opens UCX listeners: these bind to every address.
"""

from __future__ import annotations

import difflib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from typing import Any, Final, Protocol

from benchmarks._references import REFERENCES, References, Unavailable
from benchmarks._results import FLOORS, Figure, Floor, Result, Table

__all__ = ["Bench", "Floor", "Measured", "Work", "WrongMeasurement", "unknown"]

#: Does what is measured. It may return the seconds that count, instead of all that it took, or several numbers by name.
Work = Callable[[], Awaitable[Any]]
QUICK: Final = 3


class WrongMeasurement(Exception):
    """A scenario measured something else than it says."""


class Progress(Protocol):
    """Is told how far a run is."""

    def step(self, case: str, number: int, rounds: int) -> None:
        """Note a round that ended."""

    def done(self, table: Table) -> None:
        """Note a case that ended."""


class Bench:
    """Measures works in rounds.

    Args:
        result: Receives the tables.
        stack: Ends what was opened, when the scenario has ended.
        rounds: Of each case, or ``None`` for the scenario's own number.
        quick: Whether to take few rounds, and for the scenario to leave out what takes long.
        without: Extras that are left out, such as ``ray``.
        clock: Tells seconds.
        progress: Is told how far the run is.
    """

    def __init__(
        self,
        result: Result,
        stack: AsyncExitStack,
        *,
        rounds: int | None = None,
        quick: bool = False,
        without: tuple[str, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
        progress: Progress | None = None,
    ) -> None:
        """Begin with nothing measured."""
        self.result = result
        self.stack = stack
        self.quick = quick
        self.clock = clock
        self.rounds = rounds
        self._references = References(stack, without)
        self._progress = progress
        self._shown = 0

    async def measure(
        self,
        case: str,
        works: Mapping[str, Work],
        *,
        beside: Sequence[str] = (),
        nbytes: int = 0,
        rounds: int = 15,
        count: int = 1,
        floors: Mapping[str, Floor] | None = None,
        in_order: bool = False,
        collector: bool = True,
    ) -> Measured:
        """Measure works in rounds, one of each in each round; one round before the first is not counted.

        Args:
            case: What is the same for all of them, such as ``256 x 64 KiB``.
            works: What is measured, by name.
            beside: The references: of ``works``, or of those that every scenario may name (``_references.py``).
            nbytes: How many bytes each of them moves, also the references.
            rounds: How many, where the command does not say.
            count: So many calls of each work in each round, for works of microseconds.
            floors: By work, what it cannot do without; shown as a ratio.
            in_order: Whether the order matters; else every second round goes backwards.
            collector: Whether the garbage collector runs as users have it.

        Raises:
            WrongMeasurement: A name in ``beside`` is none.
        """
        self.show()
        rounds = QUICK if self.quick else self.rounds or rounds
        table = Table(case, nbytes=nbytes, floors=dict(floors or {}))
        works = {**works, **await self._opened([*beside, *_of_floors(table.floors)], works, nbytes)}
        table.beside = [name for name in dict.fromkeys(beside) if name in works]
        with nullcontext() if collector else _no_collector():
            for number in range(rounds + 1):
                order = list(works.items())
                for name, work in order if in_order or number % 2 else reversed(order):
                    told = await self._once(work, count)
                    for key, value in told.items() if number else ():
                        table.seconds.setdefault(f"{name}, {key}" if key else name, []).append(value)
                if self._progress is not None:
                    self._progress.step(case, number, rounds)
        # In the order in which they are named, whichever came first.
        table.seconds = {key: table.seconds[key] for name in works for key in table.seconds if _made_by(key, name)}
        self.result.tables.append(table)
        return Measured(table, self)

    async def _opened(self, names: Sequence[str], works: Mapping[str, Work], nbytes: int) -> dict[str, Work]:
        """Return the works of references that are not among ``works``; those that cannot be had are left out."""
        found = {}
        for name in names:
            if name not in works and name not in REFERENCES:
                raise WrongMeasurement(unknown("reference", name, [*works, *REFERENCES]))
            with suppress(Unavailable):
                if name not in works and name not in found:
                    found[name] = await self._references.get(name, nbytes)
        return found

    async def _once(self, work: Work, count: int) -> Mapping[str, float]:
        """Return the mean seconds of so many calls, or what they told."""
        clock = self.clock
        began = clock()
        # A loop would add to a work of a few microseconds.
        told = [await work()] if count == 1 else [await work() for _ in range(count)]
        took = clock() - began
        if isinstance(told[-1], float):
            return {"": sum(told) / count}
        if isinstance(told[-1], dict) and count == 1:
            return told[-1]  # type: ignore[no-any-return]
        return {"": took / count}

    def check(self, holds: bool, said: str) -> None:  # noqa: FBT001 - reads as an assert
        """Fail the scenario if it does not measure what it says.

        Raises:
            WrongMeasurement: It does not hold.
        """
        if not holds:
            raise WrongMeasurement(said)

    def figure(self, case: str, name: str, values: Sequence[float], **bounds: Any) -> None:
        """Note a number that is no time of a work, such as megabytes; ``bounds`` as of :class:`Figure`."""
        table = next((one for one in self.result.tables if one.case == case), None)
        if table is None:
            self.result.tables.append(table := Table(case))
        table.figures.append(Figure(name, [float(value) for value in values], **bounds))

    def show(self) -> None:
        """Show the cases that were not shown yet; a new one begins, so all their figures are noted."""
        for table in self.result.tables[self._shown :]:
            self._shown += 1
            if self._progress is not None:
                self._progress.done(table)


class Measured:
    """A case that was measured: numbers can be made of it."""

    def __init__(self, table: Table, bench: Bench) -> None:
        """Hold the rounds."""
        self.table = table
        self._bench = bench

    def figure(self, name: str, of: Callable[[Mapping[str, float]], float], **bounds: Any) -> Measured:
        """Note a number made of each round's seconds; left out where a reference of it could not be had.

        Args:
            name: What it is.
            of: Makes it, of the seconds of one round by work.
            bounds: As of :class:`Figure`, such as ``at_most``, ``unit``, and ``must``: which aim it stands for.
        """
        seconds = self.table.seconds
        length = len(next(iter(seconds.values()), ()))
        try:
            values = [of({key: column[at] for key, column in seconds.items()}) for at in range(length)]
        except KeyError as error:
            if error.args[0] not in REFERENCES:
                raise WrongMeasurement(unknown("work", error.args[0], list(seconds))) from error
            return self
        self._bench.figure(self.table.case, name, values, **bounds)
        return self

    def ratio(self, name: str, other: str, **bounds: Any) -> Measured:
        """Note how many times as long as another work or reference one took; ``bounds`` as of :meth:`figure`."""
        return self.figure(f"{name} / {other}", lambda seconds: seconds[name] / seconds[other], **bounds)


def _of_floors(floors: Mapping[str, Floor]) -> list[str]:
    return [name for part, name in FLOORS.items() if any(getattr(floor, part) for floor in floors.values())]


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _made_by(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}, ")


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """Say that there is no such thing, and what is meant perhaps."""
    close = difflib.get_close_matches(name, known, 3, 0.4)
    meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"no {kind} {name!r}{meant} There are: {', '.join(known)}"
