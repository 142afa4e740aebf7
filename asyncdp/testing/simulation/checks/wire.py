"""The wire: retries within the budget and the ceiling, a stale slot asked once, outages asked about by one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..violation import Violation

if TYPE_CHECKING:
    from ..history import Budgets, History
    from ..wire_request import SlotKey, WireRequest

__all__ = ["crowded_outages", "endless_waits", "overspent_budgets", "stale_asked_again", "too_many_requests"]

#: Lengths of time over which retries are counted, in seconds.
WINDOWS_S = (0.5, 2.0, 10.0)
#: Requests that pay what an earlier call owes, or look again for what is not there yet: they are no retries.
UNPAID = frozenset({"Abort", "AbandonClaim", "Resolve", "TryClaim", "TryPartition"})
#: Asks whether what does not answer does so again.
PROBE = "Probe"
#: The request that follows a wait for an outage comes after a short pause, of so many seconds at most.
PAUSE_S = 2.0


def _retries(requests: Sequence[WireRequest]) -> list[float]:
    """When one client asked again for what had failed, or whether what did not answer does so again."""
    failed: set[object] = set()
    again: list[float] = []
    for request in sorted(requests, key=lambda request: request.at):
        if request.kind in UNPAID:
            if request.attempt > 1:
                again.append(request.at)
            continue
        if request.kind == PROBE:
            again.append(request.at)
            continue
        subjects: list[object] = [(request.op_id, request.kind, request.subject)]
        if request.kind == "ReadSlots":
            subjects = [(request.op_id, key) for key in request.slots]
        if any(subject in failed for subject in subjects):
            again.append(request.at)
        failed.difference_update(subjects)
        if request.fault:
            failed.update(subjects)
        elif request.failed:
            failed.update((request.op_id, key) for key in request.failed)
    return again


def overspent_budgets(history: History) -> Iterator[Violation]:
    """Find clients that retried more often than their budget allows.

    It promises: retries within any time t are at most ratio x (calls in t and in two windows before)
    + floor x (window + t). A probe costs as much as a retry; the request that follows an outage's end is free.
    """
    free = _outages_over(history)
    by_client: dict[str, list[WireRequest]] = defaultdict(list)
    for request in history.requests:
        by_client[request.client].append(request)
    for client, requests in by_client.items():
        budget = history.budgets.get(client)
        if budget is None or budget.ratio == float("inf"):
            continue
        calls = sorted(op.began for op in history.operations if op.client == client)
        retries = _retries(requests)
        for length in WINDOWS_S:
            worst = _worst(calls, retries, free[client], budget, length)
            if worst is not None:
                at, count, allowed = worst
                text = f"client {client} retried {count} times within {length} s, its budget allows {allowed:.1f}"
                yield Violation("budget", f"{text} (from {at:.4f} s on)")


def _worst(
    calls: Sequence[float], retries: Sequence[float], free: Sequence[float], budget: Budgets, length: float
) -> tuple[float, int, float] | None:
    """Return the first time span in which the budget was overspent."""
    first = early = late = 0
    for last, now in enumerate(retries):
        while retries[first] < now - length:
            first += 1
        began = retries[first]
        while early < len(calls) and calls[early] < began - 2 * budget.window_s:
            early += 1
        while late < len(calls) and calls[late] <= now:
            late += 1
        allowed = budget.ratio * (late - early) + budget.floor_per_s * (budget.window_s + now - began)
        allowed += _within(free, began - PAUSE_S, now)
        if last - first + 1 > allowed + 1.0:
            return began, last - first + 1, allowed
    return None


def too_many_requests(history: History) -> Iterator[Violation]:
    """Find user calls that asked for one slot more often than rounds x attempts x ports tried.

    After each wait for an outage that ended it may be tried once more, and as often again in all.
    """
    asked: dict[tuple[str, str, SlotKey], list[float]] = defaultdict(list)
    for request in history.requests:
        for key in request.slots:
            asked[request.client, request.op_id, key].append(request.at)
    free = _outages_over(history)
    for (client, op_id, key), moments in asked.items():
        budget = history.budgets.get(client)
        if budget is None or len(moments) <= budget.per_slot:
            continue
        waits = _within(free[client], min(moments), max(moments))
        most = budget.per_slot + min(budget.per_slot, budget.after_wait * waits)
        if len(moments) > most:
            text = f"client {client} asked {len(moments)} times for slot {key} in one call ({op_id}), {most} is most"
            yield Violation("ceiling", text)


def crowded_outages(history: History) -> Iterator[Violation]:
    """Find clients that asked twice at once whether what does not answer does so again."""
    last: dict[tuple[str, str | None], WireRequest] = {}
    for request in sorted(history.requests, key=lambda request: request.at):
        if request.kind != PROBE:
            continue
        before = last.get((request.client, request.host))
        if before is not None and request.at < before.done_at:
            what = "the directory" if request.host is None else request.host
            calls = f"({before.op_id}, {request.op_id})"
            text = f"client {request.client} asked twice at once whether {what} answers {calls}"
            yield Violation("outage", text)
        if before is None or request.done_at >= before.done_at:
            last[request.client, request.host] = request


def endless_waits(history: History) -> Iterator[Violation]:
    """Find user calls that waited for outages longer than they may.

    One that asked, was not answered, and asked the same again without another request waited meanwhile.
    """
    waited: dict[tuple[str, str], float] = defaultdict(float)
    last: dict[tuple[str, str], WireRequest] = {}
    for request in sorted(history.requests, key=lambda request: request.at):
        call = request.client, request.op_id
        before = last.get(call)
        if before is not None and request.kind == before.kind == PROBE and request.host == before.host and before.fault:
            waited[call] += request.at - before.at
        last[call] = request
    for (client, op_id), seconds in waited.items():
        budget = history.budgets.get(client)
        if budget is not None and seconds > budget.patience_s + 1e-6:
            text = f"client {client} waited {seconds:.3f} s for outages in one call ({op_id})"
            yield Violation("outage", f"{text}, {budget.patience_s:g} s is most")


def _outages_over(history: History) -> Mapping[str, Sequence[float]]:
    """When calls of each client were told that what they had waited for answers again."""
    over: dict[str, list[float]] = defaultdict(list)
    for event in history.events:
        if event.what == "outage_over":
            over[event.client].append(event.at)
    return over


def _within(moments: Sequence[float], since: float, until: float) -> int:
    return bisect_right(moments, until) - bisect_left(moments, since)


def stale_asked_again(history: History) -> Iterator[Violation]:
    """Find slots that were asked for again by a call that had been told that they are stale.

    A call whose second look-up failed does not know where its rows lie, and begins anew.
    """
    told: dict[tuple[str, str], dict[SlotKey, float]] = defaultdict(dict)
    for request in sorted(history.requests, key=lambda request: request.at):
        known = told[request.client, request.op_id]
        if request.kind == "Locate" and request.fault:
            known.clear()
        for key in request.slots:
            if known.get(key, request.at) < request.at:
                text = (
                    f"client {request.client} asked again for slot {key}, which it knew to be stale ({request.op_id})"
                )
                yield Violation("stale-once", text)
        for key in request.stale:
            known.setdefault(key, request.done_at)
