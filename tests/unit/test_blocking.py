"""The blocking client: verbs without await, from any thread, refused where they would block an event loop."""

import asyncio
import errno
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal

from asyncdp import (
    ClaimNotReady,
    DataPlaneBadRequest,
    DataPlaneClosed,
    DataPlaneConfig,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    KVBatchMeta,
    MemoryTransport,
)
from asyncdp.blocking import BlockingClient, build_blocking_client
from asyncdp.process import client_loop
from asyncdp.protocol import VERBS, DataPlaneClient
from asyncdp.testing import FaultPlan, faulty_stack

MEMORY: DataPlaneConfig = {"enabled": True, "impl": "memory"}
NAME = "asyncdp blocking client"
SLOW = pytest.mark.slow
AWAY = (DataPlaneUnavailable, DataPlaneTimeout, DataPlaneNotReady)


@pytest.fixture
def client() -> Iterator[BlockingClient]:
    """A plane with eight samples for one task."""
    with build_blocking_client(MEMORY) as client:
        client.register_partition("p", ["x"], 8, ["train"])
        client.put_samples([f"s{i}" for i in range(8)], "p", {"x": torch.arange(8)})
        yield client


def threads() -> int:
    """Return how many clients' threads run."""
    return sum(one.name == NAME for one in threading.enumerate())


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds, for a minute at most."""
    ends = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def in_a_child(run: Callable[[], None]) -> int:
    """Run something in a forked child, and return its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: this process has threads
        pid = os.fork()
    if not pid:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_there_with_its_arguments(verb: str) -> None:
    """The same names, order, defaults and docstring; no coroutine function."""
    ours, theirs = getattr(BlockingClient, verb), getattr(DataPlaneClient, verb)
    assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
    assert ours.__doc__ == theirs.__doc__
    assert not inspect.iscoroutinefunction(ours)


def test_claim_read_pop(client: BlockingClient) -> None:
    """NeMo-RL's calls, as it makes them."""
    meta = client.claim_meta("p", "train", ["x"], 4)
    assert client.get_data(meta)["x"].tolist() == [0, 1, 2, 3]
    client.pop(meta, "p")
    assert client.depth("p") == 4
    assert not client.check_consumption_status("p", ["train"])
    client.clear_samples([f"s{i}" for i in range(4, 8)], "p")
    assert client.list_metadata("p") == []
    assert client.get_capabilities().mutation_dedup
    assert client.snapshot()
    assert client.owner


def test_errors_are_those_of_the_async_client(client: BlockingClient) -> None:
    """Raised in the thread that called."""
    with pytest.raises(ClaimNotReady):
        client.claim_meta("p", "train", ["x"], 99, timeout_s=0.0)
    with pytest.raises(DataPlaneBadRequest, match="task"):
        client.claim_meta("p", "none", ["x"], 1)
    with pytest.raises(TypeError):
        client.depth()  # type: ignore[call-arg]


def test_many_threads_share_one_client(client: BlockingClient) -> None:
    """Claims that wait hold nobody else up, and each sample goes to one thread."""
    client.put_samples([f"t{i}" for i in range(192)], "p", {"x": torch.arange(192)})

    def work(_: int) -> list[str]:
        got = []
        while True:
            meta = client.claim_meta("p", "train", ["x"], 5, blocking=False)
            if not meta.size:
                return got
            assert client.get_data(meta)["x"].shape == (meta.size,)
            got += meta.sample_ids

    with ThreadPoolExecutor(9) as pool:
        waiting = pool.submit(client.claim_meta, "p", "train", ["x"], 500, timeout_s=30.0)
        found = [one for got in pool.map(work, range(8)) for one in got]
        assert sorted(found) == sorted([f"s{i}" for i in range(8)] + [f"t{i}" for i in range(192)])
        client.close()
        with pytest.raises(DataPlaneClosed):
            waiting.result()
    assert threads() == 0


def test_batches_without_await(client: BlockingClient) -> None:
    """In a for loop, and read ahead in a with statement, which releases what nobody got."""
    seen = []
    for meta, data in client.batches("p", "train", ["x"], 2, idle="end", timeout_s=0.0):
        assert data["x"].shape == (2,)
        seen += meta.sample_ids
    assert seen == [f"s{i}" for i in range(8)]
    client.put_samples([f"n{i}" for i in range(8)], "p", {"x": torch.arange(8)})
    with client.batches("p", "train", ["x"], 2, prefetch=2) as batches:
        meta, _ = next(batches)
        until(lambda: len(client.list_claims("p", "train")) >= 7)
    claims = [one.sample_ids for one in client.list_claims("p", "train")]
    assert claims[4:] == [("n0", "n1")]
    with pytest.raises(RuntimeError, match="async with"):
        next(client.batches("p", "train", ["x"], 2, prefetch=1))


