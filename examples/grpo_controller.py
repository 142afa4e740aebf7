"""The SingleController: steers the run by metadata only; it never sees a tensor."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from asyncdp.examples.grpo_plane import FAULTS, ROLLOUTS, WEIGHTS, insist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp import Client, DataPlaneGroupMeta
    from asyncdp.examples.grpo_account import Account
    from asyncdp.examples.grpo_plane import DemoConfig
    from asyncdp.examples.grpo_progress import Progress

__all__ = ["SingleController"]

LOOK_EVERY_S = 0.25
"""Seconds between two looks at the plane: a few training steps."""


class SingleController:
    """Looks at the plane, evicts groups that are too old, keeps the numbers that a person wants to see.

    Args:
        plane: A client of its own.
    """

    def __init__(self, plane: Client, config: DemoConfig, account: Account, progress: Progress) -> None:
        self.plane = plane
        self.config = config
        self.account = account
        self.progress = progress

    async def run(self, stop: anyio.Event) -> None:
        """Look again and again; a look that fails is made up for by the next one."""
        while not stop.is_set():
            with suppress(*FAULTS):
                await self._look()
            await anyio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        weights = await self.plane.list_metadata(WEIGHTS)
        groups = await self.plane.list_metadata(ROLLOUTS)
        depth = await self.plane.depth(ROLLOUTS)
        newest = weights[0].weight_version or 0 if weights else 0
        self.account.seen([key for group in groups for key in group.keys])
        self.progress.looked(depth, [newest - _version(group) for group in groups])
        await self._evict([group for group in groups if newest - _version(group) > self.config.max_age], "stale")

    async def _evict(self, groups: Sequence[DataPlaneGroupMeta], reason: str) -> None:
        if groups:
            rows = groups[0].meta().concat(group.meta() for group in groups[1:])
            await insist(lambda: self.plane.evict(rows, ROLLOUTS))
            self.account.evicted(rows.sample_ids, reason)

    async def evict_lost(self) -> None:
        """Evict groups of which a row was lost with the storage that held it.

        To be called once the trainer has ended: until then it does so, since it may be training on what it read before.
        """
        await self._evict([group for group in await self._groups() if group.lost_keys], "gone")

    async def left(self) -> list[str]:
        """Return the ids of all samples that are in the plane, however often it takes to get an answer."""
        return [key for group in await self._groups() for key in group.keys]

    async def _groups(self) -> list[DataPlaneGroupMeta]:
        while True:
            try:
                return await self.plane.list_metadata(ROLLOUTS)
            except FAULTS:
                await anyio.sleep(0.1)


def _version(group: DataPlaneGroupMeta) -> int:
    return group.weight_version or 0
