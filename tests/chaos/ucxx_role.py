"""A rollout worker or a trainer as a process of its own: ``python -m tests.chaos.ucxx_role {json}``.

It writes down what it was told by the plane, before it goes on. It ends when its standard input does. On SIGUSR1 it
kills itself at the worst moment: a worker in the middle of its next put's copy, a trainer with its next claim in hand.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncdp import stack
from asyncdp.errors import ClaimLost, ClaimNotReady, DataPlaneError, PartialReadError
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client import connection, lane
from tests.chaos.ucxx_journal import Journal
from tests.chaos.ucxx_rows import FIELDS, fields_of, versions

__all__ = ["PARTITION", "ROWS_PER_PUT"]

PARTITION = "rollouts"
ROWS_PER_PUT = 4
TIMEOUT_S = 4.0
#: How long a trainer tries to read what it has claimed: longer than any fault that heals.
READ_S = 15.0


def die() -> None:
    """Be killed, here and now."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_mid_put() -> None:
    """Let the next put be cut off: on the lane between two fields, over the wire when the host waits for the bytes."""
    whole = lane.pack

    def half(*args: Any) -> Iterator[int]:
        for copied in whole(*args):
            yield copied
            die()

    async def none(*_: Any) -> None:
        die()

    lane.pack = half  # type: ignore[assignment]
    connection.send_all = none  # type: ignore[assignment]


class Role:
    """What both have: a client, a journal, an end.

    Args:
        told: ``config``, ``owner``, ``journal``, ``attempt_timeout_s``.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        """Attach lazily."""
        self.owner = told["owner"]
        self.journal = Journal(Path(told["journal"]))
        self.ended = asyncio.Event()
        self.doomed = False
        transport = UCXXTransport({**told["config"], "owner": self.owner}, bootstrap=False)
        hedged = {"hedge_after_s": 0.5, "hedge_quantile": 0.95}
        self.client = stack(transport, attempt_timeout_s=told["attempt_timeout_s"], **hedged)

    def doom(self) -> None:
        """Take the order to die at the worst moment."""
        self.doomed = True

    async def work(self) -> None:
        """Do one round."""
        raise NotImplementedError

    async def run(self) -> None:
        """Work until the end of standard input."""
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self._heard, loop)
        loop.add_signal_handler(signal.SIGUSR1, self.doom)
        print("ready", flush=True)  # noqa: T201 - the parent waits for it
        while not self.ended.is_set():
            await self.work()
            await asyncio.sleep(0.05)
        await self.client.close()
        self.journal.note("closed")

    def _heard(self, loop: asyncio.AbstractEventLoop) -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            self.ended.set()


class Worker(Role):
    """Puts rows that nobody ever put before."""

    number = 0

    async def work(self) -> None:
        """Put a few rows and write down what became of it."""
        if self.doomed:
            die_in_mid_put()
        self.number += 1
        ids = [f"{self.owner}-{self.number}-{at}" for at in range(ROWS_PER_PUT)]
        self.journal.note("begun", ids=ids)
        try:
            await self.client.put_samples(ids, PARTITION, fields_of(ids, 1), timeout_s=TIMEOUT_S)
        except DataPlaneError as err:
            self.journal.note("failed", ids=ids, error=type(err).__name__, ambiguous=err.ambiguous)
        else:
            self.journal.note("acked", ids=ids)


class Trainer(Role):
    """Claims rows, borrows and pops them, and keeps the last batches."""

    def __init__(self, told: dict[str, Any]) -> None:
        """Begin without batches."""
        super().__init__(told)
        self._turn = 0
        self._kept: deque[tuple[Sequence[str], Any]] = deque(maxlen=3)

    async def work(self) -> None:
        """Claim a batch and see it through: now rows of several slots, now of one, which are borrowed on the lane."""
        self._turn += 1
        size = 2 if self._turn % 2 else 2 * ROWS_PER_PUT
        try:
            meta = await self.client.claim_meta(PARTITION, "train", FIELDS, size, timeout_s=TIMEOUT_S, min_batch_size=1)
        except ClaimNotReady:
            return
        except DataPlaneError as err:
            self.journal.note("not claimed", error=type(err).__name__)
            return
        self.journal.note("claimed", ids=meta.sample_ids, claim=meta.handles[0].claim_id)
        if self.doomed:
            die()
        await self._read(meta)
        await asyncio.sleep(0.05)
        self.journal.note("popping", ids=meta.sample_ids)
        while True:
            try:
                await self.client.pop(meta, PARTITION, timeout_s=TIMEOUT_S)
            except ClaimLost as err:
                self.journal.note("claim lost", ids=meta.sample_ids, error=str(err))
                return
            except DataPlaneError as err:
                self.journal.note("not popped", error=type(err).__name__)
                await asyncio.sleep(0.1)
            else:
                self.journal.note("popped", ids=meta.sample_ids)
                return

    async def _read(self, meta: Any) -> None:
        """Read the batch, again and again while it does not come; what never came is written down."""
        until = asyncio.get_running_loop().time() + READ_S
        while True:
            failed, why = list(meta.sample_ids), ""
            try:
                rows = await self.client.get_data(meta, FIELDS, borrow=True, timeout_s=TIMEOUT_S)
                self._kept.append((meta.sample_ids, rows))
                for ids, kept in self._kept:  # those of before were popped, and their space may be other rows' by now
                    versions(ids, kept)
                failed = []
            except PartialReadError as err:
                versions(err.ok.sample_ids, err.rows)
                failed, why = err.failed.sample_ids, ", ".join({type(one).__name__ for one in err.errors.values()})
            except DataPlaneError as err:
                why = type(err).__name__
            except AssertionError as err:
                self.journal.note("wrong bytes", ids=meta.sample_ids, error=str(err))
                raise
            over = asyncio.get_running_loop().time() > until or "Stale" in why
            if not failed or over:
                self.journal.note("read", ids=[name for name in meta.sample_ids if name not in failed])
                if failed:
                    self.journal.note("unreadable", ids=failed, error=why)
                return
            await asyncio.sleep(0.1)


def main() -> None:
    """Be the role that the argument names."""
    told = json.loads(sys.argv[1])
    role = {"worker": Worker, "trainer": Trainer}[told["role"]]

    async def run() -> None:
        await role(told).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
