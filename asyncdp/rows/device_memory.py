"""Copies between devices and host memory, through pinned host memory that is used again.

A device copies from and to pinned memory by itself, while the event loop goes on; from other memory the driver makes a
copy of its own first, and holds the caller up.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import torch
from tensordict import TensorDict, TensorDictBase

from asyncdp.process.buffer_pool import BufferPool

from .pack import field_names, raw_leaf
from .tensors import jagged, packed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    from asyncdp.calls.context import Env

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Copy", "Staging", "on_host", "staging_of"]

#: Bytes of pinned memory that one client has in use at a time; half of it for puts, half for reads.
MOST_BYTES: Final = 512 << 20
#: Bytes of one copy to a device; two of them are under way at a time.
PIECE_BYTES: Final = 16 << 20
#: Seconds between two looks at whether a copy has ended, and after which free pinned memory is given back.
LOOK_S, IDLE_S = 0.0002, 30.0


class Copy(Protocol):
    """A copy that was started."""

    def query(self) -> bool:
        """Return whether it has ended."""


class Accelerator(Protocol):
    """What staging needs of a kind of device."""

    def pinned(self, nbytes: int) -> memoryview:
        """Allocate pinned host memory, which is freed with the last reference to it."""

    def empty_like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Allocate a tensor of this shape and dtype on a device."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Start a copy between a device and pinned memory."""


class Cuda:
    """CUDA devices, by their current streams."""

    def pinned(self, nbytes: int) -> memoryview:
        """Allocate page-locked memory."""
        memory: Any = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memoryview(memory)

    def empty_like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Allocate a tensor on a device."""
        return torch.empty_like(tensor, device=device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Enqueue a copy, and an event after it."""
        with torch.cuda.device((source if source.is_cuda else target).device):
            target.copy_(source, non_blocking=True)
            event: Any = torch.cuda.Event()
            event.record()
        copy: Copy = event
        return copy


class Staging:
    """Moves tensors between one kind of device and host memory.

    Pinned memory is used again once nothing refers to it and no copy reads or writes it; that of a copy whose caller
    was cancelled is kept until the copy has ended.

    Args:
        accelerator: The kind of device.
        most_bytes: Most bytes of pinned memory in use at a time: half of it for tensors that come from a device, which
            are copied as ``.cpu()`` does beyond that, and half for what goes to one, which waits.
        piece_bytes: Most bytes of one copy to a device.
    """

    def __init__(
        self, accelerator: Accelerator, *, most_bytes: int = MOST_BYTES, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """Start without memory."""
        self._accelerator = accelerator
        self._most, self._share = most_bytes, most_bytes // 2
        self._piece = min(piece_bytes, self._share // 2)
        self._pool = BufferPool(keep_bytes=most_bytes, least_bytes=1, huge_pages=False, allocate=accelerator.pinned)
        #: Bytes in use from and to a device, and what finalizers gave back of each since the last look.
        self._used = {"from": 0, "to": 0}
        self._returned: deque[tuple[str, int]] = deque()
        #: Copies under way with their pinned memory; they stay here if nobody waits for them any more.
        self._running: dict[int, tuple[Copy, Bytes]] = {}
        self._count = 0

    async def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a device's tensor in host memory, by one copy."""
        buffer = self._take("from", tensor.nbytes)
        if buffer is None:
            return tensor.cpu()
        host = torch.from_numpy(buffer).view(tensor.dtype).view(tensor.shape)
        await self._ended(self._start(host, tensor.contiguous(), buffer))
        return host

    async def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy on a device of a tensor of host memory; it goes there in pieces."""
        tensor = tensor.contiguous()
        out = self._accelerator.empty_like(tensor, device)
        if not tensor.nbytes:
            return out
        source, target = _flat(tensor).numpy(), _flat(out)
        under_way: deque[int] = deque()
        for begin in range(0, len(source), self._piece):
            piece = source[begin : begin + self._piece]
            if len(under_way) > 1:
                await self._ended(under_way.popleft())
            while (buffer := self._take("to", len(piece))) is None:  # noqa: ASYNC110 - a device tells nobody
                await anyio.sleep(LOOK_S)
            buffer[:] = piece
            under_way.append(self._start(target[begin : begin + len(piece)], torch.from_numpy(buffer), buffer))
            del buffer
        for copy in under_way:
            await self._ended(copy)
        return out

    async def move(self, data: TensorDict, device: torch.device) -> TensorDict:
        """Return what was read with all of its tensors on a device."""
        leaves, there = {}, device
        for name in field_names(data):
            leaf = raw_leaf(data, name)
            if isinstance(leaf, torch.Tensor):
                leaf = await _parts(leaf, lambda part: self.to_device(part, device))
                there = leaf.device
            leaves[name] = leaf
        return TensorDict(leaves, data.batch_size, device=there)

    def _take(self, way: str, nbytes: int) -> Bytes | None:
        """Return pinned memory; None where too much is in use, or nothing is asked for."""
        self._running = {number: one for number, one in self._running.items() if not one[0].query()}
        while self._returned:
            before, size = self._returned.popleft()
            self._used[before] -= size
        self._pool.trim(IDLE_S)
        self._pool.keep_bytes = max(1, self._most - sum(self._used.values()) - nbytes)
        if not nbytes or self._used[way] + nbytes > self._share:
            return None
        buffer = self._pool.empty(nbytes)
        self._used[way] += nbytes
        weakref.finalize(buffer, self._returned.append, (way, nbytes)).atexit = False
        return buffer

    def _start(self, target: torch.Tensor, source: torch.Tensor, buffer: Bytes) -> int:
        self._count += 1
        self._running[self._count] = self._accelerator.copy(target, source), buffer
        return self._count

    async def _ended(self, number: int) -> None:
        while number in self._running and not self._running[number][0].query():  # noqa: ASYNC110 - as above
            await anyio.sleep(LOOK_S)
        self._running.pop(number, None)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)


async def _parts(leaf: torch.Tensor, move: Callable[[torch.Tensor], Awaitable[torch.Tensor]]) -> torch.Tensor:
    """Move a tensor, or the values of a jagged one."""
    if not leaf.is_nested:
        return await move(leaf.detach())
    values, offsets, dim = packed(leaf.detach())
    moved = await move(values)
    return jagged(moved if dim == 0 else moved.movedim(0, dim).contiguous(), offsets, dim)


def staging_of(env: Env) -> Staging:
    """Return the staging of a client for CUDA devices, which is made when it is first needed."""
    if env.staging is None:
        env.staging = Staging(Cuda())
    return env.staging


async def on_host(fields: Mapping[str, Any] | TensorDictBase, env: Env) -> Mapping[str, Any] | TensorDictBase:
    """Return fields with the tensors that are on CUDA devices in pinned host memory; without such ones, ``fields``."""
    moved: dict[str, Any] = {}
    for name in field_names(fields):
        leaf = raw_leaf(fields, name)
        if _on_cuda(leaf):
            moved[name] = await _parts(leaf, staging_of(env).to_host)
        elif isinstance(leaf, (list, tuple)) and any(map(_on_cuda, leaf)):
            staged = [await staging_of(env).to_host(row.detach()) if _on_cuda(row) else row for row in leaf]
            moved[name] = staged
    if not moved:
        return fields
    return {name: moved[name] if name in moved else raw_leaf(fields, name) for name in field_names(fields)}


def _on_cuda(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return False
    return value.layout == (torch.jagged if value.is_nested else torch.strided)
