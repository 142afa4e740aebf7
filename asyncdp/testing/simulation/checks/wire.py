"""Checks of wire requests: limits of retries, of requests for stale slots, and of probes and waits in outages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..recording.violation import Violation

if TYPE_CHECKING:
    from ..recording.history import Budgets, History
    from ..recording.wire_request import SlotKey, WireRequest

__all__ = ["crowded_outages", "endless_waits", "overspent_budgets", "stale_asked_again", "too_many_requests"]

#: Lengths in seconds of the time spans in which retries are counted.
WINDOWS_S = (0.5, 2.0, 10.0)
#: Requests that reconcile an earlier call or poll for samples; repeated ones are no retries unless their attempt is
#: above 1.
UNPAID = frozenset({"Abort", "AbandonClaim", "Invalidate", "Resolve", "TryClaim", "TryPartition"})
#: The request that checks whether a host or port answers again.
PROBE = "Probe"
#: Maximum pause in seconds between the end of an outage and the request that waited for it.
PAUSE_S = 2.0


def _retries(requests: Sequence[WireRequest]) -> list[float]:
    """Return the times at which one client sent retries or probes."""
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

    The budget guarantees that the retries within any time span t are at most ratio x (calls in t and in the two windows
    before it) + floor x (window + t). A probe costs as much as a retry; the request after the end of an outage is free.
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
    """Return the first time span in which the budget was exceeded; None if there is none."""
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
    """Find user calls that requested one slot more often than rounds x attempts x ports tried.

    Each completed wait for an outage allows one more request, up to the same number again in total.
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
    """Find clients that sent concurrent probes to the same unresponsive target."""
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
    """Find user calls that waited for outages longer than allowed.

    A call waits in the time between an unanswered request and its repetition if it sent no other request in between.
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
    """Return, by client, the times at which calls were notified of the end of the outage that they waited for."""
    over: dict[str, list[float]] = defaultdict(list)
    for event in history.events:
        if event.what == "outage_over":
            over[event.client].append(event.at)
    return over


def _within(moments: Sequence[float], since: float, until: float) -> int:
    return bisect_right(moments, until) - bisect_left(moments, since)


def stale_asked_again(history: History) -> Iterator[Violation]:
    """Find slots that a call requested again after they had been answered as stale.

    A call whose second look-up failed does not know the new location of its rows and is allowed to start over.
    """
    known_stale: dict[tuple[str, str], dict[SlotKey, float]] = defaultdict(dict)
    for request in sorted(history.requests, key=lambda request: request.at):
        known = known_stale[request.client, request.op_id]
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
