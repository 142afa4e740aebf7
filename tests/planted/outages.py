"""Broken waits for what does not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp import DataPlaneError, SlotRetry
from asyncdp.middleware.outage_wait import OutageWait

if TYPE_CHECKING:
    from asyncdp.calls import Call, CallContext
    from asyncdp.calls.slots import Send


class _Alone(OutageWait):
    """Knows of no other call that waits."""

    async def wait_for_recovery(self, send: Send, call: Call[Any], err: DataPlaneError, ctx: CallContext) -> bool:
        """Wait alone."""
        return await OutageWait(self._patience.seconds).wait_for_recovery(send, call, err, ctx)


class AsksAlone(SlotRetry):
    """Each call probes for itself whether a host answers again."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Let every call wait alone."""
        super().__init__(*args, **settings)
        self._outages = _Alone(self.outage_patience_s)


class WaitsForEver(SlotRetry):
    """The patience of a call has no end before the call's own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Have patience."""
        super().__init__(*args, **settings)
        self._outages = OutageWait(1e9)
