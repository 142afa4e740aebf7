"""Each command against a faulty plane on each transport; ``python -m tests.cli.faulty_planes`` prints what each says.

Trouble: claims of a consumer that is dead, slot hosts that are full, a slot host or storage unit that was killed, a
directory or controller that is paused, and one that is gone.
"""

# ruff: noqa: T201 - it prints its table
from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import torch
from typer.testing import CliRunner

from asyncdp import Client, DataPlaneError, DataPlaneNotReady, DataPlaneTimeout, build_data_plane_client, layers_of
from asyncdp.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.transfer_queue.servers import Servers

__all__ = ["COMMANDS", "Said", "memory", "transfer_queue", "ucxx"]

#: Seconds that a plane gets to answer a command.
TIMEOUT_S = 2
#: Part of its shared memory that a slot host has free which takes no further row of 1 MiB.
FULL = 0.2
COMMANDS = (
    *("ping", "ls", "ls p", "describe p", "depth p", "claims p", "hosts", "doctor", "top --once", "top --json"),
    *("release p --owner dead --yes", "evict p --lost --dry-run", "evict p --lost --yes"),
)
#: What is released or evicted at the end only, when there is no more trouble to come.
LAST = ("release", "evict p --lost --yes")


@dataclass(frozen=True)
class Said:
    """What a command did: its exit code, seconds, and what it printed."""

    transport: str
    trouble: str
    command: str
    code: int
    seconds: float
    out: str
    err: str

    def __str__(self) -> str:
        """Return a row of the table."""
        lines = self.err.strip().splitlines() or self.out.strip().splitlines() or [""]
        line = lines[-1]
        if self.command == "doctor":
            line = "; ".join(one.strip() for one in lines if one.startswith("problem")) + "; " + line
        if self.command == "top --once":
            line = "; ".join(one for one in lines if one.startswith("!"))
        if self.command.endswith("--json"):
            line = "; ".join(json.loads(self.out)["wrong"]) if self.out else line
        if self.command in ("hosts", "claims p", "ls p"):
            line = " / ".join(" ".join(one.split()) for one in lines)
        return f"| {self.transport} | {self.trouble} | {self.command} | {self.code} | {self.seconds:.1f} | {line[:400]}"

    @property
    def is_fit(self) -> bool:
        """Whether it ended in time, with a code that means something, and an error in one line."""
        one_line = self.err.count("\n") == (self.code != 0) or self.command.startswith(("doctor", "top"))
        return self.code in (0, 1, 2, 3) and "Traceback" not in self.out + self.err and one_line


def ask(transport: str, trouble: str, config: Path, commands: tuple[str, ...] = COMMANDS) -> Iterator[Said]:
    """Run commands against a plane."""
    for command in commands:
        began = time.monotonic()
        words = [*command.split(), "--timeout", str(TIMEOUT_S)]
        env = {"COLUMNS": "100", "ASYNCDP_CONFIG": str(config)}
        done = CliRunner().invoke(app, words, env=env)
        err = done.stderr
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            err += f"Traceback: {done.exception!r}"
        yield Said(transport, trouble, command, done.exit_code, time.monotonic() - began, done.stdout, err)


LOOKING = tuple(command for command in COMMANDS if not command.startswith(LAST))


async def fill(client: Client) -> None:
    """Put six groups of two; a consumer that is dead holds one of them."""
    await client.register_partition("p", ["x"], 64, ["train"], grpo_group_size=2)
    for group in range(6):
        ids = [f"g{group}_g{i}" for i in range(2)]
        await client.put_samples(ids, "p", {"x": torch.zeros(2, 3)}, [{"weight_version": group}] * 2)
    await client.claim_meta("p", "train", ["x"], 2)


def _plane(stack: ExitStack, config: dict[str, Any]) -> tuple[Client, Path]:
    client = build_data_plane_client({"enabled": True, "owner": "dead", **config})
    stack.callback(lambda: _end(client))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncdp-trouble-")))
    file = folder / "plane.json"
    file.write_text(json.dumps(client.attach_config()))
    anyio.run(fill, client)
    return client, file


def _end(client: Client) -> None:
    with suppress(DataPlaneError):
        anyio.run(client.close)


