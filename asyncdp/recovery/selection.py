"""Selection: which groups to train on next, and which ones to evict. Sans-IO.

Each listed group gets a :class:`Verdict`. A group falls out if it can never be trained on: it is too old, has no weight
version, was lost with its storage, or was left incomplete. Among the others the one with the lowest weight version
comes first, and of these the oldest: it is the next one to fall out, so slow prompts do not starve.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from asyncdp.settings import verb_arguments as check

from .reservations import Ages, is_reservation

if TYPE_CHECKING:
    from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta

__all__ = ["Order", "Selection", "Selector", "Verdict"]

Order = Literal["windowed", "weight_fifo", "in_order"]
#: Orders, for a check of the argument.
ORDERS: tuple[Order, ...] = ("windowed", "weight_fifo", "in_order")
#: What is done with groups without a weight version.
Untagged = Literal["evict", "first", "last", "keep"]
UNTAGGED: tuple[Untagged, ...] = ("evict", "first", "last", "keep")


class Verdict(StrEnum):
    """What becomes of a group."""

    READY = "ready"
    """It may be trained on."""
    INCOMPLETE = "incomplete"
    """Rows or their commit are missing; it falls out once nobody is known to work on it."""
    AHEAD = "ahead"
    """It is for a later step, or was made with newer weights than the trainer has; it stays."""
    STALE = "stale"
    """Its weights are too old, or its step is over; it falls out."""
    UNTAGGED = "untagged"
    """It has no weight version, or no target step; it falls out, stays or is trained on, as configured."""
    LOST = "lost"
    """Rows were lost with their storage, or their host does not answer; it falls out after a grace period."""
    FAILED = "failed"
    """All of its rows are tagged ``status="failed"``; it falls out once nobody is known to work on it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome of one look at a listing.

    Attributes:
        chosen: Groups to train on now, in training order; empty if fewer than wanted are ready.
        ready: Number of groups that are ready in this step's order, chosen or not.
        fallen: Groups to evict, by verdict.
        waiting: Number of groups that stay without being ready, by verdict.
        failed_rows: Number of rows tagged ``status="failed"``.
    """

    chosen: tuple[DataPlaneGroupMeta, ...]
    ready: int
    fallen: dict[Verdict, tuple[DataPlaneGroupMeta, ...]]
    waiting: dict[Verdict, int]
    failed_rows: int

    def meta(self) -> KVBatchMeta | None:
        """Return a meta of the rows of the chosen groups, without failed rows; None if no group was chosen."""
        if not self.chosen:
            return None
        metas = [group.meta(fit_keys(group)) for group in self.chosen]
        return metas[0].concat(metas[1:])


def fit_keys(group: DataPlaneGroupMeta) -> list[str]:
    """Return the keys of a group's rows that are not tagged ``status="failed"``."""
    return [key for key, tags in zip(group.keys, group.tags, strict=True) if tags.get("status") != "failed"]


