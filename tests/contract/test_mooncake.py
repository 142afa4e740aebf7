"""The contract on TransferQueue over Mooncake: a real master and real segments, as long as the module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import DataPlaneReadError, PartialReadError, StaleSlotError
from asyncdp.testing.contract import Contract, Rows
from asyncdp.testing.contract.rig import declare, table
from tests.contract.by_config import ByConfig
from tests.contract.nemo import NemoMode
from tests.contract.on_servers import SLICE, Slow, others
from tests.transfer_queue.needs_mooncake import needs_mooncake

if TYPE_CHECKING:
    from asyncdp.testing.contract import Opener, Rig

needs_mooncake()

from asyncdp.transports.transfer_queue.mooncake.store import Store  # noqa: E402 - only where the extra is there
from tests.transfer_queue.opener import MOONCAKE, on_mooncake  # noqa: E402 - only where the extra is there

IDS = [f"s{at}" for at in range(32)]


@pytest.fixture(scope="module", autouse=True)
def servers_end() -> Iterator[None]:
    """End the servers that the module started."""
    yield
    MOONCAKE.close()


class OnMooncake:
    """The contract with rows in Mooncake, as far as its capabilities say."""

    loops = ("asyncio",)

    @pytest.fixture
    def open_plane(self) -> Opener:
        """Open planes on the servers."""
        return on_mooncake()


class Objects(Contract):
    """What a row becomes as an object of Mooncake, and what is told where Mooncake has lost it."""

    async def test_fields_come_back_in_their_shape(self, rig: Rig) -> None:
        """One dimension stays one, (N, 1) stays that, uniform rows are dense, and rows of no length are there."""
        fields: dict[str, Any] = {
            "flat": torch.arange(2.0),
            "column": torch.arange(2)[:, None],
            "uniform": torch.arange(12, dtype=torch.bfloat16).view(2, 3, 2),
            "none": torch.empty(2, 0, 3),
            "ragged": torch.nested.as_nested_tensor([torch.arange(n) for n in (2, 0)], layout=torch.jagged),
            "text": ["", "two"],
        }
        await declare(rig.client, *fields)
        await rig.client.put_samples(["a", "b"], "p", table(2, **fields))
        back = await rig.mate.get_samples(["a", "b"], "p", list(fields))
        assert set(back.keys()) == set(fields)
        for name in ("flat", "column", "uniform", "none"):
            assert not back[name].is_nested
            assert back[name].dtype == fields[name].dtype
            assert torch.equal(back[name], fields[name]), name
        assert [row.tolist() for row in back["ragged"].unbind()] == [[0, 1], []]
        assert list(back["text"]) == ["", "two"]

    @pytest.mark.parametrize("lost", [{0, 9, 31}, {3}, set(range(32))], ids=["some", "one", "all"])
    async def test_a_lost_object_is_named_by_row(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, lost: set[int]
    ) -> None:
        """What Mooncake does not hold any more is an error of that row alone; no read is short."""
        keys: list[int] = []
        put = Store.put

        def told(self: Store, unit: Any, some: Any, values: Any) -> None:
            put(self, unit, some, values)
            keys.extend(some)

        monkeypatch.setattr(Store, "put", told)
        client = await rig.open(transfer_queue={"split_bytes": 1})  # half of the rows on each unit
        await declare(client)
        await client.put_samples(IDS, "p", {"x": torch.arange(32.0)})
        MOONCAKE().store.clear(MOONCAKE().endpoints.units[0], [keys[at] for at in lost])
        with pytest.raises(DataPlaneReadError) as caught:
            await client.get_samples(IDS, "p", ["x"])
        if len(lost) == 32:
            assert isinstance(caught.value, StaleSlotError)
            return
        partial = caught.value
        assert isinstance(partial, PartialReadError)
        assert len(partial.failed.sample_ids) == len(lost)
        assert sorted(partial.ok.sample_ids + partial.failed.sample_ids) == sorted(IDS)
        assert partial.rows["x"].tolist() == [int(one[1:]) for one in partial.ok.sample_ids]


class TestMooncake(OnMooncake, Rows, Objects):
    """What a row may be, which depends on the storage."""


class TestMooncakeInFull(OnMooncake, Slow, ByConfig, NemoMode, *(theme for theme in SLICE if theme is not Rows)):
    """The themes that other servers show in make test."""


class TestMooncakeRest(OnMooncake, Slow, *others(*SLICE)):
    """What is left of the contract."""
