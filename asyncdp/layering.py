"""Puts layers around a transport: the default layers, their settings, and ``stack()``."""

from __future__ import annotations

import importlib
import inspect
import random
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import takewhile
from typing import Any

from asyncdp.calls import Clock, Env
from asyncdp.client import Client
from asyncdp.clock import AnyioClock
from asyncdp.compose.composition import SlotMapping
from asyncdp.compose.outcomes import PendingOutcomes
from asyncdp.config import UcxxSettings
from asyncdp.errors import DataPlaneError
from asyncdp.middleware.adapter import Adapter
from asyncdp.middleware.attempt_timeout import AttemptTimeout
from asyncdp.middleware.batch_retry import BatchRetry
from asyncdp.middleware.counters import Counters
from asyncdp.middleware.fault_log import FaultLog
from asyncdp.middleware.metrics import Metrics
from asyncdp.middleware.policy.budget import RetryBudget
from asyncdp.middleware.port_rotation import PortRotation
from asyncdp.middleware.reconcile import Reconcile
from asyncdp.middleware.slot_retry import SlotRetry
from asyncdp.middleware.typed_errors import TypedErrors
from asyncdp.service import Layer, Service, layers_of
from asyncdp.settings import stack_arguments as check
from asyncdp.settings.names import check_keys, no_such, not_one_of

__all__ = [
    "ADDED",
    "BELOW_MAPPING",
    "DEFAULT_LAYERS",
    "LayerFactory",
    "check_budget",
    "class_of",
    "default_layers",
    "imported",
    "layer_settings",
    "setting_paths",
    "stack",
]

#: Makes a layer around a service: a layer class, a partial of one, or any callable ``(client) -> client``.
LayerFactory = Callable[[Any], Any]

#: The default layers below Metrics, outermost first, by their names under ``layers:`` in the config.
DEFAULT_LAYERS: Mapping[str, type[Layer]] = {
    "batch_retry": BatchRetry,
    "slot_mapping": SlotMapping,
    "reconcile": Reconcile,
    "slot_retry": SlotRetry,
    "port_rotation": PortRotation,
    "attempt_timeout": AttemptTimeout,
    "typed_errors": TypedErrors,
}
#: Former names of layers in the config, which are taken for one version.
_RENAMED: Mapping[str, str] = {"settle": "reconcile"}
#: Layers that handle slot calls: SlotMapping has to be above the first of them.
BELOW_MAPPING = (Reconcile, SlotRetry, PortRotation, AttemptTimeout, TypedErrors)
#: Layers by which a service is recognised as having been through ``stack()``.
ADDED = frozenset({Metrics, *DEFAULT_LAYERS.values()})


@cache
def _all_settings() -> Mapping[type, Mapping[str, str]]:
    """Return names and annotations of each layer's keyword settings; cached, since inspecting takes milliseconds."""
    found: dict[type, Mapping[str, str]] = {}
    for kind in (*DEFAULT_LAYERS.values(), RetryBudget):
        parameters = inspect.signature(kind).parameters.values()
        found[kind] = {p.name: str(p.annotation) for p in parameters if p.kind is p.KEYWORD_ONLY}
    return found


def layer_settings() -> dict[str, dict[str, str]]:
    """Return the types of all settings under ``layers:`` as text: ``{layer: {setting: type}}``."""
    kinds: dict[str, type] = {**DEFAULT_LAYERS, "retry_budget": RetryBudget}
    return {name: dict(_all_settings()[kind]) for name, kind in kinds.items()}


def _settings_of(kind: type) -> Sequence[str]:
    return list(_all_settings()[kind])


def _setting(key: str, value: Any, layer: type[Layer], path: str) -> Any:
    """Check the type and range of a setting; further checks are the layer's own."""
    return check.setting(value, _all_settings()[layer][key], path)


def setting_paths(impl: str | None = None) -> dict[str, str]:
    """Return, for settings that users may misplace, the path in the config where they belong."""
    homes = {key: f"layers.{name}.{key}" for name, layer in DEFAULT_LAYERS.items() for key in _settings_of(layer)}
    homes |= {name: f"layers.{name}" for name in (*DEFAULT_LAYERS, "retry_budget")}
    if impl == "ucxx":
        with suppress(ImportError):
            kind = importlib.import_module("asyncdp.transports.ucxx.host.settings").HostSettings
            shared = set(UcxxSettings.__struct_fields__)
            homes |= {key: f"ucxx.host.{key}" for key in kind.__struct_fields__ if key not in shared}
    return homes


