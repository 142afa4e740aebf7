"""The directory of a plane whose rows are in storage units, under keys that the directory allocates."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncdp.transports.directory.listing import find, page
from asyncdp.transports.directory.partition import Refused
from asyncdp.transports.directory.snapshots import Snapshots

from .specs import Spec

if TYPE_CHECKING:
    from asyncdp.transports.directory.directory import Bound, Piece, Published
    from asyncdp.transports.directory.rows import Cell, Tags

__all__ = ["UnitDirectory"]

#: Rows per page of a listing; a page takes about 10 ms of the controller's time.
PAGE_ROWS = 2000
#: Seconds after which an abandoned request has either reached its unit or never will.
GRACE_S = 5.0

#: Rows of a put on one storage unit: id of the unit, first storage key, number of rows.
Share = tuple[str, int, int]


@dataclass(slots=True, eq=False)
class Home:
    """The rows of one layout in one storage unit; the directory's cells have it as place."""

    home: str
    layout: int


@dataclass(slots=True, eq=False)
class Pending:
    """Storage keys that are allocated to a put which is not published yet.

    Attributes:
        ranges: Ranges of keys that it may write.
        new: Number of samples that the put is expected to add.
        until: Time, on the directory's monotonic clock, at which the put is given up.
    """

    ranges: list[Share] = field(default_factory=list)
    new: int = 0
    until: float = 0.0


@dataclass(slots=True, eq=False)
class Sweep:
    """Garbage that a client was told to clear: when to hand it out again, the op_id of the request, and the keys."""

    until: float
    op_id: str
    ranges: dict[str, list[tuple[int, int, float]]]


