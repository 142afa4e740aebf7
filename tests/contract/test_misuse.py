"""What is wrong with a request or a config is said at once, by name, and nothing is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncdp import (
    ClearSamples,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneUnsupported,
    KVBatchMeta,
    Layer,
    MemoryTransport,
    build_data_plane_client,
    handles,
    stack,
)
from tests.contract.faults import Fault
from tests.contract.rig import BASE, declare, table
from tests.contract.same import check_same

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdp.client import BaseClient
    from tests.contract.rig import Rig

pytestmark = pytest.mark.anyio

X = torch.zeros(2)
IDS = ["a", "b"]

#: {what is wrong: (the call, what the error names)}
WRONG: dict[str, tuple[Callable[[BaseClient], Awaitable[Any]], str]] = {
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


@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_request_is_refused_by_name(rig: Rig, what: str) -> None:
    """DataPlaneBadRequest, also a ValueError, at once, that names the culprit; nothing was changed."""
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
async def test_a_wrong_request_is_sent_once_at_most(rig: Rig, what: str) -> None:
    """No layer retries what is wrong."""
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


async def test_ids_of_any_sequence_are_taken(rig: Rig) -> None:
    """Tuples, dict keys and generators of ids are sequences of strings as well as lists are."""
    await declare(rig.client)
    await rig.client.put_samples(tuple(IDS), "p", {"x": X})
    await rig.client.put_samples((name for name in IDS), "p", {"x": X + 1})  # type: ignore[arg-type]
    got = await rig.client.get_samples({"b": 1, "a": 2}.keys(), "p", ("x",))  # type: ignore[arg-type]
    check_same(got["x"], X + 1)


async def test_a_field_named_twice_in_a_get_comes_once(rig: Rig) -> None:
    """No error, no second column."""
    await declare(rig.client)
    await rig.client.put_samples(IDS, "p", {"x": X})
    assert list((await rig.client.get_samples(IDS, "p", ["x", "x"])).keys()) == ["x"]


async def test_a_verb_that_nobody_serves_is_unsupported(rig: Rig) -> None:
    """A layer that hides a call: DataPlaneUnsupported, naming what is missing."""

    class Deaf(Layer):
        @handles(ClearSamples)
        async def clear(self, call: Any, ctx: Any) -> Any:
            return await self.unserved(call, ctx)

    client = await rig.attach(Deaf)
    with pytest.raises(DataPlaneUnsupported, match="ClearSamples") as caught:
        await client.clear_samples(["a"], "p")
    assert caught.value.capability == "ClearSamples"


# --- observers


@pytest.mark.parametrize("verb", ["ping", "put_samples", "get_samples"])
async def test_a_callback_that_raises_harms_no_call(rig: Rig, verb: str) -> None:
    """X6: what watches must not harm what is watched."""
    rig.only("memory")

    def explode(event: Any) -> None:
        raise RuntimeError(event["op"])

    config = {**rig.client.attach_config(), "observability": {"enabled": True, "callback": explode}}
    client = build_data_plane_client(config, bootstrap=False)
    await declare(client)
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    if verb == "get_samples":
        await client.get_samples(["a"], "p", ["x"])
    with pytest.raises(DataPlaneError):
        await client.get_samples(["nobody"], "p", ["x"])
    await client.ping()
    assert client.snapshot()["callback_errors"] >= 3  # type: ignore[attr-defined]
    await client.close()


async def test_a_callback_is_told_every_call(rig: Rig) -> None:
    """One event per op: what, where, how many, how it ended; only where observability is enabled."""
    events: list[Any] = []
    base = {**rig.client.attach_config(), "observability": {"enabled": True, "callback": events.append}}
    client = build_data_plane_client(base, bootstrap=False)
    await declare(client)
    await client.put_samples(IDS, "p", {"x": X})
    with pytest.raises(DataPlaneError):
        await client.get_samples(["nobody"], "p", ["x"])
    await client.close()
    assert [(e["op"], e["status"], e["n_keys"]) for e in events] == [
        ("register", "ok", 0),
        ("put", "ok", 2),
        ("get", "error", 1),
    ]
    assert events[1]["n_bytes"] == X.nbytes
    quiet = build_data_plane_client(
        {**base, "observability": {"enabled": False, "callback": events.append}}, bootstrap=False
    )
    await quiet.ping()
    await quiet.close()
    assert len(events) == 3


@pytest.mark.parametrize(
    "leaf",
    [
        torch.zeros(2, dtype=torch.bfloat16),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
        ["text", None],
        [{"a": 1}, (1, 2)],
        np.array(["u", "v"], dtype=object),
    ],
    ids=["tensor", "jagged", "text", "objects", "array"],
)
async def test_counting_bytes_harms_no_call(rig: Rig, leaf: Any) -> None:
    """X6: whatever the leaves are, the count of their bytes is a number and the call ends well."""
    await declare(rig.client)
    await rig.client.put_samples(IDS, "p", {"x": leaf})
    await rig.client.get_samples(IDS, "p", ["x"])
    assert rig.client.snapshot()["total_bytes"] > 0  # type: ignore[attr-defined]


# --- config

#: {what is wrong: (changes to a good config, the key that the error names)}
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"mistyped": 1}, "mistyped"),
    "missing key": ({"storage_capacity": ...}, "storage_capacity"),
    "missing impl": ({"impl": ...}, "impl"),
    "unknown impl": ({"impl": "carrier pigeon"}, "impl"),
    "wrong type": ({"storage_capacity": "many"}, "storage_capacity"),
    "a fraction": ({"num_storage_units": 1.5}, "num_storage_units"),
    "zero": ({"num_storage_units": 0}, "num_storage_units"),
    "below zero": ({"call_timeout_s": -1}, "call_timeout_s"),
    "disabled": ({"enabled": False}, "enabled"),
    "enabled is text": ({"enabled": "yes"}, "enabled"),
    "another impl's backend": ({"backend": "mooncake_cpu"}, "backend"),
    "unknown backend": ({"backend": "floppy"}, "backend"),
    "unknown layer": ({"layers": {"mistyped": {}}}, "layers.mistyped"),
    "unknown setting": ({"layers": {"slot_retry": {"mistyped": 1}}}, "layers.slot_retry.mistyped"),
    "setting of another type": ({"layers": {"slot_retry": {"max_attempts": "four"}}}, "layers.slot_retry.max_attempts"),
    "setting out of range": ({"layers": {"slot_retry": {"max_attempts": 0}}}, "max_attempts"),
    "a time below zero": ({"layers": {"attempt_timeout": {"attempt_timeout_s": -1}}}, "attempt_timeout_s"),
    "a time as text": ({"layers": {"attempt_timeout": {"attempt_timeout_s": "10"}}}, "attempt_timeout_s"),
    "a quarantine below zero": ({"layers": {"port_rotation": {"quarantine_s": -1}}}, "quarantine_s"),
    "layers are a list": ({"layers": ["slot_retry"]}, "layers"),
    "a layer is a number": ({"layers": {"slot_retry": 4}}, "layers"),
    "unknown key of the impl": ({"memory": {"mistyped": 1}}, "memory.mistyped"),
    "wrong type of the impl": ({"memory": {"ports_per_host": "two"}}, "memory.ports_per_host"),
    "zero of the impl": ({"memory": {"rows_per_slot": 0}}, "memory.rows_per_slot"),
    "callback is no function": ({"observability": {"enabled": True, "callback": 1}}, "observability.callback"),
    "observability is bare": ({"observability": {}}, "observability.enabled"),
    "pattern without a group": ({"group_id_pattern": "{i}"}, "group_id_pattern"),
    "pattern is a number": ({"group_id_pattern": 1}, "group_id_pattern"),
    "lease of no time": ({"claim_lease_s": 0}, "claim_lease_s"),
    "acknowledgements in no time": ({"ack_timeout_ms": 0}, "ack_timeout_ms"),
    "owner is a number": ({"owner": 1}, "owner"),
    "sizes are missing": ({"impl": "transfer_queue"}, "global_segment_size"),
}


@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_a_wrong_config_is_refused_by_key(what: str) -> None:
    """X7: ValueError that names the key, before anything is started."""
    changes, key = BAD_CONFIGS[what]
    config = {name: value for name, value in {**BASE, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        build_data_plane_client(config)


@pytest.mark.parametrize("config", [None, [], "memory", 1], ids=repr)
def test_a_config_is_a_mapping(config: Any) -> None:
    """X7: anything else is a ValueError."""
    with pytest.raises(ValueError, match="mapping"):
        build_data_plane_client(config)


def test_settings_of_stack_are_checked_too() -> None:
    """X7: a setting that no layer has, settings beside a list of layers, and a value out of range."""
    with pytest.raises(ValueError, match="mistyped"):
        stack(MemoryTransport(), mistyped=1)
    with pytest.raises(ValueError, match="max_rounds"):
        stack(MemoryTransport(), [], max_rounds=2)
    with pytest.raises(ValueError, match="max_rounds"):
        stack(MemoryTransport(), max_rounds=0)


async def test_a_good_config_gives_its_settings_to_the_layers(rig: Rig) -> None:
    """layers, ack_timeout_ms and call_timeout_s arrive where they belong."""
    config = {
        **BASE,
        "ack_timeout_ms": 2500,
        "call_timeout_s": 7,
        "layers": {"slot_retry": {"max_attempts": 2}, "batch_retry": {"max_rounds": 1}},
    }
    async with build_data_plane_client(config) as client:
        settings = {}
        layer: Any = client
        while layer is not None:
            settings.update(
                {k: v for k, v in vars(layer).items() if k in ("max_attempts", "max_rounds", "attempt_timeout_s")}
            )
            layer = getattr(layer, "inner", None)
        assert settings == {"max_attempts": 2, "max_rounds": 1, "attempt_timeout_s": 2.5}
        assert client.call_timeout_s == 7
