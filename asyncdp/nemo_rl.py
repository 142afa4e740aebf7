"""A drop-in for ``nemo_rl.data_plane``: its factory, its synchronous client, its observability wrapper.

In NeMo-RL's own factory, this is all that it takes (docs/nemo_rl.md)::

    from asyncdp.nemo_rl import build_data_plane_client

The clients have the verbs of NeMo-RL's interface, with its names, order and defaults, and those of asyncdp besides.
They behave as NeMo-RL's do, in what the config's ``nemo`` selects.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tensordict import TensorDict

from asyncdp.blocking import BlockingClient
from asyncdp.factory import build_data_plane_client as build_async_client
from asyncdp.meta import KVBatchMeta as Meta
from asyncdp.rows.block import field_names, raw_leaf
from asyncdp.settings.names import as_mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.client import Client

__all__ = [
    "DataPlaneClient",
    "KVBatchMeta",
    "MetricsDataPlaneClient",
    "build_data_plane_client",
    "log_event",
]

R = TypeVar("R")
Event = dict[str, Any]


class KVBatchMeta(Meta):
    """A meta that is joined as NeMo-RL's; otherwise asyncdp's, with handles."""

    __slots__ = ()

    def concat(self, *others: Any) -> KVBatchMeta:
        """Return a meta of these rows followed by those of ``others``, with this one's fields and extra_info.

        It has tags only if every meta has, as it has sequence_lengths.

        Raises:
            DataPlaneBadRequest: The metas are of different partitions.
        """
        whole = super().concat(*others)
        metas = [one for other in others for one in ([other] if hasattr(other, "sample_ids") else other)]
        tags = whole.tags if all(one.tags is not None for one in (self, *metas)) else None
        own: Any = {"task_name": self.task_name, "fields": self.fields, "extra_info": dict(self.extra_info)}
        made = replace(whole, tags=tags, **own)
        return type(self)(*(getattr(made, one.name) for one in fields(Meta)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values: where NeMo-RL is imported, the copy is one of its metas, too."""
        return _meta, tuple(getattr(self, one.name) for one in fields(Meta))


class DataPlaneClient(BlockingClient):
    """A blocking client with the verbs of NeMo-RL's interface; made by :func:`build_data_plane_client`.

    If NeMo-RL is imported, it is an instance of its ``DataPlaneClient``, and the metas that it returns are instances of
    its ``KVBatchMeta`` as well as of asyncdp's.
    """

    def __init__(self, client: Client) -> None:
        """Wrap an async client that nobody else uses."""
        super().__init__(client, nemo=True)
        theirs = _theirs()
        if theirs is not None:
            theirs.DataPlaneClient.register(DataPlaneClient)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the config: when unpickled, the client attaches to the same plane."""
        return _attached, (self._loop.client.__reduce__(),)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,  # noqa: FBT001, FBT002 - the order of NeMo-RL's arguments
        timeout_s: float | None = 60.0,
        **more: Any,
    ) -> KVBatchMeta:
        """Claim up to ``batch_size`` ready samples, as :meth:`asyncdp.DataPlaneClient.claim_meta`."""
        args = (partition_id, task_name, required_fields, batch_size, dp_rank, blocking, timeout_s)
        return _as_theirs(super().claim_meta(*args, **more))

    def put_samples(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Write samples, as :meth:`asyncdp.DataPlaneClient.put_samples`; ids alone are put without fields."""
        named = dict(zip(("sample_ids", "partition_id", "fields", "tags"), args, strict=False)) | kwargs
        ids = named.get("sample_ids", ())
        if named.get("fields") is None and named.get("tags") is None and isinstance(ids, list) and ids:
            named["tags"] = [{} for _ in ids]
        return _as_theirs(super().put_samples(**named))

    def save_checkpoint(self, path: str, partition_id: str | None = None) -> None:
        """Save the rows of one partition, or of all, into a folder, as :func:`asyncdp.checkpoint.save`."""
        from asyncdp.checkpoint import save

        self._run("save_checkpoint", lambda: save(self._loop.client, path, partition_id))

    def load_checkpoint(self, path: str, partition_id: str | None = None) -> None:
        """Restore what ``save_checkpoint`` saved, as :func:`asyncdp.checkpoint.restore`."""
        from asyncdp.checkpoint import restore

        self._run("load_checkpoint", lambda: restore(self._loop.client, path, partition_id))


