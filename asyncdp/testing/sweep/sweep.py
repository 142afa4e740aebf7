"""The cancellation sweep of one verb."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import sniffio
import torch

from asyncdp.factory import stack

from ..faults.plan import FaultPlan
from ..faults.stacks import faulty_stack
from .checkpoints import Checkpoints
from .leftovers import leftovers
from .verbs import IDS, TASK, VERBS, SweptVerb
from .ways import ASYNCIO_ONLY, WAYS

if TYPE_CHECKING:
    from asyncdp.client import Client

    from ..contract.rig import Opener, Plane

__all__ = ["Swept", "cancellation_sweep"]

#: Factor by which more checkpoints are tried than were counted, for transports whose number of checkpoints varies.
OVER = 1.5
#: Layer settings with the shortest pauses between retries; a busy machine has time for reconciliation in ``close()``.
FAST = {"backoff_base_s": 0.001, "round_backoff_base_s": 0.001, "close_timeout_s": 20.0}
#: Seconds after which a hanging step fails.
PATIENCE_S = 30.0
#: Seconds that a transport with real sockets has to clean up after a cancelled call.
GRACE_S = 20.0
#: Maximum number of failures in the message.
TOLD = 5


@dataclass
class Swept:
    """Result of a sweep.

    Attributes:
        verb: Name of the verb.
        steps: Number of checkpoints of an undisturbed run.
        cancels: Number of cancelled runs, by way of cancelling.
        early: Number of runs that ended before their checkpoint.
    """

    verb: str
    steps: int = 0
    cancels: Counter[str] = field(default_factory=Counter)
    early: int = 0

    def __str__(self) -> str:
        """Summarize the sweep in one line."""
        ways = ", ".join(f"{way} {count}" for way, count in sorted(self.cancels.items()))
        return f"{self.verb}: {self.steps} steps, {self.cancels.total()} cancels ({ways}), {self.early} ended earlier"


async def cancellation_sweep(
    open_plane: Opener,
    verb: str | SweptVerb,
    *,
    polls: bool = False,
    every: int = 1,
    most: int = 200,
    ways: Sequence[str] | None = None,
    faults: Callable[[], FaultPlan] | None = None,
    **settings: Any,
) -> Swept:
    """Count the checkpoints of an undisturbed run of a verb; then run it again for each of them and cancel it there.

    Each run has a fresh client and a fresh partition on one plane. After each run, the sweep checks that no permit,
    probe, wait, used connection, copy or task is left, and that the next call on the same client gets its own reply.
    After the client's close, no outcome is pending, the plane holds no slot for it, no claim is lost, and a mutation
    happened as a whole or not at all.

    Args:
        open_plane: The same as the contract's fixture: ``open_plane({})`` is an async context manager that returns a
            :class:`~asyncdp.testing.contract.Plane`; see ``asyncdp.testing.contract.by_config``.
        verb: Name in :data:`VERBS`, or a verb of your own.
        polls: Whether the number of checkpoints varies between runs, as on real sockets. Then up to 1.5 times the
            counted ones are tried, a run may end before its checkpoint, and the client has time to clean up.
        every: Cancel only at each n-th checkpoint.
        most: Maximum number of checkpoints to cancel at; the last ones are left out.
        ways: Ways to cancel: ``"scope"`` (anyio), ``"native"`` (task.cancel()), ``"wait_for"`` (timeout of
            asyncio.wait_for). None: all that the running event loop supports.
        faults: Returns a fault plan for each run, so that retries and recovery are cancelled as well.
        **settings: Layer settings, as for ``stack()``.

    Raises:
        AssertionError: A check failed; the message names the checkpoints and the ways of cancelling.
        ValueError: The verb or a way does not exist.
    """
    if isinstance(verb, str) and verb not in VERBS:
        raise ValueError(f"verb: {verb!r} is not one of {sorted(VERBS)}")
    here = [way for way in WAYS if sniffio.current_async_library() == "asyncio" or way not in ASYNCIO_ONLY]
    chosen = here if ways is None else list(ways)
    for way in chosen:
        if way not in here:
            raise ValueError(f"ways: {way!r} is not one of {here}, which the running event loop has")
    name, subject = (verb, VERBS[verb]) if isinstance(verb, str) else ("a verb of your own", verb)
    swept = Swept(name)
    problems: list[str] = []
    async with open_plane({}) as plane:
        observer = stack(plane.transport, **{**FAST, **settings})
        run = _Run(plane, observer, subject, {**FAST, **settings}, faults, polls=polls)
        try:
            counted, problem = await run.once(None, "scope")
            if problem:
                raise AssertionError(f"{name} fails without a cancel: {problem}")
            swept.steps = counted.passed
            last = min(most, math.ceil(counted.passed * OVER) if polls else counted.passed)
            for at in range(1, last + 1, every):
                for way in chosen:
                    points, problem = await run.once(at, way)
                    swept.cancels[way] += 1
                    swept.early += not points.reached
                    if problem:
                        problems.append(f"cancelled by {way} at checkpoint {at} of {counted.passed}: {problem}")
        finally:
            with anyio.CancelScope(shield=True):
                await observer.close()
    if problems:
        more = f"\n... and {len(problems) - TOLD} more" if len(problems) > TOLD else ""
        raise AssertionError(f"{swept}\n" + "\n".join(problems[:TOLD]) + more)
    return swept


class _Run:
    """Runs the verb on a fresh client and partition."""

    def __init__(
        self,
        plane: Plane,
        observer: Client,
        verb: SweptVerb,
        settings: dict[str, Any],
        faults: Callable[[], FaultPlan] | None,
        *,
        polls: bool,
    ) -> None:
        self._plane = plane
        self._observer = observer
        self._verb = verb
        self._settings = settings
        self._faults = faults
        self._polls = polls
        self._number = 0
        self._name = f"sweep-{uuid.uuid4().hex[:8]}"

    async def once(self, at: int | None, way: str) -> tuple[Checkpoints, str]:
        """Run the verb once; return its checkpoints and a description of what was wrong, empty if nothing was."""
        self._number += 1
        problem = ""
        points = Checkpoints(at)
        partition = f"{self._name}-{self._number}"
        try:
            with anyio.fail_after(PATIENCE_S):
                await self._in(partition, points, way)
        except Exception as err:  # noqa: BLE001 - reported at the end of the sweep, with its checkpoint
            problem = f"{type(err).__name__}: {err}"
        finally:
            with anyio.CancelScope(shield=True):
                for name in (partition, f"{partition}-own"):
                    await self._observer.drop_partition(name)
        if not problem and (held := await self._until_empty(self._plane.leftovers)):
            problem = f"the plane still holds {held}"
        return points, problem

    async def _in(self, partition: str, points: Checkpoints, way: str) -> None:
        own = float(self._number)
        await self._observer.register_partition(partition, ["x", "y"], 8, [TASK])
        await self._observer.register_partition(f"{partition}-own", ["x"], 1, [TASK])
        await self._observer.put_samples(IDS[:2], partition, {"x": torch.tensor([0.0, 1.0])})
        await self._observer.put_samples(IDS[2:], partition, {"x": torch.tensor([2.0, 3.0])})
        await self._observer.put_samples(["own"], f"{partition}-own", {"x": torch.tensor([own])})
        transport = self._plane.attach({"owner": f"swept-{self._number}"})
        plan = FaultPlan()
        client = faulty_stack(transport, plan, **self._settings)
        try:
            given = None if self._verb.prepare is None else await self._verb.prepare(client, partition)
            for rule in () if self._faults is None else self._faults().rules:
                plan.add(rule)
            before = _tasks()
            with points.on_wire(client):
                cancelled = await WAYS[way](points, lambda: self._verb.act(client, partition, given))
            certain = not (self._polls or self._verb.shields or way == "wait_for")
            if points.reached and not cancelled and certain:
                raise AssertionError("the cancel was swallowed")
            if left := await self._until_empty(lambda: leftovers(client)):
                raise AssertionError(f"the call left {left}")
            if new := await self._until_empty(lambda: _tasks() - before):
                raise AssertionError(f"tasks are left: {sorted(new)}")
            plan.stop()
            if not self._verb.ends:
                got = float((await client.get_samples(["own"], f"{partition}-own", ["x"]))["x"])
                if got != own:
                    raise AssertionError(f"the next call got {got}, the reply of another one, and not {own}")
        finally:
            with anyio.CancelScope(shield=True):
                await client.close()
        if len(client.env.pending_outcomes) and not self._verb.ends:
            pending = [outcome.call for outcome in client.env.pending_outcomes]
            raise AssertionError(f"after close() these outcomes are still pending: {pending}")
        if self._verb.check is not None:
            await self._verb.check(self._observer, partition, cancelled)

    async def _until_empty(self, look: Callable[[], Any]) -> Any:
        """Call ``look`` until it returns nothing, or once without real sockets; return what is left."""
        found = look()
        if not found or not self._polls:
            return found
        with anyio.move_on_after(GRACE_S):
            while found:
                await anyio.sleep(0.005)
                found = look()
        return found


def _tasks() -> set[str]:
    """Return the tasks of this loop, except those named as belonging to a client, which end with the client."""
    return {
        f"{task.name} ({task.id})" for task in anyio.get_running_tasks() if not (task.name or "").startswith("asyncdp ")
    }
