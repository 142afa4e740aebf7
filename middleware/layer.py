"""The base of all layers: a client around a client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from asyncdp.client import BaseClient

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from asyncdp.block import ObjectCodec
    from asyncdp.calls import Call, CallContext, Env
    from asyncdp.meta import DataPlaneCapabilities

__all__ = ["Layer"]

R = TypeVar("R")


class Layer(BaseClient):
    """A client that passes every call to ``inner``, except those that a method is marked for with ``@handles``.

    A layer of your own::

        class Shout(Layer):
            @handles(PutSamples)
            async def put(self, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
                print("put", call.sample_ids)
                return await self.inner.execute(call, ctx)
    """

    def __init__(self, inner: BaseClient) -> None:
        """Wrap ``inner``, the next layer or the transport."""
        super().__init__()
        self.inner = inner

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Serve the call with the method marked for it, or pass it on without another frame."""
        method = self._served[type(call)]
        return self.inner.execute(call, ctx) if method is None else method(call, ctx)  # type: ignore[return-value]

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Tell what the transport guarantees."""
        return self.inner.get_capabilities()

    def attach_config(self) -> dict[str, Any]:
        """Return the transport's."""
        return self.inner.attach_config()

    def snapshot(self) -> dict[str, Any]:
        """Return that of the layer inside."""
        return self.inner.snapshot()

    @property
    def env(self) -> Env:
        """The transport's, unless stack() made one."""
        return self._env if self._env is not None else self.inner.env

    @env.setter
    def env(self, env: Env) -> None:
        self._env = env

    @property
    def object_codec(self) -> ObjectCodec:
        """The transport's."""
        return self.inner.object_codec

    @property
    def owner(self) -> str:
        """The transport's."""
        return self.inner.owner

    async def on_close(self) -> None:
        """Close what is inside."""
        await self.inner.close()
