"""asyncdp.nemo_rl: NeMo-RL's factory, blocking client and observability wrapper."""

from __future__ import annotations

import pickle
import sys
from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncdp import DataPlaneBadRequest
from asyncdp import KVBatchMeta as Ours
from asyncdp.blocking import build_blocking_client
from asyncdp.nemo_rl import DataPlaneClient, KVBatchMeta, MetricsDataPlaneClient, build_data_plane_client

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

CONFIG = {
    "enabled": True,
    "impl": "memory",
    "backend": "simple",
    "storage_capacity": 1000,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 0.5,
    "global_segment_size": 1 << 39,
    "local_buffer_size": 1 << 36,
    "controller_address": None,
    "observability": {"enabled": False},
}


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    """Yield the client of a driver."""
    made = build_data_plane_client(CONFIG)
    yield made
    made.close()


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for NeMo-RL's module with the interface."""

    @dataclass
    class Meta:
        partition_id: str
        task_name: str | None
        sample_ids: list[str]
        fields: list[str] | None = None
        sequence_lengths: list[int] | None = None
        extra_info: dict[str, Any] = field(default_factory=dict)
        tags: list[dict[str, Any]] | None = None

    class Interface(ABC):  # noqa: B024 - only to be registered with
        pass

    module: Any = ModuleType("nemo_rl.data_plane.interfaces")
    module.KVBatchMeta, module.DataPlaneClient = Meta, Interface
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def rows(n: int) -> TensorDict:
    """Make fields of n rows."""
    return TensorDict({"x": torch.arange(n), "r": torch.ones(n, 2)}, batch_size=[n])


def test_a_step_of_a_synchronous_trainer(client: DataPlaneClient) -> None:
    """Register, put, claim, read, write back, clear, in NeMo-RL's order of arguments; a worker has the same config."""
    client.register_partition("train", ["x", "r", "lp"], 4, ["lp", "train"], 2)
    meta = client.put_samples(["a_g0", "a_g1"], "train", rows(2), [{"input_lengths": 1}, {"input_lengths": 2}])
    assert client.list_sample_ids("train") == ["a_g0", "a_g1"]
    worker = build_data_plane_client(CONFIG, bootstrap=False)
    claimed = worker.claim_meta("train", "lp", ["x"], 8, None, True, 5.0)  # noqa: FBT003 - as NeMo-RL calls it
    assert claimed.sequence_lengths == [1, 2]
    worker.put_samples(claimed.sample_ids, "train", fields=TensorDict({"lp": torch.zeros(2)}, batch_size=[2]))
    assert worker.get_data(meta.with_fields(["lp"])).batch_size == (2,)
    assert client.check_consumption_status("train", ["lp"])
    assert pickle.loads(pickle.dumps(worker)).list_sample_ids("train") == ["a_g0", "a_g1"]
    client.clear_samples(meta.sample_ids, "train")
    assert client.list_sample_ids("train") == client.list_sample_ids("nobody's") == []
    worker.close()


def test_ids_alone_may_be_put(client: DataPlaneClient) -> None:
    """NeMo-RL's client takes a put without fields and tags: the samples exist then."""
    client.put_samples(["b", "a"], "p")
    assert client.list_sample_ids("p") == ["a", "b"]


@pytest.mark.parametrize(
    ("more", "option"), [({}, True), ({"nemo": True}, False), ({"nemo": {"rectangles": False}}, True)], ids=str
)
def test_the_option_of_a_blocking_client_is_that_of_its_config(more: dict[str, Any], option: bool) -> None:  # noqa: FBT001
    """Either sets both; settings of the config stay as they are."""
    ragged = torch.nested.as_nested_tensor([torch.ones(2)] * 2, layout=torch.jagged)
    with build_blocking_client({**CONFIG, **more}, nemo=option) as client:
        again = pickle.loads(pickle.dumps(client))
        for one in (client, again):
            one.register_partition("p", ["x"], 1, ["t"], 2)
            one.put_samples(["a", "b"], "p", {"x": ragged})
            assert one.get_samples(["a", "b"], "p", ["x"])["x"].is_nested is (more.get("nemo") == {"rectangles": False})
            assert one.claim_meta("p", "t", ["x"], 64).size == 2
            assert one.list_sample_ids("p") == ["a", "b"]
            one.clear_samples(None, "p")
        again.close()


