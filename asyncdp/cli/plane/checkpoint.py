"""The commands ``asyncdp checkpoint save``, ``restore``, ``ls`` and ``verify``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..attached import ConfigFile, Json, ask, fail, print_json
from ..tables import age, count, print_table, size

if TYPE_CHECKING:
    from asyncdp.checkpoint import Summary

__all__ = ["checkpoint"]

checkpoint = typer.Typer(name="checkpoint", no_args_is_help=True, help="Save a plane into a folder, and restore it.")
Folder = Annotated[Path, typer.Argument(help="The folder of the checkpoint.")]
OnePartition = Annotated[str | None, typer.Option("--partition", help="Only this partition.")]


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Show the progress on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@checkpoint.command()
def save(path: Folder, *, partition: OnePartition = None, config: ConfigFile = None, as_json: Json = False) -> None:
    """Save a plane, or one partition; an earlier checkpoint there is replaced when this one is whole."""
    from asyncdp.checkpoint import save as save_rows

    with _bar() as bar, _files("save"):
        done = ask("checkpoint save", config, lambda client: save_rows(client, path, partition, progress=bar))
    _told("saved", done, as_json=as_json)


@checkpoint.command()
def restore(
    path: Folder,
    *,
    partition: OnePartition = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Drop partitions that have rows.", show_default=False)
    ] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Restore the rows and claims of a checkpoint into a plane."""
    from asyncdp.checkpoint import restore as restore_rows

    with _bar() as bar, _files("restore"):
        done = ask(
            "checkpoint restore",
            config,
            lambda client: restore_rows(client, path, partition, replace=replace, progress=bar),
        )
    _told("restored", done, as_json=as_json)


@checkpoint.command()
def ls(path: Folder, *, as_json: Json = False) -> None:
    """List what a checkpoint holds."""
    from asyncdp.checkpoint import contents

    _local("ls", contents, path, "holds", as_json=as_json)


@checkpoint.command()
def verify(path: Folder, *, as_json: Json = False) -> None:
    """Check every file of a checkpoint against its checksum; exit code 1 names the one that is damaged."""
    from asyncdp.checkpoint import verify as check

    _local("verify", check, path, "verified", as_json=as_json)


@contextmanager
def _files(command: str) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        fail(f"checkpoint {command}", err)


def _local(command: str, look: Callable[[Path], Summary], path: Path, what: str, *, as_json: bool) -> None:
    from asyncdp.checkpoint import CheckpointError

    try:
        done = look(path)
    except CheckpointError as err:
        fail(f"checkpoint {command}", err)
    _told(what, done, as_json=as_json)


def _told(what: str, done: Summary, *, as_json: bool) -> None:
    import time

    if as_json:
        print_json(asdict(done))
        return
    left = {name: len(ids) for name, ids in done.left_out.items()}
    print_table(
        ("partition", "rows", "left out"),
        [(name, count(rows), left.get(name, 0)) for name, rows in done.partitions.items()],
        right=("rows", "left out"),
    )
    written = f"{size(done.size_bytes)} ({size(done.written_bytes)} written by this save)"
    typer.echo(f"{what}: generation {done.generation}, {written}, {age(time.time() - done.saved_at)} old")
