"""Memory of large reads: used again when nobody sees it any more, never before, and not kept for ever."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp.process.buffer_pool import BufferPool
from asyncdp.transports.transfer_queue.lifecycle import POOLED_BYTES

if TYPE_CHECKING:
    from asyncdp.client import Client
    from tests.transfer_queue.ray_cluster import RayCluster

pytestmark = pytest.mark.anyio

SIZE = POOLED_BYTES


@pytest.fixture
async def pool(anyio_backend: str) -> BufferPool:
    """Give a pool that keeps two buffers."""
    made = BufferPool(keep_bytes=2 * SIZE, least_bytes=SIZE, huge_pages=False)
    made.trim_in(asyncio.get_running_loop(), 10.0)
    return made


def allocate(pool: BufferPool, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Take memory as a read does."""
    return torch.from_numpy(pool.empty(size)).view(dtype)


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda whole: whole[5:9],
    "numpy": lambda whole: whole.view(-1, 2).numpy(),
    "storage": lambda whole: whole.untyped_storage(),
    "detached": lambda whole: whole.detach(),
    "nested": lambda whole: torch.nested.nested_tensor_from_jagged(whole, torch.tensor([0, 3, whole.numel()])),
}


@pytest.mark.parametrize("alias", ALIASES)
async def test_memory_comes_back_when_its_last_reader_is_gone(pool: BufferPool, alias: str) -> None:
    """Whatever sees it keeps it; then the next read of that size gets it."""
    whole = allocate(pool, SIZE, torch.float32)
    address = whole.data_ptr()
    kept = ALIASES[alias](whole)
    del whole
    gc.collect()
    assert pool.idle_bytes == 0
    other = allocate(pool, SIZE, torch.float32)
    assert other.data_ptr() != address
    del kept
    gc.collect()
    assert pool.idle_bytes == SIZE
    assert allocate(pool, SIZE, torch.int64).data_ptr() == address


async def test_no_more_lies_idle_than_was_allowed(pool: BufferPool) -> None:
    """What is over goes back to the system; so does everything at the end."""
    lent = [allocate(pool, SIZE, torch.uint8) for _ in range(5)]
    lent.clear()
    gc.collect()
    assert pool.idle_bytes == 2 * SIZE
    pool.clear()
    assert pool.idle_bytes == 0


async def test_a_buffer_much_too_large_is_not_lent(pool: BufferPool) -> None:
    """A small read must not hold on to the memory of a large one."""
    large = allocate(pool, 2 * SIZE + 2, torch.uint8)
    assert large.numel() == 2 * SIZE + 2
    del large
    gc.collect()
    assert allocate(pool, SIZE, torch.uint8).untyped_storage().nbytes() == SIZE


async def test_idle_memory_goes_back_in_time(pool: BufferPool) -> None:
    """By the event loop's timer, without another read."""
    pool.trim_in(asyncio.get_running_loop(), 0.01)
    lent = allocate(pool, SIZE, torch.uint8)
    del lent
    gc.collect()
    assert pool.idle_bytes == SIZE
    for _ in range(500):
        if not pool.idle_bytes:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the memory stayed")


async def test_results_of_reads_are_never_written_again(plane: Callable[..., Client], lasting: RayCluster) -> None:
    """R10: a result that is kept stays as it was through later reads; one that was let go of is used again."""
    owner = plane(lasting, transfer_queue={"split_bytes": 1})
    await owner.register_partition("p", ["x"], 4, ["train"])
    rows = torch.arange(4.0 * SIZE // 4).view(4, -1)
    ids = ["a", "b", "c", "d"]
    await owner.put_samples(ids, "p", {"x": rows})
    kept = [(await owner.get_samples(ids, "p", ["x"]))["x"] for _ in range(3)]
    part = (await owner.get_samples(ids, "p", ["x"]))["x"][1:2]
    for _ in range(3):
        (await owner.get_samples(list(reversed(ids)), "p", ["x"]))["x"].zero_()
    assert all(torch.equal(one, rows) for one in kept)
    assert torch.equal(part, rows[1:2])
