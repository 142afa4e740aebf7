"""A ledger of capacity: backpressure before a rollout starts, counted anew from the plane after a restart."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.clock import AnyioClock
from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, DataPlaneUnsupported
from asyncdp.settings import stack_arguments
from asyncdp.settings import verb_arguments as check

from .gate import Gate
from .places import Phase, Places
from .reservations import Ages, Listing, Reservation, reservation_id, reservation_tags

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable

    from asyncdp.calls import Clock
    from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta
    from asyncdp.protocol import DataPlaneClient

__all__ = ["CapacityLedger", "clock_of", "removed_together"]

#: Largest number of rows that one removal names.
ROWS_AT_ONCE = 2000


def clock_of(client: DataPlaneClient) -> Clock:
    """Return the clock of a client's stack; of a client that has none, that of the event loop."""
    clock: Clock = getattr(getattr(client, "env", None), "clock", None) or AnyioClock()
    return clock


def removed_together(groups: Iterable[DataPlaneGroupMeta]) -> list[KVBatchMeta]:
    """Return metas of all rows of some groups of one partition, each of at most about ROWS_AT_ONCE rows."""
    batches: list[KVBatchMeta] = []
    waiting: list[KVBatchMeta] = []
    rows = 0
    for group in groups:
        waiting.append(group.meta())
        rows += len(group.keys)
        if rows >= ROWS_AT_ONCE:
            batches.append(waiting[0].concat(waiting[1:]))
            waiting, rows = [], 0
    if waiting:
        batches.append(waiting[0].concat(waiting[1:]))
    return batches


