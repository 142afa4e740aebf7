"""Errors travel between processes (Ray ships them) and stay what they are."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asyncdp import DataPlaneError, PartialReadError
from asyncdp.testing.contract.base import Contract
from asyncdp.testing.contract.rig import Rig, declare, table
from asyncdp.testing.contract.same import check_same

__all__ = ["Errors"]


class Errors(Contract):
    """Errors travel between processes (Ray ships them) and stay what they are."""

    async def test_errors_of_a_real_client_survive(self, rig: Rig) -> None:
        """What calls raise, with all that the layers wrote on it."""
        await declare(rig.client, "x", "y")
        float8 = torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fn)
        data = table(x=torch.arange(2, dtype=torch.bfloat16), y=float8)
        await rig.client.put_samples(["a", "b"], "p", data)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: rig.client.get_samples(["nobody"], "p", ["x"]),
            lambda: rig.client.get_samples(["a", "nobody", "b"], "p", ["y", "x"]),
            lambda: rig.client.claim_meta("p", "train", ["x"], 9, timeout_s=0.2),
            lambda: rig.client.depth("mistyped"),
            lambda: rig.client.put_samples(["c"], "p", {"x": torch.zeros(1)}),
        ]
        for call in calls:
            with pytest.raises(DataPlaneError) as caught:
                await call()
            err = caught.value
            twin = pickle.loads(pickle.dumps(err))
            assert type(twin) is type(err)
            assert str(twin) == str(err)
            if isinstance(twin, PartialReadError):
                check_same(twin.rows["x"], data["x"])
                check_same(twin.rows["y"], data["y"])
                check_same((await rig.client.get_data(twin.ok))["x"], data["x"])
            else:
                assert {n: v for n, v in vars(twin).items() if n[0] != "_"} == {
                    n: v for n, v in vars(err).items() if n[0] != "_"
                }