@pytest.mark.parametrize("config", [None, {}, {"enabled": False, "impl": "memory"}])
def test_a_disabled_plane_is_refused(config: Any) -> None:
    """By a ValueError that says so, as for no config at all."""
    with pytest.raises(ValueError, match=r"disabled.*legacy"):
        build_data_plane_client(config)


def test_an_unknown_impl_is_refused() -> None:
    """As NeMo-RL's factory says it."""
    with pytest.raises(ValueError, match="unknown data_plane impl: 'noop'"):
        build_data_plane_client({**CONFIG, "impl": "noop"})


def test_metas_and_clients_are_nemo_rls_too(theirs: Any, client: DataPlaneClient) -> None:
    """Where NeMo-RL is imported; they keep what asyncdp's have, also as parts and as pickles."""
    meta = client.put_samples(["a", "b"], "p", rows(2))
    part = pickle.loads(pickle.dumps(meta)).subset([1]).with_fields(["y"])
    for one in (meta, part, meta.concat(part)):
        assert isinstance(one, theirs.KVBatchMeta)
        assert isinstance(one, Ours)
        assert one.handles is not None
    assert part.sample_ids == ["b"]
    assert isinstance(client, theirs.DataPlaneClient)
    plain = theirs.KVBatchMeta("p", None, ["b", "a"], ["x"])
    assert client.get_data(plain)["x"].tolist() == [1, 0]
    client.clear_samples(["a", "b"], "p")
    with pytest.raises(DataPlaneBadRequest, match="partition_ids must match"):
        meta.concat(theirs.KVBatchMeta("other", None, []))


def test_metas_are_joined_as_nemo_rls() -> None:
    """With tags only if all have some, and with the first one's fields and extra_info."""
    one = KVBatchMeta("p", "t", ["a"], ["x", "y"], extra_info={"k": 1}, tags=[{"n": 1}])
    two = KVBatchMeta("p", "u", ["b"], ["x"], extra_info={"k": 2, "j": 3}, tags=[{"n": 2}])
    whole = one.concat(two)
    assert (whole.task_name, whole.fields, whole.extra_info) == ("t", ["x", "y"], {"k": 1})
    assert whole.tags == [{"n": 1}, {"n": 2}]
    assert one.concat(two, KVBatchMeta("p", "t", ["c"])).tags is None
    with pytest.raises(ValueError, match="align 1:1"):
        KVBatchMeta("p", "t", ["a", "b"], tags=[{}])


def test_observability_tells_what_nemo_rls_wrapper_tells() -> None:
    """One event per call, bytes and keys that are live, errors and timeouts apart."""
    events: list[dict[str, Any]] = []
    config = {**CONFIG, "observability": {"enabled": True, "callback": events.append}}
    client = build_data_plane_client(config)
    assert isinstance(client, MetricsDataPlaneClient)
    client.register_partition("p", ["x", "r"], 3, ["t"])
    client.put_samples(["a", "b", "c"], "p", rows(3))
    assert client.bytes_outstanding_by_partition() == {"p": 48}
    client.get_data(client.claim_meta("p", "t", ["x"], 2))
    client.get_samples(["a"], "p", ["x"])
    with pytest.raises(TimeoutError):
        client.claim_meta("p", "t", ["x"], 2, timeout_s=0) and client.claim_meta("p", "t", ["x"], 2, timeout_s=0)
    with pytest.raises(KeyError):
        client.get_samples(["nobody"], "p", ["x"])
    client.clear_samples(["a"], "p")
    found = client.snapshot()
    assert (found["n_keys_outstanding"], found["bytes_outstanding"], found["peak_bytes_outstanding"]) == (2, 32, 48)
    assert (found["last_put_bytes_per_key"], found["max_bytes_per_key_seen"]) == (16, 16)
    client.clear_samples(None, "p")
    assert client.snapshot()["bytes_outstanding"] == 0
    client.close()
    told = [(e["op"], e["n_keys"], e["n_bytes"], e["status"]) for e in events]
    assert told == [
        ("register", 3, 0, "ok"),
        ("put", 3, 48, "ok"),
        ("claim_meta", 2, 0, "ok"),
        ("get_data", 2, 16, "ok"),
        ("get", 1, 8, "ok"),
        ("claim_meta", 1, 0, "ok"),
        ("claim_meta", 0, 0, "timeout"),
        ("get", 1, 0, "error"),
        ("clear", 1, 0, "ok"),
        ("clear", 0, 0, "ok"),
        ("close", 0, 0, "ok"),
    ]
    assert events[0].keys() == {"op", "partition_id", "n_keys", "n_bytes", "wall_ms", "status"}
