"""The errors of a data plane, in one tree; their details are attributes, so that nobody has to parse messages.

::

    DataPlaneError
     +- DataPlaneUnavailable      retryable, blames_port   no answer: refused, reset, actor dead; or, with
     |                                                     retry_after_s, the backend is loading, busy, ...
     +- DataPlaneTimeout          retryable, blames_port   also a TimeoutError: an attempt or the call took too long
     +- DataPlaneReadError
     |   +- SampleNotFound        not retryable            also a KeyError: no such id, or the field is not produced
     |   +- StaleSlotError        not retryable            the row was removed or put anew, or its slot reused
     |   +- CorruptPayload        retryable, blames_port   length, schema or checksum does not match
     |   +- PartialReadError                               only some rows were read: rows, ok, failed, errors
     +- DataPlaneWriteError       flags of its cause
     +- DataPlaneClearError       flags of its cause
     +- DataPlaneNotReady         retryable                full, starting; retry_after_s
     |   +- ClaimNotReady         not retried by layers    also a TimeoutError
     +- DataPlaneBadRequest       not retryable            also a ValueError
     |   +- DataPlaneUnsupported  not retryable            the backend cannot; the capability is named
     |   +- ClaimLost             not retryable            released, expired or another's
     +- DataPlaneClosed           not retryable            used after close, or closed during a waiting call

``retryable``: the same call may be sent again. ``blames_port``: the port is at fault. ``ambiguous``: the backend may
have carried out the call. All three are instance attributes, not class attributes: Ray raises a class that derives from
both its own error and the original's and forwards only *missing* attributes to the original, so a class attribute would
hide the real value.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tensordict import TensorDict

    from asyncdp.meta import KVBatchMeta
    from asyncdp.rows.block import Block

__all__ = [
    "ClaimLost",
    "ClaimNotReady",
    "CorruptPayload",
    "DataPlaneBadRequest",
    "DataPlaneClearError",
    "DataPlaneClosed",
    "DataPlaneError",
    "DataPlaneNotReady",
    "DataPlaneReadError",
    "DataPlaneTimeout",
    "DataPlaneUnavailable",
    "DataPlaneUnsupported",
    "DataPlaneWriteError",
    "PartialReadError",
    "SampleNotFound",
    "StaleSlotError",
]


#: Largest number of ids that a message names.
SHOWN = 8


def _rebuild(cls: type[DataPlaneError], state: dict[str, Any]) -> DataPlaneError:
    """Make an error from its pickled state without calling a constructor (subclasses may want other arguments)."""
    err = cls.__new__(cls)
    err.args = (state["message"],)
    err.__dict__.update(state)
    return err


class DataPlaneError(Exception):
    """Root of every error that a data plane raises.

    Attributes:
        message: What went wrong, without the context that ``str()`` adds.
        op: The user's verb (``"get_samples"``), empty if it is not known yet.
        partition_id: Partition of the call, or None if not known.
        host: Id or address of the slot host that the request went to, or None.
        port: Port of that host, or None.
        sample_ids: Ids of the samples concerned; empty if it concerns no particular ones.
        field: Name of the field or argument concerned, or None.
        attempts: Number of requests that were sent for what failed.
        elapsed_s: Seconds since the call began, or None if not known.
        retryable: Whether the same call may be sent again.
        blames_port: Whether the port is at fault.
        ambiguous: Whether the backend may have carried out the call.
        cause_text: Text of the exception that caused this one, or None; unlike ``__cause__`` it survives pickling.
    """

    # Default (retryable, blames_port) of new errors of this class; read once, when an error is created.
    _starts: tuple[bool, bool] = (False, False)
    # Set by SlotRetry: the writer may reserve space again for the rows of this failed write. The retry budget was
    # charged for it already, or the call has waited for the host to come back.
    may_reserve_again: bool = False

    def __init__(  # noqa: PLR0913 - context is many small things, all optional
        self,
        message: str = "",
        *,
        op: str = "",
        partition_id: str | None = None,
        host: str | None = None,
        port: int | None = None,
        sample_ids: Sequence[str] = (),
        field: str | None = None,
        attempts: int = 1,
        elapsed_s: float | None = None,
        retryable: bool | None = None,
        blames_port: bool | None = None,
        ambiguous: bool = False,
        cause: BaseException | None = None,
    ) -> None:
        """Set the attributes; ``cause`` becomes ``__cause__``."""
        super().__init__(message)
        retry, blame = self._starts
        self.message = message
        self.op = op
        self.partition_id = partition_id
        self.host = host
        self.port = port
        self.sample_ids = tuple(sample_ids)
        self.field = field
        self.attempts = attempts
        self.elapsed_s = elapsed_s
        self.retryable = retry if retryable is None else retryable
        self.blames_port = blame if blames_port is None else blames_port
        self.ambiguous = ambiguous
        self.cause_text: str | None = None
        if cause is not None:
            self.__cause__ = cause
            self.cause_text = f"{type(cause).__name__}: {cause}"

    def __str__(self) -> str:
        """Return message and context; the same before and after pickling."""
        known = [f"{name}={value}" for name, value in (("op", self.op), ("partition", self.partition_id)) if value]
        if self.host is not None:
            known.append(f"at={self.host}" if self.port is None else f"at={self.host}:{self.port}")
        if self.attempts > 1:
            known.append(f"attempts={self.attempts}")
        if self.elapsed_s is not None:
            known.append(f"after={self.elapsed_s:.3g}s")
        if self.ambiguous:
            known.append("ambiguous")
        return f"{self.message} [{' '.join(known)}]" if known else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes, so that errors of every subclass keep class, text and attributes."""
        state = dict(self.__dict__)
        if self.cause_text is None and self.__cause__ is not None:
            state["cause_text"] = f"{type(self.__cause__).__name__}: {self.__cause__}"
        return _rebuild, (type(self), state)

    def located(
        self,
        *,
        op: str | None = None,
        partition_id: str | None = None,
        host: str | None = None,
        port: int | None = None,
    ) -> DataPlaneError:
        """Fill in context that is not known yet, in place, and return the error itself."""
        if op and not self.op:
            self.op = op
        if self.partition_id is None:
            self.partition_id = partition_id
        if self.host is None or (self.host == host and self.port is None):
            self.host = host
            self.port = port
        return self


