"""Puts clients together: the only module, with the command line, that knows layers and transports."""

from __future__ import annotations

import importlib
import inspect
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from asyncdp import stack_arguments as check
from asyncdp.calls import Clock, Env
from asyncdp.client import BaseClient
from asyncdp.clock import AnyioClock
from asyncdp.config import Config, parse_config
from asyncdp.ledger import Ledger
from asyncdp.middleware.adapter import Adapter
from asyncdp.middleware.attempt_timeout import AttemptTimeout
from asyncdp.middleware.batch_retry import BatchRetry
from asyncdp.middleware.budget import RetryBudget
from asyncdp.middleware.metrics import Metrics, log_event
from asyncdp.middleware.port_rotation import PortRotation
from asyncdp.middleware.settle import Settle
from asyncdp.middleware.slot_mapping import SlotMapping
from asyncdp.middleware.slot_retry import SlotRetry
from asyncdp.middleware.typed_errors import TypedErrors
from asyncdp.setting_names import check_keys

__all__ = ["DEFAULT_LAYERS", "build_data_plane_client", "default_layers", "layers_of", "stack"]

#: What wraps a client: a layer class, a partial of one, or any callable ``(inner) -> client``.
LayerFactory = Callable[[BaseClient], Any]

#: The default stack below Metrics, outermost first, by the names that ``layers:`` in the config uses.
DEFAULT_LAYERS: Mapping[str, type[BaseClient]] = {
    "batch_retry": BatchRetry,
    "slot_mapping": SlotMapping,
    "settle": Settle,
    "slot_retry": SlotRetry,
    "port_rotation": PortRotation,
    "attempt_timeout": AttemptTimeout,
    "typed_errors": TypedErrors,
}
#: Layers that see slots: SlotMapping stands above the first of them.
_BELOW_MAPPING = (Settle, SlotRetry, PortRotation, AttemptTimeout, TypedErrors)


def _settings_of(layer: type) -> list[str]:
    """Names of the keyword settings of a layer."""
    parameters = inspect.signature(layer).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _setting(key: str, value: Any, layer: type[BaseClient], path: str) -> Any:
    """Check a setting's type and range; what else may be wrong with it is the layer's to say."""
    return check.setting(value, str(inspect.signature(layer).parameters[key].annotation), path)


def default_layers(by_layer: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any) -> list[LayerFactory]:
    """Return the default layers below Metrics, outermost first, to use as they are or with others among them.

    Args:
        by_layer: ``{layer name: {setting: value}}``, as ``layers:`` in the config.
        **settings: Settings by their own names, which no two layers share: ``attempt_timeout_s=5.0``.

    Raises:
        ValueError: No layer of that name, no layer has that setting, or its value is of another type or not positive.
    """
    check_keys({"layers": by_layer or {}})
    chosen: dict[str, dict[str, Any]] = {name: {} for name in DEFAULT_LAYERS}
    for name, values in (by_layer or {}).items():
        if name not in DEFAULT_LAYERS:
            msg = f"layers.{name}: no such layer; there are {list(DEFAULT_LAYERS)}"
            raise ValueError(msg)
        for key, value in values.items():
            if key not in _settings_of(DEFAULT_LAYERS[name]):
                msg = f"layers.{name}.{key}: no such setting; there are {_settings_of(DEFAULT_LAYERS[name])}"
                raise ValueError(msg)
            chosen[name][key] = _setting(key, value, DEFAULT_LAYERS[name], f"layers.{name}.{key}")
    for key, value in settings.items():
        homes = [name for name, layer in DEFAULT_LAYERS.items() if key in _settings_of(layer)]
        if not homes:
            msg = f"{key}: no layer has this setting"
            raise ValueError(msg)
        chosen[homes[0]][key] = _setting(key, value, DEFAULT_LAYERS[homes[0]], key)
    return [partial(layer, **chosen[name]) if chosen[name] else layer for name, layer in DEFAULT_LAYERS.items()]


def layers_of(client: BaseClient) -> Iterator[BaseClient]:
    """Iterate over a stack, outermost first, the transport last."""
    at: Any = client
    while at is not None:
        yield at
        at = getattr(at, "inner", None)


def _client(made: Any, what: str) -> BaseClient:
    """Wrap what knows verbs only; ``what`` names it where it is no client."""
    if isinstance(made, BaseClient):
        return made
    check.client(made, what)
    return Adapter(made)


def _check_budget(settings: Mapping[str, float] | None, key: str) -> None:
    """Refuse settings that the retry budget does not know or cannot use."""
    known = _settings_of(RetryBudget)
    for name in settings or {}:
        if name not in known:
            msg = f"{key}.{name}: no such setting; there are {known}"
            raise ValueError(msg)
    try:
        RetryBudget(0.0, **(settings or {}))
    except (TypeError, ValueError) as err:
        msg = f"{key}: {err}"
        raise ValueError(msg) from err


