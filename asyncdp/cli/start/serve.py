"""The command ``asyncdp serve``: its options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..output_file import can_be_kept_private
from .serving import CannotServe, Serving, serve_host, serve_plane

__all__ = ["serve"]

SUFFIXES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
#: The option of each setting of a slot host that has one, where it is not called alike.
OPTIONS = {"host_id": "--name", "arena_bytes": "--arena", "max_slot_bytes": "--max-slot"}
#: Seconds that a slot host waits for a directory that is not there yet.
WAIT_S = 30.0


class _Size(int):
    """Bytes, read from ``1073741824``, ``64M``, ``1GiB``; all powers of 1024."""

    @classmethod
    def read(cls, text: str) -> _Size:
        """Read them, or say what is wrong."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
        made = cls(float(found[1]) * (1 << SUFFIXES[found[2].upper()])) if found else cls(0)
        if made < 1:
            msg = f"{text!r} is no size: say it like 64M, 1GiB or 1073741824"
            raise typer.BadParameter(msg)
        return made


def _more(texts: list[str]) -> dict[str, Any]:
    """Read ``KEY=VALUE``; a value is JSON, or else a text."""
    import json

    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            msg = f"{text!r} is not KEY=VALUE"
            raise typer.BadParameter(msg, param_hint="--set")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _flag(text: str, help_: str) -> Any:
    return typer.Option(f"--{text}/--no-{text}", help=help_, show_default=False)


def serve(  # noqa: PLR0913 - the options of a command
    *,
    directory: Annotated[
        str | None,
        typer.Option(
            envvar="ASYNCDP_DIRECTORY",
            show_default=False,
            help="URL of the directory of a plane (redis://, rediss://, unix://) that this slot host joins. Without it"
            " a directory is started as well: a whole plane, for this machine alone.",
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Prefix of the plane's keys in the directory.")] = "asyncdp",
    name: Annotated[
        str | None,
        typer.Option(help="The host's name, the same at each start: its arena is found by it. [this machine's]"),
    ] = None,
    bind: Annotated[str | None, typer.Option(help="Address that the ports listen at. [127.0.0.1]")] = None,
    publish: Annotated[
        str | None,
        typer.Option(help="Address that clients use. [--bind; of 0.0.0.0 this machine's own]"),
    ] = None,
    ports: Annotated[int | None, typer.Option(min=1, max=64, help="Ports of a host that serve the same. [4]")] = None,
    first_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="First number tried; a taken one is left out. [0: any]")
    ] = None,
    arena: Annotated[
        _Size | None,
        typer.Option(parser=_Size.read, metavar="BYTES", help="Shared memory of a host, taken at the start. [1GiB]"),
    ] = None,
    max_slot: Annotated[
        _Size | None, typer.Option(parser=_Size.read, metavar="BYTES", help="Largest payload of a slot. [256MiB]")
    ] = None,
    on_full: Annotated[
        Literal["wait", "raise", "overwrite_oldest"] | None,
        typer.Option(help="What a put does then. [wait]"),
    ] = None,
    adopt: Annotated[bool | None, _flag("adopt", "Recover the slots that a killed host left. [yes]")] = None,
    keep_arena: Annotated[
        bool | None,
        _flag(
            "keep-arena",
            "Leave rows for the next start after an orderly end too. [yes; of a whole plane with --folder]",
        ),
    ] = None,
    checksum: Annotated[bool | None, _flag("checksum", "Send a CRC-32 with each slot. [no]")] = None,
    ucx: Annotated[bool | None, _flag("ucx", "Offer UCX, whose listener binds everywhere. [yes]")] = None,
    devices: Annotated[str | None, typer.Option(help="Network devices for UCX. [all]")] = None,
    drain_s: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that running requests get at the end. [5]")
    ] = None,
    wait_s: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds to wait for a directory that is not there yet. [30]")
    ] = None,
    more: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of a slot host.")
    ] = None,
    hosts: Annotated[int | None, typer.Option(min=1, max=64, help="Slot hosts of a whole plane. [1]")] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="Samples that a whole plane holds. [1000000]")] = None,
    start_timeout_s: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that slot hosts of a whole plane may take to start. [60]")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where a whole plane keeps its data. [a temporary one]"),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            callback=can_be_kept_private,
            help="File for the clients' config, private to its owner.",
        ),
    ] = None,
    json_line: Annotated[
        bool, typer.Option("--json", help="Report readiness as one line of JSON.", show_default=False)
    ] = False,
) -> None:
    """Serve slots: a slot host of the plane at --directory, or else a whole plane on this machine.

    Clients on other machines have to know the secret in the environment's ASYNCDP_SECRET. Ctrl-C or SIGTERM lets
    running requests end and stops in order; a second one cuts them off.
    """
    given = {
        "host_id": name,
        "bind": bind,
        "publish": publish,
        "ports": ports,
        "first_port": first_port,
        "arena_bytes": arena,
        "max_slot_bytes": max_slot,
        "on_full": on_full,
        "adopt": adopt,
        "keep_arena": keep_arena,
        "checksum": checksum,
        "ucx": ucx,
        "devices": devices,
        "drain_s": drain_s,
    }
    host = {key: value for key, value in given.items() if value is not None}
    own = {"folder": None if folder is None else str(folder), "start_timeout_s": start_timeout_s}
    for key, value in _more(more or []).items():
        if key in given or key in own:
            msg = f"{key} has an option of its own: {OPTIONS.get(key, '--' + key.replace('_', '-'))}"
            raise typer.BadParameter(msg, param_hint="--set")
        host[key] = value
    serving = Serving(namespace=namespace, host=host, config_file=config_file, json_line=json_line)
    plane_only: dict[str, Any] = {"--hosts": hosts, "--capacity": capacity, "--folder": folder}
    plane_only |= {"--start-timeout-s": start_timeout_s}
    host_only = {"--name": name, "--bind": bind, "--publish": publish, "--wait-s": wait_s}
    try:
        if directory:
            _refuse(plane_only, "is for a whole plane; this host joins the plane at --directory")
            serve_host(serving, directory, WAIT_S if wait_s is None else wait_s)
        else:
            _refuse(
                host_only,
                "needs the directory of a plane: --directory, or ASYNCDP_DIRECTORY where it has a password. A whole"
                " plane serves this machine alone: its directory is a unix socket",
            )
            serve_plane(serving, hosts or 1, capacity or 1_000_000, {k: v for k, v in own.items() if v is not None})
    except CannotServe as err:
        if err.setting is None:
            typer.echo(f"asyncdp serve: {err}", err=True)
            raise typer.Exit(1) from err
        if err.setting in ("directory", "namespace") or err.setting in given:
            hint = OPTIONS.get(err.setting, f"--{err.setting.replace('_', '-')}")
            raise typer.BadParameter(str(err), param_hint=hint) from err
        raise typer.BadParameter(f"{err.setting}: {err}", param_hint="--set") from err


def _refuse(options: dict[str, Any], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise typer.BadParameter(why, param_hint=option)