class DataPlaneUnavailable(DataPlaneError):
    """The backend does not answer: connection refused or reset, process dead, plane restarted without this partition.

    ``retry_after_s`` (seconds) is set if the backend did answer, saying that it cannot serve *now*: it is loading,
    busy, failing over or read-only. The layers then send the call again, with backoff, until its deadline.

    ``refused`` is True if what answers does not know this client's secret: the secret is wrong, or another process has
    taken the port of a slot host that has ended.
    """

    _starts = (True, True)

    def __init__(
        self, message: str = "", *, retry_after_s: float | None = None, refused: bool = False, **context: Any
    ) -> None:
        """Set ``retry_after_s`` and ``refused``."""
        super().__init__(message, **context)
        self.retry_after_s = retry_after_s
        self.refused = refused


class DataPlaneTimeout(DataPlaneError, TimeoutError):
    """An attempt, or the whole call, took longer than it may.

    ``cut_short``: the call's deadline left the attempt too little time to succeed, so an earlier error of the call is
    more informative.
    """

    _starts = (True, True)

    def __init__(self, message: str = "", *, cut_short: bool = False, **context: Any) -> None:
        """Set ``cut_short``."""
        super().__init__(message, **context)
        self.cut_short = cut_short


class DataPlaneReadError(DataPlaneError):
    """A read failed for another reason than connectivity or a wrong request."""


class SampleNotFound(DataPlaneReadError, KeyError):
    """The sample does not exist, or the field has not been produced for it."""


class StaleSlotError(DataPlaneReadError):
    """The data that a reference names is gone: its row was removed or put anew, or its slot reused. Never retryable."""


class CorruptPayload(DataPlaneReadError):
    """A payload does not have the length, schema or checksum that the storage announced."""

    _starts = (True, True)


