"""Small reads of many callers as one request: each gets its own rows and errors, in memory of its own."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from asyncdp.calls.answers import verify
from asyncdp.calls.slots import HostRef, Part, ReadResult, ReadSlots, SlotRef
from asyncdp.errors import DataPlaneError, DataPlaneUnavailable, StaleSlotError
from asyncdp.rows.block import Block, Dense
from asyncdp.transports.ucxx.client.joined_reads import JoinedReads

pytestmark = pytest.mark.anyio
HOST = HostRef("h", 7, (1,))


def ref(slot: int, rows: int = 2) -> SlotRef:
    """A reference to the first rows of a slot."""
    return SlotRef(HOST, slot, 1, ("a", "o"), range(rows), range(rows))


class Host:
    """Answers with one part for all refs; slot 13 is stale."""

    def __init__(self, width: int = 4) -> None:
        """Answer nobody yet."""
        self.width = width
        self.asked: list[list[int]] = []
        self.open = asyncio.Event()
        self.error: DataPlaneError | None = None

    async def read(self, refs: Sequence[SlotRef]) -> ReadResult:
        """Answer a read: each row holds the number of its slot."""
        self.asked.append([one.slot for one in refs])
        await self.open.wait()
        if self.error is not None:
            raise self.error
        good = [at for at, one in enumerate(refs) if one.slot != 13]
        slots = [refs[at].slot for at in good for _ in refs[at].index]
        values = torch.tensor(slots, dtype=torch.float32).view(-1, 1).expand(-1, self.width).contiguous()
        block = Block.from_fields({"a": values, "o": [f"slot {slot}" for slot in slots]}, len(slots))
        per_row, first, sizes, sums = block.row_nbytes(), 0, [], []
        for at in good:
            stop = first + len(refs[at].index)
            sizes.append(int(per_row[first:stop].sum()))
            sums.append(block.checksum(range(first, stop)))
            first = stop
        errors = {at: StaleSlotError("gone") for at, one in enumerate(refs) if one.slot == 13}
        part = Part(tuple(good), block, tuple(sizes), block.schema_hash(), tuple(sums))
        return ReadResult((part,), errors)


async def loop_runs() -> None:
    """Let the event loop run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_caller_gets_its_own_rows_and_errors() -> None:
    """Verified by size, schema and checksum, as if it had asked alone."""
    host = Host()
    reads = JoinedReads(host.read)
    asked = [[ref(10 * at), ref(10 * at + 3, 1)] for at in range(8)]
    tasks = [asyncio.create_task(reads.read(refs)) for refs in asked]
    await loop_runs()
    host.open.set()
    results = await asyncio.gather(*tasks)
    assert [len(slots) for slots in host.asked] == [2, 2, 12]
    for at, (refs, result) in enumerate(zip(asked, results, strict=True)):
        checked = verify(result, ReadSlots(HOST, tuple(refs)))
        assert set(checked.errors) == ({1} if at == 1 else set())
        assert all(isinstance(err, StaleSlotError) for err in checked.errors.values())
        rows = [row for part in checked.parts for row in part.block.columns["a"].values[:, 0].tolist()]  # type: ignore[attr-defined]
        assert rows == [10.0 * at] * 2 + [10.0 * at + 3] * (at != 1)


async def test_rows_keep_no_memory_of_other_callers() -> None:
    """A tensor of a joined answer has storage for its own rows only."""
    host = Host()
    reads = JoinedReads(host.read)
    asyncio.get_running_loop().call_later(0.01, host.open.set)
    results = await asyncio.gather(*(reads.read([ref(at)]) for at in range(6)))
    assert [len(slots) for slots in host.asked] == [1, 1, 4]
    for result in results[2:]:
        column = result.parts[0].block.columns["a"]
        assert isinstance(column, Dense)
        assert column.values.untyped_storage().nbytes() == column.nbytes == 2 * 4 * 4


async def test_large_reads_are_not_joined() -> None:
    """What many callers would have to copy is read by each itself, as soon as the answers show that rows are large."""
    host = Host(width=64 << 10)
    reads = JoinedReads(host.read)
    for joined in (True, False):
        host.asked.clear()
        host.open.clear()
        asyncio.get_running_loop().call_later(0.01, host.open.set)
        await asyncio.gather(*(reads.read([ref(at)]) for at in range(6)))
        assert [len(slots) for slots in host.asked] == ([1, 1, 4] if joined else [1] * 6)
    host.asked.clear()
    host.open.clear()
    asyncio.get_running_loop().call_later(0.01, host.open.set)
    small = JoinedReads(host.read)
    await asyncio.gather(*(small.read([ref(at, 100)]) for at in range(6)))
    assert [len(slots) for slots in host.asked] == [1] * 6


async def test_an_error_of_the_request_is_each_callers_own() -> None:
    """Its port is blamed by each of them."""
    host = Host()
    asyncio.get_running_loop().call_later(0.01, host.open.set)
    host.error = DataPlaneUnavailable("gone", host="h", port=1)
    reads = JoinedReads(host.read)
    errors = await asyncio.gather(*(reads.read([ref(at)]) for at in range(6)), return_exceptions=True)
    assert all(isinstance(err, DataPlaneUnavailable) and err.port == 1 and err.blames_port for err in errors)
    assert len({id(err) for err in errors[2:]}) == 4
