"""The commands ``asyncdp arena``: segments of shared memory on this machine that slot hosts left."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from asyncdp.errors import DataPlaneUnavailable

from ..attached import MISTAKE, Json, Yes, confirmed, fail, print_json
from ..tables import age, print_table, size

__all__ = ["arena", "segments"]

arena = typer.Typer(name="arena", no_args_is_help=True, help="List or remove the shared memory of slot hosts.")

SHM = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory


@dataclass(frozen=True)
class Segment:
    """A segment of shared memory of a slot host.

    Attributes:
        name: Name of the segment in /dev/shm.
        host_id, epoch: Its host, and the epoch of the host's slots; empty and 0 if the segment cannot be read.
        size_bytes: Its size.
        silent_s: Seconds since its host's last heartbeat.
        state: ``served``: a host runs on it. ``unserved``: its host is gone; one that starts again under this name
            recovers the rows. ``foreign``: it belongs to another user. ``unreadable``: it is no arena of this version.
    """

    name: str
    host_id: str
    epoch: int
    size_bytes: int
    silent_s: float
    state: str


def segments() -> list[Segment]:
    """Return all segments of slot hosts on this machine, by name."""
    return [one for path in sorted(SHM.glob("asyncdp-*")) if (one := _look(path)) is not None]


def _look(path: Path) -> Segment | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    from asyncdp.transports.ucxx.slots.arena import Arena

    silent_s = time.time() - found.st_mtime
    if found.st_uid != os.getuid():
        return Segment(path.name, "", 0, found.st_size, silent_s, "foreign")
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return Segment(path.name, "", 0, found.st_size, silent_s, "unreadable")
    try:
        read = Arena(path.name, fd, owned=False)
        host_id, epoch, state = read.host_id, read.epoch, "unserved"
    except (ValueError, UnicodeDecodeError):
        host_id, epoch, state = "", 0, "unreadable"
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused while its host runs, which holds it alone
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        state = "served"
    finally:
        os.close(fd)
    return Segment(path.name, host_id, epoch, found.st_size, silent_s, state)


@arena.command("ls")
def list_segments(*, as_json: Json = False) -> None:
    """List the segments in /dev/shm that slot hosts of this machine made, and whether a host serves them."""
    found = segments()
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        typer.echo(f"no segments of slot hosts in {SHM}")
        return
    columns = ("segment", "host", "state", "size", "silent for")
    rows = [(one.name, one.host_id or "-", one.state, size(one.size_bytes), age(one.silent_s)) for one in found]
    print_table(columns, rows, right=("size", "silent for"))
    unserved = [one for one in found if one.state == "unserved"]
    if unserved:
        total = size(sum(one.size_bytes for one in unserved))
        typer.echo(f"{len(unserved)} that nobody serves hold {total}: asyncdp arena rm --all")


@arena.command("rm")
def remove_segments(
    names: Annotated[list[str] | None, typer.Argument(help="Names of segments, as 'asyncdp arena ls' shows.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All arenas that no host serves.", show_default=False)] = False,
    yes: Yes = False,
) -> None:
    """Remove segments that no host serves, and the rows in them, after asking."""
    if bool(names) == every:
        fail("arena rm", "name segments, or give --all", MISTAKE)
    found = {one.name: one for one in segments()}
    for name in names or ():
        if name not in found:
            fail("arena rm", f"no segment {name!r} in {SHM}; asyncdp arena ls shows those that there are", MISTAKE)
        if found[name].state in ("served", "foreign"):
            why = "a slot host serves it" if found[name].state == "served" else "it belongs to another user"
            fail("arena rm", f"{name} is not removed: {why}")
    chosen = [one for one in found.values() if (one.state == "unserved" if every else one.name in (names or ()))]
    if not chosen:
        typer.echo("nothing to remove")
        return
    total = size(sum(one.size_bytes for one in chosen))
    question = f"Remove {len(chosen)} segments of {total}? A host that starts again under its name finds no rows then."
    confirmed("arena rm", question, yes=yes)
    from asyncdp.transports.ucxx.slots.arena import Arena

    removed = 0
    for one in chosen:
        try:
            removed += Arena.discard(one.name)
        except (DataPlaneUnavailable, OSError) as err:
            fail("arena rm", f"{one.name} is not removed ({removed} of {len(chosen)} are): {err}")
    typer.echo(f"removed {removed} segments")
