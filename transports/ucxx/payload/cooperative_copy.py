"""Long copies that yield to the event loop, and memory for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from . import payload

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from asyncdp.process.buffer_pool import BufferPool

__all__ = ["copy_cooperatively", "memory_for"]

#: Least size in bytes of an array whose fresh pages a thread has the system provide: it clears a page when it is first
#: written to, which takes 0.15 to 0.6 s for each GiB, and much longer where it makes huge pages of fragmented memory.
POPULATED_BYTES: Final = 4 << 20


async def copy_cooperatively(copies: Iterator[int]) -> None:
    """Run a generator that copies and yields the bytes of each copy; let the event loop run after each 16 MiB."""
    done = 0
    for copied in copies:
        done += copied
        if done >= payload.PIECE_BYTES:
            done = 0
            await asyncio.sleep(0)


async def memory_for(buffers: BufferPool, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return an array as ``buffers.empty`` does, without holding the event loop up for fresh pages."""
    out, fresh = buffers.take(nbytes)
    if fresh and nbytes >= POPULATED_BYTES:
        await asyncio.to_thread(buffers.populate, out)
    return out
