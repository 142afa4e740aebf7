"""Observers of a client, such as metrics, must not affect its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ..rig import declare

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Observers"]

X = torch.zeros(2)


IDS = ["a", "b"]


class Observers(Contract):
    """Observers of a client, such as metrics, must not affect its calls."""

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
    async def test_counting_bytes_harms_no_call(self, rig: Rig, leaf: Any) -> None:
        """X6: for leaves of any kind, the count of their bytes is a number and the call succeeds."""
        await declare(rig.client)
        await rig.client.put_samples(IDS, "p", {"x": leaf})
        await rig.client.get_samples(IDS, "p", ["x"])
        assert rig.client.snapshot()["total_bytes"] > 0
