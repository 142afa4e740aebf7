"""Detects misuse of UCX's listener, which anybody can reach, and chooses what to do against it.

Random bytes sent to the listener make a UCX thread spin for ever, at half a core (measured); and the listener accepts
any connection and never closes it. UCX itself does nothing against it, so the host watches its own threads and
descriptors.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import resource
import threading
from pathlib import Path
from typing import Final

__all__ = ["AGAIN_S", "Action", "DescriptorLeakDetector", "Escalation", "SpinDetector", "most_sessions"]

#: Share of a core above which an idle UCX's thread is spinning (measured: 0.5 to 1.0 when it spins; 0.02 while 70
#: clients a second connect).
_SHARE: Final = 0.25
#: The same share while UCX has work; higher, since the thread's need over other networks is not known.
_BUSY_SHARE: Final = 0.45
#: Least share of a core that the thread must really have used: on a busy machine each wake-up waits for a core, which
#: alone is no sign of spinning.
_LEAST: Final = 0.04

#: Descriptors per client session: a control stream and a UCX connection of at most three sockets (measured: 3 in all).
PER_SESSION: Final = 4
#: Descriptors reserved for other purposes than sessions: the directory, listeners, unauthenticated peers, open files.
_OWN: Final = 256
#: Tolerated descriptors beyond those of sessions: directory connections, unauthenticated peers within their timeout,
#: and what malformed connections left behind.
SPARE: Final = 128

#: Seconds before a host that restarted may restart again. A peer that sends garbage all the time can make UCX spin, but
#: it causes no more than one restart, which takes seconds, in ten minutes.
AGAIN_S: Final = 600.0
#: Misuse seen again within this many intervals of the watch counts as the same misuse; detection takes two of them.
_CURED_SPANS: Final = 6
_WORKERS: Final = 2


class SpinDetector:
    """Measures the processor time that threads other than Python's used between two checks.

    Time that a thread waited for a processor counts like time on one, so spinning shows on a busy machine too.

    The result is only meaningful in a process without other busy native threads, such as a slot host's.
    """

    def __init__(self) -> None:
        """Take the processor time used so far as the baseline."""
        self._spent = self._measure()
        self._hot = 0

    def look(self, since_s: float, *, idle: bool) -> bool:
        """Return whether a thread was busy in two consecutive checks.

        Args:
            since_s: Seconds since the last check.
            idle: Whether UCX had no work in that time.
        """
        share = (_SHARE if idle else _BUSY_SHARE) * since_s
        spent, before = self._measure(), self._spent
        self._spent = spent
        hot = False
        for thread, (ran, waited) in spent.items():
            ran_before, waited_before = before.get(thread, (0.0, 0.0))
            got = ran - ran_before
            hot = hot or (got > _LEAST * since_s and got + waited - waited_before > share)
        self._hot = self._hot + 1 if hot else 0
        return self._hot > 1

    def _measure(self) -> dict[str, tuple[float, float]]:
        """Return seconds on a processor and seconds of waiting for one, by id of each thread that is not Python's."""
        ours = {str(thread.native_id) for thread in threading.enumerate()}
        spent = {}
        for task in Path("/proc/self/task").iterdir():
            if task.name not in ours:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                    spent[task.name] = self._of(task)
        return spent

    def _of(self, task: Path) -> tuple[float, float]:
        try:
            ran, waited, _ = (task / "schedstat").read_text().split()
        except FileNotFoundError:  # not every kernel counts the waiting time
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 0.0
        return int(ran) / 1e9, int(waited) / 1e9


class DescriptorLeakDetector:
    """Compares the number of open descriptors of this process with the number that its sessions need.

    The comparison is only meaningful in a process that opens few other descriptors, such as a slot host's.
    """

    def __init__(self) -> None:
        """Take the number of descriptors that are open now as the baseline."""
        self._before = self._count()

    def look(self, sessions: int) -> bool:
        """Return whether more descriptors are open than this number of sessions and ``SPARE`` account for."""
        return self._count() > self._before + PER_SESSION * sessions + SPARE

    @staticmethod
    def _count() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough


def most_sessions() -> int:
    """Return how many sessions fit into the descriptor limit of this process; at least 16."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else max(16, (limit - _OWN) // PER_SESSION)


class Action(enum.Enum):
    """An action against misuse of the UCX listener."""

    NEW_WORKER = "UCX is started anew"
    NEW_PROCESS = "that did not help: the host begins anew"
    NOTHING = "that did not help, and nothing more is tried: start the host again"


class Escalation:
    """Chooses the next action against misuse of the UCX listener.

    A new worker mostly helps, and closes all connections. Where requests were running UCX may keep the old worker, with
    the leaked connections in it (measured); then only a new process helps. That takes a restart, and loses no row where
    the arena is adopted.

    Args:
        span_s: Seconds between two checks of the watch.
        process_from: Time from which a new process may be started, by the clock of ``now``; infinity: never.
    """

    def __init__(self, span_s: float, process_from: float = math.inf) -> None:
        """Start with no action taken."""
        self._span_s = span_s
        self._process_from = process_from
        self._tried = 0
        self._at = -math.inf

    def next(self, now: float) -> Action:
        """Return the action against misuse that was detected at ``now``, in seconds of a monotonic clock."""
        if now - self._at > _CURED_SPANS * self._span_s:
            self._tried = 0
        self._at = now
        if self._tried < _WORKERS:
            self._tried += 1
            return Action.NEW_WORKER
        return Action.NEW_PROCESS if now >= self._process_from else Action.NOTHING
