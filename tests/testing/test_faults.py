import json
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any

import anyio
import pytest
import torch

from asyncdp import (
    Client,
    DataPlaneError,
    Layer,
    MemoryTransport,
    PartialReadError,
    SlotMapping,
    build_data_plane_client,
    default_layers,
    stack,
)
from asyncdp.calls.slots import ReadSlots
from asyncdp.service import layers_of
from asyncdp.testing import FaultPlan, faulty_stack, run_virtual
from asyncdp.testing.faults.layer import Faults
from asyncdp.transports.memory.transport import DEFAULTS

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
IDS = [f"s{i}" for i in range(6)]


def transport(**memory: Any) -> MemoryTransport:
    """Make a plane with one row per slot, so that rows can fail alone."""
    return MemoryTransport({**DEFAULTS, "memory": {"rows_per_slot": 1, **memory}})


def bare(made: MemoryTransport, plan: FaultPlan) -> Client:
    """Put the faults, and nothing that would survive them, around a transport."""
    return stack(made, [SlotMapping, plan.layer])


async def fill(client: Client) -> None:
    """Put six rows."""
    await client.register_partition("p", ["x"], 6, ["t"])
    await client.put_samples(IDS, "p", {"x": torch.arange(12.0).reshape(6, 2)})


def run(plan: FaultPlan, fn: Callable[[Client, MemoryTransport], Awaitable[Any]], backend: str, **memory: Any) -> Any:
    """Run a test with a filled client on virtual time."""

    async def main() -> Any:
        made = transport(**memory)
        client = bare(made, plan)
        await fill(client)
        return await fn(client, made)

    return run_virtual(main, backend)


@BACKENDS
@pytest.mark.parametrize(
    ("plan", "raised"),
    [
        (lambda p: p.refuse(), ConnectionRefusedError),
        (lambda p: p.reset(), ConnectionResetError),
        (lambda p: p.not_ready(0.5), "DataPlaneNotReady"),
        (lambda p: p.error("EOFError"), EOFError),
        (lambda p: p.error("DataPlaneClosed"), "DataPlaneClosed"),
    ],
)
def test_requests_fail_as_planned(backend: str, plan: Callable[[Any], Any], raised: Any) -> None:
    """Refused, reset, not ready or any error, raw or typed: it is raised, recorded, and nothing was executed."""
    made = FaultPlan().on("clear_samples")
    made = plan(made)

    async def main(client: Client, made_transport: MemoryTransport) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is checked below
            await client.clear_samples(["s0"], "p")
        assert (type(caught.value).__name__ == raised) if isinstance(raised, str) else caught.type is raised
        assert len(made_transport.plane.partitions["p"].rows) == 6

    run(made, main, backend)
    (fault,) = made.injected
    assert (fault.verb, fault.call, fault.sample_ids, fault.at) == ("clear_samples", "ClearSamples", ("s0",), 0.0)


@BACKENDS
def test_silence_lasts_until_it_is_cancelled(backend: str) -> None:
    """A silent request never answers, and is not executed."""
    plan = FaultPlan().on("clear_samples").silent(times=1)

    async def main(client: Client, made: MemoryTransport) -> None:
        with anyio.move_on_after(1000.0) as scope:
            await client.clear_samples(["s0"], "p")
        assert scope.cancelled_caught
        assert len(made.plane.partitions["p"].rows) == 6
        await client.clear_samples(["s0"], "p")
        assert len(made.plane.partitions["p"].rows) == 5

    run(plan, main, backend)


@BACKENDS
@pytest.mark.parametrize(("kind", "left"), [("lose_request", 6), ("lose_reply", 5)])
def test_a_lost_reply_is_of_a_request_that_was_executed(backend: str, kind: str, left: int) -> None:
    """A lost request does nothing, a lost reply hides what was done."""
    plan = FaultPlan()
    getattr(plan, kind)("clear_samples", raises="TimeoutError", times=1)

    async def main(client: Client, made: MemoryTransport) -> None:
        with pytest.raises(TimeoutError):
            await client.clear_samples(["s0"], "p")
        assert len(made.plane.partitions["p"].rows) == left

    run(plan, main, backend)
    assert plan.counts == {kind: 1}


