"""Whether a slot host answers: it greets whoever connects to one of its ports, before anything is proved."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from ..wire.messages import MAGIC

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["greets"]

#: How long a host may take to greet, all ports together, in seconds; one that lives does it at once.
GREETING_S: Final = 1.0


async def greets(address: str, ports: Sequence[int]) -> bool:
    """Whether a slot host answers at one of these ports."""
    try:
        async with asyncio.timeout(GREETING_S):
            for port in ports:
                if await _greets_at(address, port):
                    return True
    except TimeoutError:
        pass
    return False


async def _greets_at(address: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    try:
        return await reader.readexactly(len(MAGIC)) == MAGIC
    except (OSError, EOFError):
        return False
    finally:
        writer.transport.abort()
