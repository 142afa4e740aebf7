"""A plane of one host in this process, and clients of which is seen what they ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import anyio
import torch

from asyncdp import stack
from asyncdp.testing.contract.rig import BASE
from asyncdp.transports.ucxx import UCXXTransport
from tests.ucxx.hosts import hosted

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer
    from asyncdp.transports.ucxx.host.host import Host

__all__ = ["IDS", "Seen", "seen_plane", "states_of"]

IDS = ["a", "b"]


def states_of(host: Host) -> dict[str, int]:
    """Return the numbers of a host's slots by state, after a look at what writers in shared memory have finished."""
    host.service.table.sweep(0.0)
    return {name: n for name, n in host.service.table.states().items() if n}


class Seen:
    """A plane of one host, clients of it, and what the first one asks: the directory by verb, the host to reserve."""

    def __init__(self, config: dict[str, Any], host: Host) -> None:
        self.host = host
        self.config = config
        self.transport = UCXXTransport(config, bootstrap=False)
        self.client: Any = stack(self.transport)
        self.asked: Counter[str] = Counter()
        link: Any = self.transport._directory._link
        call_of = link.call_of

        def counted(verb: str, *args: Any) -> Any:
            self.asked[verb] += 1
            return call_of(verb, *args)

        link.call_of = counted

    async def put(self, value: float = 1.0, **options: Any) -> None:
        """Put two rows of ``x``."""
        await self.client.put_samples(IDS, "p", {"x": torch.full((2, 3), float(value))}, **options)

    async def cut(self, verb: Callable[..., Any], *args: Any) -> None:
        """Make a call, and cancel it after the directory has executed it, before its answer comes."""
        link: Any = self.transport._directory._link
        function, done = link.function, anyio.Event()

        async def unanswered(*args: Any) -> None:
            await function(*args)
            done.set()
            await anyio.sleep_forever()

        link.function = unanswered
        async with anyio.create_task_group() as group:
            group.start_soon(verb, *args)
            await done.wait()
            group.cancel_scope.cancel()
        link.function = function

    def other(self) -> Any:
        """Return another client."""
        return stack(UCXXTransport(self.config, bootstrap=False))

    def states(self) -> dict[str, int]:
        """Return the numbers of slots by state, after a look at what writers in shared memory have finished."""
        return states_of(self.host)


@asynccontextmanager
async def seen_plane(
    server: EmbeddedServer, namespace: str, connect: Callable[..., Directory], **config: Any
) -> AsyncIterator[Seen]:
    """Give a plane, and in it a partition of which two rows of ``x`` were put."""
    from asyncdp.transports.ucxx.client.directory_entry import HostEntry

    ucxx = {"namespace": namespace, "devices": "lo"}
    whole = {**BASE, "impl": "ucxx", "controller_address": server.url, "ucxx": ucxx, **config}
    with mock.patch.dict("os.environ", {"ASYNCDP_SECRET": "a secret for tests"}):
        async with hosted(HostEntry(connect()), plane=namespace) as host:
            made = Seen(whole, host)
            async with made.client:
                await made.client.register_partition("p", ["x"], 8, ["t"])
                await made.put(0.0)
                made.asked.clear()
                yield made
