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
from .settings import HostSettings
from .ucx_watchdog import AGAIN_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..directory.directory import Directory
    from ..wire.handshake import Secret
    from .registration import HostDirectory

__all__ = ["DIRECTORY", "WAIT_S", "log_for_operators", "main", "many_descriptors", "reexec", "run", "serve"]

#: Environment variable with the directory's URL. The URL may contain a password, and command-line arguments are visible
#: to every user of the machine.
DIRECTORY: Final = "ASYNCDP_DIRECTORY"
#: Seconds for which a starting host waits for the directory, so the processes of a plane may be started in any order.
WAIT_S: Final = 30.0
RETRY_S: Final = 0.5
#: Environment variable that tells a process that it was restarted by :func:`reexec`.
_ANEW: Final = "ASYNCDP_BEGUN_ANEW"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Facts = dict[str, Any]


def _one_line(told: Facts) -> None:
    if not select.select([], [1], [], 0)[1]:
        return  # a parent may read only the first line; a host that restarts prints more, and the pipe may be full
    with contextlib.suppress(BrokenPipeError):  # the reader is gone; the watch of standard input handles that
        print(json.dumps({"ready": True, "pid": os.getpid(), **told}), flush=True)  # noqa: T201 - the readiness line


def _report_ready(told: Facts) -> None:
    """Report readiness; exempt what the start has made from garbage collection, which takes 50 ms with it."""
    gc.collect()
    gc.freeze()
    _one_line(told)