class Selector:
    """Decides about groups by their weight versions.

    Args:
        order: ``"windowed"``: groups whose weights are at most ``max_staleness`` versions old. ``"weight_fifo"``: the
            same, but only those of the lowest version that is there or being made, until none of it is left.
            ``"in_order"``: groups whose tag ``target_tag`` is the trainer's version.
        max_staleness: Number of weight versions that a group may be behind the trainer; for ``"in_order"`` unused.
        untagged: Groups without a weight version (or target step): ``"evict"`` them, train on them ``"first"`` or
            ``"last"``, or ``"keep"`` them without training on them.
        lost_grace_s: Seconds for which rows have to be listed as lost before their group falls out: longer than a slot
            host takes to come back with its rows. 0 where storage does not come back (TransferQueue).
        incomplete_grace_s: Seconds for which a group that nobody has reserved may be incomplete, or wholly failed.
        target_tag: Tag with the trainer's version at which a group is to be trained on; for ``"in_order"``.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    def __init__(
        self,
        order: Order = "windowed",
        *,
        max_staleness: int = 1,
        untagged: Untagged = "evict",
        lost_grace_s: float = 0.0,
        incomplete_grace_s: float = 0.0,
        target_tag: str = "target_step",
    ) -> None:
        """Check and store the arguments."""
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
        if untagged not in UNTAGGED:
            raise ValueError(f"untagged must be one of {', '.join(UNTAGGED)}, not {untagged!r}")
        max_staleness = check.count(max_staleness, "max_staleness", 0)
        for name, seconds in (("lost_grace_s", lost_grace_s), ("incomplete_grace_s", incomplete_grace_s)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
                raise ValueError(f"{name} must be a number of seconds, not {seconds!r:.80}")  # noqa: TRY004 - as below
            if not seconds >= 0:
                raise ValueError(f"{name} must not be negative, but is {seconds}")
        self.order = order
        self.max_staleness = max_staleness
        self.untagged = untagged
        self.lost_grace_s = lost_grace_s
        self.incomplete_grace_s = incomplete_grace_s
        self.target_tag = check.name(target_tag, "target_tag")
        self._lost, self._unfinished = Ages(), Ages()

    def look(
        self,
        listed: Sequence[DataPlaneGroupMeta],
        version: int,
        now: float,
        *,
        count: int = 0,
        least: int | None = None,
        in_flight: Collection[str] = (),
        in_flight_versions: Collection[int] = (),
    ) -> Selection:
        """Decide about all groups of a listing, and choose among those that are ready.

        Args:
            listed: A whole listing of the partition. Reservations in it are passed over.
            version: Weight version that the trainer is at.
            now: Monotonic seconds; from one look to the next, groups are seen to be lost or incomplete for longer.
            count: Largest number of groups to choose.
            least: Smallest number of groups to choose, else none is; None: ``count``.
            in_flight: Groups that somebody works on: they do not fall out while they are incomplete.
            in_flight_versions: Weight versions of groups that are being made and of which no row is there yet, for
                ``"weight_fifo"``.
        """
        groups = [group for group in listed if not is_reservation(group)]
        verdicts = [(group, self._verdict(group, version, in_flight)) for group in groups]
        self._lost.see(_names(verdicts, Verdict.LOST), now)
        self._unfinished.see(_names(verdicts, Verdict.INCOMPLETE, Verdict.FAILED), now)
        fallen: dict[Verdict, list[DataPlaneGroupMeta]] = {}
        waiting: Counter[Verdict] = Counter()
        ready, unready_versions = [], list(map(float, in_flight_versions))
        for group, verdict in verdicts:
            if verdict is Verdict.READY:
                ready.append(group)
            elif self._falls_out(group, verdict, now, in_flight):
                fallen.setdefault(verdict, []).append(group)
            else:
                waiting[verdict] += 1
                if verdict is Verdict.INCOMPLETE:
                    unready_versions.append(self._rank(group))
        ready.sort(key=lambda group: (self._rank(group), group.created_at, group.group_id))
        if self.order == "weight_fifo" and ready:
            in_window = [one for one in unready_versions if version - self.max_staleness <= one <= version]
            lowest = min([*in_window, *(self._rank(group) for group in ready)])
            ready = [group for group in ready if self._rank(group) == lowest]
        chosen = ready[:count] if len(ready) >= (count if least is None else least) else []
        return Selection(
            tuple(chosen),
            len(ready),
            {verdict: tuple(some) for verdict, some in fallen.items()},
            dict(waiting),
            sum(len(group.keys) - len(fit_keys(group)) for group in groups),
        )

    def _verdict(self, group: DataPlaneGroupMeta, version: int, in_flight: Collection[str]) -> Verdict:
        fit = fit_keys(group)
        whole = group.committed and group.is_complete
        if not fit:
            verdict = Verdict.FAILED
        elif not set(fit).isdisjoint(group.lost_keys):
            verdict = Verdict.LOST
        elif not whole and group.group_id in in_flight:
            verdict = Verdict.INCOMPLETE
        else:
            in_time = self._in_time(group, version)
            verdict = Verdict.INCOMPLETE if in_time is Verdict.READY and not whole else in_time
        return verdict

    def _in_time(self, group: DataPlaneGroupMeta, version: int) -> Verdict:
        """Judge a group by its version alone."""
        made_for = self._version(group)
        if made_for is None:
            return Verdict.UNTAGGED if self.untagged in ("evict", "keep") else Verdict.READY
        if made_for < version - (0 if self.order == "in_order" else self.max_staleness):
            return Verdict.STALE
        return Verdict.AHEAD if made_for > version else Verdict.READY

    def _falls_out(self, group: DataPlaneGroupMeta, verdict: Verdict, now: float, in_flight: Collection[str]) -> bool:
        """Return whether a group that is not ready is to be evicted now."""
        if verdict is Verdict.LOST:
            return self._lost.age_s(group.group_id, now) >= self.lost_grace_s
        if verdict in (Verdict.INCOMPLETE, Verdict.FAILED):
            if group.group_id in in_flight:
                return False
            return self._unfinished.age_s(group.group_id, now) >= self.incomplete_grace_s
        return verdict is Verdict.STALE or (verdict is Verdict.UNTAGGED and self.untagged == "evict")

    def _version(self, group: DataPlaneGroupMeta) -> int | None:
        """Return the trainer's version that a group was made with (``"in_order"``: is made for), None if unknown."""
        if self.order != "in_order":
            return group.weight_version
        targets = [tags[self.target_tag] for tags in group.tags if tags.get(self.target_tag) is not None]
        return min(targets, default=None)

    def _rank(self, group: DataPlaneGroupMeta) -> float:
        """Return what the order of training follows: the version, or a place before or behind all versions."""
        version = self._version(group)
        if version is None:
            return -math.inf if self.untagged == "first" else math.inf
        return float(version)


def _names(verdicts: Sequence[tuple[DataPlaneGroupMeta, Verdict]], *wanted: Verdict) -> list[str]:
    return [group.group_id for group, verdict in verdicts if verdict in wanted]
