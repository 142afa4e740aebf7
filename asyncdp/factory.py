"""Builds clients from configs: opens a transport and puts the layers around it that the config asks for."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdp.config import Config, NemoSettings, UcxxSettings, config_warnings, parse_config, plain_config
from asyncdp.errors import DataPlaneError
from asyncdp.layering import (
    ADDED,
    DEFAULT_LAYERS,
    LayerFactory,
    _restack,  # noqa: F401 - where clients that release 0.2.0 pickled look for it
    check_budget,
    class_of,
    default_layers,
    imported,
    layer_settings,
    setting_paths,
    stack,
)
from asyncdp.middleware.metrics import Metrics, log_event
from asyncdp.nemo.layer import Nemo
from asyncdp.nemo.rendezvous import Plane, find
from asyncdp.process.tracebacks import shorten
from asyncdp.service import Service, layers_of
from asyncdp.settings import stack_arguments as check
from asyncdp.settings.names import check_keys

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = [
    "DEFAULT_LAYERS",
    "build_data_plane_client",
    "check_config",
    "default_layers",
    "layer_settings",
    "layers_of",
    "stack",
]


def _transport(config: Mapping[str, Any], parsed: Config, *, bootstrap: bool) -> Service:
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
    try:
        transport: Service = kind(config, bootstrap=bootstrap)
    except DataPlaneError as err:
        if not parsed.full_tracebacks:
            shorten(err)
        raise err from err.__cause__
    return transport


def build_data_plane_client(
    config: Mapping[str, Any], *, bootstrap: bool = True, layers: Sequence[LayerFactory] | None = None
) -> Client:
    """Build a client from a config.

    Args:
        config: See :class:`~asyncdp.config.DataPlaneConfig`; ``{"enabled": True, "impl": "memory"}`` is enough.
        bootstrap: Whether to start the plane (in the driver) rather than attach to one that runs (in workers, with the
            driver's ``attach_config()``).
        layers: User-defined layers, as for ``stack()``, outermost first; they are put above the default layers. A list
            that contains default layers (``[*default_layers(), Mine]``) is taken as the whole stack. If ``layers:`` in
            the config is a list, its layers are put below these.

    Raises:
        ValueError: A key is unknown, missing or has the wrong type, two keys contradict each other, or the config is
            disabled; the message names the key.
        TypeError: A layer cannot be called or returns no client; the message says which.
        ImportError: The impl needs an extra that is not installed; the message names it.
        DataPlaneError: The plane could not be started.

    Warns:
        UserWarning: A key has no effect; the message names it.
    """
    given = None if layers is None else check.factories(layers)
    parsed, made, retry_budget = _planned(config, given or ())
    config = plain_config(config)
    plane = _plane_of(parsed)
    if plane is not None and not bootstrap and (address := find(plane)) is not None:
        config["controller_address"] = address
    for text in config_warnings(parsed):
        warnings.warn(text, stacklevel=2)
    on_event = None
    if parsed.observability is not None and parsed.observability.enabled:
        on_event = parsed.observability.callback or log_event
    client = stack(
        _transport(config, parsed, bootstrap=bootstrap),
        made,
        on_event=on_event,
        call_timeout_s=parsed.call_timeout_s,
        claim_poll_s=parsed.claim_meta_poll_interval_s,
        retry_budget=retry_budget,
    )
    client.full_tracebacks = parsed.full_tracebacks
    attach = client.attach_config()
    if plane is not None and bootstrap and isinstance(client.service, Nemo):
        client.service.announce(plane, attach["controller_address"])
    if parsed.ucxx is not None and parsed.ucxx.allow_pickle:  # unpickling a client runs its sender's code anyway
        attach["ucxx"] = {**attach["ucxx"], "allow_pickle": True}
    client.recipe = (_reattach, (attach, *([] if given is None else [given])))
    return client


def _plane_of(parsed: Config) -> Plane | None:
    """Return the plane by which a driver and its workers find each other; None if the config has an address or no need.

    TransferQueue is found by the names of its actors.
    """
    wanted = isinstance(parsed.nemo, NemoSettings) and parsed.nemo.find_plane and parsed.controller_address is None
    if not wanted or parsed.impl == "transfer_queue":
        return None
    return Plane(parsed.impl, (parsed.ucxx or UcxxSettings()).namespace if parsed.impl == "ucxx" else "")


def check_config(config: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Check a config as :func:`build_data_plane_client` does, without opening anything.

    Returns:
        The checked config, and warnings about keys that have no effect.

    Raises:
        ValueError: A key is unknown, missing or has the wrong type, two keys contradict each other, or the config is
            disabled; the message names the key.
    """
    parsed, _, _ = _planned(config, ())
    return parsed, config_warnings(parsed)


def _planned(
    config: Mapping[str, Any], given: Sequence[LayerFactory]
) -> tuple[Config, list[LayerFactory], Mapping[str, float] | None]:
    """Check a config; return it with the layers that it and ``given`` ask for, and the settings of the retry budget."""
    parsed = parse_config(config, homes=setting_paths)
    by_layer, own = _layers_of_config(parsed.layers)
    retry_budget = by_layer.pop("retry_budget", None)
    check_budget(retry_budget, "layers.retry_budget")
    if parsed.ack_timeout_ms is not None:
        attempt = by_layer.setdefault("attempt_timeout", {})
        if "attempt_timeout_s" in attempt:
            both = "ack_timeout_ms and as layers.attempt_timeout.attempt_timeout_s"
            raise ValueError(f"ack_timeout_ms: given twice, as {both}; leave one out")
        attempt["attempt_timeout_s"] = parsed.ack_timeout_ms / 1e3
    acked = "" if parsed.ack_timeout_ms is None else "ack_timeout_ms"
    made = _arranged([*given, *own], by_layer, acked)
    if isinstance(parsed.nemo, NemoSettings):
        top = [] if any(class_of(factory) is Metrics for factory in made) else [Metrics]
        made = [partial(Nemo, settings=parsed.nemo), *top, *made]
    return parsed, made, retry_budget


def _layers_of_config(
    layers: Mapping[str, Any] | Sequence[Any],
) -> tuple[dict[str, dict[str, Any]], list[LayerFactory]]:
    """Return the settings of the default layers and the user-defined layers of a config's ``layers:``."""
    by_layer: dict[str, dict[str, Any]] = {}
    own: list[LayerFactory] = []
    parts: list[tuple[str, Any]] = [("layers", layers)]
    if not isinstance(layers, Mapping):
        parts = [(f"layers[{at}]", one) for at, one in enumerate(layers)]
    for where, one in parts:
        if isinstance(one, Mapping):
            check_keys({"layers": one})
            if twice := by_layer.keys() & one.keys():
                raise ValueError(f"{where}.{min(twice)}: given twice")
            by_layer |= {name: dict(values) for name, values in one.items()}
        elif isinstance(one, str):
            own.append(imported(one, where))
        elif callable(one):
            own.append(one)
        else:
            wanted = "a layer, its name 'package.module:Name', or a mapping of settings by layer"
            raise ValueError(f"{where}: must be {wanted}, not {one!r:.80}")  # noqa: TRY004 - a config error
    return by_layer, own


def _arranged(own: Sequence[LayerFactory], by_layer: Mapping[str, Mapping[str, Any]], acked: str) -> list[LayerFactory]:
    """Put user-defined layers above the default ones; a list that contains default layers is returned as it is."""
    if not any(class_of(factory) in ADDED - {Metrics} for factory in own):
        inner = [factory for factory in own if getattr(factory, "innermost", False)]
        return [*(factory for factory in own if factory not in inner), *default_layers(by_layer), *inner]
    default_layers(by_layer)
    given = [f"layers.{name}.{key}" for name, values in by_layer.items() for key in values]
    if given:
        raise ValueError(
            f"{acked or given[0]}: is of a default layer, and the list of layers is the whole stack: set it there"
        )
    return list(own)


def _reattach(config: dict[str, Any], layers: Sequence[LayerFactory] | None = None) -> Client:
    return build_data_plane_client(config, bootstrap=False, layers=layers)