def stack(
    transport: Any,
    layers: Sequence[LayerFactory] | None = None,
    *,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    on_event: Callable[[Any], None] | None = None,
    call_timeout_s: float | None = None,
    claim_poll_s: float | None = None,
    retry_budget: Mapping[str, float] | None = None,
    **settings: Any,
) -> BaseClient:
    """Put layers around a transport.

    Args:
        transport: A transport, or any client with the verbs only (sync or async), which is then wrapped by Adapter.
        layers: Callables ``(inner) -> client``, outermost first; None: the default ones. Metrics is always there, and
            SlotMapping where the transport is slot_addressable: they are added where the list has none.
        clock: Source of time for all layers; for tests.
        rng: Source of chance for all layers; for tests.
        on_event: Gets one event per op.
        call_timeout_s: Seconds that a verb may take; default: the transport's, 60 s.
        claim_poll_s: Pause between two looks of a blocking claim, where the backend cannot wait itself.
        retry_budget: Settings of :class:`~asyncdp.middleware.budget.RetryBudget`: ratio, floor_per_s, window_s.
        **settings: Settings of the default layers, by name: ``attempt_timeout_s=5.0``, ``max_rounds=2``.

    Returns:
        The outermost client. Errors that leave it are not ``retryable`` any more: the layers have tried.

    Raises:
        ValueError: A setting that no layer has, or settings together with a list of layers, or a value of another type
            or out of range; the message names it.
        TypeError: The transport is no client, or a layer cannot be called or makes none; the message says which.
    """
    _check_budget(retry_budget, "retry_budget")
    check.options(clock=clock, rng=rng, on_event=on_event, call_timeout_s=call_timeout_s, claim_poll_s=claim_poll_s)
    layers = None if layers is None else check.factories(layers)
    if layers is not None and settings:
        msg = f"{next(iter(settings))}: settings go with the default layers; give them to the layers of the list"
        raise ValueError(msg)
    base = _client(transport, "transport")
    client = base
    made = list(default_layers(**settings) if layers is None else layers)
    if not base.get_capabilities().slot_addressable:
        made = [f for f in made if _class_of(f) is not SlotMapping]
    elif not any(_class_of(f) is SlotMapping for f in made):
        at = next((i for i, f in enumerate(made) if _class_of(f) in _BELOW_MAPPING), len(made))
        made.insert(at, SlotMapping)
    for factory in reversed(made):
        client = _client(factory(client), f"what {_name_of(factory)} returned")
    added = takewhile(lambda layer: layer is not base, layers_of(client))
    metrics = next((layer for layer in added if isinstance(layer, Metrics)), None)
    if metrics is None:
        client = metrics = Metrics(client, on_event)
    elif on_event is not None:
        metrics.on_event = on_event
    env = Env(
        clock=clock or AnyioClock(),
        rng=rng or random.Random(),  # noqa: S311 - jitter
        sink=metrics,
        budget=RetryBudget(0.0, **(retry_budget or {})),
        codec=base.object_codec,
        ledger=Ledger(),
        session=uuid.uuid4().hex[:16],  # never by rng: two clients with one seed would share their op_ids
    )
    if claim_poll_s is not None:
        env.claim_poll_s = claim_poll_s
    for layer in layers_of(client):
        layer.env = env
    client.outermost = True
    client.call_timeout_s = base.call_timeout_s if call_timeout_s is None else call_timeout_s
    options = {
        "call_timeout_s": call_timeout_s,
        "claim_poll_s": claim_poll_s,
        "retry_budget": retry_budget,
        **settings,
    }
    client.recipe = (_restack, (transport, layers, options))
    return client


def _restack(transport: Any, layers: Sequence[LayerFactory] | None, options: dict[str, Any]) -> BaseClient:
    return stack(transport, layers, **options)


def _class_of(factory: LayerFactory) -> Any:
    """Return the class that a factory makes, where it can be told."""
    return factory.func if isinstance(factory, partial) else factory


def _name_of(factory: LayerFactory) -> str:
    return str(getattr(_class_of(factory), "__name__", repr(factory)))


def _transport(config: Mapping[str, Any], parsed: Config, *, bootstrap: bool) -> BaseClient:
    module, name, extra = {
        "memory": ("asyncdp.transports.memory", "MemoryTransport", ""),
        "transfer_queue": ("asyncdp.transports.transfer_queue", "TQTransport", "tq"),
        "ucxx": ("asyncdp.transports.ucxx", "UCXXTransport", "ucxx"),
    }[parsed.impl]
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as err:
        msg = f"impl {parsed.impl!r} cannot be opened; it needs the extra: pip install 'asyncdp[{extra}]' ({err})"
        raise ImportError(msg) from err
    transport: BaseClient = kind(config, bootstrap=bootstrap)
    return transport


def build_data_plane_client(config: Mapping[str, Any], *, bootstrap: bool = True) -> BaseClient:
    """Build a client from a config.

    Args:
        config: See :class:`~asyncdp.config.DataPlaneConfig`.
        bootstrap: Whether to start the plane (driver), or to attach to the one that is there (workers, with the
            driver's ``attach_config()``).

    Raises:
        ValueError: A key is unknown, missing or ill-typed, or the config is disabled; the message names the key.
        ImportError: The impl needs an extra that is not installed; the message names it.
    """
    parsed = parse_config(config)
    config = {key: value for key, value in config.items() if key != "observability" or value is not None}
    by_layer = {name: dict(values) for name, values in parsed.layers.items()}
    if parsed.ack_timeout_ms is not None:
        by_layer.setdefault("attempt_timeout", {}).setdefault("attempt_timeout_s", parsed.ack_timeout_ms / 1e3)
    retry_budget = by_layer.pop("retry_budget", None)
    _check_budget(retry_budget, "layers.retry_budget")
    layers = default_layers(by_layer)
    on_event = None
    if parsed.observability is not None and parsed.observability.enabled:
        on_event = parsed.observability.callback or log_event
    client = stack(
        _transport(config, parsed, bootstrap=bootstrap),
        layers,
        on_event=on_event,
        call_timeout_s=parsed.call_timeout_s,
        claim_poll_s=parsed.claim_meta_poll_interval_s,
        retry_budget=retry_budget,
    )
    client.recipe = (_reattach, (client.attach_config(),))
    return client


def _reattach(config: dict[str, Any]) -> BaseClient:
    return build_data_plane_client(config, bootstrap=False)
