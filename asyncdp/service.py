"""Service and Layer: the base classes of transports and of the layers around them.

A transport is a :class:`Service`: it serves calls (:mod:`asyncdp.calls`, :mod:`asyncdp.calls.slots`) with methods
marked with ``@handles``. A :class:`Layer` is a service that wraps another one. Users have a
:class:`~asyncdp.client.Client`, which turns each use of a verb into one call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from asyncdp.calls import Call, CallContext
from asyncdp.errors import DataPlaneUnsupported
from asyncdp.meta import DataPlaneCapabilities
from asyncdp.metrics.snapshot import Snapshot, empty_snapshot
from asyncdp.protocol import VERBS
from asyncdp.rows.block import PICKLE, ObjectCodec

if TYPE_CHECKING:
    from types import TracebackType

    from asyncdp.calls import Env
    from asyncdp.client import Client
    from asyncdp.metrics.histogram import Histogram

__all__ = ["Layer", "Service", "layers_of"]

R = TypeVar("R")


class _Served(dict[type[Call[Any]], Callable[..., Awaitable[Any]] | None]):
    """Maps each class of call to the method that serves it, or None.

    A class without a method of its own (PopSamples derives from ClearSamples) gets that of its nearest ancestor. The
    lookup happens at the first call of the class, so the class may be defined later than the service.
    """

    def __missing__(self, kind: type[Call[Any]]) -> Callable[..., Awaitable[Any]] | None:
        near = next((ancestor for ancestor in kind.__mro__[1:] if self.get(ancestor) is not None), None)
        method = self[kind] = None if near is None else self[near]
        return method


class Service:
    """Serves calls with the methods that a subclass marks with ``@handles``; base class of transports.

    ::

        class Shelf(Service):
            @handles(Ping)
            async def answer(self, call: Ping, ctx: CallContext) -> None: ...

        client = stack(Shelf())
    """

    #: Default of ``timeout_s`` for the verbs of a client over this service, in seconds.
    call_timeout_s: float = 60.0
    #: State shared by all services of a stack; set by the client over them.
    env: Env
    #: Whether every read of slots has to come here as ReadSlots, as layers that inject faults need it. Where neither
    #: the transport nor a layer below SlotMapping says so, slots in shared memory are read as soon as they are located.
    sees_reads: ClassVar[bool] = True
    _methods: ClassVar[dict[type[Call[Any]], str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the methods marked with ``@handles``, including inherited ones."""
        super().__init_subclass__(**kwargs)
        marked: dict[type[Call[Any]], str] = {}
        for base in reversed(cls.__mro__):
            for name, member in vars(base).items():
                for kind in getattr(member, "__handles__", ()):
                    marked[kind] = name
        cls._methods = marked

    def __init__(self) -> None:
        """Bind the methods that serve calls."""
        self._served = _Served({kind: getattr(self, name) for kind, name in self._methods.items()})
        self._closed = False
        self._pid = os.getpid()
        self._as_client: Client | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Raise TypeError, unless a subclass defines how it is pickled."""
        msg = f"a {type(self).__name__} is pickled as part of the client that stack() returned"
        raise TypeError(msg)

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Serve a call with the method marked for it; raise DataPlaneUnsupported if there is none."""
        method = self._served[type(call)]
        if method is None:
            return self.unserved(call, ctx)
        return method(call, ctx)  # type: ignore[return-value]

    def unserved(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Raise DataPlaneUnsupported for a call that no method is marked for."""
        kind = type(call).__name__
        msg = f"{type(self).__name__} does not serve {kind}"
        raise DataPlaneUnsupported(msg, capability=kind, op=ctx.verb)

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Return what the backend guarantees; nothing, unless a subclass overrides this."""
        return DataPlaneCapabilities()

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which another process attaches to the same plane."""
        msg = f"{type(self).__name__} cannot be attached to"
        raise DataPlaneUnsupported(msg, capability="attach_config", op="attach_config")

    def snapshot(self) -> Snapshot:
        """Return what the stack has counted; all zero without a Metrics layer."""
        return empty_snapshot()

    def call_times(self) -> dict[tuple[str, str], Histogram]:
        """Return a histogram of durations per (op, status); {} without a Metrics layer."""
        return {}

    @property
    def object_codec(self) -> ObjectCodec:
        """The codec that encodes non-tensor values."""
        return PICKLE

    @property
    def owner(self) -> str:
        """Name under which the plane lists what a client of this service puts and claims."""
        return ""

    # -- closing

    async def close(self) -> None:
        """Close the service. Idempotent; in a forked child it leaves the parent's service open."""
        if self._closed:
            return
        self._closed = True
        if self._as_client is not None:
            await self._as_client.end_calls()
        if self._pid == os.getpid():  # in a forked child the connections, and a plane it owns, belong to the parent
            await self.on_close()

    async def on_close(self) -> None:
        """Free the resources of a subclass; called once."""

    async def __aenter__(self) -> Self:
        """Return the service itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the service."""
        await self.close()

    # -- deprecated, kept for one version: the verbs as methods of transports and layers

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a verb of a client over this service."""
            if name not in VERBS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            kind = type(self).__name__
            text = f"{kind}.{name}: a service has no verbs; use stack(...), or Client(...) for a client without layers"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            if self._as_client is None:
                from asyncdp import Client

                self._as_client = Client(self)
            return getattr(self._as_client, name)


class Layer(Service):
    """A service that wraps another one and passes on to it every call for which it has no ``@handles`` method.

    A layer of your own::

        class Shout(Layer):
            @handles(PutSamples)
            async def put(self, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
                print("put", call.sample_ids)
                return await self.inner.execute(call, ctx)

    Args:
        inner: The next layer, the transport, or a client, whose service is then wrapped.

    Attributes:
        inner: The wrapped service.
        capabilities: Capabilities of the wrapped service; read once, when the layer is made.
    """

    def __init__(self, inner: Service | Client) -> None:
        """Wrap ``inner``."""
        super().__init__()
        self.inner: Service = inner if isinstance(inner, Service) else inner.given
        self.capabilities = self.inner.get_capabilities()

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Serve the call with the method marked for it, or return the inner service's coroutine as it is."""
        method = self._served[type(call)]
        return self.inner.execute(call, ctx) if method is None else method(call, ctx)  # type: ignore[return-value]

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Return what the transport guarantees."""
        return self.capabilities

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which another process attaches to the transport's plane."""
        return self.inner.attach_config()

    def snapshot(self) -> Snapshot:
        """Return what the stack has counted, as the wrapped service does."""
        return self.inner.snapshot()

    def call_times(self) -> dict[tuple[str, str], Histogram]:
        """Return a histogram of durations per (op, status), as the wrapped service does."""
        return self.inner.call_times()

    @property
    def object_codec(self) -> ObjectCodec:
        """The codec with which the transport encodes non-tensor values."""
        return self.inner.object_codec

    @property
    def owner(self) -> str:
        """Name under which the plane lists what a client of the transport puts and claims."""
        return self.inner.owner

    async def on_close(self) -> None:
        """Close the wrapped service."""
        await self.inner.close()


def layers_of(client: Client | Service) -> Iterator[Service]:
    """Iterate over the services of a client, outermost first, the transport last."""
    at: Any = client if isinstance(client, Service) else client.service
    while at is not None:
        yield at
        at = getattr(at, "inner", None)
