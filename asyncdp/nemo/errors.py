"""Errors as code written for NeMo-RL knows them: those of the infrastructure are ConnectionErrors, too.

NeMo-RL repeats a rollout that failed with a ConnectionError or TimeoutError, and gives up a prompt that failed with any
other error. Its clients raise KeyError for names that they do not know.
"""

from __future__ import annotations

from typing import Any

from asyncdp.errors import (
    ClaimNotReady,
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneClearError,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    PartialReadError,
)

__all__ = [
    "translated",
]


class UnavailableConnectionError(DataPlaneUnavailable, ConnectionError):
    """DataPlaneUnavailable that is a ConnectionError, too."""


class NotReadyConnectionError(DataPlaneNotReady, ConnectionError):
    """DataPlaneNotReady of a server that is a ConnectionError, too."""


class CorruptConnectionError(CorruptPayload, ConnectionError):
    """CorruptPayload that is a ConnectionError, too."""


class ReadConnectionError(DataPlaneReadError, ConnectionError):
    """DataPlaneReadError whose cause may pass, and that is a ConnectionError, too."""


class WriteConnectionError(DataPlaneWriteError, ConnectionError):
    """DataPlaneWriteError whose cause may pass, and that is a ConnectionError, too."""


class ClearConnectionError(DataPlaneClearError, ConnectionError):
    """DataPlaneClearError whose cause may pass, and that is a ConnectionError, too."""


class PartialConnectionError(PartialReadError, ConnectionError):
    """PartialReadError of which rows failed with an error of the infrastructure; a ConnectionError, too."""


class PartialKeyError(PartialReadError, KeyError):
    """PartialReadError whose missing rows or fields do not exist; a KeyError, too."""


class UnknownNameError(DataPlaneBadRequest, KeyError):
    """DataPlaneBadRequest that names a partition, task or field that nobody declared; a KeyError, too."""


#: By the exact class of an error, the class that is a ConnectionError as well.
_INFRASTRUCTURE: dict[type[DataPlaneError], type[DataPlaneError]] = {
    DataPlaneUnavailable: UnavailableConnectionError,
    DataPlaneNotReady: NotReadyConnectionError,
    CorruptPayload: CorruptConnectionError,
}
#: The same of errors that have the flags of their cause, and are of the infrastructure only where it may pass.
_BY_FLAGS: dict[type[DataPlaneError], type[DataPlaneError]] = {
    DataPlaneReadError: ReadConnectionError,
    DataPlaneWriteError: WriteConnectionError,
    DataPlaneClearError: ClearConnectionError,
}
#: Arguments that name something which has to exist.
_NAMES = frozenset({"partition_id", "task_name"})


def translated(err: DataPlaneError, call: Any) -> DataPlaneError:
    """Return an error as NeMo-RL's code knows it, with the same attributes; itself if there is nothing to add.

    Args:
        err: An error of the plane, with the flags that it had when it was raised.
        call: The call that it answers.
    """
    if isinstance(err, PartialReadError):
        return _partial(err, call)
    kind = type(err)
    if isinstance(err, ClaimNotReady):
        return err
    if kind is DataPlaneBadRequest:
        required = getattr(call, "required_fields", ())
        return _as(UnknownNameError, err) if err.field in _NAMES or err.field in required else err
    if kind in _BY_FLAGS:
        return _as(_BY_FLAGS[kind], err) if err.retryable or err.blames_port else err
    return _as(_INFRASTRUCTURE[kind], err) if kind in _INFRASTRUCTURE else err


def _partial(err: PartialReadError, call: Any) -> DataPlaneError:
    """Translate a partial read; one without any row becomes the error of its rows."""
    if not err.ok.size:
        return translated(err.alone(), call)
    err.errors = {at: translated(one, call) for at, one in err.errors.items()}
    if any(isinstance(one, ConnectionError) for one in err.errors.values()):
        return _as(PartialConnectionError, err)
    if all(isinstance(one, KeyError) for one in err.errors.values()):
        return _as(PartialKeyError, err)
    return err


def _as(kind: type[DataPlaneError], err: DataPlaneError) -> DataPlaneError:
    """Return the same error as an instance of ``kind``."""
    made = kind.__new__(kind)
    made.args = err.args
    made.__dict__.update(err.__dict__)
    made.__cause__ = err.__cause__
    return made
