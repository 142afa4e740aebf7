"""The roles of the controller example. All that they tell each other lies in the plane.

The controller reserves a place for each group, in the name of a worker; the worker finds the reservation in
``list_metadata``, and writes the group; the scorer adds rewards; the trainer claims groups with rewards, and takes a
step on them. A step is over when it is in the journal: then the groups are popped, by the trainer, or by the controller
after a death of the trainer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import torch

from asyncdp import ClaimNotReady, Client, DataPlaneError, KVBatchMeta, Layer, Service, build_data_plane_client
from asyncdp.calls import CallContext, EvictSamples, handles
from asyncdp.examples.controller_journal import Journal, Notes
from asyncdp.recovery import CapacityLedger, GroupWriter, RecoveryLoop, Reservation, Selector
from asyncdp.recovery.reservations import Listing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncdp import DataPlaneGroupMeta

__all__ = ["PARTITION", "ROLES", "Part", "declare", "main", "play"]

PARTITION = "rollouts"
SIZE = 4
"""Rows of a group."""
CAPACITY = 12
"""Groups that may be made or wait at once."""
STEP = 2
"""Groups of a training step."""
LOOK_S = 0.1
"""Seconds between two looks at the plane."""


@dataclass(frozen=True)
class Part:
    """Who a role is.

    Attributes:
        role: Its name: ``"controller"``, ``"worker-0"``, ...
        life: Number of its lives so far: each has a name of its own to the plane.
        folder: Where journal and notes are.
        workers: Number of workers.
        plane: The ``attach_config()`` of the plane.
        lost_grace_s: See :class:`~asyncdp.recovery.Selector`.
    """

    role: str
    life: int
    folder: Path
    workers: int
    plane: dict[str, Any]
    lost_grace_s: float

    @property
    def owner(self) -> str:
        """Its name to the plane."""
        return f"{self.role}.{self.life}"

    def notes(self) -> Notes:
        """Return where it writes down what it does."""
        return Notes(self.folder, self.owner)


def alive_in(folder: Path) -> Callable[[str], bool]:
    """Return what tells whether an owner lives: the driver keeps a file for each that does."""
    return lambda owner: (folder / f"{owner}.alive").exists()


async def declare(plane: Client) -> None:
    """Declare the partition."""
    await plane.register_partition(PARTITION, ["number", "reward"], 1000, ["score", "train"], grpo_group_size=SIZE)


def number_of(group_id: str) -> int:
    """Return what the rows of a group hold, so that rows of another one are noticed."""
    return int(group_id.rpartition("-")[2])


async def play(part: Part) -> None:
    """Play a role until it is cancelled, or its process killed."""
    layers = [partial(_NoteEvictions, notes=part.notes())] if part.role == "controller" else []
    config = {**part.plane, "owner": part.owner}
    async with build_data_plane_client(config, bootstrap=False, layers=layers) as plane:
        await ROLES[part.role.partition("-")[0]](part, plane)


class _NoteEvictions(Layer):
    """Writes down what is going to be evicted, before it is."""

    def __init__(self, inner: Service, notes: Notes) -> None:
        super().__init__(inner)
        self._notes = notes

    @handles(EvictSamples)
    async def note(self, call: EvictSamples, ctx: CallContext) -> Any:
        """Write it down, and pass it on."""
        self._notes.add("evict", sorted({sample_id.rpartition("_g")[0] for sample_id in call.sample_ids or ()}))
        return await self.inner.execute(call, ctx)


async def _controller(part: Part, plane: Client) -> None:
    """Dispatch, and keep the partition in order."""
    journal = Journal(part.folder)

    def trained(groups: Sequence[DataPlaneGroupMeta]) -> list[DataPlaneGroupMeta]:
        done = set(journal.read()[1])
        return [group for group in groups if group.group_id in done]

    loop = RecoveryLoop(
        CapacityLedger(plane, PARTITION, CAPACITY, relist_s=LOOK_S),
        Selector(max_staleness=20, lost_grace_s=part.lost_grace_s, incomplete_grace_s=5.0),
        version=lambda: journal.read()[0],
        declare=lambda: declare(plane),
        trained=trained,
        alive=alive_in(part.folder),
        backoff_base_s=0.1,
        backoff_cap_s=1.0,
        ping_timeout_s=2.0,
        sweep_every_s=0.5,
    )
    async with anyio.create_task_group() as pumps:
        pumps.start_soon(loop.run)
        number = 0
        while True:
            async with loop.reported():
                worker = f"worker-{number % part.workers}"
                group_id = f"{part.owner}-{number}"
                await loop.ledger.reserve(group_id, owner=_living(part, worker), weight_version=journal.read()[0])
            number += 1


def _living(part: Part, role: str) -> str:
    """Return the name to the plane of the newest life of a role."""
    lives = [int(path.stem.rpartition(".")[2]) for path in part.folder.glob(f"{role}.*.alive")]
    return f"{role}.{max(lives, default=0)}"


async def _worker(part: Part, plane: Client) -> None:
    """Write the groups that are reserved in its name."""
    notes, done = part.notes(), set[str]()

    async def look() -> None:
        listing = Listing(await plane.list_metadata(PARTITION))
        there = {group.group_id for group in listing.groups}
        for group_id, row in listing.reservations.items():
            if listing.owner(group_id) == part.owner and group_id not in done and group_id not in there:
                done.add(group_id)
                version = row.weight_version or 0
                place = Reservation(group_id, part.owner, listing.token(group_id), version, row.meta())
                await write(group_id, version, place)

    async def write(group_id: str, version: int, place: Reservation) -> None:
        async with GroupWriter(
            plane, PARTITION, group_id, size=SIZE, weight_version=version, reservation=place
        ) as group:
            for half in range(2):
                ids = [f"{group_id}_g{half * SIZE // 2 + row}" for row in range(SIZE // 2)]
                await group.put(ids, {"number": torch.full((SIZE // 2,), number_of(group_id))})
                await anyio.sleep(0.02)
        notes.add("committed", [group_id])

    await _again_and_again(look)


async def _scorer(part: Part, plane: Client) -> None:
    """Add a reward to each row."""
    del part

    async def score() -> None:
        meta = await plane.claim_meta(PARTITION, "score", ["number"], SIZE * STEP, min_batch_size=SIZE, timeout_s=1.0)
        try:
            data = await plane.get_data(meta)
            reward = data["number"].to(torch.float32) / 2
            await plane.put_samples(meta, PARTITION, {"reward": reward}, stale="skip")
        except DataPlaneError:
            await plane.release_claim(meta)  # whoever claims it next scores it again
            raise

    await _again_and_again(score)


async def _trainer(part: Part, plane: Client) -> None:
    """Take steps; one is over once it is in the journal."""
    journal, notes = Journal(part.folder), part.notes()

    async def step() -> None:
        meta = await plane.claim_meta(
            PARTITION, "train", ["number", "reward"], SIZE * STEP, min_batch_size=SIZE, timeout_s=1.0
        )
        try:
            data = await plane.get_data(meta)
        except DataPlaneError:
            await plane.release_claim(meta)
            raise
        done = set(journal.read()[1])
        groups = sorted({tags["group_id"] for tags in meta.tags or ()} - done)
        for at, tags in enumerate(meta.tags or ()):
            number = number_of(tags["group_id"])
            if (int(data["number"][at]), float(data["reward"][at])) != (number, number / 2):
                notes.add("wrong", [tags["group_id"]])
        await anyio.sleep(0.05)  # the step itself
        if groups:
            journal.step(groups)
        await _pop(plane, meta)

    await _again_and_again(step)


async def _pop(plane: Client, meta: KVBatchMeta) -> None:
    """Remove what is in the journal; the controller does so where this fails."""
    with suppress(DataPlaneError):
        await plane.pop(meta, PARTITION)


async def _again_and_again(work: Callable[[], Awaitable[None]]) -> None:
    """Work; what fails is tried again, since the plane has all that is needed for it."""
    while True:
        try:
            await work()
        except ClaimNotReady:
            continue
        except DataPlaneError:
            await anyio.sleep(LOOK_S)
        await anyio.sleep(LOOK_S / 4)


ROLES: dict[str, Callable[[Part, Client], Awaitable[None]]] = {
    "controller": _controller,
    "worker": _worker,
    "scorer": _scorer,
    "trainer": _trainer,
}


def main(part: Part) -> None:
    """Play a role in a process of its own, which ends with the driver."""
    import signal

    from asyncdp.examples.async_grpo import be_small

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_small()

    async def until_alone() -> None:
        parent = os.getppid()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play, part)
            while os.getppid() == parent:  # noqa: ASYNC110 - the death of a process is no event
                await anyio.sleep(0.5)
            os._exit(1)

    anyio.run(until_alone)
