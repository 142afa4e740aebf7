"""The recovery loop of a controller: closes a gate when the plane is away, and opens it when all is as it should be."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import anyio

from asyncdp.errors import (
    ClaimNotReady,
    DataPlaneBadRequest,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
)
from asyncdp.middleware.policy.backoff import Backoff
from asyncdp.settings import stack_arguments
from asyncdp.settings import verb_arguments as check

from .ledger import clock_of, removed_together
from .machine import Event, RecoveryMachine, State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

    from asyncdp.calls import Clock
    from asyncdp.meta import DataPlaneGroupMeta

    from .ledger import CapacityLedger
    from .machine import RecoveryStep
    from .reservations import Listing
    from .selection import Selection, Selector

__all__ = ["RecoveryGaveUp", "RecoveryLoop", "is_outage"]

R = TypeVar("R")
_UNATTENDED: Final = "the gate stays closed: RecoveryLoop.run was not started, or has ended"
#: What was selected in the ``reported()`` blocks that the task is in, or that its parents were in when it began.
SELECTED: ContextVar[tuple[tuple[RecoveryLoop, list[Selection]], ...]] = ContextVar("asyncdp_selected", default=())


def is_outage(error: BaseException) -> bool:
    """Return whether an error says that the plane is away, busy, loading or full, and may be waited for."""
    away = (DataPlaneUnavailable, DataPlaneTimeout, DataPlaneNotReady)
    return isinstance(error, away) and not isinstance(error, ClaimNotReady)


class RecoveryGaveUp(DataPlaneUnavailable):
    """Outages without progress between them took longer than ``give_up_after_s``.

    Attributes:
        story: The steps of these outages, as one line each.
    """

    def __init__(self, message: str = "", *, story: Sequence[str] = (), **context: Any) -> None:
        """Set the story; the message ends with it."""
        super().__init__("\n  ".join([message, *story]), retryable=False, **context)
        self.story = tuple(story)


class RecoveryLoop:
    """Keeps one partition of a controller in order, through outages of the plane.

    ``run`` is a task of the controller. It begins as after an outage, since a controller that is started again knows
    nothing: it waits until the plane answers, has partitions declared, counts the ledger's capacity anew, removes what
    was trained and evicts what can never be, releases the claims of owners that are gone, and opens the gate. The pumps
    of the controller call the plane through ``call``, or report their errors: an outage closes the gate, and all of
    this happens again. Between outages the partition is put in order every ``sweep_every_s``.

    All removals name the lives of the rows that were listed: rows that were put anew meanwhile stay.

    Args:
        ledger: Counts the capacity of the partition; its gate is the gate, and its client makes all calls.
        selector: Decides which groups are evicted.
        version: Returns the weight version that the trainer is at.
        declare: Declares the controller's partitions; called in each recovery, since a plane without a persistent
            directory comes back without them. None: somebody else does.
        trained: Tells which groups are trained: it gets the listed ones and returns those that the trainer's journal
            has. They are popped before claims are released. None: the trainer removes them itself, and one that is
            killed between a step and its pop leaves them to be trained again.
        alive: Tells of an owner of claims or reservations whether it lives, at once or as an awaitable. Claims and
            reservations of the others are released. None: claims end by their leases, reservations by their age.
        tasks: Tasks whose claims are looked at; None: all tasks of the partition.
        on_event: Called with each step of a recovery; its errors are ignored.
        backoff_base_s: Longest first wait before a ping, in seconds.
        backoff_cap_s: Longest wait before a ping at all, in seconds.
        ping_timeout_s: Seconds that a ping may take.
        sweep_every_s: Seconds between two sweeps while the gate is open.
        give_up_after_s: Seconds after which ``run`` raises RecoveryGaveUp: those of an outage, and of the outages
            before it since a group was last seen to be made or trained (``ledger.progress``). Each counts from the
            beginning of the call that failed to the open gate; if the gate was open for so long, the count begins anew.
        settled_s: Seconds for which the gate has to be open before waits are short again.
        clock: Source of time; None: that of the client.
        rng: Source of randomness; None: a new one.

    Raises:
        ValueError: An argument has the wrong type or is out of range; the message names it.

    Attributes:
        removed: Number of groups that were removed, by verdict, and those that were popped as ``"trained"``.
        released: Number of owners whose claims were released.
        failed_rows: Number of rows tagged ``status="failed"`` at the last look.
        unknown_owners: Owners about whom ``alive`` raised, with the text of its error; they keep what they have.
    """

    def __init__(  # noqa: PLR0913 - its parts, and settings with defaults
        self,
        ledger: CapacityLedger,
        selector: Selector,
        version: Callable[[], int],
        *,
        declare: Callable[[], Awaitable[None]] | None = None,
        trained: Callable[[Sequence[DataPlaneGroupMeta]], Collection[DataPlaneGroupMeta]] | None = None,
        alive: Callable[[str], bool | Awaitable[bool]] | None = None,
        tasks: Sequence[str] | None = None,
        on_event: Callable[[RecoveryStep], None] | None = None,
        backoff_base_s: float = 0.5,
        backoff_cap_s: float = 10.0,
        ping_timeout_s: float = 5.0,
        sweep_every_s: float = 5.0,
        give_up_after_s: float = 600.0,
        settled_s: float = 30.0,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Close the gate; ``run`` opens it."""
        stack_arguments.options(
            clock=clock,
            rng=rng,
            on_event=on_event,
            backoff_base_s=backoff_base_s,
            backoff_cap_s=backoff_cap_s,
            ping_timeout_s=ping_timeout_s,
            sweep_every_s=sweep_every_s,
            give_up_after_s=give_up_after_s,
            settled_s=settled_s,
        )
        given: dict[str, Any] = {"version": version, "declare": declare, "trained": trained, "alive": alive}
        for name, call in given.items():
            if not callable(call) and (call is not None or name == "version"):
                raise ValueError(f"{name}: must be callable, not {call!r:.80}")
        self.ledger = ledger
        self.selector = selector
        self.removed: Counter[str] = Counter()
        self.released = 0
        self.failed_rows = 0
        self.unknown_owners: dict[str, str] = {}
        self._client = ledger.client
        self._partition_id = ledger.partition_id
        self._version = version
        self._declare = declare
        self._trained = trained
        self._alive = alive
        self._tasks = None if tasks is None else check.names(tasks, "tasks")
        self._on_event = on_event
        self._ping_timeout_s = ping_timeout_s
        self._sweep_every_s = sweep_every_s
        self._give_up_after_s = give_up_after_s
        self._settled_s = settled_s
        self._backoff = Backoff(backoff_base_s, backoff_cap_s)
        self._clock = clock or clock_of(ledger.client)
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._progress = ledger.progress
        self._machine: RecoveryMachine | None = None
        self._fault = anyio.Event()
        self._looking = anyio.Lock()
        self._training: dict[str, Selection] = {}  # by group: the selection that has chosen it
        self._listing: Listing | None = None
        ledger.gate.close()
        ledger.gate.unattended = _UNATTENDED

    # -- what the pumps of a controller use

    @property
    def story(self) -> tuple[RecoveryStep, ...]:
        """The steps of the newest outage, and of those before it without progress in between."""
        return () if self._machine is None else self._machine.story

    @property
    def outage(self) -> int:
        """Number of the newest outage, from 0: the start."""
        return 0 if self._machine is None else self._machine.outage

    def report(self, error: BaseException, *, outage: int | None = None) -> bool:
        """Report the error of a call; return whether it says that the plane is away, which closes the gate.

        A slot host that refuses the client's secret is no outage before the first progress, as the secret may be wrong;
        after it, it is one, as another process may have taken the port of a host that is away.

        Args:
            error: The error.
            outage: :attr:`outage` when the call began. A call that began before an outage that is over by now fails
                because of that one: it closes nothing.
        """
        if not is_outage(error) or self._wrong_secret(error):
            return False
        self._fault_of(error, outage)
        return True

    async def call(self, call: Callable[[], Awaitable[R]]) -> R:
        """Wait for the gate and make a call; if the plane is away, report it, wait until it is back, and call again.

        For calls that may be made twice: reads, removals, puts of the same rows. (A put without an answer may have
        happened, and is then made again.)

        Raises:
            RecoveryGaveUp: The plane did not come back in time.
            Exception: Any error of the call that is no outage.
        """
        while True:
            await self.ledger.gate.wait()
            outage = self.outage
            try:
                return await call()
            except DataPlaneError as err:
                if not self.report(err, outage=outage):
                    raise

    @asynccontextmanager
    async def reported(self) -> AsyncIterator[None]:
        """Wait for the gate and run a block; an outage in it is reported and suppressed, and the block ends there.

        If the block ends with an outage, any other error or a cancellation, the groups that were selected in it and are
        neither finished nor put back are put back.

        For a step of a pump that is made again anyway::

            while True:
                async with loop.reported():
                    await step()
        """
        await self.ledger.gate.wait()
        outage = self.outage
        selections: list[Selection] = []
        SELECTED.set((*SELECTED.get(), (self, selections)))
        try:
            yield
        except BaseException as err:
            for selection in selections:
                for group in selection.chosen:
                    if self._training.get(group.group_id) is selection:
                        del self._training[group.group_id]
            if not isinstance(err, DataPlaneError) or not self.report(err, outage=outage):
                raise
        finally:
            SELECTED.set(tuple(one for one in SELECTED.get() if one[1] is not selections))

    async def select(self, count: int, *, least: int | None = None) -> Selection:
        """List the partition, remove what falls out, and choose groups to train on, see :meth:`Selector.look`.

        The chosen groups are not removed, nor chosen again, until ``finish`` or ``put_back``, the end of the block of
        ``reported`` with an error, or until ``trained`` says that they are trained.
        """
        selection = await self._look(count=count, least=count if least is None else least)
        self._training.update((group.group_id, selection) for group in selection.chosen)
        for loop, selections in SELECTED.get():
            if loop is self:
                selections.append(selection)
        return selection

    async def finish(self, groups: Sequence[DataPlaneGroupMeta]) -> None:
        """Pop groups that were chosen and are trained on, and give their places back.

        Groups that ``trained`` has named meanwhile are popped and counted already.
        """
        for rows in removed_together(groups):
            await self._client.pop(rows, self._partition_id)
        self._count([group for group in groups if group.group_id in self._training], "trained")
        self.put_back(groups)

    def put_back(self, groups: Sequence[DataPlaneGroupMeta]) -> None:
        """Let groups be chosen again that were chosen and not trained on."""
        for group in groups:
            self._training.pop(group.group_id, None)

    async def sweep(self) -> None:
        """Do once what every recovery does after the ping, but for the declarations."""
        await self._look()
        await self._release()

    # -- the task

    async def run(self) -> NoReturn:
        """Recover, then wait for the next outage, until cancelled.

        Whatever it raises is raised to all who wait for the gate as well.

        Raises:
            RecoveryGaveUp: A recovery was not over in time.
            DataPlaneError: The request itself is wrong, or the client was closed.
        """
        machine = self._machine = RecoveryMachine(
            self._backoff,
            self._rng,
            self._clock.now(),
            give_up_after_s=self._give_up_after_s,
            settled_s=self._settled_s,
        )
        self.ledger.gate.close()
        self.ledger.gate.unattended = ""
        try:
            while True:
                if machine.state is State.OPEN:
                    await self._keep_open()
                else:
                    await self._recover(machine)
        except Exception as err:
            self.ledger.gate.break_with(err)
            raise
        finally:
            self.ledger.gate.close()
            self.ledger.gate.unattended = _UNATTENDED

    async def _recover(self, machine: RecoveryMachine) -> None:
        """Do the job of one state, and go on to the next one."""
        event = Event.WAITED if machine.state is State.WAITING else Event.DONE
        detail: dict[str, Any] = {}
        error: DataPlaneError | None = None
        with anyio.CancelScope(deadline=machine.expires) as limit:
            try:
                detail = await self._job(machine)
            except DataPlaneError as err:
                event, error = Event.FAILED if self._mends(err) else Event.BROKEN, err
        if limit.cancelled_caught:
            event = Event.EXPIRED
        if error is not None:
            detail = _detail_of(error)
        step = self._handle(event, detail, error)
        if step.next_state is State.GIVEN_UP:
            raise self._gave_up(machine) if error is None else error

    def _gave_up(self, machine: RecoveryMachine) -> RecoveryGaveUp:
        story = [str(step) for step in machine.story]
        if machine.left_out:
            story.insert(len(story) // 2, f"({machine.left_out} steps are not shown)")
        if machine.first_outage == machine.outage:
            message = f"the plane was not back after {self._give_up_after_s:g} s; the steps of outage {machine.outage}:"
        else:
            message = (
                f"outages {machine.first_outage} to {machine.outage} took {self._give_up_after_s:g} s together, and no"
                " group was made or trained in between: the plane answers pings, and fails otherwise; their steps:"
            )
        return RecoveryGaveUp(message, story=story, op="recover", partition_id=self._partition_id)

    async def _job(self, machine: RecoveryMachine) -> dict[str, Any]:
        """Do the job of the state, and return what is to be told of it."""
        match machine.state:
            case State.WAITING:
                waits_s = max(0.0, machine.wait_until - self._clock.now())
                await self._clock.sleep(waits_s)
                return {"waited_s": round(waits_s, 3)}
            case State.PINGING:
                await self._client.ping(timeout_s=self._ping_timeout_s)
                return {}
            case State.REBUILDING:
                if self._declare is not None:
                    await self._declare()
                self._listing = await self._rebuild()
                return {"used": self.ledger.used, "capacity": self.ledger.capacity}
            case State.EVICTING:
                before = Counter(self.removed)
                selection = await self._look(self._listing)
                return {"removed": dict(self.removed - before), "waiting": dict(selection.waiting)}
            case _:
                return {"released": await self._release(), "unknown_owners": dict(self.unknown_owners)}

    async def _keep_open(self) -> None:
        """Sweep now and then until a fault is reported."""
        with anyio.move_on_after(self._sweep_every_s):
            await self._fault.wait()
            return
        outage = self.outage
        try:
            await self.sweep()
        except DataPlaneError as err:
            if not self._mends(err):
                raise
            self._fault_of(err, outage)

    def _mends(self, error: DataPlaneError) -> bool:
        """Return whether waiting may mend an error: not where the request or secret is wrong or the client closed."""
        return not isinstance(error, (DataPlaneBadRequest, DataPlaneClosed)) and not self._wrong_secret(error)

    def _wrong_secret(self, error: BaseException) -> bool:
        """Return whether the client was refused, and has not been shown to be accepted."""
        return not self.ledger.progress and getattr(error, "refused", False)

    def _fault_of(self, error: BaseException, outage: int | None) -> None:
        machine = self._machine
        if machine is not None and machine.state is State.OPEN and outage in (None, machine.outage):
            self._handle(Event.FAULT, _detail_of(error), error)

    def _handle(self, event: Event, detail: dict[str, Any], error: BaseException | None) -> RecoveryStep:
        """Have the machine take an event; the gate follows its state."""
        machine = self._machine
        assert machine is not None  # noqa: S101 - run() has made it
        if self.ledger.progress != self._progress:
            self._progress = self.ledger.progress
            machine.progressed()
        step = machine.handle(
            event,
            self._clock.now(),
            detail,
            retry_after_s=getattr(error, "retry_after_s", None),
            took_s=getattr(error, "elapsed_s", None) or 0.0,
        )
        if machine.gate_is_open:
            self._fault = anyio.Event()
            self.ledger.gate.open()
        else:
            self._fault.set()
            self.ledger.gate.close()
        if self._on_event is not None:
            with suppress(Exception):  # an observer must not harm what it observes
                self._on_event(step)
        return step

    # -- jobs

    async def _rebuild(self) -> Listing:
        return await self.ledger.rebuild(gone=None if self._alive is None else self._is_gone)

    async def _look(self, listing: Listing | None = None, *, count: int = 0, least: int = 0) -> Selection:
        """Remove what is trained and what falls out of a listing (None: of a new one), and choose among the rest."""
        async with self._looking:
            if listing is None:
                listing = await self._rebuild()
            groups = listing.groups
            if self._trained is not None:
                trained = list(self._trained(groups))  # chosen ones too: the outage that ended a step is over by now
                self.put_back(trained)
                await self._remove(trained, "trained", self._client.pop)
                done = {group.group_id for group in trained}
                groups = [group for group in groups if group.group_id not in done]
            groups = [group for group in groups if group.group_id not in self._training]
            selection = self.selector.look(
                groups,
                self._version(),
                self._clock.now(),
                count=count,
                least=least,
                in_flight=listing.reservations,
                in_flight_versions=listing.versions(),
            )
            self.failed_rows = selection.failed_rows
            for verdict, fallen in selection.fallen.items():
                await self._remove(fallen, verdict, self._client.evict)
            return selection

    async def _remove(
        self, groups: Sequence[DataPlaneGroupMeta], why: str, verb: Callable[..., Awaitable[None]]
    ) -> None:
        for rows in removed_together(groups):
            await verb(rows, self._partition_id)
        self._count(groups, why)

    def _count(self, groups: Sequence[DataPlaneGroupMeta], why: str) -> None:
        """Count groups that were removed, and give their places back."""
        self.removed[str(why)] += len(groups)
        self.ledger.freed((group.group_id for group in groups), trained=why == "trained")

    async def _release(self) -> int:
        """Release the claims of owners that are gone, and return how many such owners there were."""
        if self._alive is None or not self._client.get_capabilities().claim_release:
            return 0
        if self._tasks is None:
            self._tasks = (await self._client.describe(self._partition_id)).consumer_tasks
        owners: set[str] = set()
        for task in self._tasks:
            owners.update(claim.owner for claim in await self._client.list_claims(self._partition_id, task))
        gone = [owner for owner in sorted(owners) if await self._is_gone(owner)]
        for owner in gone:
            await self._client.release_claims(self._partition_id, owner)
        self.released += len(gone)
        return len(gone)

    async def _is_gone(self, owner: str) -> bool:
        """Ask the caller about an owner; one that it cannot tell about keeps what it has."""
        assert self._alive is not None  # noqa: S101 - asked for only then
        try:
            alive = self._alive(owner)
            if inspect.isawaitable(alive):
                alive = await alive
        except Exception as err:  # noqa: BLE001 - whatever asks about processes may fail like they do
            self.unknown_owners[owner] = f"{type(err).__name__}: {err}"
            return False
        self.unknown_owners.pop(owner, None)
        return not alive


def _detail_of(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}
