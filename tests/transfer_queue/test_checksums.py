"""The option ``checksum``: a flipped bit is CorruptPayload, for every reader, and costs only its own row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import CorruptPayload, DataPlaneError, PartialReadError, stack
from asyncdp.testing.contract import Objects, Rows, Stale
from asyncdp.transports.transfer_queue import TQTransport
from tests.transfer_queue.opener import without_ray

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdp.client import Client
    from asyncdp.testing.contract import Opener
    from tests.transfer_queue.ray_cluster import RayCluster

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SUMMED = {"transfer_queue": {"checksum": True}}
IDS = [f"k{at}" for at in range(6)]


class TestContractWithChecksums(Rows, Objects, Stale):
    """What moves rows holds with checksums as well."""

    loops = ("asyncio",)

    @pytest.fixture
    def open_plane(self) -> Opener:
        """Open planes whose clients write checksums."""
        return without_ray(**SUMMED["transfer_queue"])


def _bit_flipped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flipped = value.clone()
        flipped.view(-1).view(torch.uint8)[3] ^= 4
        return flipped
    return bytes([value[0] ^ 4]) + bytes(value[1:])


async def flip(client: Client, field: str, sample_id: str) -> None:
    """Flip a bit of one value where it lies in its storage unit."""
    transport: Any = TQTransport(client.attach_config(), bootstrap=False)
    deadline = anyio.current_time() + 60
    link = await transport._connection.link(deadline)
    groups, *_ = await link.ask("locate", ("p", [sample_id], (field,), None), deadline)
    unit, _, _, keys, _ = groups[0]
    values = await link.client.get(unit, keys, [field])
    await link.client.put(unit, keys, {field: [_bit_flipped(values[field][0])]})
    await transport.close()


@pytest.mark.parametrize("width", [8, 40_000])
@pytest.mark.parametrize("reader", ["who wrote", "somebody else"])
async def test_a_flipped_bit_costs_its_own_row(
    plane: Callable[..., Client], lasting: RayCluster, width: int, reader: str
) -> None:
    """PartialReadError names it, small values and large; other fields of it, and other rows, are read."""
    owner = plane(lasting, **SUMMED)
    await owner.register_partition("p", ["x", "y"], 6, ["train"])
    x = torch.arange(6.0 * width).view(6, width)
    await owner.put_samples(IDS, "p", {"x": x, "y": torch.arange(6)})
    plain = {**owner.attach_config()}
    plain["transfer_queue"] = {**plain["transfer_queue"], "checksum": False}
    mate = stack(TQTransport(plain, bootstrap=False))
    client = owner if reader == "who wrote" else mate
    assert torch.equal((await client.get_samples(IDS, "p", ["x"]))["x"], x)
    await flip(owner, "x", "k2")
    with pytest.raises(PartialReadError) as caught:
        await client.get_samples(IDS, "p", ["x", "y"])
    assert caught.value.failed.sample_ids == ["k2"]
    assert isinstance(caught.value.errors[2], CorruptPayload)
    assert caught.value.errors[2].host
    assert torch.equal(caught.value.rows["x"], x[[0, 1, 3, 4, 5]])
    assert (await client.get_samples(IDS, "p", ["y"]))["y"].tolist() == list(range(6))
    await mate.close()


async def test_objects_and_ragged_rows_have_checksums_as_well(
    plane: Callable[..., Client], lasting: RayCluster
) -> None:
    """Before anything is unpickled."""
    owner = plane(lasting, **SUMMED)
    await owner.register_partition("p", ["words", "ragged"], 2, ["train"])
    ragged = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    await owner.put_samples(["a", "b"], "p", {"words": [{"a": 1}, None], "ragged": ragged})
    for field in ("words", "ragged"):
        await flip(owner, field, "a")
        with pytest.raises(DataPlaneError) as caught:
            await owner.get_samples(["a"], "p", [field])
        assert isinstance(caught.value, CorruptPayload)
        assert caught.value.field == field  # type: ignore[attr-defined]


async def test_rows_with_and_without_checksums_are_read_together(
    plane: Callable[..., Client], lasting: RayCluster
) -> None:
    """Each writer decides for its own puts; what has a checksum is checked, whoever reads."""
    owner = plane(lasting, **SUMMED)
    await owner.register_partition("p", ["x"], 2, ["train"])
    plain = {**owner.attach_config()}
    plain["transfer_queue"] = {**plain["transfer_queue"], "checksum": False}
    mate = stack(TQTransport(plain, bootstrap=False))
    await owner.put_samples(["a"], "p", {"x": torch.ones(1, 3)})
    await mate.put_samples(["b"], "p", {"x": torch.zeros(1, 3)})
    assert (await mate.get_samples(["b", "a"], "p", ["x"]))["x"].tolist() == [[0.0] * 3, [1.0] * 3]
    await flip(owner, "x", "a")
    with pytest.raises(PartialReadError) as caught:
        await mate.get_samples(["b", "a"], "p", ["x"])
    assert caught.value.failed.sample_ids == ["a"]
    await mate.close()