async def run(
    settings: HostSettings,
    directory: HostDirectory | None = None,
    *,
    secret: Secret | None = None,
    wait_s: float = WAIT_S,
    watch_stdin: bool = False,
    ready: Callable[[Facts], None] = _one_line,
    before: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT, until the parent exits, or until another incarnation of this host registers.

    A first signal lets running requests finish; a second one cuts them off.

    Args:
        settings: Configuration of the host.
        directory: Directory that the host registers with; None: it does not register.
        secret: Shared secret that clients have to prove; None: from the environment.
        wait_s: Seconds to wait at the start for a directory that does not answer yet.
        watch_stdin: Whether to stop at the end of standard input. Where the parent holds the other end of that pipe,
            the host stops however the parent dies; PR_SET_PDEATHSIG would follow the thread that started the host.
        ready: Called with what the host registered once it serves; by default prints one line of JSON:
            ``{"ready": true, "pid": ..., "ports": [...], ...}``.
        before: Awaited once the directory answers, before the host starts.

    Returns:
        Whether the host stopped because it needs a new process; the caller then calls :func:`reexec`.

    Raises:
        DataPlaneError: The host cannot start; the message says why.
    """
    loop = asyncio.get_running_loop()
    anew_from = time.monotonic() + AGAIN_S if _ANEW in os.environ else 0.0
    host = Host(settings, directory, secret, anew_from=anew_from)

    def request_end() -> None:
        host.spoilt = False
        if host.ended.is_set():
            host.cut_off_requests()
        host.ended.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, request_end)
    try:
        if watch_stdin:
            _watch(loop, host)
        if directory is not None:
            await _until_there(directory, host, wait_s)
        if host.ended.is_set():
            return False
        if before is not None:
            await before()
        report = await host.start()
        try:
            ready(asdict(report))
            await host.ended.wait()
        finally:
            await host.stop()
    finally:
        for number in _SIGNALS:  # the host has stopped in order; a further signal must not change the exit code
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    return host.spoilt


def reexec() -> None:
    """Re-execute the same command with the same process id, standard streams and environment; does not return.

    To be called where :func:`run` returned True. The process id stays, so a supervisor need not do anything.
    """
    structlog.get_logger("asyncdp.ucxx").warning("the host restarts in the same process", pid=os.getpid())
    os.environ[_ANEW] = "1"
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored across exec
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - UCX's descriptors, leaked ones too, survive an exec
        if int(name) > 2:  # noqa: PLR2004 - the standard streams
            # The exec closes it. Were it closed before, UCX's thread would abort the process.
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)  # noqa: FBT003 - a function of the library
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command


async def _until_there(directory: HostDirectory, host: Host, wait_s: float) -> None:
    """Wait until the directory answers or the host is told to stop; raise its error after ``wait_s`` seconds."""
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


async def serve(
    settings: HostSettings, url: str | None, namespace: str, *, setting: str = DIRECTORY, **options: Any
) -> bool:
    """Serve as :func:`run` does, registered with the directory at ``url``; return what it returns.

    Args:
        settings: Configuration of the host.
        url: URL of the directory; None: serve without one, for tests of a single host.
        namespace: Prefix of the plane's keys in the directory.
        setting: Name of the setting that holds the URL, for errors.
        options: Further arguments of :func:`run`. Where the environment has no secret, the one that the directory
            shares is used, if any.

    Raises:
        DataPlaneError: The host cannot start.
        ImportError: The extra ``ucxx`` is not installed.
        ValueError: The URL is not a valid directory URL.
    """
    if not url:
        return await run(settings, **options)
    from ..client.directory_entry import HostEntry
    from ..directory.directory import Directory
    from ..directory.settings import DirectorySettings

    directory = Directory(url, settings=DirectorySettings(namespace=namespace), setting=setting)
    try:
        return await run(settings, HostEntry(directory), before=partial(_check_rights, directory), **options)
    finally:
        await directory.close()


async def _check_rights(directory: Directory) -> None:
    """Warn where the directory's user may access other planes on its server; an embedded server has only one plane."""
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
    """Watch standard input for the parent's commands and for its end."""
    try:
        if not stat.S_ISFIFO(os.fstat(0).st_mode) and not stat.S_ISSOCK(os.fstat(0).st_mode) and not os.isatty(0):
            raise OSError("it is a file, not a pipe, a socket or a terminal")  # noqa: TRY301 - a file has no other end that a parent could close
        loop.add_reader(0, _heard, loop, host)
    except OSError as err:
        msg = f"standard input cannot be watched for the end of the parent process: {err}"
        raise DataPlaneUnavailable(msg, retryable=False, blames_port=False, cause=err) from err


def _heard(loop: asyncio.AbstractEventLoop, host: Host) -> None:
    """Handle input of the parent: ``fail port 2`` makes that port fail; the end of input stops the host."""
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
    """Log to standard error; standard output carries only the readiness line, and may not be read after it.

    The end of a connection is logged at debug level, which operators do not see.

    A standard stream that is closed is opened on ``/dev/null``. Otherwise the next socket would get its number and
    receive whatever UCX or a library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    log_to(sys.stderr or Path(os.devnull).open("w"))  # noqa: SIM115 - open for as long as the process runs


def many_descriptors() -> None:
    """Raise the limit of open descriptors of this process to its hard limit; each client takes up to four."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str] | None = None) -> None:
    """Parse arguments and serve; exit code 0 after an orderly end, 1 where the host cannot start.

    Environment: ``ASYNCDP_SECRET`` what clients have to know, ``ASYNCDP_DIRECTORY`` URL of the directory.
    """
    parser = argparse.ArgumentParser(prog="python -m asyncdp.transports.ucxx.host.main", description=__doc__)
    parser.add_argument("--settings", required=True, help="HostSettings as JSON; the secret comes from ASYNCDP_SECRET")
    parser.add_argument("--watch-stdin", action="store_true", help="end when standard input does")
    parser.add_argument("--namespace", default="asyncdp", help="prefix of the plane's keys in the directory")
    parser.add_argument("--wait-s", type=float, default=WAIT_S, help="how long to wait for a directory at the start")
    args = parser.parse_args(argv)
    log_for_operators()
    many_descriptors()
    options = {"watch_stdin": args.watch_stdin, "wait_s": args.wait_s, "ready": _report_ready}
    try:
        settings = msgspec.json.decode(args.settings, type=HostSettings)
        anew = asyncio.run(serve(settings, os.environ.get(DIRECTORY), args.namespace, **options))
    except (DataPlaneError, ImportError, ValueError) as err:
        sys.exit(f"the slot host cannot serve: {err}")
    if anew:
        reexec()
    gc.freeze()  # without it, interpreter shutdown starts with a collection over all objects


if __name__ == "__main__":
    main()