def default_layers(by_layer: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any) -> list[LayerFactory]:
    """Return the default layers below Metrics, outermost first, for use in ``stack()`` alone or with other layers.

    Args:
        by_layer: ``{layer name: {setting: value}}``, as under ``layers:`` in the config.
        **settings: Settings by name alone, such as ``attempt_timeout_s=5.0``; no two layers share a name.

    Raises:
        ValueError: A layer or setting is unknown, or a value has the wrong type or is not positive.
    """
    check_keys({"layers": by_layer or {}})
    chosen: dict[str, dict[str, Any]] = {name: {} for name in DEFAULT_LAYERS}
    for given, values in (by_layer or {}).items():
        name = _RENAMED.get(given, given)
        if name != given:
            text = f"layers.{given}: it is layers.{name} now; the old name is taken for one version"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        if name not in DEFAULT_LAYERS:
            raise no_such(
                f"layers.{name}", (*DEFAULT_LAYERS, "retry_budget"), problem="no such layer", homes=setting_paths()
            )
        for key, value in values.items():
            known = _settings_of(DEFAULT_LAYERS[name])
            if key not in known:
                raise no_such(f"layers.{name}.{key}", known, problem="no such setting", homes=setting_paths())
            chosen[name][key] = _setting(key, value, DEFAULT_LAYERS[name], f"layers.{name}.{key}")
    for key, value in settings.items():
        homes = [name for name, layer in DEFAULT_LAYERS.items() if key in _settings_of(layer)]
        if not homes:
            known = [name for layer in DEFAULT_LAYERS.values() for name in _settings_of(layer)]
            raise no_such(key, known, problem="no layer has this setting")
        chosen[homes[0]][key] = _setting(key, value, DEFAULT_LAYERS[homes[0]], key)
    return [partial(layer, **chosen[name]) if chosen[name] else layer for name, layer in DEFAULT_LAYERS.items()]


def _service(made: Any, what: str, inner: Service | None = None) -> Service:
    """Return a service, a client's service, or an Adapter around any other client; ``what`` names it in errors."""
    if isinstance(made, Service):
        return made
    if isinstance(made, Client):
        return made.given
    check.client(made, what)
    return Adapter(made, inner=inner)


def _wrapped(factory: LayerFactory, inner: Service, env: Env) -> Service:
    """Put a layer around a service: a Service class gets the service itself, any other callable a client over it."""
    kind = class_of(factory)
    below: Any = inner if isinstance(kind, type) and issubclass(kind, Service) else Client(inner, env=env)
    return _service(factory(below), f"what {_name_of(factory)} returned", inner)


def check_budget(settings: Mapping[str, float] | None, key: str) -> None:
    """Refuse settings that the retry budget does not know or cannot use."""
    known = _settings_of(RetryBudget)
    for name in settings or {}:
        if name not in known:
            raise no_such(f"{key}.{name}", known, problem="no such setting")
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
) -> Client:
    """Put layers around a transport and return a client over them.

    Args:
        transport: A transport, a client over one without layers, or any object with the verbs of a client (sync or
            async), which is then wrapped by Adapter.
        layers: Layer classes, outermost first, or callables that get a client over the layers below and return an
            object with the verbs of a client. None: the default layers. Metrics, and SlotMapping if the transport is
            slot_addressable, are added if the list has none.
        clock: Source of time for all layers; for tests.
        rng: Source of randomness for all layers; for tests.
        on_event: Called with one event per op.
        call_timeout_s: Default ``timeout_s`` of the verbs, in seconds; None: the transport's, 60 s.
        claim_poll_s: Seconds between two polls of a blocking claim, if the backend cannot long-poll; None: 0.05.
        retry_budget: Settings of :class:`~asyncdp.middleware.policy.budget.RetryBudget`: ratio, floor_per_s, window_s.
        **settings: Settings of the default layers by name, such as ``attempt_timeout_s=5.0`` or ``max_rounds=2``.

    Returns:
        The client. The errors that it raises have ``retryable=False``, since the layers have retried already.

    Raises:
        ValueError: No layer has a setting of that name, settings are given together with a list of layers, or a value
            has the wrong type or is out of range; the message names it.
        TypeError: The transport is no client, or a layer cannot be called or returns no client; the message says which.
    """
    check_budget(retry_budget, "retry_budget")
    check.options(clock=clock, rng=rng, on_event=on_event, call_timeout_s=call_timeout_s, claim_poll_s=claim_poll_s)
    layers = None if layers is None else check.factories(layers)
    if layers is not None and settings:
        msg = f"{next(iter(settings))}: settings go with the default layers; give them to the layers of the list"
        raise ValueError(msg)
    base = _service(transport, "transport")
    counters = Counters()
    env = Env(
        clock=clock or AnyioClock(),
        rng=rng or random.Random(),  # noqa: S311 - jitter
        sink=counters,
        budget=RetryBudget(0.0, **(retry_budget or {})),
        codec=base.object_codec,
        pending_outcomes=PendingOutcomes(),
        session=uuid.uuid4().hex[:16],  # not from rng: two clients with the same seed would share op_ids
    )
    env.log = FaultLog(base.owner).write
    if claim_poll_s is not None:
        env.claim_poll_s = claim_poll_s
    top = base
    for factory in reversed(_around(base, default_layers(**settings) if layers is None else layers)):
        top = _wrapped(factory, top, env)
    _check_bare(base)
    added = takewhile(lambda layer: layer is not base, layers_of(top))
    metrics = next((layer for layer in added if isinstance(layer, Metrics)), None)
    if metrics is None:
        top = metrics = Metrics(top, on_event)
    elif on_event is not None:
        metrics.on_event = on_event
    metrics.counters = counters
    for layer in layers_of(top):
        layer.env = env
    client = Client(top, env=env)
    client.outermost = True
    if call_timeout_s is not None:
        client.call_timeout_s = call_timeout_s
    options = {
        "call_timeout_s": call_timeout_s,
        "claim_poll_s": claim_poll_s,
        "retry_budget": retry_budget,
        **settings,
    }
    client.recipe = (_restack, (transport, layers, options))
    return client