class PartialReadError(DataPlaneReadError):
    """Only some rows of a read could be read; the error holds these rows.

    Attributes:
        rows: TensorDict of the rows that were read, in the order requested, batch size ``(len(ok),)``.
        ok: KVBatchMeta of the rows that were read.
        failed: KVBatchMeta of the rows that could not be read.
        errors: ``{position in the request: error}`` of each row that could not be read.
    """

    #: Makes a Block of a TensorDict and a number of rows. Set by :mod:`asyncdp.rows.block`, which imports this module.
    columnar: ClassVar[Callable[[Any, int], Block] | None] = None

    def __init__(
        self,
        message: str = "",
        *,
        rows: TensorDict | Block,
        ok: KVBatchMeta,
        failed: KVBatchMeta,
        errors: Mapping[int, DataPlaneError],
        **context: Any,
    ) -> None:
        """Set the attributes; a :class:`~asyncdp.rows.block.Block` becomes a TensorDict when ``rows`` is first read."""
        context.setdefault("retryable", any(e.retryable for e in errors.values()))
        super().__init__(message, **context)
        self._rows = rows
        self.ok = ok
        self.failed = failed
        self.errors = dict(errors)

    @property
    def rows(self) -> TensorDict:
        """TensorDict of the rows that were read, in the order requested."""
        if not hasattr(self._rows, "batch_size"):
            self._rows = self._rows.to_tensordict()
        return self._rows  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows in columnar form: a TensorDict's pickle loses float8 and unsigned tensors."""
        rebuild, (kind, state) = super().__reduce__()
        try:
            state["_rows"] = self._rows if self.columnar is None else self.block
        except DataPlaneError:  # a client of another project returned leaves that no column can hold
            state["_rows"] = self._rows
        return rebuild, (kind, state)

    def alone(self) -> DataPlaneError:
        """Return the one error to raise if no row could be read: the first retryable one, else the first."""
        errors = list(self.errors.values())
        first = next((e for e in errors if e.retryable), errors[0])
        if len(errors) == 1:
            return first
        chosen = copy(first)
        chosen.__cause__ = first.__cause__
        same = [i for i, e in zip(self.failed.sample_ids, errors, strict=True) if type(e) is type(first)]
        shown = ", ".join(map(repr, same[:SHOWN])) + (", ..." if len(same) > SHOWN else "")
        others = f", and {len(errors) - len(same)} others failed otherwise" if len(errors) > len(same) else ""
        chosen.sample_ids = tuple(same)
        chosen.message = f"none of {len(errors)} rows came: {first.message} ({shown}{others})"
        return chosen

    @property
    def block(self) -> Block:
        """The rows that were read, in columnar form, for layers that process them further."""
        if not hasattr(self._rows, "batch_size"):
            return self._rows
        columnar = type(self).columnar
        assert columnar is not None  # noqa: S101 - whoever uses blocks has imported their module
        return columnar(self._rows, self.ok.size)


class DataPlaneWriteError(DataPlaneError):
    """A write failed for another reason than connectivity or a wrong request; it has the flags of its cause."""


class DataPlaneClearError(DataPlaneError):
    """A clear failed, or cannot be confirmed; it has the flags of its cause."""


class DataPlaneNotReady(DataPlaneError):
    """The plane is full or still starting; nothing was done. It may be asked again in ``retry_after_s`` seconds."""

    _starts = (True, False)

    def __init__(self, message: str = "", *, retry_after_s: float | None = None, **context: Any) -> None:
        """Set ``retry_after_s`` (seconds)."""
        super().__init__(message, **context)
        self.retry_after_s = retry_after_s


class ClaimNotReady(DataPlaneNotReady, TimeoutError):
    """Too few samples were ready in time; nothing was claimed. Layers do not retry it: the caller decides how to go on.

    Attributes:
        required_fields: Fields that a sample must have to be ready.
        ready: Number of samples that were ready.
        requested: Number of samples that had to be ready.
        oldest_wait_s: Seconds for which the oldest unready sample has been waiting; None if there is none.
        waiting_ids: Ids of unready samples, oldest first, at most 16.
        missing_fields: ``{required field: number of unready samples that lack it}``, without fields that none lacks; on
            UCXX counted over the oldest 1000 unready samples.
    """

    _starts = (False, False)

    def __init__(
        self,
        message: str = "",
        *,
        required_fields: Sequence[str] = (),
        ready: int = 0,
        requested: int = 0,
        oldest_wait_s: float | None = None,
        waiting_ids: Sequence[str] = (),
        missing_fields: Mapping[str, int] | None = None,
        **context: Any,
    ) -> None:
        """Set the attributes."""
        super().__init__(message, **context)
        self.required_fields = tuple(required_fields)
        self.ready = ready
        self.requested = requested
        self.oldest_wait_s = oldest_wait_s
        self.waiting_ids = tuple(waiting_ids)
        self.missing_fields = dict(missing_fields or {})


class DataPlaneBadRequest(DataPlaneError, ValueError):
    """The request is wrong and nothing was changed; the message names what is wrong with it."""


class DataPlaneUnsupported(DataPlaneBadRequest):
    """The backend does not support the request; ``capability`` names what it lacks."""

    def __init__(self, message: str = "", *, capability: str = "", **context: Any) -> None:
        """Set the name of the missing capability."""
        super().__init__(message, **context)
        self.capability = capability


class ClaimLost(DataPlaneBadRequest):
    """The client does not hold the claim (any more): it was released, has expired, or belongs to another client."""


class DataPlaneClosed(DataPlaneError):
    """The client was closed, before the call or during it."""


def __getattr__(name: str) -> Any:
    """Return the former error PortQuarantined, which is kept for one version."""
    if name == "PortQuarantined":
        import asyncdp

        return asyncdp.PortQuarantined
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
