"""Clients and slot hosts that end with reads in flight; jobs of ``forking.py``."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from asyncdp import stack
from asyncdp.errors import DataPlaneError
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client.directory_entry import HostEntry
from asyncdp.transports.ucxx.directory import Directory, DirectorySettings
from asyncdp.transports.ucxx.host.main import log_for_operators, run
from asyncdp.transports.ucxx.host.settings import HostSettings

__all__ = ["IDS", "ROW", "host", "read"]

Say = Callable[[Any], None]
IDS = [f"s{at}" for at in range(4)]
#: 2 MiB: a read of all is under way for some milliseconds.
ROW = 1 << 19


async def _reader(client: Any, say: Say) -> None:
    """Read for ever; every row is right, or there is a typed error."""
    told = False
    while True:
        try:
            rows = await client.get_samples(IDS, "p", ["x"], timeout_s=60)
        except DataPlaneError:
            await asyncio.sleep(0.01)
            continue
        assert [float(row[-1]) for row in rows["x"]] == [float(at) for at in range(len(IDS))]
        if not told:
            told = True
            say("reads")


async def read(told: dict[str, Any], say: Say) -> None:
    """Read with several tasks at once, and end in the way that ``how`` says once reads are in flight."""
    client = stack(UCXXTransport(told["config"], bootstrap=False), attempt_timeout_s=2.0)
    tasks = [asyncio.create_task(_reader(client, say)) for _ in range(3)]
    rng = random.Random(told["seed"])
    if told["how"] == "never":
        await asyncio.gather(*tasks)
    await client.get_samples(IDS[:1], "p", ["x"])  # so that all of it is connected
    await asyncio.sleep(rng.random() * 0.1)
    if told["how"] == "exit":
        sys.exit(0)
    if told["how"] == "cancel":
        for task in tasks:
            task.cancel()
    await client.close()
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


async def host(told: dict[str, Any], say: Say) -> None:
    """Be a slot host until SIGTERM."""
    log_for_operators()  # not to standard output, where the parent listens
    directory = Directory(told["url"], settings=DirectorySettings(namespace=told["namespace"]))
    await run(msgspec.convert(told["settings"], HostSettings), HostEntry(directory), ready=say)
    await directory.close()


async def fill(client: Any) -> None:
    """Put what is read."""
    await client.register_partition("p", ["x"], len(IDS), ["train"])
    x = torch.arange(float(len(IDS)))[:, None].expand(len(IDS), ROW)
    await client.put_samples(IDS, "p", {"x": x})