def build_data_plane_client(cfg: Mapping[str, Any] | None, *, bootstrap: bool = True) -> Any:
    """Build a client from NeMo-RL's config, or from one of asyncdp, with the option ``nemo``.

    Args:
        cfg: See :class:`~asyncdp.config.DataPlaneConfig`; ``nemo`` is True unless given.
        bootstrap: Whether to start the plane (in the driver) rather than attach to one that runs. Workers may be given
            the driver's own config; with impl ``ucxx`` they find its plane in the same Ray job or on the same machine.

    Returns:
        A :class:`DataPlaneClient`; wrapped in :class:`MetricsDataPlaneClient` if observability is enabled.

    Raises:
        ValueError: The config is None or disabled, the impl is unknown, or another key is wrong.
    """
    given = as_mapping(cfg)
    if given is None or not given.get("enabled"):
        msg = "enabled: the data plane is disabled; set data_plane.enabled, or use the legacy trainer (grpo.grpo_train)"
        raise ValueError(msg)
    config = {key: given[key] for key in given}
    if config.get("impl") not in ("memory", "transfer_queue", "ucxx"):
        msg = f"unknown data_plane impl: {config.get('impl')!r} is not one of 'memory', 'transfer_queue', 'ucxx'"
        raise ValueError(msg)
    if config.get("nemo") is None:
        config["nemo"] = True
    watch = as_mapping(config.pop("observability", None)) or {}
    client = DataPlaneClient(build_async_client(config, bootstrap=bootstrap))
    if not watch.get("enabled"):
        return client
    return MetricsDataPlaneClient(client, on_event=watch.get("callback") or log_event)


def _attached(recipe: tuple[Any, ...]) -> DataPlaneClient:
    make, arguments = recipe[:2]
    return DataPlaneClient(make(*arguments))


# --- metas that are NeMo-RL's too -----------------------------------------------------------------------------------


def _theirs() -> Any:
    """Return NeMo-RL's module with the interface if it is imported, else None."""
    return sys.modules.get("nemo_rl.data_plane.interfaces")


#: By NeMo-RL's class of metas, the class of those that are both.
_KINDS: dict[type, type[KVBatchMeta]] = {}


def _kind() -> type[KVBatchMeta]:
    """Return the class of metas that are NeMo-RL's as well; asyncdp's own if NeMo-RL is not imported."""
    module = _theirs()
    theirs = KVBatchMeta if module is None else module.KVBatchMeta
    if issubclass(KVBatchMeta, theirs):
        return KVBatchMeta
    if theirs not in _KINDS:
        _KINDS[theirs] = type("KVBatchMeta", (KVBatchMeta, theirs), {"__module__": __name__})
    return _KINDS[theirs]


def _as_theirs(meta: Meta) -> KVBatchMeta:
    return _meta(*(getattr(meta, one.name) for one in fields(Meta)))


def _meta(*values: Any) -> KVBatchMeta:
    return _kind()(*values)


# --- observability --------------------------------------------------------------------------------------------------


def log_event(event: Event) -> None:
    """Log one event at level INFO."""
    logging.getLogger(__name__).info("data_plane_event: %s", event)


@dataclass
class DataPlaneStats:
    """Totals of a :class:`MetricsDataPlaneClient` over successful calls."""

    total_bytes: int = 0
    total_keys: int = 0
    total_ops: int = 0
    bytes_outstanding: int = 0
    peak_bytes_outstanding: int = 0
    max_bytes_per_key_seen: int = 0
    last_put_bytes_per_key: int = 0


