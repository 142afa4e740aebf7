"""The config of a client: a mapping, as it comes from YAML, checked key by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from asyncdp.settings.names import convert, not_one_of, plain_mapping

__all__ = [
    "Config",
    "DataPlaneConfig",
    "MemorySettings",
    "ObservabilityConfig",
    "TransferQueueSettings",
    "UcxxSettings",
    "oddities",
    "parse_config",
    "plain_config",
    "shared_config",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
CALL_TIMEOUT_S = 60.0


class ObservabilityConfig(TypedDict):
    """``enabled``: whether ``callback`` (default: one structlog line) is called with an event per op."""

    enabled: bool
    callback: NotRequired[Callable[[dict[str, Any]], None]]


class DataPlaneConfig(TypedDict):
    """What ``build_data_plane_client`` takes: ``{"enabled": True, "impl": "memory"}`` is a whole config.

    All keys but ``enabled`` and ``impl`` have defaults, which a value of None stands for too. OmegaConf's configs are
    taken as they are.

    ``backend``: ``simple`` or ``mooncake_cpu`` for transfer_queue, ``simple`` for memory, ``valkey`` for ucxx.
    ``storage_capacity``: samples that the plane holds (1,000,000). ``num_storage_units``: storage units, or slot hosts
    that are started (2; of ucxx 1). ``claim_meta_poll_interval_s``: pause between two looks of a waiting claim, where
    the backend cannot wait itself (0.05). ``global_segment_size``, ``local_buffer_size``: bytes, for mooncake_cpu.
    These may also stand in a mapping ``simple`` or ``mooncake_cpu``, of which the one that ``backend`` names counts.
    ``controller_address``: where the plane is. ``ack_timeout_ms``: how long one attempt may take; the same as
    ``layers: {attempt_timeout: {attempt_timeout_s: ...}}``. ``call_timeout_s``: how long a verb may take (60).
    ``layers``: the settings of the default layers by layer, or a list of such mappings and of layers of one's own,
    outermost first, as callables or ``"package.module:Name"``. ``group_id_pattern``: how the group is read off an id
    (``{group}_g{i}``). ``claim_lease_s``: seconds after which a claim ends by itself (None: never). ``owner``: the
    client's name to the plane. ``full_tracebacks``: whether errors keep every frame and cause, which the environment
    variable ``ASYNCDP_FULL_TRACEBACKS=1`` says too. A mapping named after the impl holds the transport's own keys.
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
    memory: NotRequired[dict[str, Any] | None]
    transfer_queue: NotRequired[dict[str, Any] | None]
    ucxx: NotRequired[dict[str, Any] | None]


