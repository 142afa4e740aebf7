"""One connection of a client to a port: a control stream and, once payload needs it, a UCX connection beside it.

One request at a time. Whatever ends otherwise than with its reply (a cancel, a timeout, an error of the line) leaves
the connection *spent*: it is closed at once and never used again, since the reply may still be on its way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from asyncdp.calls.slots import Part, ReadResult
from asyncdp.errors import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
)

from ..payload.blocks import block_of, layout_of, pack, rows_of
from ..payload.cooperative_copy import copy_cooperatively
from ..payload.payload import Payload
from ..slots.writer_process import this_machine, this_process
from ..wire.chunks import batches, post_receives, send_all, wait_all
from ..wire.control import Control
from ..wire.failures import restore
from ..wire.handshake import Secret, knock
from ..wire.messages import (
    MOST_FIELDS,
    MOST_PICKED,
    MOST_REFS,
    MOST_ROWS,
    MOST_SLOTS,
    Abort,
    Ask,
    Done,
    Drop,
    Failed,
    Granted,
    More,
    PartHead,
    Read,
    Ready,
    Reserve,
    Rows,
    SlotRows,
    Tie,
    Tied,
    Told,
    Welcome,
    WireError,
    Write,
    Written,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncdp.calls.slots import HostRef, SlotRef
    from asyncdp.rows.block import Block, ObjectCodec

    from ..wire.buffers import BufferPool
    from ..wire.engine import Engine
    from ..wire.messages import Message

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Connection", "Dropped"]

#: The payload of one reply at the most; a host splits larger ones.
MAX_REPLY_BYTES: Final = 1 << 34
Dropped = tuple[int, int, Sequence[int], tuple[str, ...]]


class Connection:
    """A connection that was let in.

    Args:
        control: Its stream.
        welcome: What the host said.
        engine: Makes the UCX connection; None: payload travels in frames only.
        address, port: Where the host is.
        codec, buffers: For what is read.
    """

    def __init__(
        self,
        control: Control,
        welcome: Welcome,
        engine: Engine | None,
        address: tuple[str, int],
        codec: ObjectCodec,
        buffers: BufferPool,
    ) -> None:
        """Watch for the stream's end."""
        self.welcome = welcome
        self.used_at = time.monotonic()
        self._control = control
        self._engine = engine
        self._address, self._port = address
        self._codec = codec
        self._buffers = buffers
        self._endpoint: Any = None
        control.on_lost = self.spend

    @classmethod
    async def open(
        cls,
        engine: Engine | None,
        secret: Secret,
        address: tuple[str, int],
        codec: ObjectCodec,
        buffers: BufferPool,
        client: bytes = b"\0" * 16,
    ) -> Connection:
        """Connect and be let in.

        Raises:
            DataPlaneUnavailable: Nobody is there, or no slot host.
            DataPlaneBadRequest: The secret is wrong.
        """
        host, port = address
        control = Control()
        try:
            await asyncio.get_running_loop().create_connection(lambda: control, host, port)
            welcome = await knock(control, secret, this_machine(), this_process(), client)
        except (OSError, WireError) as err:
            control.end()
            raise DataPlaneUnavailable(f"no slot host answers: {err}", host=host, port=port, cause=err) from err
        except BaseException:
            control.end()
            raise
        return cls(control, welcome, engine, address, codec, buffers)

    # -- life

    @property
    def spent(self) -> bool:
        """Whether it must not be used again."""
        return self._control.lost

    def spend(self) -> None:
        """End it now; what UCX still writes stays pinned in the engine. Twice is fine."""
        self._control.on_lost = lambda: None
        self._control.end()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None and self._engine is not None:
            self._engine.abandon(endpoint)

    def _lost(self, err: Exception) -> NoReturn:
        raise DataPlaneUnavailable(
            f"the connection broke: {type(err).__name__}: {err}",
            host=self._address,
            port=self._port,
            cause=err,
        ) from err

    async def _ask(self, message: Message, kind: Any) -> Any:
        """Send a request and return its reply; a failure that the host reports is raised, the connection is good."""
        await self._control.send(message)
        return await self._reply(kind)

    async def _reply(self, kind: Any) -> Any:
        reply = await self._control.receive()
        if isinstance(reply, Failed):
            raise restore(reply.code, reply.text, reply.retry_after_s, host=self._address, port=self._port)
        if not isinstance(reply, kind):
            raise WireError(f"{type(reply).__name__} came where {kind} was expected")
        return reply

    async def _tied(self) -> tuple[Engine, Any]:
        """Return the UCX connection, made when it is first needed."""
        if self._engine is None:
            raise WireError("the payload does not fit into a frame, and this client has no UCX")
        if self._endpoint is None:
            if not self.welcome.ucx_port:
                raise WireError("the payload does not fit into a frame, and the host has no UCX")
            self._endpoint = self._engine.connect(self._address, self.welcome.ucx_port)
            token = np.frombuffer(self.welcome.token, np.uint8).copy()
            self._engine.send_token(self._endpoint, token)
            await self._ask(Tie(), Tied)
        return self._engine, self._endpoint

    async def request(self, work: Any) -> Any:
        """Run one request (a coroutine of this connection); whatever ends it but a reply spends the connection."""
        try:
            result = await work
        except DataPlaneError as err:
            if isinstance(err, (CorruptPayload, DataPlaneUnsupported)) or self._control.lost:
                self.spend()
            raise
        except (OSError, WireError) as err:
            self.spend()
            self._lost(err)
        except Exception as err:
            self.spend()
            if not type(err).__name__.startswith("UCXX"):
                raise
            self._lost(err)
        except BaseException:
            self.spend()
            raise
        self.used_at = time.monotonic()
        return result

    # -- requests

    async def read(self, host: HostRef, refs: Sequence[SlotRef]) -> ReadResult:
        """Read rows of many slots in one request; in several where they are more than one may name."""
        parts: list[Part] = []
        errors: dict[int, DataPlaneError] = {}
        shares = _cuts([ref.index for ref in refs])
        for first, stop in shares:
            result: ReadResult = await self.request(self._read(host, refs[first:stop]))
            if len(shares) == 1:
                return result
            parts += [replace(part, refs=tuple(at + first for at in part.refs)) for part in result.parts]
            errors |= {at + first: err for at, err in result.errors.items()}
        return ReadResult(tuple(parts), errors)

    async def _read(self, host: HostRef, refs: Sequence[SlotRef]) -> ReadResult:
        names: dict[tuple[str, ...], int] = {}
        asked = [
            _slot_rows(ref.slot, ref.generation, names.setdefault(ref.fields, len(names)), ref.index) for ref in refs
        ]
        tag = 0 if self._engine is None else self._engine.next_tag()
        reply = await self._ask(Read(list(names), asked, tag, host.epoch), Rows)
        errors = {
            at: restore(code, text, retry, host=host.id, port=self._port)
            for at, code, text, retry in reply.errors
            if at < len(refs)
        }
        self._check(reply, refs, errors)
        if reply.inline is not None:
            buffers = _cut(reply.inline, [part.size for part in reply.parts])
        else:
            buffers = []
            if reply.parts:
                engine, endpoint = await self._tied()  # may fail: before anything is allocated
                buffers = [self._buffers.empty(part.size) for part in reply.parts]
                await wait_all(post_receives(engine, endpoint, tag, buffers))
        parts = [self._part(head, data) for head, data in zip(reply.parts, buffers, strict=True)]
        return ReadResult(tuple(parts), errors)

    def _check(self, reply: Rows, refs: Sequence[SlotRef], errors: dict[int, DataPlaneError]) -> None:
        """Check what is announced before anything is allocated for it."""
        seen = [at for part in reply.parts for at in part.refs]
        if len(set(seen)) != len(seen) or set(seen) & set(errors) or any(at >= len(refs) for at in seen):
            raise WireError("the reply names slots twice, or slots that were not asked for")
        if sum(part.size for part in reply.parts) > MAX_REPLY_BYTES:
            raise WireError("the reply is longer than any")
        for part in reply.parts:
            if part.rows != sum(len(refs[at].index) for at in part.refs) or len(part.nbytes) != len(part.refs):
                raise WireError("the reply has another number of rows than was asked for")

    def _part(self, head: PartHead, data: Bytes) -> Part:
        block = block_of(Payload.read(data, head.rows), self._codec)
        sums = None if head.checksums is None else tuple(head.checksums)
        return Part(tuple(head.refs), block, tuple(head.nbytes), head.schema, sums)

    async def reserve(
        self,
        host: HostRef,
        op_id: str,
        fields: tuple[str, ...],
        sizes: Sequence[int],
        first_row: int,
        *,
        ttl_s: float,
        wait_s: float,
        lane: bool,
    ) -> Granted:
        """Reserve slots.

        Args:
            host: Who is asked.
            op_id: Of the put.
            fields: Names, in the order of the payload's columns.
            sizes: Data bytes per row.
            first_row: Position of the first row in the put.
            ttl_s: How long from now the put may still publish, in seconds.
            wait_s: How long the host may wait for space, in seconds.
            lane: Whether this process will copy into them itself.
        """
        if len(sizes) > MOST_ROWS or len(fields) > MOST_FIELDS:
            msg = f"a put of {len(sizes)} rows and {len(fields)} fields; one may have {MOST_ROWS} and {MOST_FIELDS}"
            raise DataPlaneBadRequest(f"{msg}: put it in parts")
        message = Reserve(op_id, fields, list(sizes), first_row, ttl_s, wait_s, lane, host.epoch)
        granted: Granted = await self.request(self._ask(message, Granted))
        return granted

    async def write(
        self, host: HostRef, op_id: str, refs: Sequence[SlotRef], block: Block, *, checksum: bool = False
    ) -> None:
        """Write rows into reserved slots; ``block`` holds the rows of all refs in order."""
        if len(refs) <= MOST_SLOTS:
            await self.request(self._write(host, op_id, refs, block, checksum=checksum))
            return
        row = 0
        for first in range(0, len(refs), MOST_SLOTS):
            share = refs[first : first + MOST_SLOTS]
            stop = row + sum(len(ref.rows) for ref in share)
            await self.request(self._write(host, op_id, share, rows_of(block, row, stop), checksum=checksum))
            row = stop

    async def _write(self, host: HostRef, op_id: str, refs: Sequence[SlotRef], block: Block, *, checksum: bool) -> None:
        parts, first = [], 0
        for ref in refs:
            parts.append(rows_of(block, first, first + len(ref.rows)))
            first += len(ref.rows)
        layouts = [layout_of(part) for part in parts]
        messages, payloads = [], []
        for begin, stop in batches([layout.nbytes for layout in layouts]):
            whole, at = self._buffers.empty(sum(layout.nbytes for layout in layouts[begin:stop])), 0
            for part, layout in zip(parts[begin:stop], layouts[begin:stop], strict=True):
                out = whole[at : at + layout.nbytes]
                await copy_cooperatively(pack(part, layout, out))
                payloads.append(out)
                at += layout.nbytes
            messages.append(whole)
        slots = [(ref.slot, ref.generation, layout.nbytes) for ref, layout in zip(refs, layouts, strict=True)]
        sums = [Payload.read(data).checksum() for data in payloads] if checksum else None
        if sum(map(len, messages)) <= self.welcome.inline_bytes:
            inline = b"".join(data.tobytes() for data in messages)
            await self._ask(Write(op_id, slots, host.epoch, sums, inline), Written)
            return
        engine, endpoint = await self._tied()
        ready = await self._ask(Write(op_id, slots, host.epoch, sums), Ready | Written)
        if isinstance(ready, Written):
            return  # an earlier attempt got through, and only its answer was lost
        await send_all(engine, endpoint, ready.tag, messages, lambda: self._reply(More))
        await self._reply(Written)

    async def abort(self, op_id: str, *, idle: bool) -> int:
        """Give a put up; ``idle``: this process copies nothing of it any more. Returns how many slots stay for now."""
        done: Done = await self.request(self._ask(Abort(op_id, idle), Done))
        return done.count

    async def drop(self, host: HostRef, cells: Sequence[Dropped]) -> int:
        """End the life of rows: (slot, generation, rows, fields or none for all) each. Returns how many were found."""
        found = 0
        cells = [
            (slot, generation, piece, fields) for slot, generation, index, fields in cells for piece in _pieces(index)
        ]
        for first, stop in _cuts([index for _, _, index, _ in cells]):
            names: dict[tuple[str, ...], int] = {}
            refs = [
                _slot_rows(slot, generation, names.setdefault(fields, len(names)), index)
                for slot, generation, index, fields in cells[first:stop]
            ]
            done: Done = await self.request(self._ask(Drop(list(names), refs, host.epoch), Done))
            found += done.count
        return found

    async def ask(self) -> dict[str, int | float | str]:
        """Return what the host has and does; also the way to see that it answers."""
        told: Told = await self.request(self._ask(Ask(), Told))
        return told.facts