@pytest.mark.parametrize("what", ["the loop", "the thread", "the portal"])
def test_a_first_call_whose_loop_does_not_start_says_so(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no file or thread left for it: no call hangs, and the client works once there is one."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    where: Any = {"the loop": asyncio.events, "the thread": threading.Thread, "the portal": client_loop}[what]
    name = {"the loop": "new_event_loop", "the thread": "start", "the portal": "BlockingPortal"}[what]
    with build_blocking_client(MEMORY) as client:
        with monkeypatch.context() as broken:
            broken.setattr(where, name, fail)
            for _ in range(2):
                with pytest.raises(DataPlaneUnavailable, match="Too many open files") as raised:
                    client.ping()
                assert isinstance(raised.value.__cause__, OSError)
        assert threads() == 0
        client.ping()
        assert threads() == 1
    with build_blocking_client(MEMORY) as never_started, monkeypatch.context() as broken:
        broken.setattr(where, name, fail)
        with pytest.raises(DataPlaneUnavailable):
            never_started.ping()
    assert threads() == 0


@pytest.mark.parametrize("prefetch", [0, 1])
def test_batches_are_left_after_their_client_was_closed(client: BlockingClient, prefetch: int) -> None:
    """With the error of the block, or none; and they are not entered then."""
    other: BlockingClient = pickle.loads(pickle.dumps(client))
    with (  # noqa: PT012 - the block fails
        pytest.raises(ZeroDivisionError),
        client.batches("p", "train", ["x"], 2, prefetch=prefetch) as batches,
    ):
        next(batches)
        client.close()
        raise ZeroDivisionError
    with other.batches("p", "train", ["x"], 2, prefetch=prefetch):
        other.close()
    with pytest.raises(DataPlaneClosed), client.batches("p", "train", ["x"], 2, prefetch=prefetch):
        pass


def test_batches_are_not_entered_while_their_client_is_closed(
    client: BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed between the look and the call, as a verb."""
    stale = client._portal("batches")
    client.close()
    monkeypatch.setattr(client, "_portal", lambda _: stale)
    with pytest.raises(DataPlaneClosed) as raised, client.batches("p", "train", ["x"], 2, prefetch=1):
        pass
    assert raised.value.op == "batches"


def test_a_running_loop_is_not_blocked(client: BlockingClient) -> None:
    """The error names what to use there; in a thread of the loop's, the client works."""

    async def check() -> int:
        with pytest.raises(DataPlaneBadRequest, match="build_data_plane_client") as raised:
            client.depth("p")
        assert raised.value.op == "depth"
        return await asyncio.to_thread(client.depth, "p")

    assert asyncio.run(check()) == 8


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_client_that_was_never_used_is_closed_in_a_running_loop(backend: str) -> None:
    """An async actor that ends before its first call; closed for good."""
    client = build_blocking_client(MEMORY, nemo=True)

    async def check() -> None:
        client.close()

    anyio.run(check, backend=backend)
    with pytest.raises(DataPlaneClosed):
        client.ping()
    assert threads() == 0


def test_as_nemo_wants_it_a_running_loop_is_blocked_with_one_warning() -> None:
    """NeMo-RL's async actors call the blocking interface; every call works, the first one warns."""
    with build_blocking_client(MEMORY, nemo=True) as client:

        async def check() -> None:
            with pytest.warns(RuntimeWarning, match="register_partition blocks the event loop") as warned:
                client.register_partition("p", ["x"], 8, ["train"])
            assert warned[0].filename == __file__
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert client.depth("p") == 0

        asyncio.run(check())


def test_its_own_loop_is_never_blocked() -> None:
    """A callback that runs there would wait for itself, nemo or not."""
    found: list[Exception] = []

    def callback(_: Any) -> None:
        try:
            client.depth("p")
        except DataPlaneBadRequest as err:
            found.append(err)

    config: Any = {**MEMORY, "observability": {"enabled": True, "callback": callback}}
    with build_blocking_client(config, nemo=True) as client:
        client.ping()
    assert found


def test_it_pickles_as_its_config(client: BlockingClient) -> None:
    """Unpickled it attaches to the same plane; closing it leaves the plane up."""
    copy: BlockingClient = pickle.loads(pickle.dumps(client))
    with copy:
        assert copy.depth("p") == 8
    assert client.depth("p") == 8
    with build_blocking_client(client.attach_config(), bootstrap=False) as other:
        assert other.depth("p") == 8
    with pytest.raises(DataPlaneClosed):
        copy.depth("p")


def test_it_may_be_closed_in_any_order_and_at_once(client: BlockingClient) -> None:
    """The owner first, the other one after it; twice; from eight threads; a client that was never used."""
    copy: BlockingClient = pickle.loads(pickle.dumps(client))
    copy.ping()
    client.close()
    copy.close()
    copy.close()
    unused = build_blocking_client(MEMORY)
    unused.close()
    for one in (client, copy, unused):
        with pytest.raises(DataPlaneClosed):
            one.ping()
    crowd = build_blocking_client(MEMORY)
    crowd.ping()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: crowd.close(), range(8)))
    assert threads() == 0


