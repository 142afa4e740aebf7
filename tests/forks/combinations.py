"""Combinations of a blocking client and new processes: whatever they do, the parent's plane goes on, nothing is left.

``python -m tests.forks.combinations CONFIG SEED COUNT`` plays COUNT combinations, drawn with SEED, on the plane of a
config (JSON; on the memory transport each combination has a plane of its own). Each is played in a process that has
imported everything and used nothing. Exit code 0: all went well; each that did not is said.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset

from asyncdp import DataPlaneBadRequest, DataPlaneClosed, DataPlaneUnavailable, DataPlaneUnsupported
from asyncdp.blocking import BlockingClient, build_blocking_client

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["LIMIT_S", "play"]

ROOT = Path(__file__).parents[2]
#: Combinations of one transport in a test run.
COUNT = int(os.environ.get("ASYNCDP_COMBINATIONS", "4"))
#: 2 MiB a row: over the wire that is UCX's.
WIDE = 1 << 19
IDS = ["a", "b", "c", "d"]
#: Seconds for each step of a combination; and for all of them.
STEP_S = 300.0
LIMIT_S = 600.0 + 120.0 * COUNT


@dataclass(frozen=True)
class Combination:
    """One way to use a client and to start processes.

    Attributes:
        start: How processes are started.
        children: Number of processes that are given the client.
        copies: Whether a child unpickles a client of its own; else it uses what it was given.
        workers: Number of DataLoader workers whose dataset has the client.
        used: Whether the client was used before they are started; else it is used first while they run.
        closes: Who closes its client while the processes run, in this order.
        threads: Number of threads of the parent that read all the while, from the first use on.
        ends: How a child ends.
    """

    start: str
    children: int
    copies: bool
    workers: int
    used: bool
    closes: tuple[str, ...]
    threads: int
    ends: str

    @classmethod
    def drawn(cls, rng: random.Random) -> Self:
        """Return any that starts a process."""
        workers = rng.randint(0, 2)
        return cls(
            rng.choice(["fork", "spawn", "forkserver"]),
            rng.randint(0 if workers else 1, 2),
            rng.random() < 0.5,
            workers,
            rng.random() < 0.5,
            rng.choice([(), ("child",), ("parent",), ("child", "parent"), ("parent", "child")]),
            rng.randint(0, 2),
            rng.choice(["returns", "exits", "is killed"]),
        )


def read(client: BlockingClient, sample_id: str) -> float:
    """Read a wide row, and return what it holds."""
    row = client.get_samples([sample_id], "p", ["x"], timeout_s=60)["x"][0]
    assert row.shape == (WIDE,)
    assert row[0] == row[-1]
    return float(row[0])


def outcome(client: BlockingClient) -> str:
    """Use a client as a child does, and return what came of it."""
    try:
        assert [read(client, one) for one in IDS] == [0.0, 1.0, 2.0, 3.0]
        mine = f"of-{os.getpid()}"
        client.put_samples([mine], "p", {"x": torch.full((1, WIDE), 7.0)})
        assert read(client, mine) == 7.0
        client.clear_samples([mine], "p")
    except DataPlaneUnsupported as err:
        return "by spawn" if "by spawn" in str(err) else f"{err!r}"
    except DataPlaneBadRequest as err:
        return "refused" if "forked child" in str(err) else f"{err!r}"
    except DataPlaneUnavailable as err:
        return f"away: {err}"
    return "works"


def _copy(client: BlockingClient) -> BlockingClient:
    copy: BlockingClient = pickle.loads(pickle.dumps(client))
    return copy


def child(pipe: Connection, client: BlockingClient, one: Combination) -> None:
    """Be a child: use the client, close it when told, and end."""
    mine = _copy(client) if one.copies else client
    pipe.send(outcome(mine))
    for _ in iter(pipe.recv, "end"):
        mine.close()
        client.close()
        pipe.send("closed")
    if one.ends == "exits":
        sys.exit(0)
    if one.ends == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)


class Rows(Dataset[str]):
    """A dataset that uses the plane, in a worker with what it was given or with a client that it unpickles there."""

    def __init__(self, client: BlockingClient, copies: bool) -> None:  # noqa: FBT001
        self.client, self.copies, self.pid = client, copies, os.getpid()

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, at: int) -> str:
        if self.copies and self.pid != os.getpid():
            self.client, self.copies = _copy(self.client), False
        return outcome(self.client)


class Played:
    """One combination, in the process of the parent."""

    def __init__(self, config: dict[str, Any], one: Combination) -> None:
        self.one = one
        self.memory = config["impl"] == "memory"
        self.wire = config.get("ucxx", {}).get("lane") == "off"
        self.context: Any = multiprocessing.get_context(one.start)
        self.owner = build_blocking_client(config, bootstrap=self.memory)
        if self.memory:
            fill(self.owner)
        self.client = _copy(self.owner)
        self.wrong: list[BaseException] = []
        self.over = threading.Event()

    def expected(self, *, copies: bool, used: bool) -> str:
        """Return what comes of a use in another process."""
        forked = self.one.start == "fork"
        if forked and not copies:
            return "refused"
        if self.memory:
            return "away"
        return "by spawn" if forked and self.wire and used else "works"

    def busy(self) -> None:
        """Read until the end, in a thread."""
        try:
            while not self.over.is_set():
                read(self.client, "b")
        except DataPlaneClosed:
            if "parent" not in self.one.closes:
                self.wrong.append(AssertionError("a thread's client is closed"))
        except BaseException as err:  # noqa: BLE001 - raised by the parent
            self.wrong.append(err)

    def run(self) -> None:
        """Play it."""
        one = self.one
        threads = [threading.Thread(target=self.busy) for _ in range(one.threads)]
        if one.used:
            self.begin(threads)
        processes = [self.started() for _ in range(one.children)]
        said = [] if one.used else [_heard(pipe) for _, pipe in processes]  # they were first
        if not one.used:
            self.begin(threads)
        said = said or [_heard(pipe) for _, pipe in processes]
        assert all(text.startswith(self.expected(copies=one.copies, used=one.used)) for text in said), said
        self.load()
        for who in one.closes:
            if who == "parent":
                self.client.close()
            else:
                _close(processes)
        assert outcome(self.owner) == "works"
        for process, pipe in processes:
            pipe.send("end")
            process.join(STEP_S)
            assert process.exitcode == (-signal.SIGKILL if one.ends == "is killed" else 0)
            process.close()
            pipe.close()
        self.over.set()
        for thread in threads:
            thread.join(STEP_S)
        if self.wrong:
            raise self.wrong[0]
        if "parent" not in one.closes:
            assert outcome(self.client) == "works"
        assert outcome(self.owner) == "works"

    def begin(self, threads: list[threading.Thread]) -> None:
        """Use the client for the first time in the parent, then in its threads."""
        assert outcome(self.client) == "works"
        for thread in threads:
            thread.start()

    def started(self) -> tuple[Any, Connection]:
        """Start a child; return it and what it speaks through."""
        here, there = self.context.Pipe()
        process = self.context.Process(target=child, args=(there, self.client, self.one))
        process.start()
        there.close()
        return process, here

    def load(self) -> None:
        """Read all rows by a DataLoader; in a worker it comes out as in a child, and in this process it works."""
        one = self.one
        more = {"multiprocessing_context": self.context} if one.workers else {}
        loader: DataLoader[str] = DataLoader(
            Rows(self.client, one.copies), batch_size=2, num_workers=one.workers, **more
        )
        said = [text for batch in loader for text in batch]
        expected = self.expected(copies=one.copies, used=True) if one.workers else "works"
        assert len(said) == len(IDS)
        assert all(text.startswith(expected) for text in said), said


def _close(processes: list[tuple[Any, Connection]]) -> None:
    for _, pipe in processes:
        pipe.send("close")
        assert _heard(pipe) == "closed"


def _heard(pipe: Connection) -> str:
    assert pipe.poll(STEP_S), "a child says nothing"
    text: str = pipe.recv()
    return text


def fill(client: BlockingClient) -> None:
    """Put what is read."""
    client.register_partition("p", ["x"], 64, ["train"])
    client.put_samples(IDS, "p", {"x": torch.arange(4.0)[:, None].expand(4, WIDE)})


def descriptors() -> dict[str, str]:
    """Return this process's open descriptors, and what each is."""
    found = {}
    for one in Path("/proc/self/fd").iterdir():
        try:
            found[one.name] = str(one.readlink())
        except OSError:  # that of the listing itself
            continue
    return found


