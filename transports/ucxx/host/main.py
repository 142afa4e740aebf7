"""A slot host as a process of its own: arguments, readiness, signals, the end of its parent."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from asyncdp.errors import DataPlaneError, DataPlaneUnavailable

from .host import Host
from .operator_log import log_to
from .remedies import AGAIN_S
from .settings import HostSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..directory.directory import Directory
    from ..wire.handshake import Secret
    from .registration import HostDirectory

__all__ = ["DIRECTORY", "WAIT_S", "begin_anew", "log_for_operators", "main", "many_descriptors", "run", "serve"]

#: Names the directory's URL: it may hold a password, which arguments would show to every user of the machine.
DIRECTORY: Final = "ASYNCDP_DIRECTORY"
#: How long a host waits at its start for a directory that is not there yet, in seconds: whoever starts a whole plane at
#: once need not put it in order.
WAIT_S: Final = 30.0
RETRY_S: Final = 0.5
#: Tells a process that it is one that began anew.
_ANEW: Final = "ASYNCDP_BEGUN_ANEW"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Told = dict[str, Any]


def _one_line(told: Told) -> None:
    if not select.select([], [1], [], 0)[1]:
        return  # a parent may read none but the first line; of a host that begins anew there are more, and a pipe fills
    with contextlib.suppress(BrokenPipeError):  # whoever wanted to read it is gone; who watches will know
        print(json.dumps({"ready": True, "pid": os.getpid(), **told}), flush=True)  # noqa: T201 - the readiness line


async def run(
    settings: HostSettings,
    directory: HostDirectory | None = None,
    *,
    secret: Secret | None = None,
    wait_s: float = WAIT_S,
    watch_stdin: bool = False,
    ready: Callable[[Told], None] = _one_line,
    before: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT, until the parent is gone, or until another life of this host has registered.

    Returns whether it ended for the sake of a new process: see :func:`begin_anew`.

    A second signal cuts off the requests that the first one let end.

    Args:
        settings: Of the host.
        directory: Where it is known.
        secret: What clients have to know; None: that of the environment.
        wait_s: How long to wait for a directory that is not there yet.
        watch_stdin: End when standard input ends. A parent that holds the other end of that pipe takes the host with
            it however it dies; PR_SET_PDEATHSIG would follow the thread that started the host.
        ready: Gets what the host registered once it serves; by default prints one line of JSON:
            ``{"ready": true, "pid": ..., "ports": [...], ...}``.
        before: Awaited when the directory answers, before the host starts.

    Raises:
        DataPlaneError: It cannot start; the message says why.
    """
    loop = asyncio.get_running_loop()
    anew_from = time.monotonic() + AGAIN_S if _ANEW in os.environ else 0.0
    host = Host(settings, directory, secret, anew_from=anew_from)

    def told_to_end() -> None:
        host.spoilt = False
        if host.ended.is_set():
            host.hurry()
        host.ended.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, told_to_end)
    try:
        if watch_stdin:
            _watch(loop, host)
        if directory is not None:
            await _until_there(directory, host, wait_s)
            if before is not None:
                await before()
        if host.ended.is_set():
            return False
        report = await host.start()
        try:
            ready(asdict(report))
            await host.ended.wait()
        finally:
            await host.stop()
    finally:
        for number in _SIGNALS:  # the end is in order by now: one more signal must not spoil its exit code
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    return host.spoilt


def begin_anew() -> None:
    """Become a new process with the same command, id, standard streams and environment; does not return.

    For a host that :func:`run` says has to: its keeper, if it has one, need not do anything.
    """
    structlog.get_logger("asyncdp.ucxx").warning("begins anew as the same process", pid=os.getpid())
    os.environ[_ANEW] = "1"
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # what is ignored would stay so
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - UCX's own outlive an exec, and what was leaked is there
        if int(name) > 2:  # noqa: PLR2004 - the standard streams
            with contextlib.suppress(OSError):
                os.close(int(name))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command


async def _until_there(directory: HostDirectory, host: Host, wait_s: float) -> None:
    """Wait until the directory answers, or the host is told to end."""
    until, told = time.monotonic() + wait_s, False
    while not host.ended.is_set():
        try:
            await directory.reap()
        except DataPlaneUnavailable as err:
            if time.monotonic() >= until:
                raise
            if not told:
                structlog.get_logger("asyncdp.ucxx").warning(
                    "waiting for the directory", host=host.settings.host_id, for_at_most_s=wait_s, why=str(err)
                )
            told = True
        else:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await host.ended.wait()