class _Observability(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    enabled: bool
    callback: Any = None


class MemorySettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the mapping ``memory``.

    Attributes:
        ports_per_host: Equal doors of a slot host; several, so that rotation has somewhere to go.
        slots_per_host: Slots of a host; None: as many as needed.
        rows_per_slot: Rows of one put that share a slot; None: all of them, which is fastest.
        checksum: Whether payloads carry a CRC-32 (about 2 GB/s).
    """

    ports_per_host: Positive = 4
    slots_per_host: Positive | None = None
    rows_per_slot: Positive | None = None
    checksum: bool = False


class TransferQueueSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the mapping ``transfer_queue``.

    Attributes:
        namespace: Which plane of a TransferQueue is meant; several may share its controller and storage units.
        endpoints: Where controller and storage units listen; ``attach_config()`` fills it in: workers need no Ray then.
        bootstrap_timeout_s: How long actors may take to start, in seconds; each imports torch (measured: 11-42 s).
        actor_runtime_env: Whether the actors get TransferQueue's requirement, as installed here, in their runtime_env.
        unit_timeout_s: Whole seconds after which TransferQueue itself gives up on a storage unit; a call's own
            timeout is shorter as a rule. Takes effect where TransferQueue is not imported yet.
        heartbeat_interval_s: Pause between two heartbeats to each server, in seconds.
        heartbeat_timeout_s: Silence after which a server counts as gone, in seconds.
        split_bytes: A put of at least this many bytes is spread over the storage units.
        checksum: Whether this client's puts carry a CRC-32 per value (about 1 GB/s); all clients check those there are.
        read_pool_bytes: How much memory of reads that were let go of is kept for the next large ones, for ten seconds;
            finding new pages is most of a large read's time. 0: none.
    """

    namespace: str = "asyncdp"
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
        """Refuse heartbeats that would find every server gone."""
        if self.heartbeat_interval_s >= self.heartbeat_timeout_s:
            raise ValueError(
                f"heartbeat_timeout_s: {self.heartbeat_timeout_s:g} s is not longer than heartbeat_interval_s"
                f" ({self.heartbeat_interval_s:g} s): every server would count as gone between two heartbeats"
            )


class UcxxSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the mapping ``ucxx``.

    Attributes:
        namespace: Prefix of the plane's keys in the directory; planes that share a directory have different ones.
        lane: ``auto``: copy through shared memory where a slot host is on this machine; ``off``: always over the wire.
        secret: What slot hosts want clients to know; default: the environment's ``ASYNCDP_SECRET``. It is in no
            ``attach_config()`` and no pickle: another process gets it by the environment. An embedded plane without one
            makes a random one, which its directory tells to whoever has the directory's password.
        allow_pickle: Whether values that msgpack cannot keep travel as pickles, which run code where they are read.
            Each process says so for itself: it is in no ``attach_config()``.
        checksum: Whether payloads that are written over the wire carry a CRC-32 (about 2 GB/s).
        connections_per_port: Requests to one port of a slot host at the same time; more wait.
        devices: Network devices for UCX, such as ``mlx5_0:1``; None: all.
        start_timeout_s: How long slot hosts that are started as children may take; each imports torch.
        folder: Where an embedded directory keeps its data, so that the plane outlives its owner; None: temporary.
        host_log: Where slot hosts started as children log: ``folder``: files beside the directory's data, which go
            with them; ``stderr``: this process' own standard error.
        host: Settings of slot hosts started as children, by the names of ``HostSettings``.
        directory: Settings of the directory's client, by the names of ``DirectorySettings``.
    """

    namespace: str = "asyncdp"
    lane: Literal["auto", "off"] = "auto"
    secret: str | None = None
    allow_pickle: bool = False
    checksum: bool = False
    connections_per_port: Positive = 8
    devices: str | None = None
    start_timeout_s: Seconds = 60.0
    folder: str | None = None
    host_log: Literal["folder", "stderr"] = "folder"
    host: dict[str, Any] = {}
    directory: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Without the secret."""
        shown = ((name, getattr(self, name)) for name in self.__struct_fields__ if name != "secret")
        return f"UcxxSettings({', '.join(f'{name}={value!r}' for name, value in shown)})"


class _Seeds(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys that may also stand in a mapping named after the backend."""

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
    controller_address: str | None = None
    ack_timeout_ms: Positive | None = None
    observability: _Observability | None = None
    call_timeout_s: Seconds = CALL_TIMEOUT_S
    layers: dict[str, dict[str, Any]] | list[Any] = {}
    group_id_pattern: str = r"{group}_g{i}"
    strict_schema: bool = False
    auto_register: bool = False
    claim_lease_s: Seconds | None = None
    owner: str | None = None
    full_tracebacks: bool = False
    memory: MemorySettings | None = None
    transfer_queue: TransferQueueSettings | None = None
    ucxx: UcxxSettings | None = None


#: The backends of each impl, the default first.
BACKENDS = {"memory": ("simple",), "transfer_queue": ("simple", "mooncake_cpu"), "ucxx": ("valkey",)}
#: Storage units, or slot hosts that are started, where the config does not say how many. A slot host takes its arena, 1
#: GiB of shared memory, when it starts.
UNITS = {"memory": 2, "transfer_queue": 2, "ucxx": 1}
#: Seconds between two looks of a waiting claim: a twentieth of what a person notices, and 20 requests a second.
POLL_S = 0.05


def _pattern(text: str) -> str:
    """Turn ``{group}_g{i}`` into a regular expression; both names must be there."""
    if text.count("{group}") != 1 or text.count("{i}") != 1:
        msg = f"group_id_pattern: {text!r} must name {{group}} and {{i}} once each"
        raise ValueError(msg)
    return re.escape(text).replace(re.escape("{group}"), "(?P<group>.+)").replace(re.escape("{i}"), r"\d+")


def shared_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what other clients of the same plane may take over: all but the owner and the callback."""
    shared: dict[str, Any] = {key: value for key, value in config.items() if key != "owner"}
    if shared.get("observability"):
        shared["observability"] = {k: v for k, v in shared["observability"].items() if k != "callback"}
    return shared


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as transports keep it and others attach with: flat, of plain values, without None.

    Raises:
        ValueError: It is no mapping, or a key is given twice: flat, and in the mapping named after the backend.
    """
    return _flat(config)[0]


def _flat(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the plain config, and where the keys come from that stood in the mapping of the backend."""
    given: object = config
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
        convert(own, _Seeds, backend)
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
        homes: Tells, for an impl, where names belong that are no keys of a config:
            ``{"max_rounds": "layers.batch_retry.max_rounds"}``.

    Raises:
        ValueError: The config is disabled; or a key is unknown, missing or ill-typed, or two do not go together. The
            message names the key.
    """
    given, origins = _flat(config)
    if given.get("enabled") is False:
        raise ValueError("enabled: the data plane is disabled by its config")
    impl = given.get("impl")
    known = impl if isinstance(impl, str) and impl in BACKENDS else "memory"
    backend = given.get("backend")
    if impl == known and isinstance(backend, str) and backend not in BACKENDS[known]:
        raise not_one_of("backend", backend, BACKENDS[known], f" for impl {known!r}")
    longest = given.get("call_timeout_s")
    poll_s = min(POLL_S, longest / 10) if isinstance(longest, (int, float)) and longest > 0 else POLL_S
    defaults = {"backend": BACKENDS[known][0], "num_storage_units": UNITS[known], "claim_meta_poll_interval_s": poll_s}
    elsewhere = {**_homes(known), **(homes(known) if homes is not None else {})}
    parsed = convert({**defaults, **given}, Config, homes=elsewhere, origins=origins)
    _check_together(parsed)
    return msgspec.structs.replace(parsed, group_id_pattern=_pattern(parsed.group_id_pattern))


def _homes(impl: str) -> dict[str, str]:
    """Return where the transports' own keys belong, those of the impl before those of others."""
    kinds = {"ucxx": UcxxSettings, "transfer_queue": TransferQueueSettings, "memory": MemorySettings}
    first = sorted(kinds, key=lambda name: name == impl)
    return {key: f"{name}.{key}" for name in first for key in kinds[name].__struct_fields__}


def _check_together(config: Config) -> None:
    """Refuse keys that are right by themselves and cannot work together."""
    if config.claim_meta_poll_interval_s >= config.call_timeout_s:
        raise ValueError(
            f"claim_meta_poll_interval_s: {config.claim_meta_poll_interval_s:g} s is not shorter than call_timeout_s"
            f" ({config.call_timeout_s:g} s): a waiting claim would look once"
        )
    if config.backend == "mooncake_cpu":
        for key in ("global_segment_size", "local_buffer_size"):
            if getattr(config, key) is None:
                raise ValueError(f"{key}: required where backend is 'mooncake_cpu'")
    callback = None if config.observability is None else config.observability.callback
    if callback is not None and not callable(callback):
        raise ValueError(f"observability.callback: must be callable, not a {type(callback).__name__}")


def oddities(config: Config) -> list[str]:
    """Return what is odd about a config that can work all the same: settings without an effect."""
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
            f"{key}: has no effect; only the backend 'mooncake_cpu' reads it"
            for key in ("global_segment_size", "local_buffer_size")
            if getattr(config, key) is not None and config.impl != "transfer_queue"
        ]
    if config.impl == "ucxx" and config.controller_address is not None and config.ucxx is not None:
        told += [
            f"ucxx.{key}: has no effect; controller_address says that the plane is there already"
            for key in ("host", "folder")
            if getattr(config.ucxx, key)
        ]
    return told