def until(holds: Any, what: str) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + STEP_S
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.05)


def be_parent(config: dict[str, Any], one: Combination) -> None:
    """Play a combination, and see that nothing of it is left in this process but what Python and UCX keep."""
    before = descriptors()
    played = Played(config, one)
    played.run()
    played.owner.close()
    wire = played.wire
    del played
    gc.collect()  # nobody may have closed the client
    until(lambda: not [t for t in threading.enumerate() if t.name == "asyncdp blocking client"], "a client's thread")
    assert not multiprocessing.active_children()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    gc.collect()
    left = {number: what for number, what in descriptors().items() if before.get(number) != what}
    assert wire or not left, left  # UCX may keep a worker's descriptors for as long as the process lasts


def _of_session(session: int) -> list[str]:
    """Return the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(f"{folder.name}: {(folder / 'cmdline').read_text()[:200]!r}")
        except OSError:
            continue
    return found


def _in_a_session(work: Any) -> str:
    """Do it in a forked process that ends as an interpreter does; return what went wrong."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        os.setsid()
        try:
            work()
        except BaseException:  # noqa: BLE001 - told
            os.write(writing, traceback.format_exc().encode()[-8000:])
            os._exit(1)
        os.close(writing)
        sys.exit(0)
    os.close(writing)
    ends = time.monotonic() + 2 * STEP_S
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > ends:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reading)
            return "it hangs"
        time.sleep(0.02)
    os.set_blocking(reading, False)
    try:
        told = os.read(reading, 1 << 16).decode()
    except BlockingIOError:
        told = ""
    os.close(reading)
    if told or done[1]:
        for left in _of_session(pid):
            os.kill(int(left.partition(":")[0]), signal.SIGKILL)
        return told or f"ended with {os.waitstatus_to_exitcode(done[1])}"
    try:
        until(lambda: not _of_session(pid), "processes are left")
    except AssertionError:
        return f"processes are left: {_of_session(pid)}"
    return ""


def main() -> None:
    """Play what the arguments say."""
    gc.collect()
    gc.freeze()  # else each collection of a child, and its end, takes seconds: they look at all of torch
    config, rng, count = json.loads(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    if config["impl"] != "memory":

        def filled() -> None:
            with build_blocking_client(config, bootstrap=False) as client:
                fill(client)

        assert not (told := _in_a_session(filled)), told
    failed = 0
    for number in range(count):
        one = Combination.drawn(rng)
        began = time.monotonic()
        told = _in_a_session(lambda one=one: be_parent(config, one))  # type: ignore[misc]
        failed += bool(told)
        took = f"{time.monotonic() - began:.1f} s"
        sys.stdout.write(f"{number} {one}: {told or 'did no harm'}, {took}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{count - failed} of {count} did no harm\n")
    sys.exit(min(failed, 1))


def play(config: dict[str, Any], seed: int) -> str:
    """Play COUNT combinations in a process of their own; returns the last line of what it said."""
    command = [sys.executable, "-m", "tests.forks.combinations", json.dumps(config), str(seed), str(COUNT)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
