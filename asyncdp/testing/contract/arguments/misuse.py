"""An invalid request is refused at once, with the name of the wrong argument, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from asyncdp import DataPlaneBadRequest, DataPlaneUnsupported, KVBatchMeta, Layer
from asyncdp.calls import CallContext, ClearSamples, EvictSamples, GetSamples, handles

from ..faults import Fault
from ..rig import declare, table
from ..same import check_same

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..rig import Rig
from ..base import Contract

__all__ = ["Misuse"]

X = torch.zeros(2)


IDS = ["a", "b"]


#: {description of the mistake: (the call, the name that the error must contain)}
WRONG: dict[str, tuple[Callable[[Any], Awaitable[Any]], str]] = {
    "put: duplicate ids": (lambda c: c.put_samples(["a", "b", "a"], "p", {"x": torch.zeros(3)}), "'a'"),
    "put: ids are a string": (lambda c: c.put_samples("ab", "p", {"x": X}), "sample_ids"),
    "put: ids are None": (lambda c: c.put_samples(None, "p", {"x": X}), "sample_ids"),
    "put: an id is no string": (lambda c: c.put_samples(["a", 1], "p", {"x": X}), "sample_ids"),
    "put: an id is empty": (lambda c: c.put_samples(["a", ""], "p", {"x": X}), "sample_ids"),
    "put: no partition": (lambda c: c.put_samples(IDS, "", {"x": X}), "partition_id"),
    "put: partition is None": (lambda c: c.put_samples(IDS, None, {"x": X}), "partition_id"),
    "put: unknown partition": (lambda c: c.put_samples(IDS, "mistyped", {"x": X}), "'mistyped'"),
    "put: tags only, unknown partition": (lambda c: c.put_samples(IDS, "mistyped", tags=[{}, {}]), "'mistyped'"),
    "put: too few rows": (lambda c: c.put_samples(IDS, "p", {"x": torch.zeros(1)}), "'x'"),
    "put: too many rows": (lambda c: c.put_samples(IDS, "p", {"x": torch.zeros(3)}), "'x'"),
    "put: another batch size": (lambda c: c.put_samples(IDS, "p", table(x=torch.zeros(3))), "batch size"),
    "put: no batch size": (lambda c: c.put_samples(IDS, "p", TensorDict({"x": X}, batch_size=[])), "batch size"),
    "put: nothing": (lambda c: c.put_samples(IDS, "p"), "fields"),
    "put: no fields": (lambda c: c.put_samples(IDS, "p", {}), "fields"),
    "put: fields are a tensor": (lambda c: c.put_samples(IDS, "p", X), "fields"),
    "put: a field is a number": (lambda c: c.put_samples(IDS, "p", {"x": 1}), "'x'"),
    "put: a field has no name": (lambda c: c.put_samples(IDS, "p", {"": X}), "fields"),
    "put: a field's name is no string": (lambda c: c.put_samples(IDS, "p", {1: X}), "fields"),
    "put: too few tags": (lambda c: c.put_samples(IDS, "p", {"x": X}, [{}]), "tags"),
    "put: too many tags": (lambda c: c.put_samples(IDS, "p", tags=[{}] * 3), "tags"),
    "put: tags are one dict": (lambda c: c.put_samples(IDS, "p", {"x": X}, {"k": 1}), "tags"),
    "put: a tag row is a list": (lambda c: c.put_samples(IDS, "p", {"x": X}, [{}, []]), "tags[1]"),
    "put: a tag is a tensor": (lambda c: c.put_samples(IDS, "p", {"x": X}, [{}, {"k": X}]), "'k'"),
    "put: a tag is a list": (lambda c: c.put_samples(IDS, "p", {"x": X}, [{"k": [1]}, {}]), "'k'"),
    "put: a tag's name is no string": (lambda c: c.put_samples(IDS, "p", {"x": X}, [{1: 1}, {}]), "tags[0]"),
    "get: unknown partition": (lambda c: c.get_samples(["old"], "mistyped", ["x"]), "'mistyped'"),
    "get: fields are a string": (lambda c: c.get_samples(["old"], "p", "x"), "select_fields"),
    "get: no fields": (lambda c: c.get_samples(["old"], "p", []), "select_fields"),
    "get: fields are None": (lambda c: c.get_samples(["old"], "p", None), "select_fields"),
    "get: ids are a string": (lambda c: c.get_samples("old", "p", ["x"]), "sample_ids"),
    "get_data: no meta": (lambda c: c.get_data(["old"]), "meta"),
    "get_data: no fields": (lambda c: c.get_data(KVBatchMeta("p", sample_ids=["old"])), "select_fields"),
    "claim: unknown partition": (lambda c: c.claim_meta("mistyped", "train", ["x"], 1), "'mistyped'"),
    "claim: unknown task": (lambda c: c.claim_meta("p", "mistyped", ["x"], 1), "'mistyped'"),
    "claim: unknown field": (lambda c: c.claim_meta("p", "train", ["mistyped"], 1), "'mistyped'"),
    "claim: no samples": (lambda c: c.claim_meta("p", "train", ["x"], 0), "batch_size"),
    "claim: a fraction": (lambda c: c.claim_meta("p", "train", ["x"], 1.5), "batch_size"),
    "claim: min above batch": (lambda c: c.claim_meta("p", "train", ["x"], 1, min_batch_size=2), "min_batch_size"),
    "claim: min of none": (lambda c: c.claim_meta("p", "train", ["x"], 1, min_batch_size=0), "min_batch_size"),
    "claim: fields are a string": (lambda c: c.claim_meta("p", "train", "x", 1), "required_fields"),
    "claim: a rank below zero": (lambda c: c.claim_meta("p", "train", ["x"], 1, -1), "dp_rank"),
    "check: unknown task": (lambda c: c.check_consumption_status("p", ["mistyped"]), "'mistyped'"),
    "check: unknown partition": (lambda c: c.check_consumption_status("mistyped", ["train"]), "'mistyped'"),
    "check: tasks are a string": (lambda c: c.check_consumption_status("p", "train"), "task_names"),
    "clear: ids are a string": (lambda c: c.clear_samples("old", "p"), "sample_ids"),
    "clear: no partition": (lambda c: c.clear_samples(["old"], ""), "partition_id"),
    "clear all: no partition": (lambda c: c.clear_samples(None, ""), "partition_id"),
    "pop: keys are a string": (lambda c: c.pop("old", "p"), "keys"),
    "pop: another partition's meta": (lambda c: c.pop(KVBatchMeta("q", sample_ids=["old"]), "p"), "'q'"),
    "evict: keys are None": (lambda c: c.evict(None, "p"), "keys"),
    "list_metadata: unknown partition": (lambda c: c.list_metadata("mistyped"), "'mistyped'"),
    "depth: unknown partition": (lambda c: c.depth("mistyped"), "'mistyped'"),
    "describe: unknown partition": (lambda c: c.describe("mistyped"), "'mistyped'"),
    "list_claims: unknown task": (lambda c: c.list_claims("p", "mistyped"), "'mistyped'"),
    "list_claims: unknown partition": (lambda c: c.list_claims("mistyped", "train"), "'mistyped'"),
    "release: no meta": (lambda c: c.release_claim("old"), "meta"),
    "release: no claim": (lambda c: c.release_claim(KVBatchMeta("p", "train", ["old"])), "'old'"),
    "release_claims: no owner": (lambda c: c.release_claims("p", ""), "owner"),
    "register: no name": (lambda c: c.register_partition("", ["x"], 1, ["t"]), "partition_id"),
    "register: fields are a string": (lambda c: c.register_partition("p", "x", 1, ["t"]), "fields"),
    "register: tasks are a string": (lambda c: c.register_partition("p", ["x"], 1, "t"), "consumer_tasks"),
    "register: a count below zero": (lambda c: c.register_partition("p", ["x"], -1, ["t"]), "num_samples"),
    "register: a count as text": (lambda c: c.register_partition("p", ["x"], "1", ["t"]), "num_samples"),
    "register: groups of none": (lambda c: c.register_partition("p", ["x"], 1, ["t"], 0), "grpo_group_size"),
    "register: no vocabulary": (lambda c: c.register_partition("p", ["x"], 1, [], None, {"e": []}), "'e'"),
    "register: a word twice": (lambda c: c.register_partition("p", ["x"], 1, [], None, {"e": ["u", "u"]}), "'e'"),
    "register: enums are a list": (lambda c: c.register_partition("p", ["x"], 1, [], None, ["e"]), "enums"),
    "register: vocabulary of a tensor": (lambda c: c.register_partition("p", [], 1, [], None, {"x": ["u"]}), "'x'"),
    "timeout below zero": (lambda c: c.depth("p", timeout_s=-1), "timeout_s"),
    "timeout is no number": (lambda c: c.get_samples(["old"], "p", ["x"], timeout_s=float("nan")), "timeout_s"),
    "timeout is text": (lambda c: c.ping(timeout_s="5"), "timeout_s"),
    "timeout is True": (lambda c: c.put_samples(IDS, "p", {"x": X}, timeout_s=True), "timeout_s"),
}


class Misuse(Contract):
    """An invalid request is refused at once, with the name of the wrong argument, and changes nothing."""

    @pytest.mark.parametrize("what", WRONG)
    async def test_a_wrong_request_is_refused_by_name(self, rig: Rig, what: str) -> None:
        """The call raises DataPlaneBadRequest, which is a ValueError, with the wrong name; nothing is changed."""
        call, named = WRONG[what]
        watch = Fault()
        client = await rig.attach(watch)
        await declare(client)
        await client.put_samples(["old"], "p", {"x": torch.ones(1)}, [{"k": 1}])
        before = (await client.describe("p"), await client.list_metadata("p"), await client.list_partitions())
        with pytest.raises(DataPlaneBadRequest) as caught:
            await call(client)
        err = caught.value
        assert named in err.message
        assert isinstance(err, ValueError)
        assert (err.retryable, err.blames_port, err.ambiguous, err.attempts) == (False, False, False, 1)
        assert (await client.describe("p"), await client.list_metadata("p"), await client.list_partitions()) == before
        assert await client.list_claims("p", "train") == []

    @pytest.mark.parametrize("what", WRONG)
    async def test_a_wrong_request_is_sent_once_at_most(self, rig: Rig, what: str) -> None:
        """No layer retries an invalid request."""
        call, _ = WRONG[what]
        watch = Fault()
        client = await rig.attach(watch)
        await declare(rig.client)
        await rig.client.put_samples(["old"], "p", {"x": torch.ones(1)})
        with pytest.raises(DataPlaneBadRequest):
            await call(client)
        assert len({id(c) for c in watch.seen}) == len(watch.seen)
        kinds = [type(c).__name__ for c in watch.seen if type(c).__name__ != "Abort"]
        assert len(set(kinds)) == len(kinds)

    async def test_ids_of_any_sequence_are_taken(self, rig: Rig) -> None:
        """Tuples, dict keys and generators of ids are accepted like lists."""
        await declare(rig.client)
        await rig.client.put_samples(tuple(IDS), "p", {"x": X})
        await rig.client.put_samples((name for name in IDS), "p", {"x": X + 1})  # type: ignore[arg-type]
        got = await rig.client.get_samples({"b": 1, "a": 2}.keys(), "p", ("x",))  # type: ignore[arg-type]
        check_same(got["x"], X + 1)

    async def test_a_field_named_twice_in_a_get_comes_once(self, rig: Rig) -> None:
        """There is no error and no second column."""
        await declare(rig.client)
        await rig.client.put_samples(IDS, "p", {"x": X})
        assert list((await rig.client.get_samples(IDS, "p", ["x", "x"])).keys()) == ["x"]

    async def test_a_verb_that_nobody_serves_is_unsupported(self, rig: Rig) -> None:
        """If a layer hides a call, the verb raises DataPlaneUnsupported with the name of the call."""

        class Deaf(Layer):
            @handles(ClearSamples)
            async def clear(self, call: Any, ctx: Any) -> Any:
                return await self.unserved(call, ctx)

        client = await rig.attach(Deaf)
        with pytest.raises(DataPlaneUnsupported, match="ClearSamples") as caught:
            await client.clear_samples(["a"], "p")
        assert caught.value.capability == "ClearSamples"

    async def test_a_calls_subclass_is_served_like_its_parent(self, rig: Rig) -> None:
        """U17: even if it is defined late, all layers and the transport pass on the call object with its attributes."""
        watch = Fault()
        client = await rig.attach(watch)
        await declare(client)
        await client.put_samples(IDS, "p", {"x": X})
        await client.evict(["a"], "p")  # the type of this call is cached from here on

        @dataclass(frozen=True, slots=True)
        class Retire(EvictSamples):
            why: str = ""

        @dataclass(frozen=True, slots=True)
        class Read(GetSamples):
            why: str = ""

        def context(verb: str) -> CallContext:
            now = client.env.clock.now()
            return CallContext(client.env, client.env.next_op_id(), now + 10, verb, now)

        got = await client.execute(Read(("b",), "p", ("x",), why="to look"), context("read"))
        check_same(got["x"], X[:1])
        assert await client.execute(Retire(("b", "gone"), "p", why="too old"), context("retire")) == 1
        assert (await client.describe("p")).size == 0
        assert [call.why for call in watch.seen if isinstance(call, Retire)] == ["too old"]
