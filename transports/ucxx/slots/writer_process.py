"""Which process, on which machine: what tells that a writer is dead, and that two processes share memory."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Machine", "Process", "holds_socket", "this_machine", "this_process"]


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


def holds_socket(process: Process, address: tuple[str, int]) -> bool:
    """Whether a process of this machine has the TCP socket of this local address: what a peer says of itself, proved.

    False where that cannot be seen from here: in another network namespace, or of another user's process.

    Args:
        process: Who is said to be the peer.
        address: The peer's, as this end of the connection sees it.
    """
    inode = _inode_of(address)
    if inode is None or not process.lives():
        return False
    wanted = f"socket:[{inode}]"
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process.pid}/fd"):  # noqa: PTH208 - names are enough
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/{name}") == wanted:  # noqa: PTH115 - thousands of them
                    return True
    return False


def _inode_of(address: tuple[str, int]) -> str | None:
    """Find a socket of this network namespace by its local address."""
    try:
        ip = ipaddress.ip_address(address[0])
    except ValueError:
        return None
    ip = getattr(ip, "ipv4_mapped", None) or ip
    packed = ip.packed
    words = (packed[at : at + 4][::-1] for at in range(0, len(packed), 4))  # the kernel prints each in its own order
    name = f"{b''.join(words).hex().upper()}:{address[1]:04X}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/tcp" if ip.version == 4 else "/proc/net/tcp6").read_text().splitlines()[1:]:  # noqa: PLR2004 - IPv4
            fields = line.split()
            if fields[1] == name and fields[9] != "0":
                return fields[9]
    return None
