"""Jobs in children that were forked from a parent which has imported UCX and not used it; see ``forking.py``."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

__all__ = ["Forker", "Job"]

ROOT = Path(__file__).parents[2]


class Job:
    """One child.

    Attributes:
        pid: Its process id.
        ended: Its exit code, or minus the signal that ended it.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.pid: asyncio.Future[int] = loop.create_future()
        self.stopped: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.said: asyncio.Queue[Any] = asyncio.Queue()

    async def hear(self, within_s: float = 30.0) -> Any:
        """Return what it says next."""
        async with asyncio.timeout(within_s):
            return await self.said.get()

    async def code(self, within_s: float = 30.0) -> int:
        """Return its exit code."""
        async with asyncio.timeout(within_s):
            return await self.ended

    async def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(await self.pid, number)

    def take(self, told: dict[str, Any]) -> None:
        """Note what the parent says of it."""
        for name, future in (("pid", self.pid), ("stopped", self.stopped), ("ended", self.ended)):
            if name in told and not future.done():
                future.set_result(told[name])
        if "said" in told:
            self.said.put_nowait(told["said"])


class Forker:
    """The parent of the children, as its own parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}

    @classmethod
    @asynccontextmanager
    async def start(cls, **env: str) -> AsyncIterator[Forker]:
        """Start it; at the end it ends, and takes with it what still runs."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.ucxx.forking", cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        made = cls(process)
        async with asyncio.timeout(60):
            assert json.loads(await process.stdout.readline()) == {"ready": True}
        ear = asyncio.create_task(made._listen(process.stdout))
        try:
            yield made
        finally:
            process.stdin.close()
            await process.wait()
            await ear
            process._transport.close()  # type: ignore[attr-defined]

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            try:
                told = json.loads(line)
            except json.JSONDecodeError:  # not ours: somebody's log
                sys.stderr.write(line.decode())
                continue
            self._jobs[told["job"]].take(told)

    async def run(self, call: str, **told: Any) -> Job:
        """Fork a child that runs ``package.module:function``."""
        number = next(self._numbers)
        job = self._jobs[number] = Job()
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps({"job": number, "call": call, "told": told}) + "\n").encode())
        await self._process.stdin.drain()
        return job
