"""The command ``asyncdp top``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from asyncdp.cli.attached import NO_ANSWER, ConfigFile, Json, TimeoutS, attach, code_of, fail, print_json
from asyncdp.cli.tables import console
from asyncdp.errors import DataPlaneError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .overview import Overviews

__all__ = ["top"]


def top(
    *,
    web: Annotated[bool, typer.Option("--web", help="Serve a page instead.", show_default=False)] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0: any that is free.")] = 9401,
    bind: Annotated[str, typer.Option(help="Address that the page is served at; it has no password.")] = "127.0.0.1",
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Time between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print it and end.", show_default=False)] = False,
    config: ConfigFile = None,
    timeout: TimeoutS = 5.0,
    as_json: Json = False,
) -> None:
    """Show what a plane does, live: what is wrong first, then calls, partitions, hosts, claims and clients.

    Calls, ports and retries are known of clients that publish them (asyncdp.metrics.published.Publisher). With --once
    or --json it ends with code 3 if the plane does not answer.
    """
    client = attach("top", config)
    view: Callable[[Overviews], Awaitable[None]]
    if once or as_json:
        view = partial(_once, as_json=as_json)
    elif web:
        view = partial(_page, bind=bind, port=port, every_s=every)
    else:
        view = partial(_live, every_s=every)

    async def main() -> bool:
        from .overview import Overviews

        async with client:
            overviews = Overviews(client, timeout)
            await view(overviews)
        return bool(overviews.latest["plane"]["answers"])

    try:
        answers = anyio.run(main)
    except DataPlaneError as err:
        fail("top", err, code_of(err))
    except OSError as err:
        fail("top", f"{bind}:{port}: {err.strerror or err}")
    except KeyboardInterrupt:
        return
    if not answers:
        raise typer.Exit(NO_ANSWER)


async def _once(overviews: Overviews, *, as_json: bool) -> None:
    seen = await overviews.look()
    if as_json:
        print_json(seen)
        return
    from .terminal import screen

    out = console()
    out.print(screen(seen, out.width))


async def _live(overviews: Overviews, *, every_s: float) -> None:
    from rich.live import Live

    from .terminal import screen

    out = console()
    with Live(console=out, screen=out.is_terminal, auto_refresh=False, transient=False) as live:
        while True:
            seen = await overviews.look()
            live.update(screen(seen, out.width, out.height if out.is_terminal else 1000), refresh=True)
            await anyio.sleep(every_s)


async def _page(overviews: Overviews, *, bind: str, port: int, every_s: float) -> None:
    from .page import serve_page

    await overviews.look()
    server = serve_page(bind, port, lambda: overviews.latest)
    typer.echo(f"http://{bind}:{server.server_address[1]}/ (Ctrl-C ends)")
    try:
        while True:
            await anyio.sleep(every_s)
            await overviews.look()
    finally:
        server.shutdown()
        server.server_close()
