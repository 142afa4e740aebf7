"""Every error comes through Ray as itself: a controller in another process routes on class and attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncdp import errors
from asyncdp.errors import DataPlaneError, PartialReadError, SampleNotFound
from asyncdp.meta import KVBatchMeta
from asyncdp.rows.block import Block
from tests.transfer_queue.opener import CLUSTER

ray = pytest.importorskip("ray", reason="needs the extra tq: pip install 'asyncdp[tq]'")

pytestmark = pytest.mark.slow  # Ray starts a process for it; unit/test_errors_pickle.py has the same without Ray

KINDS = sorted(
    (getattr(errors, name) for name in errors.__all__ if name != "PartialReadError"), key=lambda kind: kind.__name__
)


@pytest.fixture(autouse=True)
def cluster() -> Any:
    """Join the session's Ray."""
    return CLUSTER()


def _partial() -> PartialReadError:
    columns = {"b": torch.ones(1, 2, dtype=torch.bfloat16), "f": torch.ones(1, 2).to(torch.float8_e4m3fn)}
    return PartialReadError(
        "1 of 2 rows did not come",
        rows=Block.from_fields(columns, 1),
        ok=KVBatchMeta("p", sample_ids=["a"]),
        failed=KVBatchMeta("p", sample_ids=["b"]),
        errors={1: SampleNotFound("no sample 'b'", sample_ids=("b",))},
        op="get_samples",
    )


def _through(err: DataPlaneError) -> BaseException:
    """Raise an error in a Ray task and return what ``ray.get`` raises here."""

    def fail() -> None:
        raise err

    task = ray.remote(num_cpus=0)(fail)
    try:
        ray.get(task.remote(), timeout=120)
    except Exception as raised:  # noqa: BLE001 - whatever comes is the finding
        return raised
    pytest.fail("nothing was raised")


def test_each_class_of_error_is_caught_as_itself() -> None:
    """What a task raises is caught by its own class, with flags, place and text; as a value it stays equal."""
    for kind in KINDS:
        sent = kind("it broke", op="get_samples", partition_id="p", host="h", port=3, retryable=True, ambiguous=True)
        raised = _through(sent)
        assert isinstance(raised, kind), kind
        for name in ("op", "partition_id", "host", "port", "retryable", "ambiguous", "blames_port", "message"):
            assert getattr(raised, name) == getattr(sent, name), (kind, name)
        back = ray.get(ray.put(sent))
        assert (type(back), str(back), back.__dict__) == (kind, str(sent), sent.__dict__)


def test_the_rows_of_a_partial_read_come_along() -> None:
    """PartialReadError keeps its bf16 and fp8 rows, and the error of each missing row."""
    sent = _partial()
    raised: Any = _through(sent)
    assert isinstance(raised, PartialReadError)
    assert raised.ok.sample_ids == ["a"]
    assert isinstance(raised.errors[1], SampleNotFound)
    for name, dtype in (("b", torch.bfloat16), ("f", torch.float8_e4m3fn)):
        assert raised.rows[name].dtype == dtype
        assert raised.rows[name].view(torch.uint8).equal(sent.rows[name].view(torch.uint8))
