"""What can be found out about a running plane: whether slot hosts accept the secret, and the directory's state."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from asyncdp.config import UcxxSettings, parse_config
from asyncdp.errors import DataPlaneError

from ..client.host_resolver import HostResolver
from ..directory import Directory
from ..payload.objects import MsgpackCodec
from ..wire.handshake import Secret, UnprovedError
from .embedded import directory_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

    from ..directory import HostInfo

__all__ = ["Diagnosis", "diagnose"]

#: Seconds that one slot host may take to answer.
HOST_S = 5.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found out.

    Attributes:
        clock_ahead_s: Seconds that the directory's clock is ahead of this machine's; negative: behind.
        memory: The directory's used bytes, its limit in bytes (0: none) and its maxmemory-policy; None: this user may
            not ask for it.
        persistent: Whether the directory writes its data to disk; None: this user may not ask for it.
        refused: By host id, why a host that runs refuses this client, such as a wrong secret.
        silent: By host id, why a registered host cannot be used.
        told: Those of the refusing hosts that accept the secret which the directory tells.
    """

    clock_ahead_s: float
    memory: tuple[int, int, str] | None
    persistent: bool | None
    refused: Mapping[str, str]
    silent: Mapping[str, str]
    told: Collection[str] = ()


async def diagnose(config: Mapping[str, Any], now: Callable[[], float] = time.time) -> Diagnosis:
    """Look at a plane without changing it.

    Args:
        config: What clients attach with.
        now: This machine's clock, in unix seconds.

    Raises:
        DataPlaneError, RedisError, OSError: The directory cannot be used.
    """
    parsed = parse_config(config)
    settings = parsed.ucxx or UcxxSettings()
    directory = Directory(str(parsed.controller_address), settings=directory_settings(settings))
    resolver = HostResolver(directory, settings, Secret(settings.secret), MsgpackCodec(allow_pickle=False))
    with_told = HostResolver(directory, settings, Secret(""), MsgpackCodec(allow_pickle=False))
    try:
        ahead_s = await directory.server_time() - now()
        memory, persistent = await directory.state()
        refused: dict[str, str] = {}
        silent: dict[str, str] = {}
        told: set[str] = set()
        for host in await directory.hosts():
            try:
                async with asyncio.timeout(HOST_S):
                    await _ask(resolver, host)
            except TimeoutError:
                silent[host.id] = f"no answer within {HOST_S:g} s"
            except (DataPlaneError, RedisError, OSError) as err:
                (refused if isinstance(err.__cause__, UnprovedError) else silent)[host.id] = str(err)
                if host.id in refused and await directory.shared_secret() is not None:
                    with suppress(TimeoutError, DataPlaneError, RedisError, OSError):
                        async with asyncio.timeout(HOST_S):
                            await _ask(with_told, host)
                            told.add(host.id)
        return Diagnosis(ahead_s, memory, persistent, refused, silent, told)
    finally:
        await with_told.close()
        await resolver.close()
        await directory.close()


async def _ask(resolver: HostResolver, host: HostInfo) -> None:
    place = await resolver.find(host.ref)
    if place is not None:
        await resolver.host_client.ask(host.ref, place.route)
