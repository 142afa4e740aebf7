"""The leak guard: finds what a test left behind in the process and on the machine.

pytest imports this module even in runs that use no fixture of asyncdp, so it does not import the core.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["KINDS", "LeakGuard", "lasting"]

#: Kinds of leaks.
KINDS = ("tasks", "threads", "processes", "files", "segments")
#: Seconds that threads and child processes which a test stopped have to end.
GRACE_S = 2.0
#: Name prefixes of threads that belong to test tools, or to pools whose idle threads end by themselves.
OUTSIDE = ("asyncdp watchdog", "pytest_timeout", "Trio thread", "AnyIO worker thread")
#: Processes that Python keeps running from their first use until its own end.
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
SHM = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
PROC = Path("/proc")

#: The active guards; :func:`lasting` informs them.
_AT_WORK: list[LeakGuard] = []


@dataclass
class Snapshot:
    """Resources that exist at one moment, by kind: ``{identity: description for messages}``."""

    threads: dict[object, str] = field(default_factory=dict)
    processes: dict[object, str] = field(default_factory=dict)
    files: dict[object, str] = field(default_factory=dict)
    segments: dict[object, str] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Snapshot:
        """Take a snapshot of threads, child processes, file descriptors and shared memory segments."""
        return cls(_threads(), _processes(), _files(), {name: name for name in _segments()})

    def without(self, known: Snapshot) -> Snapshot:
        """Return the resources that ``known`` does not have."""
        return Snapshot(
            *(
                {key: name for key, name in here.items() if key not in there}
                for here, there in zip(self, known, strict=True)
            )
        )

    def add(self, other: Snapshot) -> None:
        """Add the resources of another snapshot."""
        for here, there in zip(self, other, strict=True):
            here.update(there)

    def __iter__(self) -> Iterator[dict[object, str]]:
        """Iterate over the kinds."""
        return iter((self.threads, self.processes, self.files, self.segments))

    def items(self) -> Iterator[tuple[str, dict[object, str]]]:
        """Iterate over (name, resources) of the kinds."""
        return zip(KINDS[1:], self, strict=True)


def _threads() -> dict[object, str]:
    return {
        thread.ident: f"{thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if not thread.name.startswith(OUTSIDE)
    }


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listed in PROC.glob(f"{pid}/task/*/children"):
        try:
            found += map(int, listed.read_text().split())
        except OSError:  # the thread has just ended
            continue
    return found


def _processes() -> dict[object, str]:
    found: dict[object, str] = {}
    for pid in _children(os.getpid()):
        try:
            line = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            name = line or f"{(PROC / str(pid) / 'comm').read_text().strip()} (ended, and nobody has waited for it)"
        except OSError:
            continue
        if not any(kept in line for kept in KEPT):
            found[pid] = f"{pid}: {name:.120}"
    return found


def _files() -> dict[object, str]:
    found: dict[object, str] = {}
    try:
        numbers = os.listdir(PROC / "self" / "fd")  # noqa: PTH208 - names are all that is wanted, and this is per test
    except OSError:
        return found
    for number in numbers:
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - as above
        except OSError:  # the descriptor that was used to list the folder
            continue
        found[number, target] = f"{number} -> {target}"
    return found


def _segments() -> list[str]:
    try:
        return os.listdir(SHM)  # noqa: PTH208 - as above
    except OSError:
        return []


def _mapped(pid: int) -> set[str]:
    """Return the names of the segments that a process has mapped."""
    try:
        maps = (PROC / str(pid) / "maps").read_text()
    except OSError:
        return set()
    prefix = f"{SHM}/"
    return {line.split(prefix, 1)[1].removesuffix(" (deleted)") for line in maps.splitlines() if prefix in line}


def _mapped_by_us() -> set[str]:
    todo, found = [os.getpid()], set[str]()
    while todo:
        pid = todo.pop()
        found |= _mapped(pid)
        todo += _children(pid)
    return found


def _mapped_by_anyone() -> set[str]:
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return set[str]().union(*map(_mapped, pids))


class LeakGuard:
    """Compares snapshots from before and after a test.

    The owner of a segment that no process has mapped is unknown, and other programs create segments as well. Such a
    segment is only suspected, together with the test in which it appeared, and reported if it still exists at the end
    of the session.

    Args:
        grace_s: Seconds that resources have to disappear after a test.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self._known = Snapshot()
        self._suspects: dict[str, str] = {}

    def begin(self) -> None:
        """Take the snapshot to compare with; what it contains is not a leak."""
        self._known = Snapshot.now()

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Add what is created within the ``with`` block to the snapshot."""
        before = Snapshot.now()
        try:
            yield
        finally:
            self._known.add(Snapshot.now().without(before))

    def left(self, test: str, allow: tuple[str, ...] = ()) -> list[str]:
        """Return one line for each new resource that does not disappear in time."""
        new = self._new(test, allow)
        if new:
            until = time.monotonic() + self.grace_s
            while new and time.monotonic() < until:
                gc.collect()  # finalizers of unreferenced objects close resources, and may release further objects
                time.sleep(0.01)
                new = self._new(test, allow)
        return new

    def _new(self, test: str, allow: tuple[str, ...]) -> list[str]:
        found = Snapshot.now().without(self._known)
        if found.segments:
            ours = _mapped_by_us()
            self._suspects |= {str(name): test for name in found.segments if name not in ours}
            found.segments = {name: text for name, text in found.segments.items() if name in ours}
        singular = {"processes": "process", "files": "file descriptor", "segments": "shared-memory segment"}
        return [
            f"{singular.get(kind, kind.removesuffix('s'))} {text}"
            for kind, there in found.items()
            if kind not in allow
            for text in there.values()
        ]

    def suspect(self, found: Mapping[str, str]) -> None:
        """Add the segments that another process suspects: {segment: test}."""
        self._suspects.update(found)

    def suspects(self) -> Mapping[str, str]:
        """Return the suspected segments that still exist and that no process has mapped: {segment: test}."""
        there = set(_segments()) & self._suspects.keys()
        if there:
            there -= _mapped_by_anyone()
        return {name: self._suspects[name] for name in sorted(there)}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Register this guard with :func:`lasting` during the ``with`` block."""
        _AT_WORK.append(self)
        try:
            yield
        finally:
            _AT_WORK.remove(self)


@contextmanager
def lasting() -> Iterator[None]:
    """Exempt what is created in this block from the leak guard, such as servers that serve the whole session.

    ::

        with lasting():
            server = start_server()

    Fixtures with a wider scope than ``function`` are exempt without this.
    """
    with ExitStack() as stack:
        for guard in _AT_WORK:
            stack.enter_context(guard.lasting())
        yield
