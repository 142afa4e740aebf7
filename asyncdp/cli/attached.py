"""What the commands share that look at a running plane: their options, attaching, and one line for each error.

Exit codes: 0: done. 1: the plane refused, or something was found that is wrong. 2: a mistake in the command or in the
config. 3: the plane does not answer.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import anyio
import typer

from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
)
from asyncdp.settings.names import nearest

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = [
    "MISTAKE",
    "NO_ANSWER",
    "WRONG",
    "ConfigFile",
    "Json",
    "Partition",
    "TimeoutS",
    "Yes",
    "ask",
    "attach",
    "code_of",
    "confirmed",
    "fail",
    "print_json",
    "read_config",
]

R = TypeVar("R")

WRONG, MISTAKE, NO_ANSWER = 1, 2, 3

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="ASYNCDP_CONFIG",
        show_default=False,
        help="File with what clients attach with: the attach_config() of a client as JSON or YAML, or what"
        " 'asyncdp serve --config' wrote.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.", show_default=False)]
Partition = Annotated[str, typer.Argument(help="The partition.")]
TimeoutS = Annotated[
    float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="How long the plane may take to answer.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.", show_default=False)]


def fail(command: str, text: object, code: int = WRONG) -> NoReturn:
    """End a command with one line on stderr and an exit code; where the plane does not answer, with what to do next."""
    line = " ".join(str(text).split()) + ("; asyncdp doctor looks for the cause" if code == NO_ANSWER else "")
    typer.echo(f"asyncdp {command}: {line}", err=True)
    raise typer.Exit(code)


def read_config(file: Path) -> dict[str, Any]:
    """Read a config from a JSON or YAML file.

    Raises:
        ValueError: The file cannot be read, or holds no mapping; the message names the file.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as err:
        reason = (err.strerror or str(err)) if isinstance(err, OSError) else "not a text file"
        raise ValueError(f"{file}: {reason}") from err
    found: Any
    if file.suffix in (".yaml", ".yml"):
        try:
            import yaml  # type: ignore[import-untyped,unused-ignore]
        except ImportError as err:
            raise ValueError(f"{file}: reading YAML needs: pip install pyyaml; JSON needs nothing") from err
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as err:
            raise ValueError(f"{file}: is no YAML: {err}") from err
    else:
        try:
            found = json.loads(text)
        except ValueError as err:
            raise ValueError(f"{file}: is no JSON: {err}") from err
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: holds no mapping, but a {type(found).__name__}")  # noqa: TRY004 - a config error
    return dict(found)


def attach(command: str, config_file: Path | None) -> Client:
    """Return a client of the running plane that a config file names; end the command where that is not possible."""
    if config_file is None:
        fail(command, "which plane? Name a config file: --config FILE, or ASYNCDP_CONFIG", MISTAKE)
    from asyncdp.factory import build_data_plane_client

    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            client = build_data_plane_client(read_config(config_file), bootstrap=False)
    except (ValueError, TypeError, ImportError, DataPlaneBadRequest) as err:
        fail(command, err if str(config_file) in str(err) else f"{config_file}: {err}", MISTAKE)
    except DataPlaneError as err:
        fail(command, err, code_of(err))
    for warning in told:
        if issubclass(warning.category, UserWarning):
            typer.echo(f"asyncdp {command}: {config_file}: {warning.message}", err=True)
    return client


def ask(command: str, config_file: Path | None, work: Callable[[Client], Awaitable[R]]) -> R:
    """Attach to a plane, do ``work`` with a client of it, and return its result; end the command on any error."""
    client = attach(command, config_file)
    near = ""

    async def main() -> R:
        nonlocal near
        async with client:
            try:
                return await work(client)
            except DataPlaneBadRequest as err:
                near = await _nearest_partition(client, err)
                raise

    try:
        return anyio.run(main)
    except DataPlaneError as err:
        fail(command, f"{err}{near}", code_of(err))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _nearest_partition(client: Client, err: DataPlaneBadRequest) -> str:
    """Return what to add to the error of an unknown partition: the partition whose name is most like it, if one is."""
    if err.field != "partition_id" or not err.partition_id:
        return ""
    from asyncdp.metrics.published import PARTITION

    with suppress(DataPlaneError):
        known = [one.partition_id for one in await client.list_partitions() if one.partition_id != PARTITION]
        return nearest(err.partition_id, known)
    return ""


def code_of(err: DataPlaneError) -> int:
    """Return the exit code of an error of the plane."""
    if isinstance(err, (DataPlaneUnavailable, DataPlaneTimeout)):
        return NO_ANSWER
    return MISTAKE if isinstance(err, DataPlaneBadRequest) and not isinstance(err, DataPlaneUnsupported) else WRONG


def confirmed(command: str, question: str, *, yes: bool) -> None:
    """Ask before something is removed; end the command where the answer is no, or where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(command, f"{question} Nobody can be asked here: repeat with --yes", MISTAKE)
    if not typer.confirm(question, default=False, err=True):
        fail(command, "nothing was done")


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