def test_a_call_that_races_with_the_close_ends(client: BlockingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on while a thread hands a call over to it: its portal would wait for the loop for ever."""
    between, go = threading.Event(), threading.Event()
    hand_over = BlockingPortal._spawn_task_from_thread

    def late(*args: Any) -> None:
        between.set()
        assert go.wait(60)
        hand_over(*args)

    client.ping()
    portal: Any = client._loop._portal
    monkeypatch.setattr(BlockingPortal, "_spawn_task_from_thread", late)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client.ping)
        assert between.wait(60)
        closing = pool.submit(client.close)
        try:
            until(lambda: portal._event_loop_thread_id is None)  # it takes no more calls
            with pytest.raises(TimeoutError):
                closing.result(0.3)
        finally:
            go.set()
        with pytest.raises(DataPlaneClosed):
            call.result(60)
        closing.result(60)


def test_the_last_reference_ends_its_thread() -> None:
    """A client that is collected without a close ends the thread of its event loop."""
    client = build_blocking_client(MEMORY)
    client.ping()
    assert threads() == 1
    del client
    gc.collect()
    until(lambda: threads() == 0)


END = """
import sys, threading
from asyncdp.blocking import build_blocking_client
client = build_blocking_client({"enabled": True, "impl": "memory"})
client.register_partition("p", ["x"], 8, ["train"])
threading.Thread(target=client.claim_meta, args=("p", "train", ["x"], 8), daemon=True).start()
client.put_samples(["a"], "p", {"x": [1.0]})
print("done", flush=True)
"""


@SLOW
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del client", "raise SystemExit"])
def test_the_interpreter_ends_without_close(end: str) -> None:
    """X3: with a claim that waits, too; code 0, and nothing on stderr but what a waiting thread may say."""
    ran = subprocess.run([sys.executable, "-c", END + end], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.partition("\n")[0]) == (0, "done"), ran.stderr  # the claim given up is logged


@SLOW
def test_an_interrupt_of_the_waiting_thread_cancels_the_call() -> None:
    """Ctrl-C in a claim that waits: the claim is given up, and the client goes on."""
    code = """
import os, signal, threading, time
from asyncdp.blocking import build_blocking_client
client = build_blocking_client({"enabled": True, "impl": "memory"})
client.register_partition("p", ["x"], 8, ["train"])
main = threading.main_thread().ident
threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
try:
    client.claim_meta("p", "train", ["x"], 8)
except KeyboardInterrupt:
    client.put_samples([str(i) for i in range(8)], "p", {"x": list(map(float, range(8)))})
    time.sleep(0.2)
    print(len(client.claim_meta("p", "train", ["x"], 8, timeout_s=20.0)), len(client.list_claims("p", "train")))
client.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "8 1"), ran.stderr


@SLOW
def test_a_forked_child_does_no_harm(client: BlockingClient) -> None:
    """In it verbs raise, close does nothing, a client of its own works; the parent goes on."""

    def child() -> None:
        with pytest.raises(DataPlaneBadRequest, match="forked child"):
            client.depth("p")
        with pytest.raises(DataPlaneBadRequest, match="forked child"):
            next(client.batches("p", "train", ["x"], 2))
        client.close()
        client._finalizer()
        client._loop.end_at_exit()
        gc.collect()
        with build_blocking_client(MEMORY) as own:
            own.register_partition("q", ["x"], 8, ["train"])
            assert own.depth("q") == 0

    for _ in range(3):
        assert in_a_child(child) == 0
    assert client.depth("p") == 8


@SLOW
def test_eight_threads_outlive_faults_and_deaths() -> None:
    """For a minute hosts die and come back, calls are refused and answers lost: each row is trained once."""
    plan = FaultPlan(seed=3).refuse(p=0.02).lose_reply(p=0.02).lose_request(p=0.01)
    for at_s in range(5, 60, 10):
        plan = plan.crash_host(f"host-{at_s // 10 % 2}", at_s=at_s, restart_at_s=at_s + 1)
    trained: list[list[str]] = []
    lost: list[str] = []
    ends = time.monotonic() + 60.0
    stack_ = faulty_stack(MemoryTransport({**MEMORY, "num_storage_units": 2}), plan, attempt_timeout_s=0.5)
    with BlockingClient(stack_) as client:
        client.register_partition("p", ["x"], 8, ["train"])

        def work(number: int) -> None:
            made = 0
            while time.monotonic() < ends:
                ids = [f"{number}-{made + i}" for i in range(4)]
                made += 4
                with suppress(*AWAY):
                    client.put_samples(ids, "p", {"x": torch.full((4,), float(number))})
                with suppress(*AWAY):
                    meta = client.claim_meta("p", "train", ["x"], 4, blocking=False)
                    if meta.size:
                        train(meta)

        def train(meta: KVBatchMeta) -> None:
            try:
                data = client.get_data(meta)
            except DataPlaneReadError:
                lost.extend(meta.sample_ids)  # with a host; seldom more than a batch
                return
            assert data["x"].tolist() == [float(one.split("-")[0]) for one in meta.sample_ids]
            trained.append(meta.sample_ids)
            with suppress(*AWAY):
                client.pop(meta, "p")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    found = [one for batch in trained for one in batch]
    assert len(found) == len(set(found))
    assert len(found) > 1000
    assert threads() == 0