class UnitDirectory(Snapshots):
    """The directory of a plane on TransferQueue. One thread of the controller runs it, one call at a time.

    Args:
        units: Ids of the plane's storage units.
        config: ``capacity`` (samples), ``group_pattern``, ``strict_schema``, ``auto_register``.
    """

    new_spec = Spec
    #: Methods that a request may call.
    OPS = frozenset(
        (
            *("abandon", "abort", "claim", "clear", "consumed", "depth", "describe", "drop", "groups", "has"),
            *("list_claims", "listing", "locate", "place", "publish", "register", "release", "release_owner"),
            *("resolve", "restore_claims", "rows_by_unit", "state"),
        )
    )

    def __init__(self, units: list[str], config: dict[str, Any]) -> None:
        """Start empty, in a new random epoch."""
        super().__init__(**config)
        self.units = list(units)
        self.config = dict(config)
        self.pending: dict[str, Pending] = {}
        self.load: dict[str, int] = dict.fromkeys(self.units, 0)  # rows per unit
        self.layouts: list[tuple[Any, ...]] = []
        self.layout_ids: dict[tuple[Any, ...], int] = {}
        self.homes: dict[tuple[str, int], Home] = {}
        self.garbage: dict[str, list[tuple[int, int, float]]] = {unit: [] for unit in self.units}
        self.swept: dict[int, Sweep] = {}
        self.tickets = 0
        # Keys are never reused, and do not collide with TransferQueue's own indexes or with keys of other planes.
        self.next_key = random.SystemRandom().getrandbits(29) << 33 | 1 << 62

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        """Return an empty mapping for TransferQueue's snapshots, whose readers could not import these classes."""
        return {}

    def rows_by_unit(self) -> dict[str, int]:
        """Return the number of rows of each storage unit."""
        return dict(self.load)

    def resolve(self, op_id: str, age_s: float) -> str:
        """Return the outcome of a mutation as the base class does; release the keys of one that is refused."""
        state = super().resolve(op_id, age_s)
        if state == "refused":
            self.drop_pending(op_id)
        return state

    def _prune(self, now: float) -> None:
        super()._prune(now)
        self.expire_pending()

    # -- puts

    def place(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: Sequence[str],
        op_id: str,
        wanted: int,
        avoid: Sequence[str],
        left_s: float,
        only: str | None = None,
    ) -> tuple[Any, ...]:
        """Choose units for the rows of a put and allocate storage keys; rows that live need no further capacity.

        Returns:
            ``("done", result)`` if this op_id was published already, else ``("shares", [(unit, first key, count)],
            {field: spec})``; the shares cover the rows in their order, in at most ``wanted`` parts.
        """
        if op_id in self._records:
            return ("done", self.once(op_id, 0.0, lambda: (None, False)))
        specs, new = self.prepare(partition_id, sample_ids, fields, only, self._promised(op_id))
        units = sorted((u for u in self.units if u not in avoid), key=lambda u: self.load.get(u, 0))
        if not units:
            text = "none of the storage units answers"
            raise Refused("DataPlaneUnavailable", text, partition_id=partition_id, blames_port=False)
        units = units[: max(1, min(wanted, len(sample_ids)))]
        pending = self.pending.setdefault(op_id, Pending())
        pending.new = max(pending.new, new)
        pending.until = self.monotonic() + min(left_s, 1e6) + 60.0
        shares, left = [], len(sample_ids)
        for at, unit in enumerate(units):
            count = -(-left // (len(units) - at))
            shares.append((unit, self.next_key, count))
            self.next_key += count
            left -= count
        pending.ranges.extend(shares)
        return ("shares", shares, {name: spec.to_wire() for name, spec in specs.items()})

    def _promised(self, except_for: str) -> int:
        """Return how many samples the other pending puts will add."""
        self.expire_pending()
        return sum(pending.new for op_id, pending in self.pending.items() if op_id != except_for)

    def publish(  # noqa: PLR0913, PLR0917 - one request
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        op_id: str,
        not_after: float,
        owner: str,
        tags: Sequence[Tags] | None,
        shares: Sequence[Share],
        forms: Mapping[str, tuple[Any, ...]],
        specs: Mapping[str, tuple[Any, ...]],
        sizes: Mapping[str, int | Sequence[int]],
        bound: Bound | None = None,
    ) -> Published:
        """Publish the rows of a put, with their tags, atomically.

        Which rows may be written is decided here, once; the outcome is recorded even if all rows are left out.
        """
        seen = {name: Spec(*spec) for name, spec in specs.items()}

        def act() -> tuple[Published, bool]:
            if shares and op_id not in self.pending:
                text = "this put was given up: its storage keys are not reserved any more"
                raise Refused("DataPlaneWriteError", text)
            promised = self._promised(op_id)
            try:
                what = (partition_id, sample_ids, owner, tags, seen, bound, sizes)
                return self.put(*what, lambda: self._take_over(op_id, shares, forms), promised), True
            except Refused:
                self._give_up_shares(op_id, shares)
                raise

        return self.once(op_id, not_after, act)

    def _take_over(self, op_id: str, shares: Sequence[Share], forms: Mapping[str, tuple[Any, ...]]) -> Iterable[Piece]:
        """Return where the rows of a put are stored; its unused keys become garbage after ``GRACE_S``."""
        if not shares:
            return []
        layout, names = self._layout(forms), tuple(forms)
        pieces: list[Piece] = []
        start = 0
        for unit, first, count in shares:
            home = self.homes.setdefault((unit, layout), Home(unit, layout))
            pieces.append((home, names, range(first, first + count), range(start, start + count)))
            self.load[unit] = self.load.get(unit, 0) + count
            start += count
        used = set(shares)
        after = self.monotonic() + GRACE_S
        for entry in self.pending.pop(op_id).ranges:
            if entry not in used:  # for a unit whose write failed and may still be executed
                self.garbage.setdefault(entry[0], []).append((entry[1], entry[2], after))
        return pieces

    def _layout(self, forms: Mapping[str, tuple[Any, ...]]) -> int:
        """Return the number of the layout with these forms; puts with equal forms share a layout."""
        key = tuple(sorted(forms.items()))
        number = self.layout_ids.get(key)
        if number is None:
            number = self.layout_ids[key] = len(self.layouts)
            self.layouts.append(key)
        return number

    def abort(self, op_id: str, *, settled: bool) -> None:
        """Abort a put that is not published; it is refused from now on."""
        self.drop_pending(op_id, 0.0 if settled else GRACE_S)

    # -- storage keys that are not needed any more

    def drop_pending(self, op_id: str, grace_s: float = GRACE_S) -> None:
        """Drop a pending put; its keys become garbage after ``grace_s``, when none of its writes is in flight."""
        pending = self.pending.pop(op_id, None)
        if pending is None:
            return
        after = self.monotonic() + grace_s
        for unit, first, count in pending.ranges:
            self.garbage.setdefault(unit, []).append((first, count, after))

    def _give_up_shares(self, op_id: str, shares: Sequence[Share]) -> None:
        """Make the written shares of a refused put garbage; its other keys stay allocated for writes in flight."""
        pending = self.pending.get(op_id)
        if pending is None:
            return
        for share in shares:
            if share in pending.ranges:
                pending.ranges.remove(share)
                self.garbage.setdefault(share[0], []).append((share[1], share[2], 0.0))
        if not pending.ranges:
            del self.pending[op_id]

    def expire_pending(self) -> None:
        """Drop the pending puts whose deadline for publishing has passed."""
        now = self.monotonic()
        for op_id in [op_id for op_id, pending in self.pending.items() if pending.until < now]:
            self.drop_pending(op_id)

    def discard(self, cell: Cell) -> None:
        """Mark a storage key as garbage."""
        unit, key = cell.place.home, cell.index
        ranges = self.garbage.setdefault(unit, [])
        self.load[unit] = self.load.get(unit, 0) - 1
        if ranges and ranges[-1][0] + ranges[-1][1] == key and ranges[-1][2] == 0.0:
            first, count, after = ranges[-1]
            ranges[-1] = (first, count + 1, after)
        else:
            ranges.append((key, 1, 0.0))

    def sweep(self, done: list[int], op_id: str = "") -> tuple[int, dict[str, list[tuple[int, int]]]]:
        """Return the garbage to clear as (ticket, {unit: [(first key, count)]}); ``done`` are tickets of cleared one.

        Garbage that was not reported as cleared is returned again after half a minute, to the same op_id at once.
        """
        now = self.monotonic()
        for ticket in done:
            self.swept.pop(ticket, None)
        for ticket in [t for t, sweep in self.swept.items() if sweep.until < now or (op_id and sweep.op_id == op_id)]:
            for unit, ranges in self.swept.pop(ticket).ranges.items():
                self.garbage.setdefault(unit, []).extend(ranges)
        due = {}
        for unit, ranges in self.garbage.items():
            ready = [entry for entry in ranges if entry[2] <= now]
            if ready:
                due[unit] = ready
                self.garbage[unit] = [entry for entry in ranges if entry[2] > now]
        if not due:
            return 0, {}
        self.tickets += 1
        self.swept[self.tickets] = Sweep(now + 30.0, op_id, due)
        return self.tickets, {unit: [(first, count) for first, count, _ in ranges] for unit, ranges in due.items()}

    def all_keys(self) -> dict[str, list[tuple[int, int]]]:
        """Return all storage keys that may hold values, as {unit: [(first key, count)]}; used to close the plane."""
        for op_id in list(self.pending):
            self.drop_pending(op_id, 0.0)
        for partition in self.partitions.values():
            for row in partition.rows.values():
                for cell in row.each_cell():
                    self.discard(cell)
        for sweep in self.swept.values():
            for unit, ranges in sweep.ranges.items():
                self.garbage.setdefault(unit, []).extend(ranges)
        return {unit: [(first, count) for first, count, _ in ranges] for unit, ranges in self.garbage.items() if ranges}

    # -- queries

    def locate(
        self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str], meant: Sequence[int | None] | None
    ) -> tuple[Any, ...]:
        """Find where rows are stored.

        Returns:
            ``(groups, missing, incarnations, specs, layouts, version)``: groups are (unit, layout, fields, keys, rows),
            missing is {row: (kind, message, info)}, layouts are the forms of the fields by layout.
        """
        part = self.partition(partition_id)
        found = find(part, sample_ids, fields, meant)
        groups = [(home.home, home.layout, names, *where) for (home, names), where in found.spots.items()]
        specs = {name: part.fields[name].to_wire() for name in fields if name in part.fields}
        layouts = {group[1]: self.layouts[group[1]] for group in groups}
        return groups, found.missing, found.lives, specs, layouts, self.sequence

    def cell_name(self, cell: Cell) -> str:
        """Return the storage unit and key of a cell; keys are never reused."""
        return f"{cell.place.home}/{cell.index}"

    def state(self, partition_id: str) -> tuple[tuple[Any, ...], dict[str, tuple[Any, ...]]]:
        """Return the state of a partition as :meth:`snapshot` does, and the specs of its fields."""
        specs = {name: spec.to_wire() for name, spec in self.partition(partition_id).fields.items()}
        return self.snapshot(partition_id), specs

    def groups(self, partition_id: str, after: int) -> tuple[list[tuple[Any, ...]], int | None]:
        """List a page of groups by the incarnation of their first row; the second value is the next ``after``."""
        return page(self.partition(partition_id), after, PAGE_ROWS)
