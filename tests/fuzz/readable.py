"""Whether a block that came from outside can be read to its last value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdp.errors import DataPlaneError

if TYPE_CHECKING:
    from asyncdp.rows.block import Block

__all__ = ["readable"]


def readable(block: Block) -> None:
    """Look at every value of a block; an error of the plane is fine."""
    for name, column in block.columns.items():
        assert len(column) == block.n, name
    try:
        block.to_tensordict()
    except DataPlaneError:
        return
