"""The processes of a run: starts them, writes down what they tell, ends them."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncdp.examples.grpo_failure import Failure, why_it_ended
from asyncdp.examples.grpo_plane import from_afar
from asyncdp.examples.grpo_role import GO, READY, STOP, Kind, Role, play

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess
    from types import TracebackType
    from typing import Self

    from asyncdp.examples.grpo_account import Account
    from asyncdp.examples.grpo_plane import DemoConfig
    from asyncdp.examples.grpo_progress import Progress

__all__ = ["Crew"]

JOIN_S = 10.0
"""Seconds that a process may take to end once its pipe has closed."""


@dataclass
class _Member:
    """A process, and our end of its pipe."""

    role: Role
    process: SpawnProcess
    pipe: Connection
    killed: bool = False
    failure: Failure | None = None

    def why(self) -> str:
        """Say why it ended: in its own words, if it had any left."""
        return self.failure.why if self.failure is not None else why_it_ended(self.process.exitcode)


class Crew:
    """Runs each role in a process of its own. Leaving the context kills what still runs.

    Args:
        config: Of the run.
        plane: Where they attach.
        account, progress: Where their entries are written.
    """

    def __init__(self, config: DemoConfig, plane: dict[str, Any], account: Account, progress: Progress) -> None:
        self.config = config
        self.progress = progress
        self._plane = plane
        self._books: dict[str, Any] = {"account": account, "progress": progress}
        # Spawned, not forked: a copy of this process would hold its sockets and the locks of its threads.
        self._context = multiprocessing.get_context("spawn")
        self._members: dict[str, _Member] = {}
        self._workers = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill what still runs: nothing, if all went well."""
        for member in self._members.values():
            member.process.kill()
        for member in self._members.values():
            member.process.join()
            member.pipe.close()

    @property
    def workers(self) -> list[str]:
        """The names of the rollout workers that are at work."""
        return [name for name, member in self._members.items() if member.role.kind is Kind.WORKER]

    async def gather(self) -> None:
        """Start all roles; returns when each has attached."""
        async with anyio.create_task_group() as starting:
            for kind in (Kind.TRAINER, Kind.CONTROLLER, *[Kind.WORKER] * self.config.workers):
                starting.start_soon(self._start, kind)

    async def perform(self, stop: anyio.Event) -> None:
        """Let all work until ``stop`` is set, or the trainer has reached its goal; returns when they have ended."""
        async with anyio.create_task_group() as tasks:
            for member in tuple(self._members.values()):
                tasks.start_soon(self._accompany, member, stop)

    async def replace(self, worker: str, stop: anyio.Event) -> None:
        """Kill a worker, without a warning, and let a new one work in its place; returns when that one has ended."""
        gone = self._members[worker]
        gone.killed = True
        gone.process.kill()
        self.progress.struck("worker killed", role=worker, pid=gone.process.pid)
        member = await self._start(Kind.WORKER)
        self.progress.struck("worker started", role=member.role.name, pid=member.process.pid)
        await self._accompany(member, stop)

    async def _start(self, kind: Kind) -> _Member:
        """Start a process and wait until it has attached."""
        plane = from_afar(self._plane) if kind is Kind.TRAINER else self._plane
        role = Role(kind, self._workers, self.config, plane)
        self._workers += kind is Kind.WORKER
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=play, args=(role, theirs), name=role.name, daemon=True)
        process.start()
        theirs.close()  # held open here, its end would never be seen
        member = self._members[role.name] = _Member(role, process, ours)
        word = await _receive(member)
        if word != READY:
            member.failure = word if isinstance(word, Failure) else None
            await anyio.to_thread.run_sync(process.join, JOIN_S)
            raise RuntimeError(f"{role.name} did not start: {member.why()}")
        return member

    async def _accompany(self, member: _Member, stop: anyio.Event) -> None:
        """See a process through its work: from go to stop, and to the end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tell_when_to_stop, member, stop)
            await self._hear(member)
            tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(member.process.join, JOIN_S)
        member.pipe.close()
        del self._members[member.role.name]
        if member.process.exitcode != 0 and not member.killed:
            raise RuntimeError(f"{member.role.name} ended too soon: {member.why()}")
        if member.role.kind is Kind.TRAINER:
            stop.set()  # it has reached its goal, if it was not told to

    async def _hear(self, member: _Member) -> None:
        """Write down what a process tells, until its end."""
        _tell(member, GO)
        while (entry := await _receive(member)) is not None:
            if isinstance(entry, Failure):
                member.failure = entry
                continue
            getattr(self._books[entry.book], entry.method)(*entry.args)


async def _receive(member: _Member) -> Any:
    """Return what a process says next; None once it has ended, however it did."""
    try:
        return await anyio.to_thread.run_sync(member.pipe.recv, abandon_on_cancel=True)
    except (EOFError, OSError):  # the latter in the middle of an entry: killed while it wrote
        return None


def _tell(member: _Member, word: str) -> None:
    with suppress(OSError):  # it has ended
        member.pipe.send(word)


async def _tell_when_to_stop(member: _Member, stop: anyio.Event) -> None:
    await stop.wait()
    _tell(member, STOP)