class MetricsDataPlaneClient:
    """Wraps any synchronous client; calls ``on_event`` once per call, with what NeMo-RL's wrapper of this name tells.

    An event has op, partition_id, n_keys, n_bytes, wall_ms and status (``ok``, ``error`` or ``timeout``). Verbs that
    NeMo-RL's interface does not have are passed on without an event.

    Args:
        inner: The client; closed with the wrapper.
        on_event: Called with each event; None: nobody is told.
    """

    def __init__(self, inner: Any, on_event: Callable[[Event], None] | None = None) -> None:
        """Start with all totals at zero."""
        self._inner = inner
        self._on_event = on_event
        self._stats = DataPlaneStats()
        self._live: dict[str, dict[str, int]] = {}
        theirs = _theirs()
        if theirs is not None:
            theirs.DataPlaneClient.register(MetricsDataPlaneClient)

    def __getattr__(self, name: str) -> Any:
        """Return a verb of the wrapped client."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def snapshot(self) -> dict[str, Any]:
        """Return the totals, and bytes and keys that are put and not cleared."""
        return {**asdict(self._stats), "n_keys_outstanding": sum(map(len, self._live.values()))}

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """Return the bytes that are put and not cleared, by partition."""
        return {name: sum(sizes.values()) for name, sizes in self._live.items()}

    def _told(self, op: str, partition_id: str, call: Callable[[], R], n_keys: int = 0, n_bytes: int = 0) -> R:
        """Make a call and tell of its end."""
        began = monotonic()
        status = "error"
        try:
            result = call()
            status = "ok"
            if isinstance(result, TensorDict):
                n_bytes = _tensor_bytes(result)
            elif not n_keys and hasattr(result, "sample_ids"):
                n_keys = len(result.sample_ids)
        except TimeoutError:
            status = "timeout"
            raise
        finally:
            self._emit(op, partition_id, n_keys, n_bytes, began, status)
        return result

    def _emit(self, op: str, partition_id: str, n_keys: int, n_bytes: int, began: float, status: str) -> None:
        sizes = {"n_keys": int(n_keys), "n_bytes": int(n_bytes), "wall_ms": (monotonic() - began) * 1e3}
        if self._on_event is not None:
            self._on_event({"op": op, "partition_id": partition_id, **sizes, "status": status})
        if status != "ok":
            return
        stats = self._stats
        stats.total_bytes += n_bytes
        stats.total_keys += n_keys
        stats.total_ops += 1
        if op == "put" and n_keys:
            stats.last_put_bytes_per_key = n_bytes // n_keys
            stats.max_bytes_per_key_seen = max(stats.max_bytes_per_key_seen, n_bytes // n_keys)

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Declare a partition."""
        args = (partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums)
        self._told("register", partition_id, lambda: self._inner.register_partition(*args), int(num_samples))

    def claim_meta(self, partition_id: str, *args: Any, **kwargs: Any) -> Any:
        """Claim samples."""
        return self._told("claim_meta", partition_id, lambda: self._inner.claim_meta(partition_id, *args, **kwargs))

    def get_data(self, meta: Any, select_fields: Sequence[str] | None = None) -> Any:
        """Read fields of the rows of a meta."""
        return self._told(
            "get_data", meta.partition_id, lambda: self._inner.get_data(meta, select_fields), len(meta.sample_ids)
        )

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Return whether every sample is claimed by every named task."""
        call = self._inner.check_consumption_status
        return bool(self._told("check_consumption_status", partition_id, lambda: call(partition_id, task_names)))

    def put_samples(self, sample_ids: Sequence[str], partition_id: str, fields: Any = None, tags: Any = None) -> Any:
        """Write samples; their bytes count evenly for each until it is cleared."""
        ids = sample_ids if isinstance(sample_ids, list) else list(sample_ids)
        n_bytes = _tensor_bytes(fields)
        put = self._inner.put_samples
        meta = self._told("put", partition_id, lambda: put(ids, partition_id, fields, tags), len(ids), n_bytes)
        if ids and n_bytes:
            live = self._live.setdefault(partition_id, {})
            each, more = divmod(n_bytes, len(ids))
            for at, key in enumerate(ids):
                live[key] = live.get(key, 0) + each + (at < more)
            self._stats.bytes_outstanding += n_bytes
            self._stats.peak_bytes_outstanding = max(self._stats.peak_bytes_outstanding, self._stats.bytes_outstanding)
        return meta

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        """Read fields of samples."""
        get = self._inner.get_samples
        return self._told("get", partition_id, lambda: get(sample_ids, partition_id, select_fields), len(sample_ids))

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Remove samples; None: all of the partition."""
        ids = sample_ids if sample_ids is None or isinstance(sample_ids, list) else list(sample_ids)
        clear = self._inner.clear_samples
        self._told("clear", partition_id, lambda: clear(ids, partition_id), len(ids or ()))
        live = self._live.get(partition_id, {})
        freed = sum(live.values()) if ids is None else sum(live.pop(key, 0) for key in ids)
        self._stats.bytes_outstanding -= freed
        if ids is None or not live:
            self._live.pop(partition_id, None)

    def list_sample_ids(self, partition_id: str) -> Any:
        """Return the ids of all samples of a partition, sorted."""
        return self._told("list_sample_ids", partition_id, lambda: self._inner.list_sample_ids(partition_id))

    def close(self) -> None:
        """Close the wrapped client."""
        self._told("close", "", self._inner.close)


def _tensor_bytes(rows: Any) -> int:
    """Return the bytes of the tensors among the fields; what is no tensor does not count."""
    if rows is None:
        return 0
    leaves = [raw_leaf(rows, name) for name in field_names(rows)]
    return sum((leaf.values() if leaf.is_nested else leaf).nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
