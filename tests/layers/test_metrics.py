import gc
import weakref
from typing import Any

import anyio
import pytest
import structlog

from asyncdp import (
    ClaimNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    Layer,
    MemoryTransport,
    Metrics,
    PartialReadError,
    default_layers,
    stack,
)
from asyncdp.calls import CallContext, Ping, PutSamples, handles
from asyncdp.service import layers_of
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, rows, virtual


def counted(rig: Rig, name: str) -> dict[str, int]:
    """Return one event's counts by its labels."""
    by: dict[str, int] = rig.layer(Metrics).snapshot()["events_by"].get(name, {})
    return by


@virtual
async def test_calls_are_counted_by_how_they_end() -> None:
    """Each user call is one op, with one of four ends, whatever its requests went through."""
    plan = FaultPlan().on("ping").refuse(times=1).on("depth").refuse().on("list_metadata").silent()
    seen: list[dict[str, Any]] = []
    async with Rig(plan, attempt_timeout_s=1.0) as rig:
        rig.layer(Metrics).on_event = seen.append
        await rig.client.ping()
        with pytest.raises(DataPlaneUnavailable):
            await rig.client.depth("p")
        with pytest.raises(DataPlaneTimeout):
            await rig.client.list_metadata("p", timeout_s=3.0)
        with pytest.raises(ClaimNotReady):
            await rig.client.claim_meta("p", "t", ["x"], 1, timeout_s=2.0)
        with anyio.move_on_after(0.5):
            await rig.client.list_metadata("p")
        got = rig.layer(Metrics).snapshot()
        assert got["ops"] == {
            "ping": {"ok": 1},
            "depth": {"error": 1},
            "list_metadata": {"timeout": 1, "cancelled": 1},
            "claim_meta": {"timeout": 1},
        }
        assert [(e["op"], e["status"]) for e in seen] == [
            ("ping", "ok"),
            ("depth", "error"),
            ("list_metadata", "timeout"),
            ("claim_meta", "timeout"),
            ("list_metadata", "cancelled"),
        ]
        assert seen[2]["wall_ms"] == pytest.approx(3000.0, rel=0.01)
        assert seen[3]["wall_ms"] == pytest.approx(2000.0, rel=0.1)
        assert got["wall_ms"]["claim_meta"]["p50"] == pytest.approx(2000.0, rel=0.5)


@virtual
async def test_the_tensors_of_a_put_of_unknown_outcome_are_let_go() -> None:
    """What it would enter into the account is kept until it is settled, the rows themselves are not."""

    class Silent(Layer):
        """Answers no put."""

        @handles(PutSamples)
        async def put(self, call: PutSamples, ctx: CallContext) -> Any:
            del call, ctx
            await anyio.sleep_forever()

    async with stack(MemoryTransport(), [Silent]) as client:
        await client.register_partition("p", ["x"], 2, ["t"])
        fields = {"x": rows(2, 3)}
        tensor = weakref.ref(fields["x"])
        async with anyio.create_task_group() as group:
            group.start_soon(client.put_samples, ["a", "b"], "p", fields)
            await anyio.sleep(1.0)
            group.cancel_scope.cancel()
        del fields
        gc.collect()
        assert tensor() is None


@virtual
async def test_every_kind_of_event_is_counted_once() -> None:
    """Retry, rotation, quarantine, probe, recovery, round, stale slot, skipped host: each counted, with its labels."""
    plan = FaultPlan().on(host="host-0", port=1).refuse(times=1)
    plan.on("get_samples", sample="s3").stale(times=1, at_s=150)
    plan.on("get_samples", sample="s2").error("CorruptPayload", times=1, at_s=150)
    plan.on("put_samples", host="host-1", call="WriteSlots").error("DataPlaneUnavailable", at_s=200)
    async with Rig(plan, hosts=2, ports=2) as rig:
        ids = await rig.fill(4)
        for _ in range(2):
            await rig.get(ids)
        assert counted(rig, "rotation") == {"reason=DataPlaneUnavailable host=host-0 port=1": 1}
        assert counted(rig, "quarantine") == {"reason=DataPlaneUnavailable host=host-0 port=1": 1}
        await anyio.sleep(100.0)
        for _ in range(2):
            await rig.get(ids)
        assert counted(rig, "probe") == {"host=host-0 port=1": 1}
        assert counted(rig, "recovered") == {"host=host-0 port=1": 1}
        await anyio.sleep(50.0)
        with pytest.raises(PartialReadError):
            await rig.get(ids)
        assert sum(counted(rig, "stale_slots").values()) == 1
        (retried,) = counted(rig, "retry")
        assert retried.startswith("reason=CorruptPayload host=host-0")
        await anyio.sleep(100.0)
        await rig.client.put_samples(["new"], "p", {"x": rows(1)})
        assert counted(rig, "host_skipped") == {"reason=DataPlaneUnavailable host=host-1": 1}


