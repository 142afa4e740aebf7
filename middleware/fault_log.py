"""FaultLog: one log line for each fault that the layers of a client notice."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog

from asyncdp.log_line import log_line

if TYPE_CHECKING:
    from asyncdp.calls import CallContext

__all__ = ["LEVELS", "FaultLog"]

#: Level of each event. What is expected to happen in races, and each single retry, is of use in debugging only.
LEVELS: Final[Mapping[str, str]] = {
    "quarantine": "warning",
    "budget_refused": "warning",
    "outage": "warning",
    "unsettled": "warning",
    "recovered": "info",
    "outage_over": "info",
    "ambiguous": "info",
    "hedge": "debug",
    "outrun": "info",
    "host_skipped": "debug",
    "probe": "debug",
    "retry": "debug",
    "rotation": "debug",
    "round": "debug",
    "settled": "debug",
    "stale_slots": "debug",
}
#: Seconds for which the same event at the same host and port is not written again; the next line says how many it was.
REPEAT_INTERVAL_S: Final = 10.0
#: Kinds of lines that are remembered for that.
REMEMBERED: Final = 1024
#: Ids of samples in a line, and characters of each.
IDS, ID_LENGTH = 3, 64
#: Labels that a line has as they are.
_SHOWN: Final = ("reason", "host", "port", "for_s", "what", "state")


class FaultLog:
    """Writes the events of a client to structlog's logger ``asyncdp``.

    Nothing is configured here. Where the program has not configured structlog, lines go to standard error and those of
    level debug are left out; structlog's own default would print all to standard output, which may be the program's
    result. A line never holds a tensor. What writing raises (a full disk) is ignored.

    Args:
        client: Name of the client in each line: its owner.
    """

    def __init__(self, client: str = "") -> None:
        """Start with no lines written."""
        self._client = client
        self._written: dict[tuple[Any, ...], tuple[float, int]] = {}

    def write(self, name: str, labels: Mapping[str, Any], ctx: CallContext) -> None:
        """Write the line of an event of a user call, unless the same one was written a moment ago."""
        level = LEVELS.get(name)
        configured = structlog.is_configured()
        if level is None or (level == "debug" and not configured):
            return
        with contextlib.suppress(Exception):  # code of the program's own processors, and of its files
            now = ctx.env.clock.now()
            more = 0 if level == "debug" else self._repeated(name, labels, now)
            if more is not None:
                line = {**_about(labels, ctx, now), **({"repeated": more} if more else {})}
                log_line(level, name, client=self._client, **line)

    def _repeated(self, name: str, labels: Mapping[str, Any], now: float) -> int | None:
        """Return how many lines of this kind were left out since the last one; None: this one is left out too."""
        key = name, labels.get("host"), labels.get("port"), labels.get("what")
        last = self._written.get(key)
        if last is not None and now - last[0] < REPEAT_INTERVAL_S:
            self._written[key] = last[0], last[1] + 1
            return None
        if len(self._written) >= REMEMBERED:
            self._written.clear()
        self._written[key] = now, 0
        return last[1] if last is not None else 0


def _about(labels: Mapping[str, Any], ctx: CallContext, now: float) -> dict[str, Any]:
    """Return what a line says: where, why, and of which call."""
    call = ctx.call
    line: dict[str, Any] = {"op": ctx.verb}
    partition = labels.get("partition_id") or getattr(call, "partition_id", None)
    if partition is not None:
        line["partition"] = partition
    ids = getattr(call, "sample_ids", None)
    if ids:
        line["ids"] = [str(one)[:ID_LENGTH] for one in ids[:IDS]]
        if len(ids) > IDS:
            line["n_ids"] = len(ids)
    line |= {name: labels[name] for name in _SHOWN if labels.get(name) is not None}
    line |= {"attempt": ctx.attempt, "op_id": labels.get("op_id", ctx.op_id)}
    if call is not None:
        line["elapsed_s"] = round(now - ctx.began, 6)
    return line
