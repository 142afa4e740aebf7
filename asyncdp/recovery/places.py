"""Places: how many rollout groups may be under way or in the plane at once. Sans-IO, so there is no await in it.

A group takes one place from the moment it is asked for until its rows are removed::

    (none) --take--> ASKED --reserve--> RESERVED --hold--> HELD --free--> (none)

A listing of the plane corrects what is known, but it shows the plane as it was at some moment between the request and
its answer. So each change has a number, :meth:`Places.mark` notes the newest one before the
request is sent, and a listing does not undo a change that came after its mark.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Phase", "Places"]


class Phase(StrEnum):
    """What a group takes its place for."""

    ASKED = "asked"
    """The put of its reservation has not ended, or its outcome is not known."""
    RESERVED = "reserved"
    """Its reservation is in the plane, and none of its own rows."""
    HELD = "held"
    """Its rows are in the plane."""


class Places:
    """Counts the groups that take a place, each once.

    Args:
        capacity: Number of places.

    Raises:
        ValueError: ``capacity`` is below 1.
    """

    def __init__(self, capacity: int) -> None:
        """Begin with all places free."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity
        self._phases: dict[str, Phase] = {}
        self._changed: dict[str, int] = {}  # by group, also those that were freed since the last mark
        self._changes = 0
        self._applied = 0

    @property
    def used(self) -> int:
        """Number of groups that take a place; above ``capacity`` if the plane holds more than were reserved."""
        return len(self._phases)

    @property
    def free_places(self) -> int:
        """Number of places that can be taken."""
        return max(0, self.capacity - len(self._phases))

    def phase(self, group_id: str) -> Phase | None:
        """Return what a group takes its place for; None if it takes none."""
        return self._phases.get(group_id)

    def of(self, phase: Phase) -> list[str]:
        """Return the groups in a phase, in the order in which they took their places."""
        return [group_id for group_id, one in self._phases.items() if one is phase]

    def take(self, group_id: str) -> bool:
        """Take a place for a group that has none; return False, without effect, if none is free.

        Raises:
            ValueError: The group has a place.
        """
        if group_id in self._phases:
            raise ValueError(f"group {group_id!r} has a place already: it is {self._phases[group_id]}")
        if not self.free_places:
            return False
        self._set(group_id, Phase.ASKED)
        return True

    def reserve(self, group_id: str) -> None:
        """Note that the reservation of a group is in the plane. A group whose rows are there is left as it is."""
        if self._phases.get(group_id) is not Phase.HELD:
            self._set(group_id, Phase.RESERVED)

    def hold(self, group_id: str) -> None:
        """Note that rows of a group are in the plane."""
        self._set(group_id, Phase.HELD)

    def free(self, group_id: str) -> None:
        """Give the place of a group back, if it has one."""
        if self._phases.pop(group_id, None) is not None:
            self._number(group_id)

    def mark(self) -> int:
        """Return the number of the newest change; to be called before a listing is requested."""
        return self._changes

    def apply(self, mark: int, *, reserved: Collection[str], held: Collection[str]) -> None:
        """Take over a listing, except for groups that were changed after its mark.

        A group that is in neither collection gives its place back, unless it is ASKED: its put may still arrive. A
        listing with an older mark than one that was applied before is ignored.

        Args:
            mark: What :meth:`mark` returned before the listing was requested.
            reserved: Groups with a reservation in the plane.
            held: Groups with rows in the plane.
        """
        if mark < self._applied:
            return
        self._applied = mark
        for group_id in [one for one, changed in self._changed.items() if changed <= mark]:
            del self._changed[group_id]
        listed = dict.fromkeys(reserved, Phase.RESERVED) | dict.fromkeys(held, Phase.HELD)
        for group_id, phase in list(self._phases.items()):
            if group_id not in listed and phase is not Phase.ASKED and group_id not in self._changed:
                del self._phases[group_id]
        for group_id, phase in listed.items():
            if group_id not in self._changed:
                self._phases[group_id] = phase

    def _set(self, group_id: str, phase: Phase) -> None:
        self._phases[group_id] = phase
        self._number(group_id)

    def _number(self, group_id: str) -> None:
        self._changes += 1
        self._changed[group_id] = self._changes
