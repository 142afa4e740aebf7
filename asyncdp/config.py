"""The config of a client: a mapping, for example from YAML, which is checked key by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from asyncdp.settings.names import as_mapping, convert, not_one_of, plain_mapping

__all__ = [
    "Config",
    "DataPlaneConfig",
    "MemorySettings",
    "NemoSettings",
    "ObservabilityConfig",
    "TransferQueueSettings",
    "UcxxSettings",
    "config_warnings",
    "parse_config",
    "plain_config",
    "shared_config",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
CALL_TIMEOUT_S = 60.0


class ObservabilityConfig(TypedDict):
    """Config of events: if ``enabled``, ``callback`` is called with an event per op; default: log a structlog line."""

    enabled: bool
    callback: NotRequired[Callable[[dict[str, Any]], None]]


class DataPlaneConfig(TypedDict):
    """Config for ``build_data_plane_client``; ``{"enabled": True, "impl": "memory"}`` is complete.

    All keys but ``enabled`` and ``impl`` have defaults, which None selects too. A config may be one of OmegaConf's.

    Attributes:
        enabled: Whether the plane is to be opened. If False, ``build_data_plane_client`` refuses, before it looks at
            anything else.
        impl: The transport.
        backend: ``simple`` for memory; ``simple`` or ``mooncake_cpu`` for transfer_queue; ``valkey`` for ucxx,
            which takes those two for it, so that ``impl`` alone can be changed. Default: the first of each.
        storage_capacity: Number of samples that the plane holds.
        num_storage_units: Number of storage units, or of slot hosts to start. Default: 2; for ucxx 1.
        claim_meta_poll_interval_s: Seconds between two polls of a waiting claim, if the backend cannot wait itself;
            shorter than ``call_timeout_s``. Default: 0.05.
        global_segment_size: Bytes of memory that each storage unit gives to Mooncake; required with ``mooncake_cpu``,
            and read by nothing else.
        local_buffer_size: Bytes of Mooncake's own buffer in each process; required with ``mooncake_cpu``, and read by
            nothing else.
        simple: A mapping with the five keys above, used if ``backend`` is ``simple``. A key that is given here and at
            the top is refused.
        mooncake_cpu: A mapping with the same keys, used if ``backend`` is ``mooncake_cpu``.
        controller_address: Address of the plane: Ray's address for transfer_queue, the URL of the directory for ucxx.
            None: a plane is started, or attached to where it is announced.
        ack_timeout_ms: Milliseconds that one attempt may take; the same as
            ``layers: {attempt_timeout: {attempt_timeout_s: ...}}``, of which only one may be given.
        observability: ``{enabled, callback}``: whether ``callback`` gets an event per verb; without one, an event is a
            log line.
        call_timeout_s: Seconds that a verb may take where no ``timeout_s`` is given.
        layers: Settings of the default layers by layer (``{slot_retry: {max_attempts: 2}}``) and of the retry budget
            (``retry_budget``), or a list of such mappings and of user-defined layers, outermost first, as callables or
            ``"package.module:Name"``.
        group_id_pattern: How a sample id contains the group id, for samples without the tag ``group_id``.
        strict_schema: Whether a put of a field that the partition does not declare is refused.
        auto_register: Whether a put to an unknown partition declares it; with ``nemo``, True unless it is given.
        claim_lease_s: Seconds after which a claim expires; None: never.
        owner: Name of the client at the plane, by which its claims are listed and released. Default: host, process id
            and a number.
        full_tracebacks: Whether errors keep every frame and cause, as the environment variable
            ``ASYNCDP_FULL_TRACEBACKS=1`` requests too.
        nemo: Whether the client behaves as NeMo-RL's where that differs, or the keys of :class:`NemoSettings`.
        memory: Keys of the memory transport, see :class:`MemorySettings`.
        transfer_queue: Keys of the TransferQueue transport, see :class:`TransferQueueSettings`.
        ucxx: Keys of the UCXX transport, see :class:`UcxxSettings`.
    """

    enabled: bool
    impl: Literal["memory", "transfer_queue", "ucxx"]
    backend: NotRequired[str | None]
    storage_capacity: NotRequired[int | None]
    num_storage_units: NotRequired[int | None]
    claim_meta_poll_interval_s: NotRequired[float | None]
    global_segment_size: NotRequired[int | None]
    local_buffer_size: NotRequired[int | None]
    simple: NotRequired[dict[str, Any] | None]
    mooncake_cpu: NotRequired[dict[str, Any] | None]
    controller_address: NotRequired[str | None]
    ack_timeout_ms: NotRequired[int | None]
    observability: NotRequired[ObservabilityConfig | None]
    call_timeout_s: NotRequired[float | None]
    layers: NotRequired[dict[str, dict[str, Any]] | list[Any] | None]
    group_id_pattern: NotRequired[str | None]
    strict_schema: NotRequired[bool | None]
    auto_register: NotRequired[bool | None]
    claim_lease_s: NotRequired[float | None]
    owner: NotRequired[str | None]
    full_tracebacks: NotRequired[bool | None]
    nemo: NotRequired[bool | dict[str, Any] | None]
    memory: NotRequired[dict[str, Any] | None]
    transfer_queue: NotRequired[dict[str, Any] | None]
    ucxx: NotRequired[dict[str, Any] | None]


class _Observability(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    enabled: bool
    callback: Any = None


class MemorySettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the mapping ``memory``.

    Attributes:
        ports_per_host: Number of interchangeable ports of a slot host; several, so that PortRotation has a choice.
        slots_per_host: Number of slots of a host; None: as many as needed.
        rows_per_slot: Number of rows of one put that share a slot; None: all of them, which is fastest.
        checksum: Whether payloads carry a CRC-32 (about 2 GB/s).
    """

    ports_per_host: Positive = 4
    slots_per_host: Positive | None = None
    rows_per_slot: Positive | None = None
    checksum: bool = False


class TransferQueueSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the mapping ``transfer_queue``.

    Attributes:
        namespace: Name of the plane; several planes may share the controller and storage units of a TransferQueue.
        endpoints: Addresses of controller and storage units; filled in by ``attach_config()``, so that workers need no
            Ray.
        bootstrap_timeout_s: Seconds that actors may take to start; each imports torch (measured: 11-42 s).
        actor_runtime_env: Whether the actors' runtime_env requires TransferQueue in the version installed here.
        unit_timeout_s: Whole seconds after which TransferQueue itself gives up on a storage unit; the timeout of a call
            is usually shorter. Has no effect if TransferQueue is imported already.
        heartbeat_interval_s: Seconds between two heartbeats to each server.
        heartbeat_timeout_s: Seconds without an answer after which a server counts as dead.
        split_bytes: A put of at least this many bytes is spread over the storage units.
        checksum: Whether this client's puts carry a CRC-32 per value (about 1 GB/s); every client verifies those that
            values have.
        read_pool_bytes: Bytes of memory of freed reads that are kept, for ten seconds, for the next large ones;
            allocating new pages takes most of a large read's time. 0: none.
    """

    namespace: Text = "asyncdp"
    endpoints: dict[str, Any] | None = None
    bootstrap_timeout_s: Seconds = 120.0
    actor_runtime_env: bool = False
    unit_timeout_s: Positive = 60
    heartbeat_interval_s: Seconds = 0.5
    heartbeat_timeout_s: Seconds = 1.5
    split_bytes: Positive = 1 << 20
    checksum: bool = False
    read_pool_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30

    def __post_init__(self) -> None:
        """Refuse heartbeat settings with which every server would count as dead."""
        if self.heartbeat_interval_s >= self.heartbeat_timeout_s:
            raise ValueError(
                f"heartbeat_timeout_s: {self.heartbeat_timeout_s:g} s is not longer than heartbeat_interval_s"
                f" ({self.heartbeat_interval_s:g} s): every server would count as gone between two heartbeats"
            )


class UcxxSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the mapping ``ucxx``.

    Attributes:
        namespace: Prefix of the plane's keys in the directory; planes that share a directory have different ones.
        lane: ``auto``: copy through shared memory if a slot host is on this machine; ``off``: always use the network.
        borrow_share: Share of a slot host's arena that reads with ``borrow=True`` of this client may keep from being
            reused at a time; beyond it they copy. 0: they always do.
        secret: Secret that clients have to prove to slot hosts; None: the environment variable ``ASYNCDP_SECRET``. It
            is in no ``attach_config()`` and no pickle; other processes get it from their environment. An embedded plane
            without one makes a random secret, which its directory gives to clients that know the directory's password.
        allow_pickle: Whether values that msgpack cannot encode are sent as pickles, which run code where they are read.
            Each process sets this for itself: it is in no ``attach_config()``.
        checksum: Whether payloads that are written over the network carry a CRC-32 (about 2 GB/s).
        connections_per_port: Number of concurrent requests to one port of a slot host; further ones wait.
        devices: Network devices for UCX, such as ``mlx5_0:1``; None: all.
        start_timeout_s: Seconds that slot hosts started as children may take to start.
        folder: Folder of an embedded directory's data, so that the plane outlives its owner; None: a temporary one.
        host_log: Where slot hosts started as children log: ``folder``: to files beside the directory's data, which are
            deleted with it; ``stderr``: to this process' standard error.
        host: Settings of slot hosts started as children, by their names in ``HostSettings``.
        directory: Settings of the directory's client, by their names in ``DirectorySettings``.
    """

    namespace: Text = "asyncdp"
    lane: Literal["auto", "off"] = "auto"
    borrow_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    secret: str | None = None
    allow_pickle: bool = False
    checksum: bool = False
    connections_per_port: Positive = 8
    devices: str | None = None
    start_timeout_s: Seconds = 60.0
    folder: Text | None = None
    host_log: Literal["folder", "stderr"] = "folder"
    host: dict[str, Any] = {}
    directory: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Return the settings as text, without the secret."""
        shown = ((name, getattr(self, name)) for name in self.__struct_fields__ if name != "secret")
        return f"UcxxSettings({', '.join(f'{name}={value!r}' for name, value in shown)})"


class NemoSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the mapping ``nemo``: in what a client behaves as NeMo-RL's; ``nemo: true`` selects all defaults.

    Attributes:
        rectangles: Whether a ragged field whose rows have equal lengths in a read comes back dense.
        partial_claims: Whether a claim returns as soon as one sample is ready, with up to ``batch_size``.
        whole_groups: Whether claims take whole groups of ``grpo_group_size``. False: the group size is not declared.
        clear_all: Whether ``clear_samples(None, ...)`` removes every sample of the partition, whoever put it.
        declare_anew: Whether registering a partition that has no samples forgets the types that its fields had.
        object_arrays: Whether an array of objects of several dimensions is put as one list per row.
        infrastructure_errors: Whether errors of the infrastructure are ConnectionErrors too, and errors of unknown
            names KeyErrors too.
        find_plane: Whether a driver makes the plane known to workers that have the same config.
    """

    rectangles: bool = True
    partial_claims: bool = True
    whole_groups: bool = False
    clear_all: bool = True
    declare_anew: bool = True
    object_arrays: bool = True
    infrastructure_errors: bool = True
    find_plane: bool = True


