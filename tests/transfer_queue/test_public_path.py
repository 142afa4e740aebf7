"""Releases of TransferQueue that lack a call: public ones stand in for it, the contract holds, and a log says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import structlog.testing
import torch

from asyncdp import DataPlaneUnavailable, DataPlaneUnsupported, stack
from asyncdp.testing.contract import Bound, ClaimFaults, DataPlaneContract, ReadFaults, Rows, Stale
from asyncdp.transports.transfer_queue import TQTransport
from asyncdp.transports.transfer_queue.private import CLEAR, GET, INFO, META, PUT, self_test
from tests.transfer_queue.another_release import CALLS, release_without
from tests.transfer_queue.opener import FOREIGN, SERVERS, foreign, without_ray
from tests.transfer_queue.servers import config_for

if TYPE_CHECKING:
    from asyncdp.testing.contract import Opener

pytestmark = pytest.mark.slow

#: All of it with ASYNCDP_PUBLIC=full; by default the themes that move rows, and those that lean on the directory most.
FULL = os.environ.get("ASYNCDP_PUBLIC") == "full"


class _UnitThemes(*((DataPlaneContract,) if FULL else (Rows, ReadFaults, Stale, Bound))):  # type: ignore[misc]
    """What storage units have a part in."""

    loops = ("asyncio",)


class _DirectoryThemes(*((DataPlaneContract,) if FULL else (ClaimFaults, Stale, Bound))):  # type: ignore[misc]
    """What the directory has a part in."""

    loops = ("asyncio",)


class TestUnitsByPublicCalls(_UnitThemes):
    """The contract where no request to a single storage unit can be made."""

    @pytest.fixture(autouse=True)
    def _release(self) -> Iterator[None]:
        with release_without(PUT, GET, CLEAR):
            yield

    @pytest.fixture
    def open_plane(self) -> Opener:
        """Open planes on TransferQueue's classes."""
        return without_ray()


class TestDirectoryBesideTheController(_DirectoryThemes):
    """The contract where the controller runs somebody else's sampler."""

    @pytest.fixture
    def open_plane(self) -> Opener:
        """Open planes on a controller that is not ours."""
        return foreign()


class TestEverythingPublic(_DirectoryThemes):
    """The contract where all of it is missing at once, but the descriptions of servers, which come from Ray."""

    @pytest.fixture(autouse=True)
    def _release(self) -> Iterator[None]:
        with release_without(PUT, GET, CLEAR, META):
            yield

    @pytest.fixture
    def open_plane(self) -> Opener:
        """Open planes on a controller that is not ours."""
        return foreign()


def test_the_release_that_is_pinned_lacks_nothing() -> None:
    """The self-test of every start."""
    assert self_test() == {}


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_call_is_found_and_named(call: str) -> None:
    """By its name, with what of it is missing."""
    with release_without(call):
        assert list(self_test()) == [call]
        assert call.strip("_") in self_test()[call]
    assert self_test() == {}


@pytest.mark.anyio
@pytest.mark.parametrize("call", [PUT, GET, CLEAR, META])
async def test_each_call_alone_has_a_stand_in(call: str) -> None:
    """A put, a get, a claim and a clear by a client that lacks it; others of the same plane have it."""
    namespace = f"without{call}"
    rows = {
        "x": torch.arange(6.0).view(3, 2),
        "words": ["a", "b", "c"],
        "n": torch.nested.nested_tensor([torch.arange(2), torch.arange(0), torch.arange(3)], layout=torch.jagged),
    }
    with structlog.testing.capture_logs() as logs, release_without(call):
        owner = stack(TQTransport(config_for(SERVERS().endpoints, namespace)))
        assert any(call.strip("_") in str(line) for line in logs if line["log_level"] == "warning")
        await owner.register_partition("p", list(rows), 3, ["train"])
        await owner.put_samples(["0", "1", "2"], "p", rows)
        meta = await owner.claim_meta("p", "train", list(rows), 3)
        mine = await owner.get_data(meta)
    mate = stack(TQTransport(owner.attach_config(), bootstrap=False))
    theirs = await mate.get_data(meta)
    for got in (mine, theirs):
        assert torch.equal(got["x"], rows["x"])
        assert got["words"] == rows["words"] or list(got["words"]) == rows["words"]
        assert [row.tolist() for row in got["n"].unbind()] == [[0, 1], [], [0, 1, 2]]
    await owner.pop(meta, "p")
    assert await mate.depth("p") == 0
    await mate.close()
    await owner.close()


@pytest.mark.anyio
async def test_a_directory_beside_the_controller_is_found_by_who_has_only_its_address() -> None:
    """The controller tells where it is; a second bootstrap joins it; its end is noticed, and the next one found."""
    plain = config_for(FOREIGN().endpoints, "beside")
    owner = stack(TQTransport(plain))
    await owner.register_partition("p", ["x"], 1, ["train"])
    await owner.put_samples(["a"], "p", {"x": torch.ones(1)})
    worker, guest = stack(TQTransport(plain, bootstrap=False)), stack(TQTransport(plain))
    for client in (worker, guest):
        assert (await client.get_samples(["a"], "p", ["x"]))["x"].tolist() == [1.0]
    await guest.close()
    assert await worker.depth("p") == 1
    await owner.close()
    with pytest.raises(DataPlaneUnavailable):
        await worker.ping()
    again = stack(TQTransport(plain))
    with anyio.fail_after(60):
        while True:  # it looks for a new one every half second
            try:
                await worker.ping()
                break
            except DataPlaneUnavailable:
                await anyio.sleep(0.05)
    with pytest.raises(DataPlaneUnavailable):  # its rows went with the directory: reported, not forgotten
        await worker.depth("p")
    await worker.close()
    await again.close()


def test_what_nothing_stands_in_for_is_refused_by_name() -> None:
    """Without Ray nobody else describes the servers."""
    with release_without(INFO), pytest.raises(DataPlaneUnsupported, match="ZMQServerInfo"):
        TQTransport(config_for(SERVERS().endpoints, "without-info"))


def test_capabilities_are_the_same_on_the_public_path(anyio_backend: Any) -> None:
    """The directory keeps them, wherever it runs."""
    bare = TQTransport(config_for(FOREIGN().endpoints, "capable"), bootstrap=False)
    assert bare.get_capabilities().claim_dedup
    assert bare.get_capabilities().mutation_dedup
