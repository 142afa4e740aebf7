"""Faults that a reader of the code found, each as a test."""

import anyio
import pytest
import torch
from tensordict import TensorDict

from asyncdp import (
    ClaimNotReady,
    Client,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    MemoryTransport,
    StaleSlotError,
    build_data_plane_client,
    default_layers,
    stack,
)
from asyncdp.testing import FaultPlan, faulty_stack, run_virtual
from asyncdp.transports.memory.transport import DEFAULTS

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@BACKENDS
def test_samples_may_change_their_group(backend: str) -> None:
    """A put that moves rows to another group is whole, and the new group can be claimed."""

    async def check() -> None:
        async with stack(MemoryTransport()) as client:
            await client.register_partition("p", ["x", "y"], 4, ["t"], grpo_group_size=2)
            await client.claim_meta("p", "t", ["x"], 2, blocking=False)
            await client.put_samples(["a", "b"], "p", {"x": torch.ones(2)}, [{"group_id": "A"}] * 2)
            await client.put_samples(["a", "b"], "p", {"y": torch.ones(2)}, [{"group_id": "B"}] * 2)
            assert [group.group_id for group in await client.list_metadata("p")] == ["B"]
            assert (await client.claim_meta("p", "t", ["x"], 2, blocking=False)).sample_ids == ["a", "b"]

    run_virtual(check, backend)


@BACKENDS
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_cancelled_iterator_gives_back_what_the_caller_did_not_get(backend: str, prefetch: int) -> None:
    """Leaving batches() by a cancel releases the claims that were read ahead."""

    async def check() -> None:
        async with stack(MemoryTransport()) as client:
            await client.register_partition("p", ["x"], 8, ["t"])
            await client.put_samples([f"s{i}" for i in range(8)], "p", {"x": torch.arange(8)})
            with anyio.move_on_after(0.2):
                async with client.batches("p", "t", ["x"], 2, prefetch=prefetch) as batches:
                    await anext(batches)
                    await anyio.sleep(10)
            assert [claim.sample_ids for claim in await client.list_claims("p", "t")] == [("s0", "s1")]

    run_virtual(check, backend)


@BACKENDS
def test_the_error_of_a_batch_carries_its_meta(backend: str) -> None:
    """A batch that cannot be read can be evicted by what its error carries."""

    async def check() -> None:
        plan = FaultPlan().on("get_data").error(StaleSlotError, times=1)
        async with faulty_stack(MemoryTransport(), plan) as client:
            await client.register_partition("p", ["x"], 4, ["t"])
            await client.put_samples(["a", "b", "c", "d"], "p", {"x": torch.arange(4)})
            batches = client.batches("p", "t", ["x"], 2)
            with pytest.raises(StaleSlotError) as caught:
                await anext(batches)
            assert caught.value.batch.sample_ids == ["a", "b"]  # type: ignore[attr-defined]
            await client.evict(caught.value.batch, "p")  # type: ignore[attr-defined]
            meta, _ = await anext(batches)
            assert meta.sample_ids == ["c", "d"]

    run_virtual(check, backend)


@BACKENDS
def test_a_vocabulary_may_grow_between_two_rounds(backend: str) -> None:
    """Words of an enum field are read right when one is added while a batch is retried."""

    async def check() -> None:
        plan = FaultPlan().on("get_samples", sample="b").error(DataPlaneUnavailable, times=4)
        transport = MemoryTransport({**DEFAULTS, "memory": {"rows_per_slot": 1}})
        async with faulty_stack(transport, plan, max_attempts=2) as client:
            await client.register_partition("p", ["e"], 2, ["t"], enums={"e": ["x", "y"]})
            await client.put_samples(["a", "b"], "p", {"e": ["x", "y"]})
            mate = stack(transport)
            words: list[object] = []

            async def read() -> None:
                words.extend((await client.get_samples(["a", "b"], "p", ["e"]))["e"])

            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await anyio.sleep(0.001)
                await mate.register_partition("p", ["e"], 2, ["t"], enums={"e": ["z"]})
                await mate.put_samples(["b"], "p", {"e": ["z"]})
            assert words in (["x", "z"], ["x", "y"])

    run_virtual(check, backend)


@BACKENDS
def test_a_silent_port_is_left_alone_by_short_calls_too(backend: str) -> None:
    """Calls of half a second find a silent port out after their first silence, not each time anew."""

    async def check() -> None:
        plan = FaultPlan()
        async with faulty_stack(MemoryTransport(), plan) as client:
            await _fill(client)
            for _ in range(8):
                await client.get_samples(["a"], "p", ["x"])  # all ports have answered once
            plan.on(call="ReadSlots", port=2).silent()
            plan.on(call="ReadSlots", port=6).silent()
            failed = 0
            for _ in range(40):
                try:
                    await client.get_samples(["a"], "p", ["x"], timeout_s=0.5)
                except DataPlaneTimeout:
                    failed += 1
            assert failed == 1

    run_virtual(check, backend)


async def _fill(client: Client) -> None:
    await client.register_partition("p", ["x", "y"], 4, ["t"])
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})


