"""The errors of a data plane: one tree, one root, attributes instead of text to parse.

::

    DataPlaneError
     +- DataPlaneUnavailable      retryable, blames_port   nobody answers: refused, reset, actor dead; or
     |   |                                                 (retry_after_s) it answers that it is loading, busy, ...
     |   +- PortQuarantined       retryable                nothing was sent; retry_after_s
     +- DataPlaneTimeout          retryable, blames_port   also a TimeoutError: an attempt or the call ran out
     +- DataPlaneReadError
     |   +- SampleNotFound        not retryable            also a KeyError: no such id, or the field is not produced
     |   +- StaleSlotError        not retryable            the slot answered: the data is gone
     |   +- CorruptPayload        retryable, blames_port   length, schema or checksum does not match
     |   +- PartialReadError      some rows came: rows, ok, failed, errors
     +- DataPlaneWriteError       as its cause says
     +- DataPlaneClearError       as its cause says
     +- DataPlaneNotReady         retryable                full, starting; retry_after_s
     |   +- ClaimNotReady         not retried by layers    also a TimeoutError
     +- DataPlaneBadRequest       not retryable            also a ValueError
     |   +- DataPlaneUnsupported  not retryable            the backend cannot; the capability is named
     |   +- ClaimLost             not retryable            released, expired or another's
     +- DataPlaneClosed           not retryable            used after close, or closed under a waiting call

``retryable``: the same call may be sent again. ``blames_port``: the port is at fault. ``ambiguous``: the backend may
have acted. All three are instance attributes on purpose: Ray raises a class that derives from both its own error and
ours and forwards only *missing* attributes to the original, so a class attribute would hide the real value.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    "PortQuarantined",
    "SampleNotFound",
    "StaleSlotError",
]


#: How many ids a message names.
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
        op: The user's verb (``"get_samples"``), empty where it is not known yet.
        partition_id, host, port: Where, as far as known.
        sample_ids: The ids that the error is about, as far as it is about some.
        field: The field that the error is about, if it is about one.
        attempts: Wire requests that were made for what failed.
        elapsed_s: Seconds since the call began, where known.
        retryable, blames_port, ambiguous: See the module's text.
        cause_text: Text of the exception behind this one; unlike ``__cause__`` it survives pickling.
    """

    # How a new error of this class is flagged unless told otherwise: (retryable, blames_port). Read once, at creation.
    _starts: tuple[bool, bool] = (False, False)
    # Set by SlotRetry: space may be reserved anew for the rows of this failed write, which is paid or was waited for.
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
        """Keep the attributes; ``cause`` becomes ``__cause__``."""
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
        """Message and context; the same before and after pickling."""
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
        """Pickle by state, so that every subclass keeps class, text and attributes."""
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
        """Fill in context that is still unknown, in place, and return the error itself."""
        if op and not self.op:
            self.op = op
        if self.partition_id is None:
            self.partition_id = partition_id
        if self.host is None or (self.host == host and self.port is None):
            self.host = host
            self.port = port
        return self


class DataPlaneUnavailable(DataPlaneError):
    """Nobody answers: connection refused or reset, process dead, plane restarted without this partition.

    ``retry_after_s`` (seconds) is set where the backend did answer, that it cannot serve *now*: it is loading, busy,
    failing over, read-only. Then the layers ask again, with backoff, until the call's time is over.
    """

    _starts = (True, True)

    def __init__(self, message: str = "", *, retry_after_s: float | None = None, **context: Any) -> None:
        """Keep ``retry_after_s``."""
        super().__init__(message, **context)
        self.retry_after_s = retry_after_s


class PortQuarantined(DataPlaneUnavailable):
    """Nothing was sent, since the port is quarantined; ``retry_after_s`` seconds from now it may be probed."""

    _starts = (True, False)


class DataPlaneTimeout(DataPlaneError, TimeoutError):
    """An attempt, or the whole call, ran out of time.

    ``cut_short``: the call's time ended before the attempt had a fair chance, so that an earlier error tells more.
    """

    _starts = (True, True)

    def __init__(self, message: str = "", *, cut_short: bool = False, **context: Any) -> None:
        """Keep ``cut_short``."""
        super().__init__(message, **context)
        self.cut_short = cut_short


class DataPlaneReadError(DataPlaneError):
    """A read failed for a reason that is neither connectivity nor the request."""


