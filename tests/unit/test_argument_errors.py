"""An error about an argument names the verb as well."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from asyncdp import DataPlaneBadRequest, MemoryTransport, stack
from asyncdp.protocol import VERBS as OF_THE_PROTOCOL
from asyncdp.testing.verbs import VERBS

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.anyio

#: Right for each argument that a verb may have; the first argument is then made wrong.
RIGHT: Mapping[str, Any] = {
    "partition_id": "p", "fields": ["x"], "num_samples": 1, "consumer_tasks": ["t"], "task_name": "t",
    "required_fields": ["x"], "batch_size": 1, "meta": None, "task_names": ["t"], "sample_ids": ["a"],
    "select_fields": ["x"], "keys": ["a"], "owner": "o",
}  # fmt: skip


def test_the_table_of_verbs_is_that_of_the_protocol() -> None:
    """Contract, sweep, fault plans and chaos take their verbs from a table that names each verb but the iterator."""
    assert {*VERBS, "batches"} == set(OF_THE_PROTOCOL)


@pytest.mark.parametrize("verb", VERBS)
async def test_an_argument_error_names_its_verb(verb: str) -> None:
    """Whatever is wrong before anything is sent: op is the verb that the user called, and field the argument."""
    async with stack(MemoryTransport()) as client:
        method = getattr(client, verb)
        needed = [p.name for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        wrong = dict.fromkeys(needed[:1] or ["timeout_s"], -1)
        with pytest.raises(DataPlaneBadRequest) as caught:
            await method(**{name: RIGHT[name] for name in needed} | wrong)
    assert caught.value.op == verb
    assert caught.value.field == next(iter(wrong))


async def test_the_warning_of_an_empty_clear_points_at_the_callers_line() -> None:
    """clear_samples(None, p) that finds nothing warns where it was called."""
    async with stack(MemoryTransport()) as client:
        await client.register_partition("p", ["x"], 1, ["t"])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            await client.clear_samples(None, "p")
    assert [warning.filename for warning in seen if warning.category is RuntimeWarning] == [__file__]
