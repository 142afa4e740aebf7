"""Checkpoints of the controller example, and how a run goes on from the last one when nothing else is left.

A checkpoint is one of the plane, and the trainer's journal (which stands for its weights) as it is after that: groups
that were trained in between are in both, and are popped, not trained again. The notes of the roles are not in it: what
it holds is where the account begins.
"""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING

from asyncdp.checkpoint import restore, save
from asyncdp.examples.controller_journal import Journal, Notes
from asyncdp.examples.controller_roles import PARTITION
from asyncdp.examples.grpo_chaos import plane_of
from asyncdp.recovery.reservations import Listing

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdp import Client

__all__ = ["Checkpoints", "destroy"]


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: Where the last one is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._plane = folder / "plane"
        self._journal = folder / "journal.json"

    async def save(self, plane: Client, stage: Path) -> None:
        """Save the plane, then the journal in ``stage``."""
        await save(plane, self._plane, PARTITION)
        if Journal(stage).path.exists():
            beside = self._journal.with_suffix(".new")
            shutil.copyfile(Journal(stage).path, beside)
            beside.replace(self._journal)

    async def restore(self, plane: Client, stage: Path) -> int:
        """Restore the last checkpoint into a new plane and a new folder; return the number of groups of the account."""
        await restore(plane, self._plane)
        if self._journal.exists():
            shutil.copyfile(self._journal, Journal(stage).path)
        listed = Listing(await plane.list_metadata(PARTITION)).groups
        there = {group.group_id for group in listed if group.committed and group.is_complete}
        begun = sorted({*there, *Journal(stage).read()[1]})
        Notes(stage, "checkpoint").add("committed", begun)
        return len(begun)


def destroy(plane: Client) -> None:
    """Kill the slot hosts and the directory, if they are processes; closing the client then removes their memory."""
    hosts = plane_of(plane)
    pids: dict[int, int] = getattr(hosts, "pids", {})
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    if hosts is not None and pids:
        hosts.server.kill()
