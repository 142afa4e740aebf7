"""An error about an argument names the verb as well."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from asyncdp import DataPlaneBadRequest, DataPlaneClient, MemoryTransport, stack

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.anyio

VERBS = [
    name
    for name, verb in vars(DataPlaneClient).items()
    if inspect.iscoroutinefunction(verb) and not name.startswith("_") and name != "close"
]
#: Right for each argument that a verb may have; the first argument is then made wrong.
RIGHT: Mapping[str, Any] = {
    "partition_id": "p", "fields": ["x"], "num_samples": 1, "consumer_tasks": ["t"], "task_name": "t",
    "required_fields": ["x"], "batch_size": 1, "meta": None, "task_names": ["t"], "sample_ids": ["a"],
    "select_fields": ["x"], "keys": ["a"], "owner": "o",
}  # fmt: skip


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