class SampleNotFound(DataPlaneReadError, KeyError):
    """No such sample, or the field has not been produced for it."""


class StaleSlotError(DataPlaneReadError):
    """The reference outlived its data: cleared, recycled, or the sample lives again. Asking again cannot help."""


class CorruptPayload(DataPlaneReadError):
    """What arrived does not have the length, schema or checksum that the storage announced."""

    _starts = (True, True)


class PartialReadError(DataPlaneReadError):
    """Some rows came and some did not; nothing that came is lost.

    Attributes:
        rows: TensorDict of the rows that came, in the order asked, batch size ``(len(ok),)``.
        ok, failed: KVBatchMeta of the rows that came, and of those that did not.
        errors: ``{position in the request: error}`` for each row that did not come.
    """

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
        """Keep the parts; a :class:`~asyncdp.rows.block.Block` becomes a TensorDict when ``rows`` is asked for."""
        context.setdefault("retryable", any(e.retryable for e in errors.values()))
        super().__init__(message, **context)
        self._rows = rows
        self.ok = ok
        self.failed = failed
        self.errors = dict(errors)

    @property
    def rows(self) -> TensorDict:
        """The rows that came, in the order asked."""
        if not hasattr(self._rows, "batch_size"):
            self._rows = self._rows.to_tensordict()
        return self._rows  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows in columnar form: a TensorDict's pickle loses float8 and unsigned tensors."""
        rebuild, (kind, state) = super().__reduce__()
        try:
            state["_rows"] = self.block
        except DataPlaneError:  # leaves of somebody else's client that no column holds: as they are
            state["_rows"] = self._rows
        return rebuild, (kind, state)

    def alone(self) -> DataPlaneError:
        """Where no row came: the error itself, of the kind that a controller can do something about."""
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
        """The same rows in columnar form, for layers that go on with them."""
        from asyncdp.rows.block import Block

        if isinstance(self._rows, Block):
            return self._rows
        return Block.from_fields(self._rows, self.ok.size)


class DataPlaneWriteError(DataPlaneError):
    """A write failed for a reason that is neither connectivity nor the request; flags as its cause says."""


class DataPlaneClearError(DataPlaneError):
    """A clear failed, or cannot be confirmed; flags as its cause says."""


class DataPlaneNotReady(DataPlaneError):
    """The plane is full or still starting; nothing was done. ``retry_after_s`` says when to ask again (seconds)."""

    _starts = (True, False)

    def __init__(self, message: str = "", *, retry_after_s: float | None = None, **context: Any) -> None:
        """Keep ``retry_after_s`` (seconds)."""
        super().__init__(message, **context)
        self.retry_after_s = retry_after_s


class ClaimNotReady(DataPlaneNotReady, TimeoutError):
    """Too few samples were ready in time; nothing was claimed. Not retried by layers: waiting is the caller's choice.

    Attributes:
        required_fields: What a sample needed.
        ready: How many samples were ready.
        requested: How many had to be ready.
        oldest_wait_s: How long the oldest unready sample has been waiting, in seconds; None where none waits.
        waiting_ids: Ids of unready samples, oldest first, at most 16.
        missing_fields: {required field: how many of the unready samples lack it}, where any do; on UCXX of the oldest
            1000 that wait.
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
        """Keep what was required and what was there."""
        super().__init__(message, **context)
        self.required_fields = tuple(required_fields)
        self.ready = ready
        self.requested = requested
        self.oldest_wait_s = oldest_wait_s
        self.waiting_ids = tuple(waiting_ids)
        self.missing_fields = dict(missing_fields or {})


class DataPlaneBadRequest(DataPlaneError, ValueError):
    """The request is wrong and nothing was changed; the message names the culprit."""


class DataPlaneUnsupported(DataPlaneBadRequest):
    """The backend cannot do this; ``capability`` names what it lacks."""

    def __init__(self, message: str = "", *, capability: str = "", **context: Any) -> None:
        """Keep the name of the missing capability."""
        super().__init__(message, **context)
        self.capability = capability


class ClaimLost(DataPlaneBadRequest):
    """The claim is not, or no longer, this client's: released, expired, or taken by another."""


class DataPlaneClosed(DataPlaneError):
    """The client was closed, before the call or under it."""
