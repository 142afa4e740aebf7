"""A plane of real processes: a directory, slot hosts, rollout workers, trainers; any of them can be hurt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncdp.transports.ucxx.directory import EmbeddedServer
from asyncdp.transports.ucxx.host.settings import HostSettings
from asyncdp.transports.ucxx.slots.arena import WORDS, Arena, arena_name
from tests.chaos.ucxx_journal import Journal, entries

__all__ = ["ChaosPlane", "Child", "descriptors", "open_files"]

ROOT = Path(__file__).parents[2]
SECRET = "a secret for chaos"
START_S = 60.0
#: How long a host keeps what nobody published, beyond the longest put.
GRACE_S = 2.0
PORTS = 3


class Child:
    """A process of ours.

    Attributes:
        told: The first line that it wrote, where that is JSON.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.told: dict[str, Any] = {}

    @classmethod
    async def start(cls, command: list[str], env: dict[str, str]) -> Child:
        """Start it, and return when it says that it is ready; it ends when our end of its standard input is closed."""
        pipe = subprocess.PIPE
        whole = {**os.environ, "ASYNCDP_SECRET": SECRET, "OMP_NUM_THREADS": "1", **env}
        child = cls(
            subprocess.Popen(  # noqa: ASYNC220 - it is there in milliseconds, and lives in this thread's process
                [sys.executable, "-m", *command], cwd=ROOT, stdin=pipe, stdout=pipe, env=whole
            )
        )
        assert child.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await asyncio.to_thread(child.process.stdout.readline)
        assert line, f"{command[0]} ended with {child.process.wait()}"
        if line.startswith(b"{"):
            child.told = json.loads(line)
        return child

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def gone(self, within_s: float = 20.0) -> int:
        """Wait until it has ended; returns its exit code."""
        async with asyncio.timeout(within_s):
            while self.process.poll() is None:  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.01)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return int(self.process.returncode)

    async def kill(self) -> None:
        """End it with SIGKILL."""
        if self.process.poll() is None:
            self.process.kill()
        await self.gone()

    async def end(self) -> int:
        """Let it end in order, as the end of its parent would; returns its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await self.gone()


class ChaosPlane:
    """The plane.

    Args:
        folder: For the directory's data and the journals.
        lane: ``auto`` or ``off``.
        ucx: Whether hosts offer UCX (their listeners bind everywhere: only in a namespace).
        host: Settings of hosts that differ.
    """

    def __init__(self, folder: Path, *, lane: str, ucx: bool, **host: Any) -> None:
        self.folder = folder
        self.name = f"chaos{uuid.uuid4().hex[:8]}"
        self.lane, self.ucx = lane, ucx
        self._host = host
        self.server = EmbeddedServer(folder / "directory")
        self.hosts: dict[int, Child] = {}
        self.roles: dict[str, Child] = {}
        self.journal = Journal(folder / "controller.journal")
        self._lives = 0

    @property
    def config(self) -> dict[str, Any]:
        """A client's config."""
        return {
            "enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 1 << 20, "num_storage_units": 2,
            "claim_meta_poll_interval_s": 0.05, "controller_address": self.server.url,
            "ucxx": {"namespace": self.name, "lane": self.lane, "devices": "lo", "directory": {"host_timeout_s": 1.5}},
        }  # fmt: skip

    def _settings(self, number: int, *, adopt: bool) -> str:
        keys = {
            "host_id": f"host-{number}", "plane": self.name, "ports": PORTS, "arena_bytes": 64 << 20,
            "max_slot_bytes": 8 << 20, "rows_per_slot": 2, "beat_s": 0.2, "grace_s": GRACE_S, "keep_arena": False,
            "ucx": self.ucx, "devices": "lo", "watch_ucx_s": 0.5, "adopt": adopt, **self._host,
        }  # fmt: skip
        return msgspec.json.encode(msgspec.convert(keys, HostSettings)).decode()

    async def start_host(self, number: int, *, adopt: bool = True) -> None:
        """Start a host, or the next life of one. The first is as users start it, the second has a fickle port."""
        module = "asyncdp.transports.ucxx.host.main" if number == 0 else "tests.chaos.ucxx_host"
        command = [module, "--watch-stdin", "--settings", self._settings(number, adopt=adopt), "--namespace", self.name]
        self.hosts[number] = await Child.start(command, {"ASYNCDP_DIRECTORY": self.server.url})

    async def start_role(self, role: str) -> str:
        """Start a worker or a trainer; returns the owner that it is."""
        self._lives += 1
        owner = f"{role}{self._lives}"
        told = {
            "role": role, "config": self.config, "owner": owner, "journal": str(self.folder / f"{owner}.journal"),
            "attempt_timeout_s": 1.0,
        }  # fmt: skip
        self.roles[role] = await Child.start(["tests.chaos.ucxx_role", json.dumps(told)], {})
        self.roles[role].told = {"owner": owner}
        return owner

    async def start(self) -> None:
        """Start the directory and both hosts."""
        await self.server.start()
        await asyncio.gather(*[self.start_host(number) for number in (0, 1)])

    def journals(self) -> dict[str, list[dict[str, Any]]]:
        """What everybody wrote down, by owner."""
        return {path.stem: entries(path) for path in sorted(self.folder.glob("*.journal"))}

    def used_slots(self, number: int) -> dict[int, int]:
        """Slots of a host that are not FREE, and their states; read from its arena itself."""
        told = self.hosts[number].told
        arena = Arena.attach(told["arena"], told["id"], told["epoch"])
        assert arena is not None
        words = np.frombuffer(arena.words, np.uint64).reshape(arena.units, WORDS)[:, 0] & np.uint64(0xFF)
        used = {int(at): int(words[at]) for at in np.flatnonzero(words)}
        arena.close()
        return used

    async def close(self) -> dict[str, int]:
        """End everybody in order; returns exit codes. Arenas of hosts that were killed for good are removed."""
        codes = {name: await child.end() for name, child in self.roles.items() if child.process.poll() is None}
        for number, child in self.hosts.items():
            if child.process.poll() is None:
                codes[f"host-{number}"] = await child.end()
        await self.server.stop()
        self.journal.close()
        return codes

    def segments(self) -> list[str]:
        """Its segments of shared memory that are there."""
        names = {arena_name(f"host-{number}", self.name) for number in (0, 1)}
        return sorted(name for name in names if (Path("/dev/shm") / name).exists())

    def discard(self) -> list[str]:
        """Remove the segments of hosts that were killed for good; returns which there were."""
        names = [arena_name(f"host-{number}", self.name) for number in (0, 1)]
        return [name for name in names if Arena.discard(name)]

    async def abandon(self) -> None:
        """End whatever still lives, by force."""
        for child in [*self.roles.values(), *self.hosts.values()]:
            await child.kill()
        self.server.kill()
        self.discard()


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(open_files(pid))


def open_files(pid: int) -> list[str]:
    """What the open descriptors of a process are."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(str(descriptor.readlink()))
    return sorted(found)
