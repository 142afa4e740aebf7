"""Sends the calls of checkpoints, which no verb of a client makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from asyncdp.calls.context import CallContext
from asyncdp.errors import DataPlaneUnsupported

if TYPE_CHECKING:
    from asyncdp.calls import Call
    from asyncdp.client import Client

__all__ = ["ask", "need_snapshots"]

R = TypeVar("R")


async def ask(client: Client, call: Call[R], op: str) -> R:
    """Have the service of a client execute a call, within the client's ``call_timeout_s``."""
    env = client.env
    began = env.clock.now()
    ctx = CallContext(env, env.next_op_id(), began + client.call_timeout_s, op, began, call=call)
    return await client.execute(call, ctx)


def need_snapshots(client: Client, op: str) -> None:
    """Raise DataPlaneUnsupported if the backend has no directory snapshots."""
    if not client.get_capabilities().directory_snapshots:
        msg = f"a checkpoint's {op} needs directory_snapshots, which this backend lacks"
        raise DataPlaneUnsupported(msg, capability="directory_snapshots", op=op)
