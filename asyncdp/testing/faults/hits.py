"""What the rules of a plan do to a request that they hit, and to single slots of a read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio.lowlevel

from asyncdp.calls.slots import ReadResult, ReadSlots
from asyncdp.errors import StaleSlotError

from .damage import damaged
from .fault import Delay, Fail, Fault, LoseReply, Send
from .recycling import Recycled, recycle

if TYPE_CHECKING:
    from .rule import Rule

__all__ = ["Hit", "OnSlots", "fault_of"]


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that hits a request.

    Attributes:
        rule: The rule.
        draw: Random number: seconds of a delay; for damage, in [0, 1), it selects the bit to flip.
        slots: For rules that hit single slots, the indexes of the hit slots in the refs of the read.
    """

    rule: Rule
    draw: float = 0.0
    slots: Collection[int] = ()


def fault_of(rule: Rule, draw: float = 0.0, *, after_s: float = 0.0) -> Fault:
    """Return what a rule that hits whole requests does to one.

    Args:
        rule: The rule.
        draw: Seconds of a delay.
        after_s: Seconds until the sender of the request gets the error.
    """
    if rule.kind == "delay":
        return Delay(draw, reply=bool(rule.options.get("reply")))
    return (LoseReply if rule.kind == "lose_reply" else Fail)(make=rule.make_error, after_s=after_s)


class OnSlots(Fault):
    """Reads the slots that are not to fail, then damages the payload of those that are to be damaged.

    Args:
        hits: What happens to which slots.
        transport: Transport whose slots are recycled; None: none are.
    """

    def __init__(self, hits: Sequence[Hit], transport: Any = None) -> None:
        super().__init__()
        self.hits = hits
        self.transport = transport

    async def strike(self, call: ReadSlots, ctx: Any, send: Send) -> Any:
        """Read."""
        errors: dict[int, Any] = {}
        recycled: list[Recycled] = []
        try:
            for hit in self.hits:
                for at in hit.slots:
                    if hit.rule.kind == "recycle":
                        recycled += recycle(self.transport, call.refs[at], hit.rule.options["how"], ctx)
                    elif hit.rule.kind in ("stale", "error"):
                        errors.setdefault(at, _error(hit, call))
            keep = [at for at in range(len(call.refs)) if at not in errors]
            if keep:
                part = call if len(keep) == len(call.refs) else replace(call, refs=tuple(call.refs[at] for at in keep))
                result = await send(part, ctx)
            else:
                await anyio.lowlevel.checkpoint()
                result = ReadResult(())
        finally:
            for one in recycled:
                one.leave()
        errors.update({keep[at]: err for at, err in result.errors.items()})
        parts = [replace(part, refs=tuple(keep[at] for at in part.refs)) for part in result.parts]
        for hit in self.hits:
            if hit.rule.kind in ("corrupt", "truncate"):
                schema = bool(hit.rule.options.get("schema"))
                parts = [damaged(part, call, hit.slots, hit.rule.kind, hit.draw, schema=schema) for part in parts]
        return ReadResult(tuple(parts), errors)


def _error(hit: Hit, call: ReadSlots) -> Exception | None:
    if hit.rule.kind == "error":
        return hit.rule.make_error()
    return StaleSlotError("injected: stale slot", host=call.host.id, port=call.port)
