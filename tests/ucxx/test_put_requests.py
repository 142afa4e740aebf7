"""What a put asks of the directory: the hosts and the types that the client knows already are not asked for again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest
import torch

from asyncdp import Client
from asyncdp.errors import DataPlaneBadRequest, DataPlaneNotReady
from asyncdp.rows.field_spec import FieldSpec
from tests.ucxx.seen_plane import IDS, Seen, seen_plane

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def seen(
    request: pytest.FixtureRequest, server: EmbeddedServer, namespace: str, connect: Callable[..., Directory]
) -> AsyncIterator[Seen]:
    """Give a plane, and in it a partition of which two rows of ``x`` were put."""
    async with seen_plane(server, namespace, connect, **getattr(request, "param", {})) as made:
        yield made


async def test_a_put_of_tensors_asks_the_directory_once(seen: Seen) -> None:
    """The types are known, and so are the hosts as of a moment ago; types that are not known are asked for."""
    await seen.put()
    assert seen.asked["publish"] == 1
    assert not seen.asked["place"]
    await seen.client.put_samples(IDS, "p", {"x": torch.ones(2, 3), "y": torch.ones(2)})
    assert seen.asked["place"] == 1
    await seen.client.put_samples(IDS, "p", {"x": [torch.ones(3)] * 2})
    assert seen.asked["place"] == 2
    assert (await seen.client.get_samples(IDS, "p", ["y"]))["y"].tolist() == [1.0, 1.0]


async def test_a_partition_that_is_another_one_by_now(seen: Seen) -> None:
    """Its types decide, not those that the client knew: what fits them is put, what does not is refused by name."""
    async with seen.other() as other:
        await other.drop_partition("p")
        await other.register_partition("p", ["x"], 8, ["t"])
        await other.put_samples(["c"], "p", {"x": torch.zeros(1, dtype=torch.int64)})
        await seen.client.put_samples(IDS, "p", {"x": torch.tensor([4, 5])})
        assert (await other.get_samples(IDS, "p", ["x"]))["x"].tolist() == [4, 5]
        await other.drop_partition("p")
        await other.register_partition("p", ["x"], 8, ["t"], enums={"x": ["no", "yes"]})
        with pytest.raises(DataPlaneBadRequest, match=r"x.*vocabulary"):
            await seen.client.put_samples(IDS, "p", {"x": torch.tensor([0, 1], dtype=torch.uint8)})
        await other.drop_partition("p")
        with pytest.raises(DataPlaneBadRequest, match="'p'"):
            await seen.client.put_samples(IDS, "p", {"x": torch.tensor([4, 5])})
    assert not seen.states()


@pytest.mark.parametrize("seen", [{"storage_capacity": 3}], indirect=True)
async def test_the_directory_refuses_what_does_not_fit(seen: Seen) -> None:
    """A put beyond the plane's capacity is DataPlaneNotReady, and its slots are free again."""
    before = seen.host.service.table.free_bytes
    with pytest.raises(DataPlaneNotReady, match="at most 3 samples"):
        await Client(seen.transport).put_samples(["c", "d"], "p", {"x": torch.zeros(2, 3)})
    assert seen.asked["place"] == 0
    assert seen.host.service.table.free_bytes == before


def test_a_type_does_not_become_a_vocabulary() -> None:
    """Codes are of the vocabulary that they were made by, or of one that has grown since; tensors are no codes."""
    words, codes = FieldSpec(enum=("no", "yes")), FieldSpec("enum", enum=("no", "yes"))
    assert words.merge(codes, "x") == codes
    assert FieldSpec("enum", enum=("no", "yes", "maybe")).merge(codes, "x").enum == ("no", "yes", "maybe")
    for old, new in [
        (words, FieldSpec("tensor", torch.uint8)),
        (FieldSpec(), codes),
        (FieldSpec(enum=("yes", "no")), codes),
    ]:
        with pytest.raises(DataPlaneBadRequest, match="x"):
            old.merge(new, "x")
