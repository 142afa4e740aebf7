"""The command ``asyncdp directory``: what an administrator does once on a server that planes share."""

from __future__ import annotations

from typing import Annotated

import anyio
import msgspec
import typer

__all__ = ["directory"]

directory = typer.Typer(
    name="directory", no_args_is_help=True, help="Prepare a Valkey or Redis server for planes that share it."
)

Namespace = Annotated[str, typer.Option(help="Prefix of the plane's keys, as in its settings.")]


def _checked(namespace: str) -> str:
    try:
        from asyncdp.transports.ucxx.directory.settings import DirectorySettings

        return msgspec.convert({"namespace": namespace}, DirectorySettings).namespace
    except ImportError as err:
        typer.echo(f"asyncdp directory: {err}; it needs: pip install 'asyncdp[ucxx]'", err=True)
        raise typer.Exit(1) from err
    except msgspec.ValidationError as err:
        text = f"{namespace!r} is not a namespace: use 1 to 64 letters, digits, '_', '.' and '-'"
        raise typer.BadParameter(text, param_hint="--namespace") from err


@directory.command()
def acl(
    *,
    namespace: Namespace = "asyncdp",
    user: Annotated[str, typer.Option(help="Name of the server's user that the plane gets.")] = "plane",
) -> None:
    """Print the command that makes a user for one plane, with the least rights that its clients and slot hosts need."""
    checked = _checked(namespace)
    from asyncdp.transports.ucxx.directory.server.acl import acl_rules

    typer.echo(" ".join(["ACL SETUSER", user, "on", ">PASSWORD", *acl_rules(checked)]))


@directory.command()
def install(
    *,
    url: Annotated[
        str,
        typer.Option(
            "--directory",
            envvar="ASYNCDP_DIRECTORY",
            show_default=False,
            help="URL of the server with an administrator's name and password; better in the environment: everybody on"
            " this machine can read options.",
        ),
    ],
    namespace: Namespace = "asyncdp",
) -> None:
    """Load the functions of this version for one plane, whose own users may not do it. Again is no harm."""
    checked = _checked(namespace)
    from redis.exceptions import RedisError

    from asyncdp.errors import DataPlaneError
    from asyncdp.settings.urls import without_password
    from asyncdp.transports.ucxx.directory.server.acl import install_functions

    try:
        anyio.run(install_functions, url, checked)
    except (DataPlaneError, RedisError, OSError, ValueError) as err:
        typer.echo(f"asyncdp directory: {without_password(url)}: {err}", err=True)
        raise typer.Exit(1) from err
    typer.echo(f"the functions for namespace {checked} are loaded")
