"""Which process, on which machine: what tells that a writer is dead, and that two processes share memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Machine", "Process", "this_machine", "this_process"]


class Machine(NamedTuple):
    """A running kernel, and the process ids that are seen there.

    Attributes:
        boot_id: Drawn anew by the kernel at each boot; the same in all containers of a machine.
        pid_namespace: Within it, process ids mean the same.
    """

    boot_id: str
    pid_namespace: int


class Process(NamedTuple):
    """One life of a process: ids are used again, but not with the same start time.

    Attributes:
        pid: Process id.
        start: When it began, in clock ticks since boot.
    """

    pid: int
    start: int

    def lives(self) -> bool:
        """Whether it still runs (a stopped one does; a zombie does not), as far as this pid namespace can see."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(fields[19]) == self.start and fields[0] not in "ZX"


def this_process() -> Process:
    """Return the process that calls; asked anew after a fork."""
    pid = os.getpid()
    return Process(pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Machine(boot_id, Path("/proc/self/ns/pid").stat().st_ino)
