"""What one get and one put compute once: sizes, and the comparison of payloads with what was announced."""

from collections import Counter
from typing import Any

import pytest
import torch

from asyncdp import Metrics
from asyncdp.calls import answers
from asyncdp.middleware import counters, metrics
from asyncdp.middleware.policy import live_bytes
from asyncdp.rows.column import Dense, Ragged
from tests.layers.rig import Rig, rows, virtual


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls by what is computed."""
    seen: Counter[str] = Counter()

    def counted(name: str, what: Any) -> Any:
        def work(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return what(*args, **kwargs)

        return work

    for column in (Dense, Ragged):
        monkeypatch.setattr(column, "row_nbytes", counted("sizes of rows", column.row_nbytes))
    monkeypatch.setattr(answers, "_check_part", counted("parts verified", answers._check_part))
    leaf_nbytes = counted("sizes of leaves", live_bytes.leaf_nbytes)
    for module in (live_bytes, metrics):
        monkeypatch.setattr(module, "leaf_nbytes", leaf_nbytes)
    assert counters.sizes_of is live_bytes.sizes_of
    return seen


@virtual
async def test_a_put_computes_the_sizes_of_its_rows_once(counts: Counter[str]) -> None:
    """Once a field, for slots and directory together; Metrics takes the size of each leaf of the user once."""
    async with Rig() as rig:
        x = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(5)], layout=torch.jagged)
        await rig.client.put_samples(["a", "b"], "p", {"x": rows(2), "y": x})
        assert counts == {"sizes of rows": 2, "sizes of leaves": 2}
        group = next(g for g in await rig.client.list_metadata("p") if "a" in g.keys)
        assert group.size_bytes == 16
        assert rig.layer(Metrics).snapshot()["bytes_outstanding"] == 44


@virtual
async def test_a_get_verifies_each_payload_once(counts: Counter[str]) -> None:
    """By TypedErrors; what composes the read takes its word for it."""
    async with Rig(rows_per_slot=None) as rig:
        await rig.fill(3)
        counts.clear()
        await rig.get(["s0", "s1", "s2"])
        assert counts == {"parts verified": 1, "sizes of leaves": 1}
