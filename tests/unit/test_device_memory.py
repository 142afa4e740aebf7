"""Tensors of devices: one copy each, through pinned memory that is used again and never while a copy runs.

A stand-in plays the device: its copies are recorded, and happen when they are told to end.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import anyio
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from asyncdp import MemoryTransport, stack
from asyncdp.errors import DataPlaneBadRequest
from asyncdp.rows.device_memory import Staging

pytestmark = pytest.mark.anyio
KIB = 1 << 10


class Copying:
    """A copy that ends after so many looks, or when it is told to; it keeps no pinned memory."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, keep: torch.Tensor, looks: float) -> None:
        """Copy nothing yet."""
        self._places: tuple[int, int] | None = (target.data_ptr(), source.data_ptr())
        self._keep: torch.Tensor | None = keep
        self._was = ctypes.string_at(source.data_ptr(), source.nbytes)
        self.looks = looks

    @property
    def ended(self) -> bool:
        """Whether it was made."""
        return self._places is None

    def query(self) -> bool:
        """Count a look."""
        self.looks -= 1
        if self.looks < 0:
            self.end()
        return self.ended

    def end(self) -> None:
        """Copy now; what it reads has to be there still."""
        if self._places is not None:
            target, source = self._places
            assert ctypes.string_at(source, len(self._was)) == self._was
            ctypes.memmove(target, source, len(self._was))
        self._places = self._keep = None


class StandIn:
    """A device in host memory."""

    def __init__(self, looks: float = 2) -> None:
        """Copies end after so many looks."""
        self.looks = looks
        self.blocks: list[bytearray] = []
        self.copies: list[Copying] = []

    def pinned(self, nbytes: int) -> memoryview:
        """Keep what is allocated: a copy may come to it late."""
        self.blocks.append(bytearray(nbytes))
        return memoryview(self.blocks[-1])

    def empty_like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Memory of the host."""
        del device
        return torch.empty_like(tensor)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copying:
        """Record a copy."""
        source = source.as_subclass(torch.Tensor)
        begins = [torch.frombuffer(block, dtype=torch.uint8).data_ptr() for block in self.blocks]
        other = source if target.data_ptr() in begins else target
        self.copies.append(Copying(target, source, other, self.looks))
        return self.copies[-1]


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """The copy that staging is there to avoid."""
        raise AssertionError("copied without staging")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Claim that a tensor is on a device."""
    return tensor.as_subclass(OnDevice)


@pytest.fixture
def device() -> StandIn:
    """A device whose copies take a while."""
    return StandIn()


async def test_a_tensor_comes_to_the_host_by_one_copy_into_memory_that_is_used_again(device: StandIn) -> None:
    """Whatever its strides; the memory comes back with its last view."""
    staging = Staging(device)
    for number in range(4):
        source = torch.arange(24).view(4, 6).T + number
        host = await staging.to_host(source)
        assert torch.equal(host, source)
        assert len(device.copies) == number + 1
        if number == 2:
            kept = host[3]
        del host
    assert len(device.blocks) == 2
    assert kept.tolist() == [5, 11, 17, 23]
    assert torch.equal(await staging.to_host(torch.empty(0, 3)), torch.empty(0, 3))


async def test_a_tensor_goes_to_a_device_through_two_pieces(device: StandIn) -> None:
    """However long it is; a piece is filled again only when its copy has ended."""
    staging = Staging(device, piece_bytes=64 * KIB)
    device.looks = 20
    for tensor in (torch.arange(100_000), torch.tensor(3.5), torch.ones(3, 0), torch.rand(5, 7).T.bfloat16()):
        assert torch.equal(await staging.to_device(tensor, torch.device("cuda")), tensor)
    assert sum(map(len, device.blocks)) <= 3 * 64 * KIB


