"""The commands ``asyncdp config``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ..attached import MISTAKE, Json, fail, print_json, read_config

if TYPE_CHECKING:
    from asyncdp.config import Config

__all__ = ["checked", "config"]

config = typer.Typer(name="config", no_args_is_help=True, help="Check a config file, or print the schema of all keys.")


def checked(given: dict[str, Any]) -> tuple[Config, list[str]]:
    """Check a config, those of slot hosts and of the directory's client included; return it, with warnings.

    Raises:
        ValueError: The message begins with the key.
        ImportError: The impl needs an extra that is not installed.
    """
    from asyncdp.factory import check_config

    parsed, warned = check_config(given)
    if parsed.ucxx is not None and (parsed.ucxx.host or parsed.ucxx.directory):
        from asyncdp.transports.ucxx.process.embedded import directory_settings

        directory_settings(parsed.ucxx)
    return parsed, warned


@config.command()
def check(
    file: Annotated[Path, typer.Argument(help="A config as JSON, or as YAML if its name ends in .yaml or .yml.")],
    *,
    as_json: Json = False,
) -> None:
    """Check a config file as a client would, without opening anything; ends with code 1 if it is invalid."""
    try:
        given = read_config(file)
    except ValueError as err:
        fail("config check", err, MISTAKE)
    try:
        parsed, warned = checked(given)
    except (ValueError, ImportError) as err:
        if as_json:
            print_json({"valid": False, "error": str(err), "warnings": []})
            raise typer.Exit(1) from err
        fail("config check", f"{file}: {err}")
    if as_json:
        print_json({"valid": True, "impl": parsed.impl, "warnings": warned})
        return
    for text in warned:
        typer.echo(f"{file}: warning: {text}")
    where = (
        ""
        if parsed.controller_address is None
        else "; names a plane to attach to, which was not asked (asyncdp doctor asks it)"
    )
    typer.echo(f"{file}: valid: {parsed.impl} with backend {parsed.backend}{where}")


@config.command()
def schema() -> None:
    """Print the JSON schema of configs, for editors and other programs."""
    print_json(config_schema())


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of configs."""
    from asyncdp.config import BACKENDS, POLL_S, UNITS, Config, DataPlaneConfig
    from asyncdp.factory import layer_settings

    made = msgspec.json.schema(Config)
    parts = made["$defs"]
    top = parts["Config"]
    top["title"], top["description"] = "A config of asyncdp", str(DataPlaneConfig.__doc__)
    top["required"] = [name for name in top["required"] if name in ("enabled", "impl")]
    keys = top["properties"]
    keys["backend"]["description"] = f"Default: {', '.join(f'{b[0]} for {impl}' for impl, b in BACKENDS.items())}."
    keys["num_storage_units"]["description"] = f"Default: {', '.join(f'{n} for {impl}' for impl, n in UNITS.items())}."
    keys["claim_meta_poll_interval_s"]["description"] = f"Default: {POLL_S:g}."
    layers = {
        name: {
            "type": "object",
            "additionalProperties": False,
            "properties": {key: _type(kind) for key, kind in settings.items()},
        }
        for name, settings in layer_settings().items()
    }
    mapping = {"type": "object", "additionalProperties": False, "properties": layers}
    keys["layers"]["anyOf"] = [mapping, {"type": "array", "items": {"anyOf": [mapping, {"type": "string"}]}}]
    for name in ("simple", "mooncake_cpu"):
        keys[name] = {"type": "object", "description": f"Keys that only the backend {name!r} uses."}
    for key, kind in keys.items():
        if key not in ("enabled", "impl") and "type" in kind:
            keys[key] = {**{k: v for k, v in kind.items() if k != "type"}, "type": [kind["type"], "null"]}
    return made


def _type(annotation: str) -> dict[str, Any]:
    words = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "None": "null"}
    return {"type": [words[part.strip()] for part in annotation.split("|") if part.strip() in words]}