async def serve(settings: HostSettings, url: str | None, namespace: str, **options: Any) -> bool:
    """Serve, known to a directory; returns what :func:`run` does, and ``options`` are those of it.

    Args:
        settings: Of the host.
        url: Of the directory; None: none, for tests of a host alone.
        namespace: Prefix of the plane's keys there.
        options: See :func:`run`. Where the environment has no secret, it is that which the directory shares, if any.

    Raises:
        DataPlaneError: It cannot start.
        ImportError: The extra ``ucxx`` is not installed.
        ValueError: The URL is none of a directory.
    """
    if not url:
        return await run(settings, **options)
    from ..client.directory_entry import HostEntry
    from ..directory.directory import Directory
    from ..directory.settings import DirectorySettings

    directory = Directory(url, settings=DirectorySettings(namespace=namespace))
    try:
        return await run(settings, HostEntry(directory), before=partial(_check_rights, directory), **options)
    finally:
        await directory.close()


async def _check_rights(directory: Directory) -> None:
    """Warn where the directory's user could reach other planes on its server; an embedded server has none."""
    if directory.embedded:
        return
    with contextlib.suppress(DataPlaneError):
        excess = await directory.excess_rights()
        if excess:
            structlog.get_logger("asyncdp.ucxx").warning(
                "the directory's user may do more than a plane needs, and could reach other planes on its server",
                commands=excess,
                remedy="give it the rights that `asyncdp directory acl` prints",
            )


def _watch(loop: asyncio.AbstractEventLoop, host: Host) -> None:
    """Notice the end of standard input."""
    try:
        if not stat.S_ISFIFO(os.fstat(0).st_mode) and not stat.S_ISSOCK(os.fstat(0).st_mode) and not os.isatty(0):
            raise OSError("it is no pipe")  # noqa: TRY301 - nobody can let go of the other end of a file
        loop.add_reader(0, _heard, loop, host)
    except OSError as err:
        msg = f"standard input is to be watched, and no parent holds the other end of it: {err}"
        raise DataPlaneUnavailable(msg, retryable=False, blames_port=False, cause=err) from err


def _heard(loop: asyncio.AbstractEventLoop, host: Host) -> None:
    """Take what the parent says: ``fail port 2`` lets a port die; the end of it is the parent's own."""
    try:
        came = os.read(0, 4096)
    except OSError:
        came = b""
    if not came:
        loop.remove_reader(0)
        host.spoilt = False
        host.ended.set()
    for line in came.decode(errors="replace").splitlines():
        words = line.split()
        if words[:2] == ["fail", "port"] and len(words) == 3 and words[2].isdigit():  # noqa: PLR2004 - of three words
            with contextlib.suppress(IndexError):
                host.fail_port(int(words[2]))


def log_for_operators() -> None:
    """Log to standard error: standard output is for what was asked for, and nobody may read it any further.

    Each connection that ends is a line at the level of debug: for a developer, not for an operator.

    Where a standard stream is closed, its number goes to nothing: else the next socket would get it, and with it all
    that UCX or a library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    log_to(sys.stderr or Path(os.devnull).open("w"))  # noqa: SIM115 - for ever


def many_descriptors() -> None:
    """Allow this process as many descriptors as its user may have: each client takes up to four."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str] | None = None) -> None:
    """Parse arguments and serve; exit code 0 after an orderly end, 1 where the host cannot start.

    Environment: ``ASYNCDP_SECRET`` what clients have to know, ``ASYNCDP_DIRECTORY`` URL of the directory.
    """
    parser = argparse.ArgumentParser(prog="python -m asyncdp.transports.ucxx.host.host", description=__doc__)
    parser.add_argument("--settings", required=True, help="HostSettings as JSON; the secret comes from ASYNCDP_SECRET")
    parser.add_argument("--watch-stdin", action="store_true", help="end when standard input does")
    parser.add_argument("--namespace", default="asyncdp", help="prefix of the plane's keys in the directory")
    parser.add_argument("--wait-s", type=float, default=WAIT_S, help="how long to wait for a directory at the start")
    args = parser.parse_args(argv)
    log_for_operators()
    many_descriptors()
    options = {"watch_stdin": args.watch_stdin, "wait_s": args.wait_s}
    try:
        settings = msgspec.json.decode(args.settings, type=HostSettings)
        anew = asyncio.run(serve(settings, os.environ.get(DIRECTORY), args.namespace, **options))
    except (DataPlaneError, ImportError, ValueError) as err:
        sys.exit(f"the slot host cannot serve: {err}")
    if anew:
        begin_anew()
    gc.freeze()  # else the end of the interpreter begins with a look at all objects