@pytest.mark.parametrize("way", ["from", "to"])
async def test_a_cancelled_copy_keeps_its_memory_until_it_has_ended(way: str) -> None:
    """Nothing else gets it meanwhile, and then it is used again."""
    device = StandIn(looks=float("inf"))
    staging = Staging(device, piece_bytes=64 * KIB)
    source = torch.arange(16 * KIB)  # two pieces

    async def move(tensor: torch.Tensor) -> torch.Tensor:
        if way == "from":
            return await staging.to_host(tensor)
        return await staging.to_device(tensor, torch.device("cuda"))

    with anyio.move_on_after(0.01) as scope:
        await move(source)
    assert scope.cancelled_caught
    cut, made = list(device.copies), len(device.blocks)
    device.looks = 0
    other = await move(source + 5)
    assert len(device.blocks) > made
    assert torch.equal(other, source + 5)
    for copying in cut:
        copying.end()
    assert torch.equal(other, source + 5)
    del other
    made = len(device.blocks)
    await move(source)
    assert len(device.blocks) == made


async def test_pinned_memory_has_a_bound(device: StandIn) -> None:
    """Beyond it a tensor comes without staging, and one that goes waits."""
    staging = Staging(device, most_bytes=256 * KIB, piece_bytes=64 * KIB)
    held = await staging.to_host(torch.zeros(100 * KIB, dtype=torch.uint8))
    device.copies.clear()
    assert (await staging.to_host(torch.ones(100 * KIB, dtype=torch.uint8))).all()
    assert not device.copies
    del held
    device.looks = float("inf")
    results: deque[torch.Tensor] = deque()

    async def go() -> None:
        results.append(await staging.to_device(torch.ones(128 * KIB, dtype=torch.uint8), torch.device("cuda")))

    async with anyio.create_task_group() as group:
        group.start_soon(go)
        group.start_soon(go)
        with anyio.fail_after(60):
            while len(results) < 2:
                await anyio.sleep(0.001)
                running = [one for one in device.copies if not one.ended]
                assert len(running) <= 2
                for one in running[:1]:
                    one.end()
                in_use = sum(staging._used.values())
                assert in_use <= 128 * KIB
                assert in_use + staging._pool.idle_bytes <= 256 * KIB
    assert all(result.all() for result in results)


async def test_what_was_read_is_moved_whole(device: StandIn) -> None:
    """Dense, ragged and other values."""
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(5)], layout=torch.jagged)
    data = TensorDict({"x": torch.arange(2), "r": ragged, "o": NonTensorStack("a", "b")}, [2])
    moved = await Staging(device).move(data, torch.device("cuda"))
    assert moved["x"].tolist() == [0, 1]
    assert [row.tolist() for row in moved["r"].unbind()] == [[1, 1], [0] * 5]
    assert moved["o"] == ["a", "b"]
    assert len(device.copies) == 2


async def test_a_put_of_a_devices_tensors_copies_each_once(device: StandIn) -> None:
    """A tensor and a list of tensors; what is in host memory is not touched."""
    async with stack(MemoryTransport()) as client:
        client.env.staging = Staging(device)
        await client.register_partition("p", ["x"], 2, ["t"])
        fields = {"x": on_device(torch.arange(2)), "l": [on_device(torch.ones(n)) for n in (1, 3)], "h": torch.ones(2)}
        await client.put_samples(["a", "b"], "p", fields)
        assert len(device.copies) == 3
        found = await client.get_samples(["a", "b"], "p", ["x", "l", "h"])
        assert found["x"].tolist() == [0, 1]
        assert [row.tolist() for row in found["l"].unbind()] == [[1], [1, 1, 1]]


async def test_batches_go_to_a_device_by_staging(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """``device="cuda"``, where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    async with stack(MemoryTransport()) as client:
        client.env.staging = Staging(device)
        await client.register_partition("p", ["x"], 2, ["t"])
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        async for _, data in client.batches("p", "t", ["x"], 2, device="cuda:0", idle="end", timeout_s=0.0):
            assert data["x"].tolist() == [0, 1]
        assert len(device.copies) == 1


@pytest.mark.parametrize("wrong", ["cuda:77", "cuda", 77, 1 << 70, "nowhere", object()])
async def test_a_device_that_is_not_there_is_refused_before_anything_is_claimed(wrong: Any) -> None:
    """By name."""
    if wrong == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    async with stack(MemoryTransport()) as client:
        with pytest.raises(DataPlaneBadRequest, match="device") as raised:
            client.batches("p", "t", ["x"], 2, device=wrong)
        assert raised.value.field == "device"
