"""asyncdp: a fault-tolerant async data plane client for reinforcement-learning post-training.

All public names can be imported from here; each module is loaded when one of its names is first used, so that
``import asyncdp`` brings neither layers nor transports.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any, Final

if __name__ != "asyncdp":
    # Imported under two names, each error class would exist twice, and `except DataPlaneError` would miss half of them.
    raise ImportError(f"this package is imported as 'asyncdp', not as {__name__!r}")

if TYPE_CHECKING:
    from asyncdp.batching.columns import kv_first_write as kv_first_write
    from asyncdp.batching.columns import read_columns as read_columns
    from asyncdp.batching.columns import write_columns as write_columns
    from asyncdp.batching.padding import materialize as materialize
    from asyncdp.batching.padding import pack_jagged_fields as pack_jagged_fields
    from asyncdp.batching.sharding import shard_meta_for_dp as shard_meta_for_dp
    from asyncdp.client import Client as BaseClient  # noqa: F401 - deprecated, kept for one version
    from asyncdp.client import Client as Client
    from asyncdp.client import DataPlaneClient as DataPlaneClient
    from asyncdp.compose.composition import SlotMapping as SlotMapping
    from asyncdp.config import DataPlaneConfig as DataPlaneConfig
    from asyncdp.config import ObservabilityConfig as ObservabilityConfig
    from asyncdp.deprecated import Transport as Transport
    from asyncdp.errors import ClaimLost as ClaimLost
    from asyncdp.errors import ClaimNotReady as ClaimNotReady
    from asyncdp.errors import CorruptPayload as CorruptPayload
    from asyncdp.errors import DataPlaneBadRequest as DataPlaneBadRequest
    from asyncdp.errors import DataPlaneClearError as DataPlaneClearError
    from asyncdp.errors import DataPlaneClosed as DataPlaneClosed
    from asyncdp.errors import DataPlaneError as DataPlaneError
    from asyncdp.errors import DataPlaneNotReady as DataPlaneNotReady
    from asyncdp.errors import DataPlaneReadError as DataPlaneReadError
    from asyncdp.errors import DataPlaneTimeout as DataPlaneTimeout
    from asyncdp.errors import DataPlaneUnavailable as DataPlaneUnavailable
    from asyncdp.errors import DataPlaneUnsupported as DataPlaneUnsupported
    from asyncdp.errors import DataPlaneWriteError as DataPlaneWriteError
    from asyncdp.errors import PartialReadError as PartialReadError
    from asyncdp.errors import SampleNotFound as SampleNotFound
    from asyncdp.errors import StaleSlotError as StaleSlotError
    from asyncdp.factory import build_data_plane_client as build_data_plane_client
    from asyncdp.factory import default_layers as default_layers
    from asyncdp.factory import stack as stack
    from asyncdp.meta import ClaimInfo as ClaimInfo
    from asyncdp.meta import DataPlaneCapabilities as DataPlaneCapabilities
    from asyncdp.meta import DataPlaneGroupMeta as DataPlaneGroupMeta
    from asyncdp.meta import HostStatus as HostStatus
    from asyncdp.meta import KVBatchMeta as KVBatchMeta
    from asyncdp.meta import PartitionInfo as PartitionInfo
    from asyncdp.meta import RowHandle as RowHandle
    from asyncdp.middleware.adapter import Adapter as Adapter
    from asyncdp.middleware.attempt_timeout import AttemptTimeout as AttemptTimeout
    from asyncdp.middleware.batch_retry import BatchRetry as BatchRetry
    from asyncdp.middleware.metrics import DataPlaneEvent as DataPlaneEvent
    from asyncdp.middleware.metrics import Metrics as Metrics
    from asyncdp.middleware.metrics import MetricsDataPlaneClient as MetricsDataPlaneClient
    from asyncdp.middleware.metrics import log_event as log_event
    from asyncdp.middleware.port_rotation import PortRotation as PortRotation
    from asyncdp.middleware.reconcile import Reconcile as Reconcile
    from asyncdp.middleware.slot_retry import SlotRetry as SlotRetry
    from asyncdp.middleware.typed_errors import TypedErrors as TypedErrors
    from asyncdp.rows.borrowed import borrowed as borrowed
    from asyncdp.service import Layer as Layer
    from asyncdp.service import Service as Service
    from asyncdp.service import layers_of as layers_of
    from asyncdp.transports.memory import MemoryTransport as MemoryTransport
    from asyncdp.transports.transfer_queue import TQTransport as TQTransport
    from asyncdp.transports.ucxx.transport import UCXXTransport as UCXXTransport

__version__: Final = "0.2.0"

_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "client": ("Client", "DataPlaneClient"),
    "batching.padding": ("materialize", "pack_jagged_fields"),
    "batching.columns": ("kv_first_write", "read_columns", "write_columns"),
    "config": ("DataPlaneConfig", "ObservabilityConfig"),
    "errors": (
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
    ),
    "factory": ("build_data_plane_client", "default_layers", "stack"),
    "meta": (
        "ClaimInfo",
        "DataPlaneCapabilities",
        "DataPlaneGroupMeta",
        "HostStatus",
        "KVBatchMeta",
        "PartitionInfo",
        "RowHandle",
    ),
    "middleware.adapter": ("Adapter",),
    "middleware.attempt_timeout": ("AttemptTimeout",),
    "middleware.batch_retry": ("BatchRetry",),
    "middleware.metrics": ("DataPlaneEvent", "Metrics", "MetricsDataPlaneClient", "log_event"),
    "middleware.port_rotation": ("PortRotation",),
    "middleware.reconcile": ("Reconcile",),
    "middleware.slot_retry": ("SlotRetry",),
    "middleware.typed_errors": ("TypedErrors",),
    "rows.borrowed": ("borrowed",),
    "service": ("Layer", "Service", "layers_of"),
    "batching.sharding": ("shard_meta_for_dp",),
    "compose.composition": ("SlotMapping",),
    "transports.memory": ("MemoryTransport",),
}
#: Not in ``__all__``: ``from asyncdp import *`` must not need an extra.
_BY_EXTRA: Final = {
    "TQTransport": ("transports.transfer_queue", "tq"),
    "UCXXTransport": ("transports.ucxx.transport", "ucxx"),
}
#: Deprecated names, kept for one version: their module, their name there, and what replaces them.
_RENAMED: Final = {
    "BaseClient": (
        "deprecated",
        "BaseClient",
        "the verbs are those of Client; a layer derives from Layer, a transport from Service",
    ),
    "PortQuarantined": ("deprecated", "PortQuarantined", "nothing raises it; PortRotation uses another port instead"),
    "Settle": ("middleware.reconcile", "Reconcile", "it is Reconcile now"),
    "Transport": ("deprecated", "Transport", "a transport derives from Service"),
}
#: Names that have left this module and are still found here for one version: {module that has them now: names}.
_MOVED: Final[dict[str, tuple[str, ...]]] = {
    "calls": (
        "Call",
        "CallContext",
        "CheckConsumptionStatus",
        "ClaimMeta",
        "ClearSamples",
        "Depth",
        "DescribePartition",
        "DropPartition",
        "Env",
        "EvictSamples",
        "GetSamples",
        "ListClaims",
        "ListMetadata",
        "ListPartitions",
        "Ping",
        "PopSamples",
        "PutSamples",
        "RegisterPartition",
        "ReleaseClaim",
        "ReleaseClaims",
        "Resend",
        "WaitPartition",
        "handles",
    ),
    "calls.slots": ("HostRef", "Locate", "ReadSlots", "SlotRef", "TryClaim"),
    "rows": ("Block", "FieldSpec"),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF), "__version__"]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:
    """Load the module of a public name on first use."""
    if name in _RENAMED:
        module, now, instead = _RENAMED[name]
        warnings.warn(f"asyncdp.{name} is kept for one version: {instead}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(f"asyncdp.{module}"), now)
    moved = next((module for module, names in _MOVED.items() if name in names), None)
    if moved is not None:
        text = f"asyncdp.{name} is asyncdp.{moved}.{name} now; here it is kept for one version"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(f"asyncdp.{moved}"), name)
    home, extra = _BY_EXTRA.get(name, (_HOME_OF.get(name), ""))
    if home is None:
        raise AttributeError(f"module 'asyncdp' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"asyncdp.{home}"), name)
    except ImportError as err:
        if not extra:
            raise
        raise ImportError(f"{name} needs the extra: pip install 'asyncdp[{extra}]' ({err})") from err
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__, *_BY_EXTRA})
