"""Long copies that yield to the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from . import payload

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["copy_cooperatively"]


async def copy_cooperatively(copies: Iterator[int]) -> None:
    """Run a generator that copies and yields the bytes of each copy; let the event loop run after each 16 MiB."""
    done = 0
    for copied in copies:
        done += copied
        if done >= payload.PIECE_BYTES:
            done = 0
            await asyncio.sleep(0)
