"""X8: errors travel between processes (Ray ships them) and stay what they are."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import asyncdp.errors
from asyncdp import (
    ClaimNotReady,
    CorruptPayload,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnsupported,
    KVBatchMeta,
    PartialReadError,
    SampleNotFound,
    StaleSlotError,
)
from asyncdp.rows.block import Block
from asyncdp.testing.contract.same import check_same, jagged, rows_of

CLASSES = [getattr(asyncdp.errors, name) for name in asyncdp.errors.__all__]
PLAIN = [kind for kind in CLASSES if kind is not PartialReadError]
CONTEXT: dict[str, Any] = {
    "op": "get_samples",
    "partition_id": "p",
    "host": "node-1",
    "port": 7,
    "sample_ids": ("a", "b"),
    "field": "x",
    "attempts": 3,
    "elapsed_s": 1.25,
    "ambiguous": True,
}
EXTRA: dict[type[DataPlaneError], dict[str, Any]] = {
    DataPlaneNotReady: {"retry_after_s": 0.5},
    ClaimNotReady: {
        "required_fields": ("x",),
        "ready": 1,
        "requested": 4,
        "oldest_wait_s": 2.0,
        "waiting_ids": ("a",),
        "missing_fields": {"x": 2},
        "retry_after_s": 1.0,
    },
    DataPlaneUnsupported: {"capability": "claim_release"},
}


def attributes(err: DataPlaneError) -> dict[str, Any]:
    """Return all that an error knows."""
    return {name: value for name, value in vars(err).items() if not name.startswith("_")}


def check_twin(twin: Any, err: DataPlaneError) -> None:
    """Fail unless ``twin`` is the same error."""
    assert type(twin) is type(err)
    assert str(twin) == str(err)
    assert twin.args == err.args
    assert attributes(twin) == attributes(err)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", PLAIN, ids=lambda k: k.__name__)
def test_an_error_survives_pickling(kind: type[DataPlaneError], protocol: int) -> None:
    """Same class, str, args and attributes, the flags that were set on it included; also by copy."""
    err = kind("it broke", **CONTEXT, **EXTRA.get(kind, {}))
    err.retryable = not err.retryable
    twin = pickle.loads(pickle.dumps(err, protocol))
    check_twin(twin, err)
    check_twin(pickle.loads(pickle.dumps(twin)), err)
    check_twin(copy.copy(err), err)
    check_twin(copy.deepcopy(err), err)
    for name, value in EXTRA.get(kind, {}).items():
        assert getattr(twin, name) == value


@pytest.mark.parametrize("kind", PLAIN, ids=lambda k: k.__name__)
def test_an_error_without_context_survives_too(kind: type[DataPlaneError]) -> None:
    """No argument at all is fine, and says nothing it does not know."""
    err = kind()
    check_twin(pickle.loads(pickle.dumps(err)), err)
    assert str(kind("text")) == "text"


def test_an_error_is_caught_as_what_python_calls_it() -> None:
    """KeyError, ValueError, TimeoutError; and its text is no KeyError's repr."""
    assert str(SampleNotFound("no 'a'")) == "no 'a'"
    assert isinstance(SampleNotFound(), KeyError)
    assert isinstance(DataPlaneTimeout(), TimeoutError)
    assert isinstance(ClaimNotReady(), TimeoutError)
    assert isinstance(DataPlaneUnsupported(), ValueError)
    assert all(issubclass(kind, DataPlaneError) for kind in CLASSES)


def test_flags_begin_as_the_tree_says() -> None:
    """(retryable, blames_port) of each class; instance attributes, so that a mixed-in class cannot hide them."""
    names = {(kind.__name__): (err.retryable, err.blames_port) for kind in PLAIN for err in [kind()]}
    assert {name for name, (retry, _) in names.items() if retry} == {
        *("DataPlaneUnavailable", "DataPlaneTimeout", "CorruptPayload", "DataPlaneNotReady"),
    }
    assert {name for name, (_, blame) in names.items() if blame} == {
        *("DataPlaneUnavailable", "DataPlaneTimeout", "CorruptPayload"),
    }
    for kind in PLAIN:
        assert {"retryable", "blames_port", "ambiguous", "message", "attempts"} <= vars(kind()).keys()


def test_the_cause_survives_as_text() -> None:
    """__cause__ does not pickle; its text does, whether it was given or set by raise from."""
    given = CorruptPayload("bad", cause=OSError("disk"))
    assert isinstance(given.__cause__, OSError)
    assert pickle.loads(pickle.dumps(given)).cause_text == "OSError: disk"

    def fail() -> None:
        raise StaleSlotError("gone") from OSError("disk")

    with pytest.raises(StaleSlotError) as caught:
        fail()
    assert pickle.loads(pickle.dumps(caught.value)).cause_text == "OSError: disk"


def test_an_error_of_a_mixed_class_keeps_its_attributes() -> None:
    """Ray raises a class that derives from its own error and ours and forwards what is missing to the original."""

    class RayTaskError(Exception):
        pass

    cause = SampleNotFound("no 'a'", **CONTEXT)

    class Both(RayTaskError, type(cause)):  # type: ignore[misc]
        def __init__(self, original: Exception) -> None:
            self.cause = original

        def __getattr__(self, name: str) -> Any:
            return getattr(self.cause, name)

    both = Both(cause)
    assert isinstance(both, SampleNotFound)
    assert (both.retryable, both.sample_ids, both.op, both.attempts) == (False, ("a", "b"), "get_samples", 3)


def partial(rows: Any) -> PartialReadError:
    """Make an error of three rows of which the middle one is missing."""
    meta = KVBatchMeta("p", sample_ids=["a", "b", "c"], fields=["x"])
    missing = SampleNotFound("no 'b'", sample_ids=("b",))
    return PartialReadError(
        "1 of 3", rows=rows, ok=meta.subset([0, 2]), failed=meta.subset([1]), errors={1: missing}, **CONTEXT
    )


LEAVES: dict[str, Any] = {
    "bfloat16": torch.arange(4, dtype=torch.bfloat16).view(2, 2),
    "float8": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 2),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "jagged": jagged(torch.rand(2), torch.rand(0)),
    "objects": [None, {"k": (1, 2)}],
}


@pytest.mark.parametrize("as_block", [True, False], ids=["block", "TensorDict"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_partial_read_keeps_its_rows(name: str, *, as_block: bool) -> None:
    """Rows of any dtype, metas and errors are the same afterwards, in columnar form and as TensorDict."""
    block = Block.from_fields({"x": LEAVES[name]}, 2)
    err = partial(block if as_block else block.to_tensordict())
    twin = pickle.loads(pickle.dumps(err))
    assert str(twin) == str(err)
    assert (twin.ok, twin.failed) == (err.ok, err.failed)
    assert list(twin.errors) == [1]
    check_twin(twin.errors[1], err.errors[1])
    check_same(twin.rows.get("x"), LEAVES[name])
    again = pickle.loads(pickle.dumps(twin))  # after its rows were looked at
    assert rows_of(again.rows.get("x"))[0] is not twin
    check_same(again.rows.get("x"), LEAVES[name])
    assert again.rows.batch_size == torch.Size([2])
