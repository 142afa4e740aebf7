"""TypedErrors: translates a backend's exceptions into the plane's errors, and verifies payloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdp.calls import CallContext, ClearSamples, GetSamples, PutSamples
from asyncdp.calls.answers import verify
from asyncdp.calls.slots import Locate, Publish, ReadSlots, Reserve, WriteSlots
from asyncdp.errors import (
    DataPlaneClearError,
    DataPlaneError,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneWriteError,
)
from asyncdp.service import Layer

if TYPE_CHECKING:
    from asyncdp.calls import Call
    from asyncdp.calls.slots import ReadResult
    from asyncdp.service import Service

__all__ = ["ErrorTable", "TypedErrors"]

R = TypeVar("R")

#: Rows of (raw exception type, as a class or a class name; function that makes the error of it, or returns None if the
#: row does not apply). The first row that applies is used.
ErrorTable = Sequence[tuple[type[BaseException] | str, Callable[..., DataPlaneError | None]]]

#: Exceptions that any backend may raise. If a connection is refused, nothing was sent; if it is reset, a request may
#: have arrived.
COMMON: ErrorTable = (
    (ConnectionRefusedError, DataPlaneUnavailable),
    (FileNotFoundError, DataPlaneUnavailable),
    (ConnectionError, DataPlaneUnavailable),
    (EOFError, DataPlaneUnavailable),
    (TimeoutError, DataPlaneTimeout),
    (OSError, DataPlaneUnavailable),
)
_NOT_SENT = (ConnectionRefusedError, FileNotFoundError)
_READS = (GetSamples, Locate, ReadSlots)
_WRITES = (PutSamples, Reserve, WriteSlots, Publish)


class TypedErrors(Layer):
    """Translates raw exceptions by the transport's ``error_table``, then by a common one, and verifies payloads.

    An exception that no row covers becomes DataPlaneReadError, DataPlaneWriteError, DataPlaneClearError or
    DataPlaneError, depending on the call; it is not retryable, since its meaning is unknown. Cancellation is passed on.

    Args:
        inner: The next layer.
        table: Rows of (exception class, error class) that are looked at before those of the transport; the first row
            that covers an exception decides.
    """

    sees_reads = False

    def __init__(self, inner: Service, *, table: ErrorTable = ()) -> None:
        """Put ``table`` before the transport's own table."""
        super().__init__(inner)
        transport: Any = inner
        while hasattr(transport, "inner"):
            transport = transport.inner
        self.table = (*table, *getattr(transport, "error_table", ()), *COMMON)

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Pass the call on; translate the exception that it raises, and verify the payloads that it returns."""
        try:
            result = await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            if not isinstance(call, ReadSlots):
                raise
            raise err.located(op=ctx.verb, host=call.host.id, port=call.port) from err.__cause__
        except Exception as err:
            raise self.typed(err, call, ctx) from err
        if isinstance(call, ReadSlots):
            return self._verified(call, result, ctx)  # type: ignore[arg-type,return-value]
        return result

    def _verified(self, call: ReadSlots, result: ReadResult, ctx: CallContext) -> ReadResult:
        """Translate the errors in the result of a read, and verify its payloads."""
        if result.errors:
            raw: dict[int, Exception] = dict(result.errors)  # a transport may put raw exceptions here
            place: dict[str, Any] = {"op": ctx.verb, "host": call.host.id, "port": call.port}
            typed = {at: self.typed(err, call, ctx).located(**place) for at, err in raw.items()}
            result = replace(result, errors=typed)
        return verify(result, call)

    def typed(self, raw: BaseException, call: Call[Any], ctx: CallContext) -> DataPlaneError:
        """Translate one raw exception; of an exception group, the first member that is no cancellation."""
        while isinstance(raw, BaseExceptionGroup):
            raw = next((e for e in raw.exceptions if isinstance(e, (Exception, BaseExceptionGroup))), raw.exceptions[0])
        if isinstance(raw, DataPlaneError):
            return raw
        host = getattr(call, "host", None)
        context: dict[str, Any] = {
            "op": ctx.verb,
            "partition_id": getattr(call, "partition_id", None),
            "host": None if host is None else host.id,
            "port": getattr(call, "port", None),
            "ambiguous": call.mutates and not isinstance(raw, _NOT_SENT),
            "cause": raw,
        }
        text = str(raw)
        message = f"{type(raw).__name__}: {text}" if text else type(raw).__name__
        for kind, make in self.table:
            if (type(raw).__name__ == kind) if isinstance(kind, str) else isinstance(raw, kind):
                made: DataPlaneError | None = make(message, **context)
                if made is not None:
                    return made
        return self._unknown(call)(message, **context)

    @staticmethod
    def _unknown(call: Call[Any]) -> type[DataPlaneError]:
        if isinstance(call, _READS):
            return DataPlaneReadError
        if isinstance(call, _WRITES):
            return DataPlaneWriteError
        return DataPlaneClearError if isinstance(call, ClearSamples) else DataPlaneError
