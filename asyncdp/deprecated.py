"""Deprecated names that are kept for one version: BaseClient, Transport and PortQuarantined."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from asyncdp import calls as c
from asyncdp.calls import CallContext, handles
from asyncdp.client import Client
from asyncdp.compose.reads import read_rows
from asyncdp.compose.waits import claim_until, partition_until
from asyncdp.compose.writes import write_rows
from asyncdp.errors import DataPlaneUnavailable
from asyncdp.service import Service

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.meta import KVBatchMeta

__all__ = ["BaseClient", "PortQuarantined", "Transport"]


class PortQuarantined(DataPlaneUnavailable):
    """Former error of a request for which no port was left; nothing has ever raised it."""

    _starts = (True, False)


class _Any(type):
    """Makes ``isinstance(x, BaseClient)`` true of clients, layers and transports, which all had the verbs."""

    def __instancecheck__(cls, one: object) -> bool:
        if cls.__module__ == __name__ and cls.__name__ == "BaseClient" and isinstance(one, (Client, Service)):
            return True
        return super().__instancecheck__(one)


class BaseClient(Service, metaclass=_Any):
    """Former base class of clients, layers and transports; replaced by Service, and by Client as a client's type."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warn that a subclass should derive from Service."""
        super().__init_subclass__(**kwargs)
        if cls.__module__ != __name__:
            text = f"{cls.__name__} derives from {cls.__mro__[1].__name__}: derive from asyncdp.Service"
            warnings.warn(text, DeprecationWarning, stacklevel=2)


class Transport(BaseClient):
    """A service that composes sample calls of its own slot calls, even without a SlotMapping above it."""

    @handles(c.GetSamples)
    async def _get(self, call: c.GetSamples, ctx: CallContext) -> TensorDict:
        return await read_rows(self.execute, call, ctx)

    @handles(c.PutSamples)
    async def _put(self, call: c.PutSamples, ctx: CallContext) -> KVBatchMeta:
        return await write_rows(self.execute, call, ctx)

    @handles(c.ClaimMeta)
    async def _claim(self, call: c.ClaimMeta, ctx: CallContext) -> KVBatchMeta:
        return await claim_until(self.execute, call, ctx)

    @handles(c.WaitPartition)
    async def _wait(self, call: c.WaitPartition, ctx: CallContext) -> None:
        await partition_until(self.execute, call, ctx)