class _BackendKeys(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys that may also be given in a mapping named after the backend."""

    storage_capacity: Positive | None = None
    num_storage_units: Positive | None = None
    claim_meta_poll_interval_s: Seconds | None = None
    global_segment_size: Positive | None = None
    local_buffer_size: Positive | None = None


class Config(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A checked config; see :class:`DataPlaneConfig` for the keys."""

    enabled: bool
    impl: Literal["memory", "transfer_queue", "ucxx"]
    backend: Literal["simple", "mooncake_cpu", "valkey"]
    num_storage_units: Positive
    claim_meta_poll_interval_s: Seconds
    storage_capacity: Positive = 1_000_000
    global_segment_size: Positive | None = None
    local_buffer_size: Positive | None = None
    controller_address: Text | None = None
    ack_timeout_ms: Positive | None = None
    observability: _Observability | None = None
    call_timeout_s: Seconds = CALL_TIMEOUT_S
    layers: dict[str, dict[str, Any]] | list[Any] = {}
    group_id_pattern: str = r"{group}_g{i}"
    strict_schema: bool = False
    auto_register: bool = False
    claim_lease_s: Seconds | None = None
    owner: Text | None = None
    full_tracebacks: bool = False
    nemo: bool | NemoSettings | None = None
    memory: MemorySettings | None = None
    transfer_queue: TransferQueueSettings | None = None
    ucxx: UcxxSettings | None = None


#: The backends of each impl, the default first.
BACKENDS = {"memory": ("simple",), "transfer_queue": ("simple", "mooncake_cpu"), "ucxx": ("valkey",)}
#: Backends of other impls that are taken for the default one, so that ``impl`` alone can be changed in a config.
STAND_INS = {"ucxx": ("simple", "mooncake_cpu")}
#: Default number of storage units, or of slot hosts to start. A slot host allocates its arena, 1 GiB of shared memory,
#: when it starts.
UNITS = {"memory": 2, "transfer_queue": 2, "ucxx": 1}
#: Default seconds between two polls of a waiting claim: a twentieth of a delay that people notice, and 20 requests a
#: second.
POLL_S = 0.05


def _pattern(text: str) -> str:
    """Turn a pattern such as ``{group}_g{i}`` into a regular expression; it must contain both names once."""
    if text.count("{group}") != 1 or text.count("{i}") != 1:
        msg = f"group_id_pattern: {text!r} must name {{group}} and {{i}} once each"
        raise ValueError(msg)
    return re.escape(text).replace(re.escape("{group}"), "(?P<group>.+)").replace(re.escape("{i}"), r"\d+")


def shared_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that other clients of the plane can use: all but the owner and the callback."""
    shared: dict[str, Any] = {key: value for key, value in config.items() if key != "owner"}
    if shared.get("observability"):
        shared["observability"] = {k: v for k, v in shared["observability"].items() if k != "callback"}
    return shared


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in the form that transports and ``attach_config()`` use: flat, with plain values, without None.

    Raises:
        ValueError: The config is no mapping, or a key is given at the top and in the mapping named after the backend.
    """
    return _flat(config)[0]


def _flat(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the plain config, and the original paths of keys that were in the mapping named after the backend."""
    given: object = as_mapping(config)
    if not isinstance(given, Mapping):
        msg = f"the config must be a mapping, not a {type(config).__name__}"
        raise ValueError(msg)  # noqa: TRY004 - config errors are ValueErrors
    if given.get("enabled") is False:
        return {"enabled": False}, {}
    whole = plain_mapping(given)
    origins: dict[str, str] = {}
    for backend in ("simple", "mooncake_cpu"):
        own = whole.pop(backend, {})
        if not isinstance(own, Mapping):
            raise ValueError(f"{backend}: must be a mapping of the backend's keys, not {own!r:.80}")  # noqa: TRY004
        convert(own, _BackendKeys, backend)
        if backend != whole.get("backend", "simple"):
            continue
        for key, value in own.items():
            if key in whole:
                raise ValueError(f"{key}: given twice, as {key} and as {backend}.{key}; leave one out")
            whole[key] = value
            origins[key] = f"{backend}.{key}"
    return whole, origins


def parse_config(
    config: Mapping[str, Any], *, homes: Callable[[str | None], Mapping[str, str]] | None = None
) -> Config:
    """Check a config.

    Args:
        config: See :class:`DataPlaneConfig`.
        homes: Returns, for an impl, the paths of settings that users may misplace, for error messages:
            ``{"max_rounds": "layers.batch_retry.max_rounds"}``.

    Raises:
        ValueError: The config is disabled, a key is unknown, missing or has the wrong type, or two keys contradict each
            other. The message names the key.
    """
    given, origins = _flat(config)
    if given.get("enabled") is False:
        raise ValueError("enabled: the data plane is disabled by its config")
    impl = given.get("impl")
    known = impl if isinstance(impl, str) and impl in BACKENDS else "memory"
    backend = given.get("backend")
    if impl == known and backend in STAND_INS.get(known, ()):
        given["backend"] = BACKENDS[known][0]
    elif impl == known and isinstance(backend, str) and backend not in BACKENDS[known]:
        raise not_one_of("backend", backend, BACKENDS[known], f" for impl {known!r}")
    longest = given.get("call_timeout_s")
    poll_s = min(POLL_S, longest / 10) if isinstance(longest, (int, float)) and longest > 0 else POLL_S
    defaults = {"backend": BACKENDS[known][0], "num_storage_units": UNITS[known], "claim_meta_poll_interval_s": poll_s}
    if given.get("nemo", False) is not False:  # TransferQueue makes a partition of whatever is put to it
        defaults["auto_register"] = True
    elsewhere = {**_setting_paths(known), **(homes(known) if homes is not None else {})}
    parsed = convert({**defaults, **given}, Config, homes=elsewhere, origins=origins)
    _check_together(parsed)
    nemo = NemoSettings() if parsed.nemo is True else parsed.nemo or None
    return msgspec.structs.replace(parsed, group_id_pattern=_pattern(parsed.group_id_pattern), nemo=nemo)


def _setting_paths(impl: str) -> dict[str, str]:
    """Return the paths of the transports' own keys; for a name that several have, the path of this impl."""
    kinds = {"ucxx": UcxxSettings, "transfer_queue": TransferQueueSettings, "memory": MemorySettings}
    first = sorted(kinds, key=lambda name: name == impl)
    return {key: f"{name}.{key}" for name in first for key in kinds[name].__struct_fields__}


def _check_together(config: Config) -> None:
    """Raise ValueError for keys that are valid alone but cannot work together."""
    if config.claim_meta_poll_interval_s >= config.call_timeout_s:
        raise ValueError(
            f"claim_meta_poll_interval_s: {config.claim_meta_poll_interval_s:g} s is not shorter than call_timeout_s"
            f" ({config.call_timeout_s:g} s): a waiting claim would look once"
        )
    if config.backend == "mooncake_cpu":
        for key in ("global_segment_size", "local_buffer_size"):
            if getattr(config, key) is None:
                raise ValueError(f"{key}: the backend 'mooncake_cpu' needs it, in bytes")
    callback = None if config.observability is None else config.observability.callback
    if callback is not None and not callable(callback):
        raise ValueError(f"observability.callback: must be callable, not a {type(callback).__name__}")


def config_warnings(config: Config) -> list[str]:
    """Return warnings about a valid config: settings that have no effect, or limits that make no sense together."""
    told = []
    seconds = None if config.ack_timeout_ms is None else config.ack_timeout_ms / 1e3
    if seconds is not None and seconds > config.call_timeout_s:
        told.append(
            f"ack_timeout_ms: an attempt may take {seconds:g} s, the whole call only {config.call_timeout_s:g} s"
            " (call_timeout_s)"
        )
    if config.claim_lease_s is not None and config.claim_lease_s <= config.claim_meta_poll_interval_s:
        told.append(
            f"claim_lease_s: a claim ends after {config.claim_lease_s:g} s, before a claim looks twice"
            f" (claim_meta_poll_interval_s, {config.claim_meta_poll_interval_s:g} s)"
        )
    if config.storage_capacity < config.num_storage_units:
        told.append(
            f"storage_capacity: {config.storage_capacity} samples leave some of {config.num_storage_units}"
            " num_storage_units empty"
        )
    if config.backend != "mooncake_cpu":
        told += [
            f"{key}: has no effect; it is of the backend 'mooncake_cpu'"
            for key in ("global_segment_size", "local_buffer_size")
            if getattr(config, key) is not None and config.impl != "transfer_queue" and not config.nemo
        ]
    if config.impl == "ucxx" and config.controller_address is not None and config.ucxx is not None:
        told += [
            f"ucxx.{key}: has no effect; controller_address says that the plane is there already"
            for key in ("host", "folder")
            if getattr(config.ucxx, key)
        ]
    return told
