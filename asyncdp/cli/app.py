"""The commands, written with typer.

Needs the extra ``asyncdp[cli]``; :mod:`asyncdp.cli.main` says so where it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from asyncdp import __version__

from .check.arena import arena
from .check.config import config
from .check.directory import directory
from .check.doctor import doctor
from .plane.checkpoint import checkpoint
from .plane.claims import claims, release
from .plane.describe import depth, describe
from .plane.evict import evict
from .plane.hosts import hosts
from .plane.ls import ls
from .plane.ping import ping
from .start.bench import bench
from .start.demo import demo
from .start.serve import serve
from .top.command import top

__all__ = ["app"]

app = typer.Typer(name="asyncdp", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,  # noqa: FBT002
) -> None:
    """A fault-tolerant async data plane for reinforcement-learning post-training."""
    if version:
        typer.echo(f"asyncdp {__version__}")
        raise typer.Exit


#: The commands in the order of the help, each with what a line of 80 columns has room for.
COMMANDS: Final[Mapping[Callable[..., None], str]] = {
    ping: "Check that a plane answers.",
    ls: "List the partitions, or the groups of one.",
    describe: "Show what a partition declares and holds.",
    depth: "Print how many groups are ready to train on.",
    claims: "List the claims of a partition.",
    release: "Release the claims of a consumer that died.",
    evict: "Remove groups that are too old, lost or incomplete.",
    hosts: "List the slot hosts or storage units.",
    top: "Show what a plane does, live; --web: as a page.",
    doctor: "Look for what keeps a plane from working.",
    serve: "Serve a slot host, or a whole plane on this machine.",
    demo: "Train a small policy over a plane with faults.",
}
for command, text in COMMANDS.items():
    app.command(short_help=text)(command)
ignored = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=ignored, short_help="Run benchmarks of a checkout.")(bench)
for commands in (config, arena, directory, checkpoint):
    app.add_typer(commands)