@BACKENDS
def test_the_account_of_live_bytes_stays_true(backend: str) -> None:
    """A field put again replaces; a put or clear of unknown outcome counts once it turned out to have happened."""

    async def check() -> None:
        plan = FaultPlan()
        async with faulty_stack(MemoryTransport(), plan, max_attempts=1) as client:
            await client.register_partition("p", ["x", "y"], 4, ["t"])
            both = TensorDict({"x": torch.zeros(1), "y": torch.zeros(1)}, [1])
            await client.put_samples(["a"], "p", both)
            await client.put_samples(["a"], "p", {"x": torch.ones(1)})
            assert client.snapshot()["bytes_outstanding"] == 8  # type: ignore[attr-defined]
            plan.lose_reply("put_samples", times=1)
            with pytest.raises((DataPlaneTimeout, DataPlaneUnavailable)):
                await client.put_samples(["b"], "p", {"x": torch.zeros(1)})
            await client.put_samples(["b"], "p", tags=[{"k": 1}])  # settles the one before
            assert client.snapshot()["bytes_outstanding"] == 12  # type: ignore[attr-defined]
            await client.clear_samples(["a", "b"], "p")
            assert client.snapshot()["bytes_outstanding"] == 0  # type: ignore[attr-defined]

    run_virtual(check, backend)


@BACKENDS
def test_metrics_name_the_error_that_the_user_gets(backend: str) -> None:
    """A read of which no row came counts as what it raises, a timeout as a timeout."""

    async def check() -> None:
        plan = FaultPlan().on(call="ReadSlots").silent()
        events: list[dict[str, object]] = []
        async with faulty_stack(MemoryTransport(), plan, on_event=events.append) as client:
            await _fill(client)
            with pytest.raises(DataPlaneTimeout):
                await client.get_samples(["a"], "p", ["x"], timeout_s=2)
            assert events[-1]["status"] == "timeout"
            with pytest.raises(KeyError):
                await client.get_samples(["zz"], "p", ["x"])
            counted = client.snapshot()["events"]  # type: ignore[attr-defined]
            assert counted["error.DataPlaneTimeout"] == counted["error.SampleNotFound"] == 1
            assert "error.PartialReadError" not in counted

    run_virtual(check, backend)


@BACKENDS
def test_a_claim_says_who_waits_for_the_rest_of_its_group(backend: str) -> None:
    """Half a group is named, with its age, by ClaimNotReady."""

    async def check() -> None:
        async with stack(MemoryTransport()) as client:
            await client.register_partition("p", ["x"], 4, ["t"], grpo_group_size=2)
            await client.put_samples(["a"], "p", {"x": torch.zeros(1)}, [{"group_id": "g"}])
            with pytest.raises(ClaimNotReady, match="'a'") as caught:
                await client.claim_meta("p", "t", ["x"], 2, timeout_s=1)
            assert caught.value.waiting_ids == ("a",)
            assert caught.value.oldest_wait_s is not None

    run_virtual(check, backend)


def test_a_second_plane_at_one_address_must_be_the_same() -> None:
    """Bootstrapping over a plane of another config names the key that differs."""
    first = MemoryTransport({**DEFAULTS, "controller_address": "memory://same"})
    MemoryTransport({**DEFAULTS, "controller_address": "memory://same", "memory": {}})
    with pytest.raises(ValueError, match="strict_schema"):
        MemoryTransport({**DEFAULTS, "controller_address": "memory://same", "strict_schema": True})
    with pytest.raises(ValueError, match="memory"):
        MemoryTransport({**DEFAULTS, "controller_address": "memory://same", "memory": {"checksum": True}})
    assert first.plane.capacity == DEFAULTS["storage_capacity"]


class VerbsOnly:
    """Somebody's layer that knows no execute: it wraps a client by its verbs."""

    def __init__(self, inner: Client) -> None:
        self.inner = inner

    async def ping(self, timeout_s: float = 5.0) -> None:
        """Pass on."""
        await self.inner.ping(timeout_s)


@BACKENDS
def test_a_layer_of_verbs_does_not_cut_the_stack_in_two(backend: str) -> None:
    """Events below it reach the one Metrics, and closing reaches the transport."""

    async def check() -> None:
        plan = FaultPlan().on("ping").refuse(times=1)
        transport = MemoryTransport()
        client = stack(transport, [VerbsOnly, *default_layers(), plan.layer])
        await client.ping()
        assert client.snapshot()["events"]["retry"] == 1  # type: ignore[attr-defined]
        await client.close()
        with pytest.raises(DataPlaneUnavailable):
            _ = transport.plane

    run_virtual(check, backend)


@BACKENDS
def test_the_retry_budget_can_be_set(backend: str) -> None:
    """Without a floor and deposits there is no retry; what no budget knows is refused by name."""

    async def check() -> None:
        plan = FaultPlan().on("ping").refuse(times=1)
        none = {"ratio": 0.0, "floor_per_s": 0.0}
        async with stack(MemoryTransport(), [*default_layers(), plan.layer], retry_budget=none) as client:
            with pytest.raises(DataPlaneUnavailable):
                await client.ping()
            assert client.snapshot()["events"]["budget_refused"] == 1  # type: ignore[attr-defined]

    run_virtual(check, backend)
    with pytest.raises(ValueError, match=r"retry_budget\.tokens"):
        stack(MemoryTransport(), retry_budget={"tokens": 1.0})
    with pytest.raises(ValueError, match=r"layers\.retry_budget.*ratio"):
        build_data_plane_client({**DEFAULTS, "layers": {"retry_budget": {"ratio": -1.0}}})
