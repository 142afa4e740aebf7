"""Check whether a slot host answers: its ports send a greeting to every connection, before authentication."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from ..wire.messages import MAGIC

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["accepts", "greets"]

#: Seconds that a host may take to send its greeting, all ports together; a running host sends it at once.
GREETING_S: Final = 1.0


async def greets(address: str, ports: Sequence[int]) -> bool:
    """Return whether a slot host answers at one of these ports."""
    try:
        async with asyncio.timeout(GREETING_S):
            for port in ports:
                if await _greets_at(address, port):
                    return True
    except TimeoutError:
        pass
    return False


async def accepts(address: str, ports: Sequence[int]) -> bool:
    """Return whether a process may listen at one of these ports: not all of them refuse at once."""
    try:
        async with asyncio.timeout(GREETING_S):
            for port in ports:
                try:
                    _, writer = await asyncio.open_connection(address, port)
                except ConnectionRefusedError:
                    continue
                except OSError:
                    return True
                writer.transport.abort()
                return True
    except TimeoutError:
        return True
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
