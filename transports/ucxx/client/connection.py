"""One connection of a client to a port: a control stream and, once payload needs it, a UCX connection beside it.

A connection serves one request at a time. A request that ends without its reply (by cancellation, a timeout or an error
of the connection) makes the connection *spent*: it is closed at once and never used again, because the late reply would
be taken for that of the next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from asyncdp.calls.slots import Part, ReadResult
from asyncdp.errors import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneReadError,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
)

from ..payload.blocks import block_of, layouts_of, rows_of, segments_of
from ..payload.cooperative_copy import memory_for
from ..payload.layout import spans
from ..payload.payload import Payload, messages_of
from ..slots.writer_process import this_machine, this_process
from ..wire.chunks import REPLY_BYTES, messages_of_write, post_receives, send_all, wait_all
from ..wire.control import Control
from ..wire.failures import restore
from ..wire.handshake import Secret, UnprovedError, authenticate
from ..wire.messages import (
    MOST_FIELDS,
    MOST_PICKED,
    MOST_REFS,
    MOST_ROWS,
    MOST_SLOTS,
    REPLIES,
    Abort,
    Ask,
    Done,
    Drop,
    Failed,
    Granted,
    HostFacts,
    More,
    PartHead,
    Read,
    Ready,
    Reserve,
    Rows,
    SlotRows,
    Tie,
    Tied,
    Welcome,
    WireError,
    Write,
    Written,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncdp.calls.slots import HostRef, SlotRef
    from asyncdp.process.buffer_pool import BufferPool
    from asyncdp.rows.block import Block, ObjectCodec

    from ..wire.engine import Engine
    from ..wire.messages import Message

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Connection", "Dropped"]

#: Largest total payload of one reply, in bytes; a host splits larger replies.
MAX_REPLY_BYTES: Final = 1 << 34
#: Most bytes of a write that are copied before the event loop runs.
_COPIED_AT_ONCE: Final = 4 << 20
Dropped = tuple[int, int, Sequence[int], tuple[str, ...]]


class Connection:
    """An authenticated connection to a port of a host.

    Args:
        control: The control stream.
        welcome: The host's Welcome message.
        engine: UCX engine that creates the UCX connection; None: payload travels in frames only.
        address: Address and port number of the host.
        codec: Decodes values that are no tensors.
        buffers: Pool of the buffers for payloads.
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
        """Keep the stream, and register for its end."""
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
        """Connect and authenticate.

        Raises:
            DataPlaneUnavailable: The port does not answer, something other than a slot host does, or the secrets of
                client and host differ.
        """
        host, port = address
        control = Control(kinds=REPLIES)
        try:
            await asyncio.get_running_loop().create_connection(lambda: control, host, port)
            welcome = await authenticate(control, secret, this_machine(), this_process(), client)
        except UnprovedError as err:
            control.end()
            raise DataPlaneUnavailable(str(err), host=host, port=port, cause=err, refused=True) from err
        except (OSError, WireError) as err:
            control.end()
            raise DataPlaneUnavailable(f"no slot host answers: {err}", host=host, port=port, cause=err) from err
        except BaseException:
            control.end()
            raise
        return cls(control, welcome, engine, address, codec, buffers)

    # -- state

    @property
    def spent(self) -> bool:
        """Whether the connection must not be used again."""
        return self._control.lost

    @property
    def ended(self) -> bool:
        """Whether the host has closed the connection, or its process has ended: as of now, by a system call."""
        return self._control.hung_up()

    def spend(self) -> None:
        """Close the connection at once; buffers that UCX still writes stay pinned in the engine. Idempotent."""
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
        """Send a request and return its reply; raise an error that the host reports, without ending the connection."""
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
        """Return the UCX engine and connection; the connection is created when it is first needed.

        Raises:
            DataPlaneUnsupported: Client or host has no UCX. No port is at fault, and no other attempt would succeed.
        """
        if self._engine is None or not self.welcome.ucx_port:
            who = "this client" if self._engine is None else "the slot host"
            most = self.welcome.inline_bytes
            msg = f"the payload does not fit into a frame (inline_bytes={most}), and {who} has no UCX"
            raise DataPlaneUnsupported(msg, capability="ucx", host=self._address, port=self._port)
        if self._endpoint is None:
            self._endpoint = self._engine.connect(self._address, self.welcome.ucx_port)
            token = np.frombuffer(self.welcome.token, np.uint8).copy()
            self._engine.send_token(self._endpoint, token)
            await self._ask(Tie(), Tied)
        return self._engine, self._endpoint

    async def request(self, work: Any) -> Any:
        """Await one request (a coroutine of this connection); any end without a reply makes the connection spent."""
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
        """Read rows of many slots in one request, or in several where they exceed the limits of one."""
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
                engine, endpoint = await self._tied()  # before the buffers are allocated, because it may fail
                buffers = [await memory_for(self._buffers, part.size) for part in reply.parts]
                await wait_all(post_receives(engine, endpoint, tag, buffers, REPLY_BYTES))
        parts = []
        for head, data in zip(reply.parts, buffers, strict=True):
            try:
                parts.append(self._part(head, data))
            except DataPlaneReadError as err:  # what one writer has put does not keep the other rows from their reader
                for at in head.refs:
                    errors[at] = type(err)(err.message, host=host.id, port=self._port, field=err.field, cause=err)
        return ReadResult(tuple(parts), errors)

    def _check(self, reply: Rows, refs: Sequence[SlotRef], errors: dict[int, DataPlaneError]) -> None:
        """Check the announced parts against the request, before buffers are allocated for them."""
        seen = [at for part in reply.parts for at in part.refs]
        if len(set(seen)) != len(seen) or set(seen) & set(errors) or any(at >= len(refs) for at in seen):
            raise WireError("the reply names slots twice, or slots that were not asked for")
        if sum(part.size for part in reply.parts) > MAX_REPLY_BYTES:
            raise WireError("the reply is longer than any")
        for part in reply.parts:
            if part.rows != sum(len(refs[at].index) for at in part.refs) or len(part.nbytes) != len(part.refs):
                raise WireError("the number of rows in the reply differs from the number requested")

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
        ahead: int = 0,
    ) -> Granted:
        """Reserve slots.

        Args:
            host: Host of this connection.
            op_id: Id of the put.
            fields: Field names, in the order of the payload's columns.
            sizes: Data bytes of each row.
            first_row: Position of the first row in the put.
            ttl_s: Seconds from now for which the put may still publish.
            wait_s: Seconds that the host may wait for free space.
            lane: Whether this process will copy into the slots itself, over shared memory.
            ahead: Number of further slots to lease for puts of the same kind.
        """
        if len(sizes) > MOST_ROWS or len(fields) > MOST_FIELDS:
            msg = f"a put of {len(sizes)} rows and {len(fields)} fields; one may have {MOST_ROWS} and {MOST_FIELDS}"
            raise DataPlaneBadRequest(f"{msg}: put it in parts")
        message = Reserve(op_id, fields, list(sizes), first_row, ttl_s, wait_s, lane, host.epoch, ahead)
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
        counts = [len(ref.rows) for ref in refs]
        layouts = layouts_of(block, counts)
        sizes = [layout.nbytes for layout in layouts]
        slots = [(ref.slot, ref.generation, size) for ref, size in zip(refs, sizes, strict=True)]
        sums = [block.checksum(range(first, stop)) for first, stop in spans(counts)] if checksum else None
        parts = (rows_of(block, first, stop) for first, stop in spans(counts))
        segments = chain.from_iterable(map(segments_of, parts, layouts))
        if sum(sizes) <= self.welcome.inline_bytes:
            inline = b"".join(segment.data for segment in segments)
            await self._ask(Write(op_id, slots, host.epoch, sums, inline), Written)
            return
        engine, endpoint = await self._tied()
        lengths, later = messages_of_write(sizes)
        messages = messages_of(segments, lengths, self._buffers.empty, _COPIED_AT_ONCE)
        await self._control.send(Write(op_id, slots, host.epoch, sums))
        first_message = next(messages)  # made while the host makes ready
        ready = await self._reply(Ready | Written)
        if isinstance(ready, Written):
            return  # an earlier attempt has written them; only its reply was lost
        messages = chain((first_message,), messages)
        await send_all(engine, endpoint, ready.tag, messages, lambda: self._reply(More), later)
        await self._reply(Written)

    async def abort(self, op_id: str, *, idle: bool) -> int:
        """Abort a put; ``idle``: this process copies no row of it any more. Returns how many slots stay occupied."""
        done: Done = await self.request(self._ask(Abort(op_id, idle), Done))
        return done.count

    async def drop(self, host: HostRef, cells: Sequence[Dropped]) -> int:
        """End the life of rows: (slot, generation, rows, fields or () for all) each. Return how many were found."""
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
        """Return the host's identity, its size and counters; also used to check that the host answers."""
        facts: HostFacts = await self.request(self._ask(Ask(), HostFacts))
        return facts.facts


def _cuts(indices: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Split refs, given by their row indices, into requests within the host's limits; return (first, stop) pairs."""
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
    """Split a row index into pieces of at most ``MOST_PICKED`` rows; a range stays whole."""
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
    """Split bytes into writable arrays of these sizes."""
    if sum(sizes) != len(data):
        raise WireError(f"{len(data)} bytes came where {sum(sizes)} were announced")
    whole = np.frombuffer(bytearray(data), np.uint8)
    out, begin = [], 0
    for size in sizes:
        out.append(whole[begin : begin + size])
        begin += size
    return out