def _cuts(indices: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Cut what is asked of slots, rows of each, into requests that a host takes, as (first, stop)."""
    out: list[tuple[int, int]] = []
    first, picked = 0, 0
    for at, index in enumerate(indices):
        count = 0 if isinstance(index, range) else len(index)
        if at > first and (at - first == MOST_REFS or picked + count > MOST_PICKED):
            out.append((first, at))
            first, picked = at, 0
        picked += count
    return [*out, (first, len(indices))]


def _pieces(index: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut a list of rows into as many as a ref may name one by one."""
    if isinstance(index, range) or len(index) <= MOST_PICKED:
        yield index
        return
    for first in range(0, len(index), MOST_PICKED):
        yield index[first : first + MOST_PICKED]


def _slot_rows(slot: int, generation: int, fields: int, index: Sequence[int]) -> SlotRows:
    if isinstance(index, range) and index.step == 1:
        return SlotRows(slot, generation, fields, index.start, len(index))
    rows = [int(row) for row in index]
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return SlotRows(slot, generation, fields, rows[0], len(rows))
    return SlotRows(slot, generation, fields, 0, 0, rows)


def _cut(data: bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Cut bytes into writable arrays of these sizes."""
    if sum(sizes) != len(data):
        raise WireError(f"{len(data)} bytes came where {sum(sizes)} were announced")
    whole = np.frombuffer(bytearray(data), np.uint8)
    out, begin = [], 0
    for size in sizes:
        out.append(whole[begin : begin + size])
        begin += size
    return out