@virtual
async def test_what_is_settled_is_counted() -> None:
    """An ambiguous mutation is counted when it is written down, and again, with its end, when it is settled."""
    plan = FaultPlan().on(call="Publish").silent(times=1).lose_reply("claim_meta", raises=None, times=1)
    async with Rig(plan) as rig:
        await rig.fill(1)
        with anyio.move_on_after(1.0):
            await rig.client.put_samples(["a"], "p", {"x": rows(1)})
        with anyio.move_on_after(1.0):
            await rig.client.claim_meta("p", "t", ["x"], 1)
        assert counted(rig, "ambiguous") == {"verb=put_samples": 1, "verb=claim_meta": 1}
        await rig.client.clear_samples(["a"], "p")
        await rig.client.claim_meta("p", "t", ["x"], 1)
        settled = counted(rig, "settled")
        assert settled["what=Resolve state=refused"] == 1
        assert settled["what=AbandonClaim state=done"] == 1


@virtual
async def test_the_account_of_live_bytes_balances() -> None:
    """Bytes go up with a put, once per field however often it is put, down with a clear; failures change nothing."""
    plan = FaultPlan().on("put_samples").not_ready(at_s=10).on("clear_samples").refuse(at_s=10)
    async with Rig(plan) as rig:
        snapshot = rig.layer(Metrics).snapshot
        for _ in range(3):
            await rig.client.put_samples(["a", "b"], "p", {"x": rows(2)})
        assert (snapshot()["bytes_outstanding"], snapshot()["n_keys_outstanding"]) == (16, 2)
        await rig.client.put_samples(["a"], "p", {"y": rows(1)})
        assert (snapshot()["bytes_outstanding"], snapshot()["max_bytes_per_key_seen"]) == (24, 16)
        await anyio.sleep(10.0)
        with pytest.raises(Exception, match="not ready"):
            await rig.client.put_samples(["c"], "p", {"x": rows(1)}, timeout_s=1.0)
        with pytest.raises(DataPlaneUnavailable):
            await rig.client.clear_samples(["a"], "p")
        assert (snapshot()["bytes_outstanding"], snapshot()["n_keys_outstanding"]) == (24, 2)
        await rig.client.evict(["a"], "p")
        assert (snapshot()["bytes_outstanding"], snapshot()["peak_bytes_outstanding"]) == (8, 24)
        await rig.client.drop_partition("p")
        assert (snapshot()["bytes_outstanding"], snapshot()["n_keys_outstanding"]) == (0, 0)


@virtual
async def test_a_watcher_that_raises_harms_no_call() -> None:
    """X6: what on_event raises is counted, logged once, and no call fails for it."""

    def angry(event: Any) -> None:
        raise RuntimeError("no")

    async with Rig() as rig:
        rig.layer(Metrics).on_event = angry
        with structlog.testing.capture_logs() as logs:
            await rig.client.ping()
            await rig.client.ping()
        assert rig.layer(Metrics).snapshot()["callback_errors"] == 2
        assert [log["log_level"] for log in logs] == ["warning"]


@virtual
async def test_a_layer_of_ones_own_sees_its_calls() -> None:
    """A user's layer of ten lines handles the calls it is marked for, anywhere in the stack, and counts by emit."""

    class Twice(Layer):
        @handles(Ping)
        async def ping_twice(self, call: Ping, ctx: CallContext) -> None:
            ctx.emit("twice", verb=ctx.verb)
            await self.inner.execute(call, ctx)
            await self.inner.execute(call, ctx)

    client = stack(MemoryTransport(), [Twice])
    await client.ping()
    await client.list_partitions()
    assert client.snapshot()["events_by"] == {"twice": {"verb=ping": 1}}  # type: ignore[attr-defined]
    await client.close()


@virtual
async def test_events_and_live_bytes_are_one_object_of_the_stack() -> None:
    """Where Metrics stands above other layers or below them, the counters are those that all layers emit to."""

    class Above(Layer):
        """A layer of one's own, above Metrics."""

        @handles(PutSamples)
        async def put(self, call: PutSamples, ctx: CallContext) -> Any:
            ctx.emit("seen", what="put")
            return await self.inner.execute(call, ctx)

    async with stack(MemoryTransport(), [Above, Metrics, *default_layers()]) as client:
        await client.register_partition("p", ["x"], 2, ["t"])
        await client.put_samples(["a"], "p", {"x": rows(1)})
        (metrics,) = [layer for layer in layers_of(client) if isinstance(layer, Metrics)]
        assert metrics.counters is client.env.sink
        got = client.snapshot()
        assert got["events_by"]["seen"] == {"what=put": 1}
        assert got["bytes_outstanding"] == metrics.counters.live_bytes.outstanding == rows(1).nbytes