def _around(base: Service, layers: Sequence[LayerFactory]) -> list[LayerFactory]:
    """Return the layers for a transport: ``layers``, those of its config, and SlotMapping if it is slot-addressable."""
    made = list(layers)
    if not any(getattr(factory, "innermost", False) for factory in made):
        made += _inherited(base)
    if not base.get_capabilities().slot_addressable:
        return [f for f in made if class_of(f) is not SlotMapping]
    if not any(class_of(f) is SlotMapping for f in made):
        at = next((i for i, f in enumerate(made) if class_of(f) in BELOW_MAPPING), len(made))
        made.insert(at, SlotMapping)
    return made


def _inherited(transport: Service) -> list[LayerFactory]:
    """Return the layers that a transport's config puts just above it, such as the fault plan of a test."""
    if isinstance(transport, (Adapter, Layer)):
        return []
    try:
        layers = transport.attach_config().get("layers")
    except DataPlaneError:  # a transport that cannot be attached to has no config with layers
        return []
    own = [one for one in layers or () if isinstance(one, str)] if isinstance(layers, list) else []
    return [made for one in own if getattr(made := imported(one, "layers"), "innermost", False)]


def _check_bare(transport: Service) -> None:
    """Raise TypeError if a transport has layers already: retries would multiply, and one of two sinks get nothing."""
    names = ", ".join(type(layer).__name__ for layer in layers_of(transport) if type(layer) in ADDED)
    if names:
        raise TypeError(
            f"transport has layers already ({names}): give stack() the bare transport, and layers of your own as"
            " layers=[...], which build_data_plane_client() takes too"
        )


def _restack(transport: Any, layers: Sequence[LayerFactory] | None, options: dict[str, Any]) -> Client:
    return stack(transport, layers, **options)


def class_of(factory: LayerFactory) -> Any:
    """Return the class that a factory makes, if it is a class or a partial of one; else the factory."""
    return factory.func if isinstance(factory, partial) else factory


def _name_of(factory: LayerFactory) -> str:
    return str(getattr(class_of(factory), "__name__", repr(factory)))


def imported(text: str, where: str) -> LayerFactory:
    """Import the layer that a config names as ``"package.module:Name"``."""
    module, _, name = text.partition(":")
    if text in DEFAULT_LAYERS:
        raise ValueError(f"{where}: {text!r} is there by default; its settings are given as {{{text}: {{...}}}}")
    if not (module and name):
        raise ValueError(f"{where}: {text!r} does not name a layer as 'package.module:Name'")
    try:
        found = importlib.import_module(module)
    except ImportError as err:
        raise ValueError(f"{where}: {text!r} cannot be imported: {err}") from err
    if not hasattr(found, name):
        names = [known for known in dir(found) if not known.startswith("_")]
        raise not_one_of(where, name, names, f" of {module}")
    layer: LayerFactory = getattr(found, name)
    if not callable(layer):
        raise ValueError(f"{where}: {text!r} is no layer: it cannot be called")  # noqa: TRY004 - a config error
    return layer
