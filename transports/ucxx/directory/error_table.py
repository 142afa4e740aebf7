"""What redis-py raises, as the plane's errors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ERROR_TABLE"]

#: (class name, the error it becomes), for the layer that translates. By name: redis-py is an extra. The names are of
#: leaf classes: its own ConnectionError and TimeoutError derive from nothing that is built in.
ERROR_TABLE: Sequence[tuple[str, Callable[..., DataPlaneError]]] = (
    ("BusyLoadingError", partial(DataPlaneNotReady, retry_after_s=0.1)),
    ("OutOfMemoryError", partial(DataPlaneNotReady, retry_after_s=0.5)),
    ("TryAgainError", partial(DataPlaneNotReady, retry_after_s=0.1)),
    ("AuthenticationError", partial(DataPlaneUnavailable, retryable=False, blames_port=False)),
    ("AuthorizationError", partial(DataPlaneUnavailable, retryable=False, blames_port=False)),
    ("NoPermissionError", DataPlaneBadRequest),
    ("ReadOnlyError", DataPlaneUnavailable),
    ("MasterDownError", DataPlaneUnavailable),
    ("ClusterDownError", DataPlaneUnavailable),
    ("InvalidResponse", DataPlaneUnavailable),
    ("ConnectionError", DataPlaneUnavailable),
    ("TimeoutError", DataPlaneTimeout),
)
