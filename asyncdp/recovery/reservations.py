"""Reservations: rows without fields that say which groups are being worked on. Sans-IO.

A reservation is a row of its own, in a group of its own, so that it takes no place among the rows of the group that it
stands for. It is never claimed, since it is not committed. Its tags say for which group it is, and who works on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta

__all__ = ["Ages", "Listing", "Reservation", "is_reservation", "reservation_id", "reservation_tags"]

#: Tag of a reservation: the group that it stands for.
FOR = "reservation_for"
#: Tag of a reservation: the name, for the plane, of the client that works on the group.
OWNER = "reservation_owner"
#: Tag of a reservation: tells it from any other reservation of the same group.
TOKEN = "reservation_token"  # noqa: S105 - no secret
#: Tag of rows that a GroupWriter puts: tells them from rows that others put under the same ids.
WRITER = "group_writer"


@dataclass(frozen=True, slots=True)
class Reservation:
    """A place for one rollout group; can be pickled and handed to the worker that produces the group.

    Attributes:
        group_id: The group.
        owner: Name of who works on it.
        token: Tells it from any other reservation of the same group.
        weight_version: Version of the weights that the group is to be made with, or None.
        meta: The row in the plane, with its handle: a removal by it spares any other reservation.
    """

    group_id: str
    owner: str
    token: str
    weight_version: int | None
    meta: KVBatchMeta


def reservation_id(group_id: str) -> str:
    """Return the sample id of a group's reservation."""
    return f"reservation:{group_id}"


def reservation_tags(group_id: str, owner: str, token: str, weight_version: int | None) -> dict[str, Any]:
    """Return the tags of a reservation."""
    tags: dict[str, Any] = {
        "group_id": reservation_id(group_id),
        "expected_num_keys": 1,
        "committed": False,
        FOR: group_id,
        OWNER: owner,
        TOKEN: token,
    }
    if weight_version is not None:
        tags["weight_version"] = weight_version
    return tags


def is_reservation(group: DataPlaneGroupMeta) -> bool:
    """Return whether a listed group is a reservation."""
    return bool(group.tags) and FOR in group.tags[0]


class Listing:
    """A listing of a partition, with reservations apart from the groups that have rows.

    Attributes:
        groups: The groups, oldest first, without reservations.
        reservations: The listed reservation of each group that has one.
    """

    def __init__(self, listed: Iterable[DataPlaneGroupMeta]) -> None:
        """Sort what was listed."""
        self.groups: list[DataPlaneGroupMeta] = []
        self.reservations: dict[str, DataPlaneGroupMeta] = {}
        for group in listed:
            if is_reservation(group):
                self.reservations[str(group.tags[0][FOR])] = group
            else:
                self.groups.append(group)

    def owner(self, group_id: str) -> str:
        """Return who works on a reserved group."""
        return str(self.reservations[group_id].tags[0].get(OWNER, ""))

    def token(self, group_id: str) -> str:
        """Return the token of a group's reservation."""
        return str(self.reservations[group_id].tags[0].get(TOKEN, ""))

    def versions(self) -> list[int]:
        """Return the weight versions with which reserved groups are being made of which no row is there yet."""
        seen = {group.group_id for group in self.groups}
        found = (row.weight_version for group_id, row in self.reservations.items() if group_id not in seen)
        return [version for version in found if version is not None]

    def finished(self) -> list[str]:
        """Return the reserved groups to which nothing will be added: their reservations are not needed any more.

        They are complete; or a GroupWriter has committed them, which it does at its end, also if rows failed.
        """
        done = {group.group_id for group in self.groups if group.committed and (group.is_complete or _written(group))}
        return [group_id for group_id in self.reservations if group_id in done]

    def made(self) -> set[tuple[str, float]]:
        """Return id and creation time of each group that was committed with all its rows, also if some are lost."""
        return {
            (group.group_id, group.created_at)
            for group in self.groups
            if group.committed and sum(row.get("status") != "failed" for row in group.tags) >= group.expected_num_keys
        }

    def drop(self, group_ids: Collection[str]) -> None:
        """Forget the reservations of these groups, which were removed from the plane."""
        for group_id in group_ids:
            del self.reservations[group_id]


def _written(group: DataPlaneGroupMeta) -> bool:
    """Return whether all rows of a group are of a GroupWriter."""
    return bool(group.tags) and all(WRITER in row for row in group.tags)


class Ages:
    """Tells for how long something has been seen.

    The age of a reservation follows from two clocks: the Unix time that its row was tagged with, which survives a
    restart of the controller but is another machine's, and this process's monotonic clock since the row was first
    listed here. The greater age counts, so a clock that is ahead delays the end of a reservation at most once.
    """

    def __init__(self) -> None:
        """Begin without having seen anything."""
        self._first: dict[str, float] = {}

    def see(self, names: Collection[str], now: float) -> None:
        """Note what is there at ``now``, in monotonic seconds, and forget what is not."""
        self._first = {name: self._first.get(name, now) for name in names}

    def age_s(self, name: str, now: float) -> float:
        """Return the seconds for which something has been seen without interruption; 0 if it has not been."""
        return now - self._first.get(name, now)
