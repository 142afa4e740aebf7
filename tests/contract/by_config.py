"""What holds for the transports that a config names: build_data_plane_client() makes their clients."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import DataPlaneError, build_data_plane_client
from asyncdp.testing.contract import Contract
from asyncdp.testing.contract.rig import declare

if TYPE_CHECKING:
    from asyncdp.testing.contract import Rig

__all__ = ["ByConfig"]


class ByConfig(Contract):
    """Clients that build_data_plane_client() makes, attached to the plane under test."""

    async def test_a_client_attaches_by_config(self, rig: Rig) -> None:
        """X4: built from attach_config() with bootstrap=False it reaches the plane; closing it leaves the plane up."""
        await declare(rig.client)
        worker = build_data_plane_client(rig.client.attach_config(), bootstrap=False)
        await worker.put_samples(["a"], "p", {"x": torch.zeros(1)})
        again = pickle.loads(pickle.dumps(worker))
        assert (await again.describe("p")).size == 1
        await worker.close()
        await again.close()
        await rig.client.ping()

    async def test_a_callback_is_told_every_call(self, rig: Rig) -> None:
        """One event per op: what, where, how many, how it ended; only where observability is enabled."""
        events: list[Any] = []
        base = {**rig.client.attach_config(), "observability": {"enabled": True, "callback": events.append}}
        client = build_data_plane_client(base, bootstrap=False)
        await declare(client)
        await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})
        with pytest.raises(DataPlaneError):
            await client.get_samples(["nobody"], "p", ["x"])
        await client.close()
        assert [(e["op"], e["status"], e["n_keys"]) for e in events] == [
            ("register", "ok", 0),
            ("put", "ok", 2),
            ("get", "error", 1),
        ]
        assert events[1]["n_bytes"] == torch.zeros(2).nbytes
        quiet = build_data_plane_client(
            {**base, "observability": {"enabled": False, "callback": events.append}}, bootstrap=False
        )
        await quiet.ping()
        await quiet.close()
        assert len(events) == 3

    @pytest.mark.parametrize("verb", ["ping", "put_samples", "get_samples"])
    async def test_a_callback_that_raises_harms_no_call(self, rig: Rig, verb: str) -> None:
        """X6: what watches must not harm what is watched."""

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
        assert client.snapshot()["callback_errors"] >= 3
        await client.close()
