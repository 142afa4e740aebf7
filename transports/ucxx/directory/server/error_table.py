"""The mapping of the server's errors and redis-py's exceptions to DataPlaneErrors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ERROR_TABLE", "PASSING"]

#: Codes of temporary errors of Valkey and Redis, for which nothing was executed; each with the seconds to wait before a
#: retry, and an explanation.
PASSING: Mapping[str, tuple[float, str]] = {
    "LOADING": (0.1, "it is loading its data"),
    "BUSY": (0.1, "a script has been running on it for long; its FUNCTION KILL or SCRIPT KILL ends one"),
    "READONLY": (0.2, "it is a replica: it is failing over, or controller_address names a replica"),
    "MASTERDOWN": (0.2, "it is a replica that has lost its primary"),
    "CLUSTERDOWN": (0.2, "its cluster does not serve this key now"),
    "TRYAGAIN": (0.1, "keys are being moved to another node of its cluster"),
    "NOREPLICAS": (0.2, "fewer replicas are connected than its min-replicas-to-write wants"),
    "MISCONF": (0.5, "it cannot save to its disk: its log says why"),
    "UNBLOCKED": (0.1, "it changed its role"),
    "KILLED": (0.1, "somebody ended this call by FUNCTION KILL or SCRIPT KILL, before it wrote anything"),
}
_KILLED = "killed by user with"
_DENIED = "the server does not know the user or password in controller_address (of a slot host: in ASYNCDP_DIRECTORY)"
_NO_PERMISSION = (
    "the server's ACL forbids this to the user in controller_address (of a slot host: in ASYNCDP_DIRECTORY); what the"
    " user of a plane needs, asyncdp directory acl prints"
)
_PROTECTED = "the server runs in protected mode: give it a password, and name it in controller_address"
_CLUSTER = "the server is a node of a cluster that keeps this key on another node: name a server without cluster mode"


def _passing(code: str, message: str, **context: Any) -> DataPlaneError:
    """Return the retryable error of a condition that ends by itself or is ended by an operator."""
    pause_s, why = PASSING[code]
    context.update(ambiguous=False, blames_port=False)  # the server answered, and executed nothing
    return DataPlaneUnavailable(f"the directory answers {code}: {why} ({message})", retry_after_s=pause_s, **context)


def _full(message: str, **context: Any) -> DataPlaneError:
    context.update(ambiguous=False)
    return DataPlaneNotReady(
        f"the directory is out of memory (its maxmemory): pop or evict samples, or raise it ({message})",
        retry_after_s=0.5,
        **context,
    )


def _refused(why: str, message: str, **context: Any) -> DataPlaneError:
    """Return the error of a condition that a retry does not remedy."""
    context.update(ambiguous=False)
    return DataPlaneBadRequest(f"{why} ({message})", **context)


def _elsewhere(message: str, **context: Any) -> DataPlaneError:
    context.update(ambiguous=False)
    return DataPlaneUnsupported(f"{_CLUSTER} ({message})", capability="cluster", **context)


def _reply(message: str, **context: Any) -> DataPlaneError | None:
    """Return the error of a reply whose code has no class in redis-py; None where the code is not known here either."""
    text = str(context.get("cause") or message)
    code = "KILLED" if _KILLED in text else text.partition(" ")[0]
    if code in PASSING:
        return _passing(code, message, **context)
    return _refused(_PROTECTED, message, **context) if code == "DENIED" else None


#: Pairs of a class name of redis-py and a function that returns the error for it, for the layer that translates errors.
#: Classes are named because redis-py is an extra. Its ConnectionError and TimeoutError do not derive from the built-in
#: classes of these names.
ERROR_TABLE: Sequence[tuple[str, Callable[..., DataPlaneError | None]]] = (
    ("BusyLoadingError", partial(_passing, "LOADING")),
    ("ReadOnlyError", partial(_passing, "READONLY")),
    ("MasterDownError", partial(_passing, "MASTERDOWN")),
    ("ClusterDownError", partial(_passing, "CLUSTERDOWN")),
    ("TryAgainError", partial(_passing, "TRYAGAIN")),
    ("OutOfMemoryError", _full),
    ("AuthenticationError", partial(_refused, _DENIED)),
    ("AuthorizationError", partial(_refused, _DENIED)),
    ("NoPermissionError", partial(_refused, _NO_PERMISSION)),
    ("MovedError", _elsewhere),
    ("AskError", _elsewhere),
    ("ResponseError", _reply),
    ("InvalidResponse", DataPlaneUnavailable),
    ("ConnectionError", DataPlaneUnavailable),
    ("TimeoutError", DataPlaneTimeout),
)
