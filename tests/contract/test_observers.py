"""Who watches a client must not harm it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncdp import (
    DataPlaneError,
    build_data_plane_client,
)
from tests.contract.rig import declare

if TYPE_CHECKING:
    from tests.contract.rig import Rig

pytestmark = pytest.mark.anyio


X = torch.zeros(2)


IDS = ["a", "b"]


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