class CapacityLedger:
    """Bounds how many rollout groups of a partition are being made or wait in the plane.

    Before work on a group starts, ``reserve`` takes a place for it and puts a *reservation* into the partition: a row
    without fields, tagged ``committed=False``, so that a controller that is started again sees the work that is in
    flight in ``list_metadata``. When the group is complete its reservation is removed (``commit``) and the group keeps
    the place until its rows are removed; ``release`` gives the place of a group back that will not come. A reservation
    that nobody commits or releases is removed when it is older than ``reservation_timeout_s``: the rollout is taken for
    lost. A rollout that comes later all the same is counted when it is listed.

    Nothing is kept but in the plane: ``rebuild`` counts anew from a listing. Use one ledger for a partition. Two that
    reserve at the same time do not take the same group twice, but may exceed the capacity until each has listed.

    Args:
        client: A client of the plane; its backend must be able to bind mutations to lives (``bound_mutations``).
        partition_id: The partition.
        capacity: Number of groups.
        reservation_timeout_s: Seconds after which a reservation is removed; longer than the longest rollout.
        relist_s: Seconds between two listings while ``reserve`` waits for a place, since groups are removed by others.
        gate: ``reserve`` waits while it is closed; None: the ledger makes one. A RecoveryLoop closes and opens it.
        clock: Source of time; None: that of the client.

    Attributes:
        progress: Number of groups that were seen to be made or trained since the first listing, one perhaps more than
            once: it grows while data comes and goes. A RecoveryLoop tells by it whether a plane is of use.

    Raises:
        DataPlaneUnsupported: The backend cannot bind mutations to lives.
        ValueError: An argument has the wrong type or is out of range; the message names it.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        capacity: int,
        *,
        reservation_timeout_s: float = 1800.0,
        relist_s: float = 1.0,
        gate: Gate | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Begin with all places free; ``rebuild`` before the first ``reserve`` of a partition that may hold rows."""
        if not client.get_capabilities().bound_mutations:
            msg = "a CapacityLedger removes reservations by the lives that it listed, which this backend cannot do"
            raise DataPlaneUnsupported(msg, capability="bound_mutations", partition_id=partition_id)
        self.client = client
        self.partition_id = check.name(partition_id, "partition_id")
        self.gate = gate or Gate()
        self.progress = 0
        self._made: set[tuple[str, float]] | None = None  # None: nothing was listed yet
        self._places = Places(check.count(capacity, "capacity"))
        self._timeout_s = stack_arguments.setting(reservation_timeout_s, "float", "reservation_timeout_s")
        self._relist_s = stack_arguments.setting(relist_s, "float", "relist_s")
        self._clock = clock or clock_of(client)
        self._ages = Ages()
        self._unsure: dict[str, str] = {}  # by group: the token of a reservation whose put may or may not have happened
        self._listing = anyio.Lock()
        self._changed = anyio.Event()

    @property
    def capacity(self) -> int:
        """Number of groups that may be made or wait at once."""
        return self._places.capacity

    @property
    def used(self) -> int:
        """Number of places taken: groups reserved, and groups with rows in the plane, each counted once."""
        return self._places.used

    @property
    def free(self) -> int:
        """Number of places that can be taken."""
        return self._places.free_places

    @property
    def reserved(self) -> list[str]:
        """Ids of the groups that are being made, of which no row was seen yet."""
        return [*self._places.of(Phase.ASKED), *self._places.of(Phase.RESERVED)]

    async def reserve(
        self, group_id: str, *, owner: str | None = None, weight_version: int | None = None
    ) -> Reservation:
        """Wait for the gate and for a free place, take it, and put the group's reservation into the plane.

        If it is cancelled or fails, the place is given back, at once or with the next listing.

        Args:
            group_id: The group that is to be made.
            owner: Name of who works on it, for ``alive`` of a RecoveryLoop; None: the client's own name.
            weight_version: Version of the weights that it is made with.

        Raises:
            DataPlaneBadRequest: The group has a place already, or an argument has the wrong type.
            DataPlaneError: The plane cannot be listed, or the reservation cannot be put.
        """
        check.name(group_id, "group_id")  # a wrong one would wait for the gate first
        while True:
            await self.gate.wait()
            got = await self.try_reserve(group_id, owner=owner, weight_version=weight_version)
            if got is not None:
                return got
            changed = self._changed
            with anyio.move_on_after(self._relist_s) as patience:
                await changed.wait()
            if patience.cancelled_caught:
                await self.rebuild()

    async def try_reserve(
        self, group_id: str, *, owner: str | None = None, weight_version: int | None = None
    ) -> Reservation | None:
        """Reserve as :meth:`reserve` does, but return None at once if no place is free."""
        check.name(group_id, "group_id")
        if owner is not None:
            check.name(owner, "owner")
        check.tag_rows([{"weight_version": weight_version}], 1)
        if group_id in self._unsure:
            await self.rebuild()
        try:
            if not self._places.take(group_id):
                return None
        except ValueError as err:
            raise DataPlaneBadRequest(str(err), op="reserve", partition_id=self.partition_id, field="group_id") from err
        token = uuid.uuid4().hex
        owner = str(getattr(self.client, "owner", "")) if owner is None else owner
        tags = reservation_tags(group_id, owner, token, weight_version)
        try:
            meta = await self.client.put_samples([reservation_id(group_id)], self.partition_id, tags=[tags], only="new")
        except DataPlaneError as err:
            if err.ambiguous:
                self._unsure[group_id] = token
            else:
                self.freed([group_id], trained=False)
            raise
        except BaseException:  # cancelled: it may have happened, or be under way still; the next listing finds out
            self._unsure[group_id] = token
            raise
        self._places.reserve(group_id)
        return Reservation(group_id, owner, token, weight_version, meta)

    async def commit(self, reservation: Reservation) -> None:
        """Remove the reservation of a group whose rows are in the plane; the group keeps its place.

        May be repeated, and called where the group was made: this ledger notes it with its next listing.
        """
        await self.client.clear_samples(reservation.meta, self.partition_id)
        self._places.hold(reservation.group_id)

    async def release(self, reservation: Reservation) -> None:
        """Remove the reservation of a group that will not come, and give its place back."""
        await self.client.clear_samples(reservation.meta, self.partition_id)
        self.freed([reservation.group_id], trained=False)

    def freed(self, group_ids: Iterable[str], *, trained: bool = True) -> None:
        """Give the places of groups back whose rows were removed, without waiting for the next listing.

        Args:
            group_ids: The groups.
            trained: Whether they were trained on, which is progress; else they were given up or evicted.
        """
        for group_id in group_ids:
            self._places.free(group_id)
            self.progress += trained
        self._notify()

    async def rebuild(self, *, gone: Callable[[str], Awaitable[bool]] | None = None) -> Listing:
        """Count anew from a listing of the plane, and remove the reservations that have ended.

        A reservation has ended if its group is complete, if it is older than ``reservation_timeout_s``, or if its owner
        is gone.

        Args:
            gone: Tells of an owner of reservations whether it is gone; None: none is.

        Returns:
            The listing, without the reservations that were removed.
        """
        async with self._listing:
            mark = self._places.mark()
            unsure = dict(self._unsure)
            await self._settle(unsure)
            listing = Listing(await self.client.list_metadata(self.partition_id))
            lost = [one for one, token in unsure.items() if one in listing.reservations and listing.token(one) == token]
            made = listing.made()
            self.progress += 0 if self._made is None else len(made - self._made)
            self._made = made
            self._places.apply(mark, reserved=listing.reservations, held=[group.group_id for group in listing.groups])
            finished = listing.finished()
            ended = dict.fromkeys([*finished, *lost, *self._aged(listing)])
            if gone is not None:
                owners = {listing.owner(one) for one in listing.reservations if one not in ended}
                dead = {owner for owner in owners if await gone(owner)}
                ended |= dict.fromkeys(one for one in listing.reservations if listing.owner(one) in dead)
            await self._remove(listing, list(ended))
            held = {group.group_id for group in listing.groups}
            for group_id, token in unsure.items():
                if self._unsure.get(group_id) == token:
                    del self._unsure[group_id]
                    if group_id not in listing.reservations and group_id not in held:
                        self._places.free(group_id)
            over = [one for one in ended if one not in held and self._places.phase(one) is not Phase.HELD]
            self.freed(over, trained=False)
            return listing

    async def _settle(self, unsure: Collection[str]) -> None:
        """Put what changes nothing to the ids of puts without an answer: these have happened by then, or never will."""
        ids = [reservation_id(group_id) for group_id in unsure]
        if ids:
            nothing: list[dict[str, Any]] = [{}] * len(ids)
            await self.client.put_samples(ids, self.partition_id, tags=nothing, only="existing", stale="skip")

    def _aged(self, listing: Listing) -> list[str]:
        """Return the groups whose reservations are too old."""
        now, wall = self._clock.now(), self._clock.time()
        tokens = {group_id: listing.token(group_id) for group_id in listing.reservations}
        self._ages.see(tokens.values(), now)
        return [
            group_id
            for group_id, row in listing.reservations.items()
            if max(wall - row.created_at, self._ages.age_s(tokens[group_id], now)) > self._timeout_s
        ]

    async def _remove(self, listing: Listing, group_ids: Collection[str]) -> None:
        for rows in removed_together(listing.reservations[one] for one in group_ids):
            await self.client.clear_samples(rows, self.partition_id)
        listing.drop(group_ids)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
