"""Service and Layer: what serves calls, and what wraps it.

A transport is a :class:`Service`: it serves calls (:mod:`asyncdp.calls`, :mod:`asyncdp.calls.slots`) by methods
marked with ``@handles``. A :class:`Layer` is a service around another one. Users hold a
:class:`~asyncdp.client.Client`, which makes one call of each verb.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

from asyncdp.calls import Call, CallContext
from asyncdp.errors import DataPlaneUnsupported
from asyncdp.meta import DataPlaneCapabilities
from asyncdp.protocol import VERBS
from asyncdp.rows.block import PICKLE, ObjectCodec

if TYPE_CHECKING:
    from types import TracebackType

    from asyncdp.calls import Env
    from asyncdp.client import Client

__all__ = ["Layer", "Service", "layers_of"]

R = TypeVar("R")


class _Served(dict[type[Call[Any]], Callable[..., Awaitable[Any]] | None]):
    """The method that serves each kind of call; None where none does.

    A call's subclass (PopSamples is a ClearSamples) goes to the method of its nearest ancestor that has one, whenever
    it was defined: it is looked for when the first such call comes.
    """

    def __missing__(self, kind: type[Call[Any]]) -> Callable[..., Awaitable[Any]] | None:
        near = next((ancestor for ancestor in kind.__mro__[1:] if self.get(ancestor) is not None), None)
        method = self[kind] = None if near is None else self[near]
        return method


class Service:
    """Serves calls. A subclass marks the methods that do with ``@handles``, and says what it guarantees.

    ::

        class Shelf(Service):
            @handles(Ping)
            async def answer(self, call: Ping, ctx: CallContext) -> None: ...

        client = stack(Shelf())
    """

    #: Seconds that a verb of a client over this service may take unless told otherwise.
    call_timeout_s: float = 60.0
    #: What all services of a stack share; set by the client over them.
    env: Env
    _methods: ClassVar[dict[type[Call[Any]], str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the methods marked with ``@handles``, also inherited ones."""
        super().__init_subclass__(**kwargs)
        marked: dict[type[Call[Any]], str] = {}
        for base in reversed(cls.__mro__):
            for name, member in vars(base).items():
                for kind in getattr(member, "__handles__", ()):
                    marked[kind] = name
        cls._methods = marked

    def __init__(self) -> None:
        """Begin open."""
        self._served = _Served({kind: getattr(self, name) for kind, name in self._methods.items()})
        self._closed = False
        self._pid = os.getpid()
        self._as_client: Client | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be pickled; a transport that can be attached to says how."""
        msg = f"a {type(self).__name__} is pickled as part of the client that stack() returned"
        raise TypeError(msg)

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Serve a call with the method marked for it; what none is marked for is DataPlaneUnsupported."""
        method = self._served[type(call)]
        if method is None:
            return self.unserved(call, ctx)
        return cast("Coroutine[Any, Any, R]", method(call, ctx))

    def unserved(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Refuse a call that no method is marked for."""
        kind = type(call).__name__
        msg = f"{type(self).__name__} does not serve {kind}"
        raise DataPlaneUnsupported(msg, capability=kind, op=ctx.verb)

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Tell what the backend guarantees; none of it unless a subclass says so."""
        return DataPlaneCapabilities()

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which another process attaches to the same plane."""
        msg = f"{type(self).__name__} cannot be attached to"
        raise DataPlaneUnsupported(msg, capability="attach_config", op="attach_config")

    def snapshot(self) -> dict[str, Any]:
        """Return the counters of the stack, see :meth:`asyncdp.Metrics.snapshot`; nothing where nobody counts."""
        return {}

    @property
    def object_codec(self) -> ObjectCodec:
        """How non-tensor values are encoded."""
        return PICKLE

    @property
    def owner(self) -> str:
        """Who a client of this service is to the plane: what it puts and claims is listed under this name."""
        return ""

    # -- the end

    async def close(self) -> None:
        """End the service. Idempotent; in a forked child the parent's goes on."""
        if self._closed:
            return
        self._closed = True
        if self._as_client is not None:
            await self._as_client.end_calls()
        if self._pid == os.getpid():  # else what it holds, and the plane it may own, are the parent's
            await self.on_close()

    async def on_close(self) -> None:
        """Free what a subclass holds; called once."""

    async def __aenter__(self) -> Self:
        """Return the service itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the service."""
        await self.close()

    # -- for one version: transports and layers had the verbs themselves

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a verb of a client over this service."""
            if name not in VERBS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            kind = type(self).__name__
            text = f"{kind}.{name}: a service has no verbs; use stack(...), or Client(...) for a client without layers"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            if self._as_client is None:
                from asyncdp.client import Client

                self._as_client = Client(self)
            return getattr(self._as_client, name)


class Layer(Service):
    """A service around another one: passes every call to ``inner``, except those that it has a ``@handles`` method for.

    A layer of your own::

        class Shout(Layer):
            @handles(PutSamples)
            async def put(self, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
                print("put", call.sample_ids)
                return await self.inner.execute(call, ctx)

    Args:
        inner: The next layer, or the transport. Of a client, the service that it calls.

    Attributes:
        inner: The service that is wrapped.
        capabilities: What it guarantees, asked once, when the layer is made.
    """

    def __init__(self, inner: Service | Client) -> None:
        """Wrap ``inner``."""
        super().__init__()
        self.inner: Service = inner if isinstance(inner, Service) else inner.given
        self.capabilities = self.inner.get_capabilities()

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Serve the call with the method marked for it, or pass it on without another frame."""
        method = self._served[type(call)]
        return self.inner.execute(call, ctx) if method is None else method(call, ctx)  # type: ignore[return-value]

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Tell what the transport guarantees."""
        return self.capabilities

    def attach_config(self) -> dict[str, Any]:
        """Return the transport's."""
        return self.inner.attach_config()

    def snapshot(self) -> dict[str, Any]:
        """Return that of the layer inside."""
        return self.inner.snapshot()

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


def layers_of(client: Client | Service) -> Iterator[Service]:
    """Iterate over the services of a client, outermost first, the transport last."""
    at: Any = client if isinstance(client, Service) else client.service
    while at is not None:
        yield at
        at = getattr(at, "inner", None)