@BACKENDS
def test_the_deciding_request_of_a_verb_is_lost(backend: str) -> None:
    """Of a put the Publish is lost, of a claim the TryClaim, of a get the ReadSlots."""
    plan = FaultPlan().lose_reply("claim_meta", times=1).lose_reply("get_samples", times=1)
    plan.lose_request("put_samples", after=1, times=1)

    async def main(client: Client, made: MemoryTransport) -> None:
        for call in (
            client.claim_meta("p", "t", ["x"], 2),
            client.get_samples(["s0"], "p", ["x"]),
            client.put_samples(["s0"], "p", {"x": torch.zeros(1, 2)}),
        ):
            with pytest.raises(ConnectionResetError):
                await call

    run(plan, main, backend)
    assert [fault.call for fault in plan.injected] == ["TryClaim", "ReadSlots", "Publish"]
    assert plan.injected[1].sample_ids == ("s0",)


@BACKENDS
def test_delays_follow_their_distribution(backend: str) -> None:
    """A fixed delay takes its time, before execution or after; a log-normal one has the median asked for."""
    plan = FaultPlan(3).on("depth").delay(2.0).on("clear_samples").delay(3.0, reply=True)
    plan.on("list_metadata").delay(p50_s=0.01, p99_s=0.5)

    async def main(client: Client, made: MemoryTransport) -> None:
        began = anyio.current_time()
        await client.depth("p")
        assert anyio.current_time() - began == pytest.approx(2.0)
        with anyio.move_on_after(1.0):
            await client.clear_samples(["s0"], "p")
        assert len(made.plane.partitions["p"].rows) == 5
        times = []
        for _ in range(400):
            began = anyio.current_time()
            await client.list_metadata("p")
            times.append(anyio.current_time() - began)
        times.sort()
        assert 0.007 < times[200] < 0.014
        assert 0.2 < times[396] < 1.5

    run(plan, main, backend)


@BACKENDS
@pytest.mark.parametrize("kind", ["stale", "truncate", "corrupt"])
def test_slots_fail_alone(backend: str, kind: str) -> None:
    """A fault of one sample's slot leaves the other rows of the same read alone."""
    plan = FaultPlan(5)
    plan.on("get_samples", sample="s3")
    getattr(plan.on("get_samples", sample="s3"), kind)()

    async def main(client: Client, made: MemoryTransport) -> None:
        with pytest.raises(PartialReadError) as caught:
            await client.get_samples(IDS, "p", ["x"])
        err = caught.value
        assert err.failed.sample_ids == ["s3"]
        assert torch.equal(err.rows["x"], torch.arange(12.0).reshape(6, 2)[[0, 1, 2, 4, 5]])
        assert type(err.errors[3]).__name__ == ("StaleSlotError" if kind == "stale" else "CorruptPayload")

    run(plan, main, backend, checksum=True)
    assert plan.injected[0].sample_ids == ("s3",)


@BACKENDS
def test_one_bit_is_enough(backend: str) -> None:
    """Without checksums a flipped bit arrives, in the copy only: the stored row is unharmed."""
    plan = FaultPlan(5).corrupt(times=1)

    async def main(client: Client, made: MemoryTransport) -> None:
        good = torch.arange(12.0).reshape(6, 2)
        assert not torch.equal((await client.get_samples(IDS, "p", ["x"]))["x"], good)
        assert torch.equal((await client.get_samples(IDS, "p", ["x"]))["x"], good)

    run(plan, main, backend)


