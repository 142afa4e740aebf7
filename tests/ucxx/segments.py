"""Arenas for tests: named apart, and gone afterwards."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asyncdp.rows.block import Block
from asyncdp.transports.ucxx.payload.blocks import block_of, layout_of, pack
from asyncdp.transports.ucxx.slots.arena import Arena

if TYPE_CHECKING:
    import numpy as np

    from asyncdp.transports.ucxx.slots.slot import Grant
    from asyncdp.transports.ucxx.slots.table import SlotTable

MIB = 1 << 20


def fresh_name() -> str:
    """A segment name that no other test has."""
    return f"asyncdp-test-{os.getpid()}-{uuid.uuid4().hex[:16]}"


def leftovers() -> set[str]:
    """Segments of this process's tests that are there: others may run tests at the same time."""
    return {path.name for path in Path("/dev/shm").glob(f"asyncdp-test-{os.getpid()}-*")}


@contextmanager
def arena(data_bytes: int = MIB, **options: Any) -> Iterator[Arena]:
    """A fresh arena of a host named ``h`` in epoch 7."""
    made = Arena.create(fresh_name(), "h", epoch=7, data_bytes=data_bytes, **options)
    try:
        yield made
    finally:
        if not made.given_up:
            made.unlink()


def rows(n: int, width: int = 8, fill: float = 1.0) -> Block:
    """A block of one field ``a``: n rows of ``width`` floats, all ``fill``."""
    return Block.from_fields({"a": torch.full((n, width), fill)}, n)


def write(table: SlotTable, grant: Grant, block: Block) -> None:
    """Copy a block into a reserved slot."""
    layout = layout_of(block)
    assert layout.nbytes <= grant.capacity
    for _ in pack(block, layout, table.arena.slice(grant.at, layout.nbytes)):
        pass


def put(table: SlotTable, op_id: str, block: Block, **options: Any) -> list[Grant]:
    """Reserve, write and seal, as a host does for a remote writer."""
    grants = table.reserve(op_id, tuple(block.columns), block.row_nbytes().tolist(), 0, 100.0, **options)
    for grant in grants:
        part = block.take(range(grant.first_row, grant.first_row + grant.rows))
        write(table, grant, part)
        slot = table.find(grant.slot, grant.generation)
        assert slot is not None
        assert table.seal(slot)
    return grants


def values(payload: Any) -> np.ndarray[Any, Any]:
    """Field ``a`` of a payload."""
    out: np.ndarray[Any, Any] = block_of(payload).columns["a"].values.numpy()
    return out
