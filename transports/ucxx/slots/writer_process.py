"""Identity of processes and machines, to detect that a writer is dead and that two processes can share memory."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Machine", "Process", "holds_socket", "this_machine", "this_process"]

#: Looks for a socket in the kernel's table, which can leave out entries while others come and go.
_LOOKS: Final = 3


class Machine(NamedTuple):
    """A machine since its last boot, and a pid namespace on it.

    Attributes:
        boot_id: Random id that the kernel draws at each boot; the same in all containers of a machine.
        pid_namespace: Inode number of the pid namespace, within which process ids are unique.
    """

    boot_id: str
    pid_namespace: int


class Process(NamedTuple):
    """Identifies a process; process ids are reused, but not with the same start time.

    Attributes:
        pid: Process id.
        start: Start time, in clock ticks since boot.
    """

    pid: int
    start: int

    def is_alive(self) -> bool:
        """Return whether it still runs (if stopped, it does; a zombie does not), as seen from this pid namespace."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(fields[19]) == self.start and fields[0] not in "ZX"


def this_process() -> Process:
    """Return the calling process; not cached, so it is right in a forked child."""
    pid = os.getpid()
    return Process(pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Machine(boot_id, Path("/proc/self/ns/pid").stat().st_ino)


def holds_socket(process: Process, address: tuple[str, int]) -> bool:
    """Return whether a process of this machine owns the TCP socket with this local address, to verify a peer's claim.

    The answer is False where it cannot be determined: in another network namespace, or for another user's process.

    Args:
        process: Process that the peer claims to be.
        address: Address of the peer, as this end of the connection sees it.
    """
    looks = (_inode_of(address) for _ in range(_LOOKS))
    inode = next((found for found in looks if found is not None), None)
    if inode is None or not process.is_alive():
        return False
    wanted = f"socket:[{inode}]"
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process.pid}/fd"):  # noqa: PTH208 - names are enough
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/{name}") == wanted:  # noqa: PTH115 - thousands of them
                    return True
    return False


def _inode_of(address: tuple[str, int]) -> str | None:
    """Return the inode of the TCP socket with this local address in this network namespace, or None."""
    try:
        ip = ipaddress.ip_address(address[0])
    except ValueError:
        return None
    ip = getattr(ip, "ipv4_mapped", None) or ip
    packed = ip.packed
    words = (packed[at : at + 4][::-1] for at in range(0, len(packed), 4))  # the kernel prints in host byte order
    name = f"{b''.join(words).hex().upper()}:{address[1]:04X}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/tcp" if ip.version == 4 else "/proc/net/tcp6").read_text().splitlines()[1:]:  # noqa: PLR2004 - IPv4
            fields = line.split()
            if fields[1] == name and fields[9] != "0":
                return fields[9]
    return None