@BACKENDS
@pytest.mark.parametrize("how", ["cleared", "reborn", "moved"])
def test_slots_are_recycled_for_real(backend: str, how: str) -> None:
    """A slot recycled between look-up and read: a moved row comes, one that was cleared or lives again is stale."""
    plan = FaultPlan(5).recycle("s3", how=how, times=1)

    async def main(client: Client, made: MemoryTransport) -> None:
        good = torch.arange(12.0).reshape(6, 2)
        if how == "moved":
            assert torch.equal((await client.get_samples(IDS, "p", ["x"]))["x"], good)
        else:
            with pytest.raises(PartialReadError) as caught:
                await client.get_samples(IDS, "p", ["x"])
            assert {at: type(e).__name__ for at, e in caught.value.errors.items()} == {3: "StaleSlotError"}
        rows = made.plane.partitions["p"].rows
        assert ("s3" in rows) == (how != "cleared")
        counts = [host.counts() for host in made.plane.hosts.values()]
        assert sum(count["ready"] for count in counts) == len(rows)
        assert not any(count["writing"] or count["reading"] for count in counts)

    run(plan, main, backend)


@BACKENDS
def test_rules_strike_when_they_should(backend: str) -> None:
    """``after`` spares, ``times`` ends, ``at_s`` and ``for_s`` bound the time, by the stack's clock."""
    plan = FaultPlan().on("ping").refuse(after=2, times=3).on("depth").refuse(at_s=10, for_s=5)
    plan.on("list_metadata").refuse(after=1, for_s=2)

    async def main(client: Client, made: MemoryTransport) -> None:
        async def works(verb: str, *args: str) -> bool:
            try:
                await getattr(client, verb)(*args)
            except ConnectionRefusedError:
                return False
            return True

        assert [await works("ping") for _ in range(7)] == [True, True, False, False, False, True, True]
        seen = []
        for _ in range(9):
            seen.append(await works("depth", "p"))
            await anyio.sleep(2.0)
        assert seen == [True] * 5 + [False] * 3 + [True]
        assert [await works("list_metadata", "p") for _ in range(3)] == [True, False, False]
        await anyio.sleep(2.0)
        assert await works("list_metadata", "p")

    run(plan, main, backend)


@BACKENDS
def test_a_host_is_cut_off_and_comes_back(backend: str) -> None:
    """A cut host answers nothing for its time, then as before; others are not touched."""
    plan = FaultPlan().cut("host-0", at_s=1.0, for_s=5.0)

    async def main(client: Client, made: MemoryTransport) -> None:
        await anyio.sleep(1.0)
        with anyio.move_on_after(1.0) as scope:
            await client.get_samples(["s0"], "p", ["x"])
        assert scope.cancelled_caught
        await client.ping()
        await anyio.sleep(4.0)
        await client.get_samples(["s0"], "p", ["x"])

    run(plan, main, backend)


@BACKENDS
@pytest.mark.parametrize("adopt", [True, False])
def test_a_host_crashes_and_restarts(backend: str, *, adopt: bool) -> None:
    """A crashed host refuses; started again it has its slots (adopted), or is empty in a new epoch."""
    plan = FaultPlan().crash_host("host-0", at_s=3, restart_at_s=6, adopt=adopt)

    async def main(client: Client, made: MemoryTransport) -> None:
        await client.get_samples(["s0"], "p", ["x"])
        await anyio.sleep(3.0)
        with pytest.raises(DataPlaneError, match="down"):
            await client.get_samples(["s0"], "p", ["x"])
        await anyio.sleep(3.0)
        if adopt:
            await client.get_samples(["s0"], "p", ["x"])
        else:
            with pytest.raises(DataPlaneError):
                await client.get_samples(["s0"], "p", ["x"])
        assert made.plane.hosts["host-0"].ref.epoch == (1 if adopt else 2)

    run(plan, main, backend)
    assert plan.counts == {"crash_host": 1, "restart_host": 1}


@BACKENDS
def test_the_same_seed_gives_the_same_faults(backend: str) -> None:
    """A plan run twice injects the same faults at the same moments; another seed others."""

    def trace(seed: int) -> list[Any]:
        plan = (
            FaultPlan(seed).refuse(p=0.1).delay(p50_s=0.01, p99_s=0.1).corrupt(p=0.05).on("get_samples").silent(p=0.02)
        )

        async def main() -> None:
            client = faulty_stack(transport(checksum=True), plan, attempt_timeout_s=0.5, max_attempts=8)
            await fill(client)
            for i in range(40):
                try:
                    await client.get_samples([IDS[i % 6], IDS[(i + 2) % 6]], "p", ["x"])
                except DataPlaneError:
                    continue

        run_virtual(main, backend)
        return plan.injected

    first = trace(1)
    assert len(first) > 50
    assert first == trace(1)
    assert first != trace(2)


