"""Starts and stops Mooncake's master as a child of this process, by its pid."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncdp.errors import DataPlaneUnavailable

__all__ = ["Master", "check_import"]

#: Seconds that the master may take to listen, and to end.
START_S, END_S = 30.0, 10.0
#: Ports are picked before the master binds them, so that another process may take one meanwhile.
TRIES = 3

#: Runs the master until its standard input ends, which the end of this process brings about too. The kernel kills the
#: master if the process that runs this is killed itself.
_RUN = """
import ctypes, signal, subprocess, sys
libc = ctypes.CDLL(None)
master = subprocess.Popen(
    sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=lambda: libc.prctl(1, signal.SIGKILL)
)
print(master.pid, flush=True)
sys.stdin.buffer.read()
master.terminate()
try:
    master.wait(5)
except subprocess.TimeoutExpired:
    master.kill()
"""
#: Nothing is evicted: an object is there until it is removed. A lease lasts longer than any read. A unit that is silent
#: for client_ttl seconds loses its rows; that it is dead is noticed by a heartbeat, and nothing waits for the master's
#: opinion, so that it is long.
_FLAGS = (
    "--client_ttl=600",
    "--default_kv_lease_ttl=600000",
    "--allow_evict_soft_pinned_objects=false",
    "--eviction_high_watermark_ratio=1.0",
    "--eviction_ratio=0.0",
)


def check_import() -> None:
    """Import Mooncake's store; the environment of its transport has to be set before.

    Raises:
        ImportError: It is not installed, or a library that it needs is missing; the message names it.
    """
    try:
        import mooncake.store
    except ImportError as err:
        needs = "it needs the extra: pip install 'asyncdp[mooncake]', and Debian's libibverbs1"
        raise ImportError(f"backend 'mooncake_cpu' cannot be opened: {err}; {needs}") from err
    del mooncake


class Master:
    """Mooncake's master on a free port of an address.

    Attributes:
        address: ``host:port`` at which it listens.
        pid: Process id of the master itself.

    Raises:
        DataPlaneUnavailable: It does not start; the message ends with what it said.
    """

    def __init__(self, ip: str) -> None:
        """Start it and wait until it listens."""
        said = ""
        for _ in range(TRIES):
            self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - the master writes to it
            port, metrics = _free_ports(ip)
            self.address = f"{ip}:{port}"
            where = (f"--rpc_address={ip}", f"--rpc_port={port}", f"--metrics_host={ip}", f"--metrics_port={metrics}")
            self._process = subprocess.Popen(  # noqa: S603 - the package's own program
                [sys.executable, "-c", _RUN, str(_program()), *where, *_FLAGS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C ends the plane in its order, not the master first
            )
            assert self._process.stdout is not None  # noqa: S101 - it is a pipe
            self.pid = int(self._process.stdout.readline() or 0)
            if self.pid and self._listens(ip, port):
                return
            self._log.seek(0)
            said = self._log.read()[-500:].strip()
            self.stop()
        msg = f"Mooncake's master did not start: {said or 'it said nothing'}"
        raise DataPlaneUnavailable(msg, blames_port=False)

    def _listens(self, ip: str, port: int) -> bool:
        until = time.monotonic() + START_S
        while time.monotonic() < until and _runs(self.pid):
            try:
                socket.create_connection((ip, port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return True
        return False

    def stop(self) -> None:
        """End the master; blocks until it has ended."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._log.close()


def _program() -> Path:
    """Return the path of the master's program, which the package brings; it is not imported."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.origin is not None  # noqa: S101, PT018 - check_import has found it
    return Path(spec.origin).parent / "mooncake_master"


def _runs(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def _free_ports(ip: str) -> tuple[int, int]:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family) as one, socket.socket(family) as other:
        one.bind((ip, 0))
        other.bind((ip, 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])