def _paused(pid: int) -> Callable[[], None]:
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def memory() -> Iterator[Said]:
    """On memory: a host that is down, and the end of the plane."""
    with ExitStack() as stack:
        client, file = _plane(stack, {"impl": "memory"})
        yield from ask("memory", "claims of the dead", file, LOOKING)
        *_, transport = layers_of(client)
        next(iter(transport.plane.hosts.values())).crash()
        yield from ask("memory", "host down", file)
        anyio.run(client.close)
        yield from ask("memory", "gone", file)


async def fill_up(client: Client) -> None:
    """Put rows of 1 MiB, over shared memory, until no slot host has room for another one and the hosts have told so."""
    told = client.attach_config()
    near = {**told, "ucxx": {**told["ucxx"], "lane": "auto"}}
    async with build_data_plane_client(near, bootstrap=False) as filler:
        await filler.register_partition("big", ["x"], 64, ["train"])
        with suppress(DataPlaneNotReady, DataPlaneTimeout):
            for row in range(64):
                await filler.put_samples([f"r{row}"], "big", {"x": torch.zeros(1, 1 << 18)}, timeout_s=TIMEOUT_S)

    async def has_room() -> bool:
        return any((host.free_bytes or 0) > FULL * (host.capacity_bytes or 1) for host in await client.list_hosts())

    with anyio.fail_after(60):
        while await has_room():  # noqa: ASYNC110 - hosts tell it by their heartbeats
            await anyio.sleep(0.1)


async def until_silent(client: Client) -> None:
    """Wait until a host counts as dead."""
    with anyio.fail_after(60):
        while all(host.alive for host in await client.list_hosts()):  # noqa: ASYNC110 - its heartbeats tell
            await anyio.sleep(0.1)


def ucxx() -> Iterator[Said]:
    """On UCXX: hosts that are full, one that is killed, a directory that is paused, and one that is gone."""
    with ExitStack() as stack:
        own = {"host": {"arena_bytes": 16 << 20, "max_slot_bytes": 4 << 20, "ucx": False}, "lane": "off"}
        client, file = _plane(stack, {"impl": "ucxx", "num_storage_units": 2, "ucxx": own})
        *_, transport = layers_of(client)
        yield from ask("ucxx", "claims of the dead", file, LOOKING)
        anyio.run(fill_up, client)
        yield from ask("ucxx", "arena full", file, LOOKING)
        anyio.run(client.drop_partition, "big")
        pid = transport.plane.server.pid
        go_on = _paused(pid)
        try:
            yield from ask("ucxx", "directory paused", file)
        finally:
            go_on()
        os.kill(transport.plane.pids[0], signal.SIGKILL)
        anyio.run(until_silent, client)
        yield from ask("ucxx", "host killed", file)
        go_on = _paused(transport.plane.pids[1])
        try:
            yield from ask("ucxx", "the other paused", file, ("ping", "hosts", "ls p", "doctor", "top --json"))
        finally:
            go_on()
        os.kill(pid, signal.SIGKILL)
        yield from ask("ucxx", "directory gone", file)


def transfer_queue(servers: Servers) -> Iterator[Said]:
    """On servers of TransferQueue: a controller that is paused, a storage unit that is killed, a controller that is."""
    from tests.transfer_queue.servers import config_for

    with ExitStack() as stack:
        own = {"split_bytes": 1}  # so that each unit holds some rows
        _, file = _plane(stack, config_for(servers.endpoints, "faulty", transfer_queue=own))
        controller, (unit, *_) = servers.endpoints.controller, servers.endpoints.units
        yield from ask("tq", "claims of the dead", file, LOOKING)
        servers.pause(controller)
        try:
            yield from ask("tq", "controller paused", file)
        finally:
            servers.resume(controller)
        servers.kill(unit)
        yield from ask("tq", "unit killed", file)
        servers.kill(controller)
        yield from ask("tq", "controller gone", file)


def _on_servers() -> Iterator[Said]:
    from tests.transfer_queue.servers import Servers

    servers = Servers()
    try:
        yield from transfer_queue(servers)
    finally:
        servers.close()


def main() -> None:
    """Print the table of the transports that are named, or of all."""
    planes = {"memory": memory, "ucxx": ucxx, "transfer_queue": _on_servers}
    unfit = []
    for name in sys.argv[1:] or planes:
        for said in planes[name]():
            print(said, flush=True)
            if not said.is_fit:
                unfit.append(said)
    for said in unfit:
        print(f"NOT FIT: {said}\n{said.out}\n{said.err}")


if __name__ == "__main__":
    main()