@BACKENDS
def test_a_rule_more_does_not_change_the_others(backend: str) -> None:
    """Each rule draws from a random source of its own."""

    def struck(plan: FaultPlan) -> list[int]:
        hit: list[int] = []

        async def main(client: Client, made: MemoryTransport) -> None:
            for i in range(60):
                try:
                    await client.ping()
                except ConnectionRefusedError:
                    hit.append(i)

        run(plan, main, backend)
        return hit

    assert struck(FaultPlan(4).on("ping").refuse(p=0.3)) == struck(
        FaultPlan(4).on("ping").refuse(p=0.3).delay(p50_s=0.1, p99_s=1.0)
    )


def test_clients_of_one_plan_have_op_ids_of_their_own() -> None:
    """Two stacks of one seed on one plane never take each other's mutations for their own."""
    made = transport()
    one, two = (faulty_stack(MemoryTransport(made.attach_config(), bootstrap=False), FaultPlan(1)) for _ in range(2))
    assert one.env.session != two.env.session


#: How a test comes to a second client of a plane.
SECOND: dict[str, Callable[[Client], Client]] = {
    "attach_config": lambda first: build_data_plane_client(first.attach_config(), bootstrap=False),
    "attach_config as JSON": lambda first: build_data_plane_client(
        json.loads(json.dumps(first.attach_config())), bootstrap=False
    ),
    "attach_config, layers of its own": lambda first: build_data_plane_client(
        first.attach_config(), bootstrap=False, layers=[Layer]
    ),
    "a pickle": lambda first: pickle.loads(pickle.dumps(first)),
    "a pickle of the second": lambda first: pickle.loads(pickle.dumps(SECOND["attach_config"](first))),
    "stack()": lambda first: stack(MemoryTransport(first.attach_config(), bootstrap=False)),
}


@pytest.mark.parametrize("way", SECOND)
@pytest.mark.parametrize("late", [False, True], ids=["planned before", "planned later"])
def test_a_second_client_of_the_plane_meets_the_plan(way: str, *, late: bool) -> None:
    """U15: however a test makes it, the same plan, just above the transport, once; its counts are those of all."""
    plan = FaultPlan(7) if late else FaultPlan(7).on("depth").refuse(times=1)

    async def main() -> None:
        async with faulty_stack(transport(), plan) as first:
            await fill(first)
            second = SECOND[way](first)
            if late:
                plan.on("depth").refuse(times=1)
            kinds = [type(layer).__name__ for layer in layers_of(second)]
            assert kinds[-2:] == ["Faults", "MemoryTransport"]
            assert kinds.count("Faults") == 1
            assert await second.depth("p") == 6
            assert plan.counts == {"refuse": 1}
            await second.close()

    run_virtual(main)


def test_a_plan_of_its_own_replaces_that_of_the_first_client() -> None:
    """faulty_stack() with another plan: what was asked for, and nothing else."""
    first = faulty_stack(transport(), FaultPlan(1).refuse())
    mine = FaultPlan(2)
    second = faulty_stack(MemoryTransport(first.attach_config(), bootstrap=False), mine)
    assert [layer.plan for layer in layers_of(second) if isinstance(layer, Faults)] == [mine]
    assert len(second.attach_config()["layers"]) == 1


@pytest.mark.slow
def test_another_process_is_told_that_its_plan_is_a_copy() -> None:
    """The rules reach it, the counts do not come back: RuntimeWarning. A plan without rules is no news."""
    code = "import pickle, sys, warnings; warnings.simplefilter('error'); plan = pickle.load(sys.stdin.buffer)"
    for plan, words in (
        (FaultPlan(3).refuse(times=1), b"RuntimeWarning: the fault plan of process"),
        (FaultPlan(), b""),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(plan), capture_output=True, timeout=120, check=False
        )
        assert words in done.stderr
        assert (done.returncode == 0) is (not words)


