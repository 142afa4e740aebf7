"""The command ``asyncdp ping``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from ..attached import ConfigFile, Json, TimeoutS, ask, print_json

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["ping"]


def ping(*, config: ConfigFile = None, timeout: TimeoutS = 5.0, as_json: Json = False) -> None:
    """Check that a plane answers; ends with code 3 if it does not."""

    async def work(client: Client) -> float:
        began = time.monotonic()
        await client.ping(timeout_s=timeout)
        return time.monotonic() - began

    seconds = ask("ping", config, work)
    if as_json:
        print_json({"answers": True, "seconds": round(seconds, 6)})
    else:
        typer.echo(f"the plane answers, after {seconds * 1e3:.1f} ms (connecting included)")
