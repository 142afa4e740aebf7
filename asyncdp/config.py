"""The config of a client: a mapping, as it comes from YAML, checked key by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from asyncdp.plain import plain_tree
from asyncdp.setting_names import check_keys

__all__ = [
    "Config",
    "DataPlaneConfig",
    "MemorySettings",
    "ObservabilityConfig",
    "TransferQueueSettings",
    "UcxxSettings",
    "parse_config",
    "shared_config",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ObservabilityConfig(TypedDict):
    """``enabled``: whether ``callback`` (default: one structlog line) is called with an event per op."""

    enabled: bool
    callback: NotRequired[Callable[[dict[str, Any]], None]]


class DataPlaneConfig(TypedDict):
    """What ``build_data_plane_client`` takes.

    The first six keys are always required, so that no default hides; ``global_segment_size`` and ``local_buffer_size``
    (bytes) where impl is transfer_queue. ``storage_capacity`` counts samples. ``ack_timeout_ms`` bounds one attempt.
    ``layers`` maps layers to their settings. A mapping named after the impl holds the transport's own keys.
    """

    enabled: bool
    impl: Literal["memory", "transfer_queue", "ucxx"]
    backend: str
    storage_capacity: int
    num_storage_units: int
    claim_meta_poll_interval_s: float
    global_segment_size: NotRequired[int]
    local_buffer_size: NotRequired[int]
    controller_address: NotRequired[str]
    ack_timeout_ms: NotRequired[int]
    observability: NotRequired[ObservabilityConfig]
    call_timeout_s: NotRequired[float]
    layers: NotRequired[dict[str, dict[str, Any]]]
    group_id_pattern: NotRequired[str]
    strict_schema: NotRequired[bool]
    auto_register: NotRequired[bool]
    claim_lease_s: NotRequired[float | None]
    owner: NotRequired[str]
    memory: NotRequired[dict[str, Any]]
    transfer_queue: NotRequired[dict[str, Any]]
    ucxx: NotRequired[dict[str, Any]]


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


class UcxxSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the mapping ``ucxx``.

    Attributes:
        namespace: Prefix of the plane's keys in the directory; planes that share a directory have different ones.
        lane: ``auto``: copy through shared memory where a slot host is on this machine; ``off``: always over the wire.
        secret: What slot hosts want clients to know; default: the environment's ``ASYNCDP_SECRET``. It is in no
            ``attach_config()`` and no pickle: another process gets it by the environment. An embedded plane without one
            makes a random one, which its directory tells to whoever has the directory's password.
        allow_pickle: Whether values that msgpack cannot keep travel as pickles, which run code where they are read.
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


class Config(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A checked config; see :class:`DataPlaneConfig` for the keys."""

    enabled: bool
    impl: Literal["memory", "transfer_queue", "ucxx"]
    backend: Literal["simple", "mooncake_cpu", "valkey"]
    storage_capacity: Positive
    num_storage_units: Positive
    claim_meta_poll_interval_s: Seconds
    global_segment_size: Positive | None = None
    local_buffer_size: Positive | None = None
    controller_address: str | None = None
    ack_timeout_ms: Positive | None = None
    observability: _Observability | None = None
    call_timeout_s: Seconds = 60.0
    layers: dict[str, dict[str, Any]] = {}
    group_id_pattern: str = r"{group}_g{i}"
    strict_schema: bool = False
    auto_register: bool = False
    claim_lease_s: Seconds | None = None
    owner: str | None = None
    memory: MemorySettings | None = None
    transfer_queue: TransferQueueSettings | None = None
    ucxx: UcxxSettings | None = None


BACKENDS = {"memory": ("simple",), "transfer_queue": ("simple", "mooncake_cpu"), "ucxx": ("valkey",)}


def _pattern(text: str) -> str:
    """Turn ``{group}_g{i}`` into a regular expression; both names must be there."""
    if text.count("{group}") != 1 or text.count("{i}") != 1:
        msg = f"group_id_pattern: {text!r} must name {{group}} and {{i}} once each"
        raise ValueError(msg)
    return re.escape(text).replace(re.escape("{group}"), "(?P<group>.+)").replace(re.escape("{i}"), r"\d+")


def shared_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what other clients of the same plane may take over: all but the owner and the callback."""
    shared: dict[str, Any] = {key: value for key, value in plain_tree(config).items() if key != "owner"}
    if shared.get("observability"):
        shared["observability"] = {k: v for k, v in shared["observability"].items() if k != "callback"}
    return shared


def parse_config(config: Mapping[str, Any]) -> Config:
    """Check a config.

    Raises:
        ValueError: A key is unknown, missing or ill-typed, or the config is disabled; the message names the key.
    """
    given: object = config
    if not isinstance(given, Mapping):
        msg = f"the config must be a mapping, not a {type(config).__name__}"
        raise ValueError(msg)  # noqa: TRY004 - config errors are ValueErrors
    check_keys(config)
    try:
        parsed = msgspec.convert(plain_tree(config), Config)
    except msgspec.ValidationError as err:
        raise ValueError(_message(str(err))) from err
    if not parsed.enabled:
        msg = "enabled: the data plane is disabled by its config"
        raise ValueError(msg)
    if parsed.backend not in BACKENDS[parsed.impl]:
        msg = f"backend: {parsed.backend!r} is not one of {list(BACKENDS[parsed.impl])} of impl {parsed.impl!r}"
        raise ValueError(msg)
    if parsed.impl == "transfer_queue":
        for key in ("global_segment_size", "local_buffer_size"):
            if getattr(parsed, key) is None:
                msg = f"{key}: required where impl is transfer_queue"
                raise ValueError(msg)
    callback = None if parsed.observability is None else parsed.observability.callback
    if callback is not None and not callable(callback):
        msg = f"observability.callback: must be callable, not a {type(callback).__name__}"
        raise ValueError(msg)
    return msgspec.structs.replace(parsed, group_id_pattern=_pattern(parsed.group_id_pattern))


def _message(text: str) -> str:
    """Put the key's name first: ``Expected `int`, got `str` - at `$.a.b``` becomes ``a.b: expected int, got str``."""
    what, _, where = text.partition(" - at `")
    path = where.rstrip("`").removeprefix("$").removeprefix(".")
    named = re.search(r"(?:unknown|missing required) field `([^`]+)`", what)
    if named:
        key = f"{path}.{named[1]}" if path else named[1]
        return f"{key}: {'unknown key' if 'unknown' in what else 'required key is missing'}"
    plain = what.replace("`", "")
    return f"{path or 'config'}: {plain[:1].lower()}{plain[1:]}"