@BACKENDS
def test_a_plan_can_be_stopped(backend: str) -> None:
    """After stop() nothing fails any more, and a host that is down comes back at its time."""
    plan = FaultPlan().on("ping").refuse().crash_host("host-0", at_s=1, restart_at_s=5).crash_host("host-1", at_s=9)

    async def main(client: Client, made: MemoryTransport) -> None:
        await anyio.sleep(1.0)
        with pytest.raises(ConnectionRefusedError):
            await client.ping()
        plan.stop()
        await client.ping()
        assert not made.plane.hosts["host-0"].up
        await anyio.sleep(10.0)
        await client.ping()
        assert all(host.up for host in made.plane.hosts.values())

    run(plan, main, backend)


@BACKENDS
@pytest.mark.parametrize("above", range(len(default_layers()) + 1))
def test_rules_follow_the_users_verb_wherever_the_layer_stands(backend: str, above: int) -> None:
    """On top, between any two layers, or at the bottom: the verb decides, not the request that passes."""
    plan = FaultPlan().on("get_samples").delay(2.0, times=1).lose_reply("put_samples", raises=None)

    async def main() -> None:
        layers = default_layers()
        client = stack(transport(), [*layers[:above], plan.layer, *layers[above:]])
        await client.register_partition("p", ["x"], 6, ["t"])
        with anyio.move_on_after(1.0) as scope:
            await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        assert scope.cancelled_caught
        began = anyio.current_time()
        await client.get_samples(["a"], "p", ["x"])
        assert anyio.current_time() - began == pytest.approx(2.0)

    run_virtual(main, backend)
    assert [(fault.kind, fault.verb) for fault in plan.injected] == [
        ("lose_reply", "put_samples"),
        ("delay", "get_samples"),
    ]
    assert plan.idle == ()


@BACKENDS
def test_a_plan_tells_what_it_did_and_what_it_did_not(backend: str) -> None:
    """report() has seed, rules, faults; idle has the rules that never struck."""
    plan = FaultPlan(11).on("ping").refuse(times=1).on("depth").silent()

    async def main(client: Client, made: MemoryTransport) -> None:
        with pytest.raises(ConnectionRefusedError):
            await client.ping()

    run(plan, main, backend)
    assert [rule.kind for rule in plan.idle] == ["silent"]
    for part in ("seed=11", "1 fault(s) injected: {'refuse': 1}", "Injected('refuse', verb='ping'", "never struck"):
        assert part in plan.report()


def test_a_plan_of_another_clock_is_refused() -> None:
    """A plan used in a second event loop, whose clock began anew, says so instead of never striking."""
    plan = FaultPlan().on("ping").refuse(at_s=1)

    async def main() -> None:
        await anyio.sleep(5)
        await bare(transport(), plan).ping()
        await anyio.sleep(5)

    run_virtual(main)
    with pytest.raises(RuntimeError, match=r"plan.fresh\(\)"):
        run_virtual(lambda: bare(transport(), plan).ping())


@pytest.mark.parametrize("rule", [{"call": "ReadSlots"}, {"sample": "s1"}])
def test_rules_strike_what_derives_from_their_call(rule: dict[str, str]) -> None:
    """U17: a subclass of a call that some layer sends is struck like its parent, by request and by slot."""

    @dataclass(frozen=True)
    class Urgent(ReadSlots):
        pass

    class Hurries(Layer):
        async def execute(self, call: Any, ctx: Any) -> Any:
            if isinstance(call, ReadSlots):
                call = Urgent(**{field.name: getattr(call, field.name) for field in fields(call)})
            return await self.inner.execute(call, ctx)

    async def main() -> int:
        plan = FaultPlan().on(**rule).stale() if "sample" in rule else FaultPlan().on(**rule).not_ready()
        client = stack(transport(), [SlotMapping, Hurries, plan.layer])
        await client.register_partition("p", ["x"], 6, ["t"])
        await client.put_samples(IDS, "p", {"x": torch.arange(6.0)})
        with pytest.raises(DataPlaneError):
            await client.get_samples(IDS, "p", ["x"])
        return len(plan.injected)

    assert run_virtual(main)
