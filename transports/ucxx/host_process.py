"""A slot host as a process of its own: arguments, readiness, signals, the end of its parent."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from asyncdp.errors import DataPlaneError
from asyncdp.transports.ucxx.host import Host
from asyncdp.transports.ucxx.host_settings import HostSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdp.transports.ucxx.host_directory import HostDirectory

__all__ = ["DIRECTORY", "main", "run"]

#: Names the directory's URL: it may hold a password, which arguments would show to every user of the machine.
DIRECTORY: Final = "ASYNCDP_DIRECTORY"


async def run(
    settings: HostSettings,
    directory: HostDirectory | None = None,
    *,
    watch_stdin: bool = False,
    ready: Callable[[str], None] = lambda line: print(line, flush=True),  # noqa: T201 - the readiness line
) -> None:
    """Serve until SIGTERM or SIGINT, until the parent is gone, or until another life of this host has registered.

    Args:
        settings: Of the host.
        directory: Where it is known.
        watch_stdin: End when standard input ends. A parent that holds the other end of that pipe takes the host with
            it however it dies; PR_SET_PDEATHSIG would follow the thread that started the host.
        ready: Gets one line of JSON when the host serves: ``{"ready": true, "ports": [...], ...}``.
    """
    loop = asyncio.get_running_loop()
    host = Host(settings, directory)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.ended.set)
    if watch_stdin:
        loop.add_reader(0, _heard, loop, host)
    report = await host.start()
    ready(json.dumps({"ready": True, "pid": os.getpid(), **asdict(report)}))
    try:
        await host.ended.wait()
    finally:
        await host.stop()


async def _serve(settings: HostSettings, namespace: str, *, watch_stdin: bool) -> None:
    """Serve, known to the directory that the environment names, if it names one."""
    url = os.environ.get(DIRECTORY)
    if not url:
        await run(settings, watch_stdin=watch_stdin)
        return
    from asyncdp.transports.ucxx.directory.directory import Directory
    from asyncdp.transports.ucxx.directory.settings import DirectorySettings
    from asyncdp.transports.ucxx.known_host import KnownHost

    directory = Directory(url, settings=DirectorySettings(namespace=namespace))
    try:
        await run(settings, KnownHost(directory), watch_stdin=watch_stdin)
    finally:
        await directory.close()


def _heard(loop: asyncio.AbstractEventLoop, host: Host) -> None:
    """Take what the parent says; nothing at all is its end."""
    if not os.read(0, 4096):
        loop.remove_reader(0)
        host.ended.set()


def main(argv: list[str] | None = None) -> None:
    """Parse arguments and serve; exit code 0 after an orderly end, 1 where the host cannot start.

    Environment: ``ASYNCDP_SECRET`` what clients have to know, ``ASYNCDP_DIRECTORY`` URL of the directory.
    """
    parser = argparse.ArgumentParser(prog="python -m asyncdp.transports.ucxx.host", description=__doc__)
    parser.add_argument("--settings", required=True, help="HostSettings as JSON; the secret comes from ASYNCDP_SECRET")
    parser.add_argument("--watch-stdin", action="store_true", help="end when standard input does")
    parser.add_argument("--namespace", default="asyncdp", help="prefix of the plane's keys in the directory")
    args = parser.parse_args(argv)
    # Standard output belongs to the readiness line: a parent that reads no further must not stall the host.
    # Each connection that ends is a line at the level of debug: for a developer, not for an operator.
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    try:
        settings = msgspec.json.decode(args.settings, type=HostSettings)
        asyncio.run(_serve(settings, args.namespace, watch_stdin=args.watch_stdin))
    except (DataPlaneError, ImportError, msgspec.ValidationError) as err:
        sys.exit(f"the slot host cannot serve: {err}")
