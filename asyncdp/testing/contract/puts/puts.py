"""Promise 3: a put is whole or absent; the same ids again replace the same fields; tags merge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    DataPlaneBadRequest,
    PartialReadError,
    SampleNotFound,
)

from ..faults import PUT, Hold
from ..rig import at_once, declare, table
from ..same import check_same
from ..steps import tags_of

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Puts"]


READ_TAGS = ["input_lengths", "weight_version", "created_at", "size_bytes", "expected_num_keys", "committed", "status"]


class Puts(Contract):
    """Promise 3: a put is whole or absent; the same ids again replace the same fields; tags merge."""

    async def test_empty_ids_are_a_no_op(self, rig: Rig) -> None:
        """P0: an empty put or clear changes nothing, and an empty get returns an empty TensorDict."""
        await declare(rig.client)
        meta = await rig.client.put_samples([], "p", table(0, x=torch.zeros(0, 3)), [])
        assert (meta.size, meta.partition_id, meta.sample_ids) == (0, "p", [])
        assert (await rig.client.put_samples([], "p")).size == 0
        got = await rig.client.get_samples([], "p", ["x"])
        assert got.batch_size == torch.Size([0])
        await rig.client.clear_samples([], "p")
        await rig.client.pop([], "p")
        await rig.client.evict([], "p")
        assert (await rig.client.get_data(meta, ["x"])).batch_size == torch.Size([0])
        await rig.client.release_claim(meta)
        assert (await rig.client.describe("p")).size == 0
        assert not (await rig.client.describe("p")).fields["x"]

    async def test_a_put_tells_what_it_wrote(self, rig: Rig) -> None:
        """The meta of a put has ids, fields, tags and lengths, and reads the data that was put."""
        await declare(rig.client, "x", "y")
        tags: list[dict[str, Any]] = [{"input_lengths": 3, "k": "v"}, {"input_lengths": 5}]
        meta = await rig.client.put_samples(["a", "b"], "p", table(x=torch.arange(2), y=torch.ones(2)), tags)
        assert (meta.partition_id, meta.sample_ids, meta.fields) == ("p", ["a", "b"], ["x", "y"])
        assert meta.task_name is None
        assert meta.sequence_lengths == [3, 5]
        assert meta.tags == tags
        check_same((await rig.mate.get_data(meta, ["x"]))["x"], torch.arange(2))
        assert list((await rig.client.get_data(meta)).keys()) == ["x", "y"]

    async def test_a_put_again_replaces_the_same_fields_only(self, rig: Rig) -> None:
        """Other fields and the tags of the ids are kept."""
        await declare(rig.client, "x", "y")
        await rig.client.put_samples(["a", "b"], "p", table(x=torch.zeros(2), y=torch.ones(2)), [{"t": 1}, {"t": 2}])
        await rig.mate.put_samples(["b"], "p", {"x": torch.full((1,), 7.0)})
        got = await rig.client.get_samples(["a", "b"], "p", ["x", "y"])
        check_same(got["x"], torch.tensor([0.0, 7.0]))
        check_same(got["y"], torch.ones(2))
        assert (await tags_of(rig, "b"))["t"] == 2
        assert (await rig.client.describe("p")).size == 2

    async def test_tags_merge_by_key(self, rig: Rig) -> None:
        """P7: after a put of fields and two puts of tags, the fields are kept and the tags merged."""
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)}, [{"k": 1, "kept": True}])
        await rig.mate.put_samples(["a"], "p", tags=[{"k": 2, "new": None}])
        await rig.client.put_samples(["a"], "p", tags=[{"other": 1.5}])
        tags = await tags_of(rig, "a")
        assert {k: tags.get(k) for k in ("k", "kept", "new", "other")} == {
            "k": 2,
            "kept": True,
            "new": None,
            "other": 1.5,
        }
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))

    async def test_scalars_of_arrays_become_plain_tags(self, rig: Rig) -> None:
        """Tags that were given as any kind of scalar are plain numbers."""
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", tags=[{"t": torch.tensor(3), "n": torch.ones(1).numpy()[0]}])
        tags = await tags_of(rig, "a")
        assert (tags["t"], type(tags["t"]), tags["n"], type(tags["n"])) == (3, int, 1.0, float)

    @pytest.mark.parametrize("value", [None, "many", 2.5, True, -1], ids=repr)
    @pytest.mark.parametrize("name", READ_TAGS)
    async def test_a_tag_of_an_odd_type_is_refused_or_harmless(self, rig: Rig, name: str, value: Any) -> None:
        """An unusual value of a tag that the plane reads is refused by name, or affects no put and no claim."""
        await declare(rig.client)
        odd = {name: value}
        try:
            meta = await rig.client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, [odd, {name: 1}])
        except DataPlaneBadRequest as err:
            assert name in err.message  # noqa: PT017 - either is right
            assert (await rig.client.describe("p")).size == 0
            return
        assert meta.size == 2
        assert len(await rig.client.list_metadata("p")) == 2
        claimed = await rig.client.claim_meta("p", "train", ["x"], 2, blocking=False)
        assert sorted(claimed.sample_ids) == ["a", "b"]

    async def test_of_two_writers_at_once_one_whole_row_wins(self, rig: Rig) -> None:
        """P11: an id that two clients put concurrently has the row of one of them, not a mixture."""
        await declare(rig.client, "x", "y")
        for k in range(10):

            def row(value: int) -> Any:
                return table(x=torch.full((1, 4), value), y=torch.full((1,), value))

            results = await at_once(
                *(
                    c.put_samples(["s"], "p", row(2 * k + i), [{"v": 2 * k + i}])
                    for i, c in enumerate((rig.client, rig.mate))
                )
            )
            assert not [r for r in results if isinstance(r, Exception)]
            got = await rig.client.get_samples(["s"], "p", ["x", "y"])
            value = int(got["y"][0])
            assert value in (2 * k, 2 * k + 1)
            check_same(got["x"], torch.full((1, 4), value))
            assert (await tags_of(rig, "s"))["v"] == value

    async def test_puts_of_one_client_at_once_do_not_disturb_each_other(self, rig: Rig) -> None:
        """Fifty concurrent puts on one client all succeed."""
        await declare(rig.client)
        results = await at_once(
            *(rig.client.put_samples([f"s{i}"], "p", {"x": torch.full((1,), i)}) for i in range(50))
        )
        assert not [r for r in results if isinstance(r, Exception)]
        got = await rig.client.get_samples([f"s{i}" for i in range(50)], "p", ["x"])
        check_same(got["x"], torch.arange(50))

    async def test_a_reader_never_sees_half_a_put(self, rig: Rig) -> None:
        """At any moment, a reader sees a put of 8 rows and 2 fields as a whole."""
        await declare(rig.client, "x", "y")
        ids = [f"s{i}" for i in range(8)]
        seen: set[float] = set()

        async def write() -> None:
            for k in range(5):
                await rig.client.put_samples(
                    ids, "p", table(x=torch.full((8,), float(k)), y=torch.full((8, 2), float(k)))
                )

        async def read() -> None:
            while 4.0 not in seen:
                try:
                    got = await rig.mate.get_samples(ids, "p", ["x", "y"])
                except SampleNotFound:
                    await anyio.lowlevel.checkpoint()
                    continue
                per_row = torch.cat([got["x"][:, None], got["y"]], 1)
                assert bool((per_row == per_row[:, :1]).all()), "a row of two puts"
                seen.update(got["x"].tolist())

        wrote, read_ = await at_once(write(), read())
        assert wrote is None
        assert read_ is None

    async def test_a_first_put_is_seen_by_nobody_until_it_is_whole(self, rig: Rig) -> None:
        """While a put is held half-way, none of its rows, tags or groups is visible or claimable."""
        hold = Hold(PUT)
        client = await rig.attach(hold)
        await declare(client)

        async def look() -> None:
            await hold.holds()
            try:
                info = await rig.client.describe("p")
                assert (info.size, await rig.client.depth("p"), await rig.client.list_metadata("p")) == (0, 0, [])
                assert not (await rig.client.claim_meta("p", "train", ["x"], 4, blocking=False)).size
                with pytest.raises((SampleNotFound, PartialReadError)):
                    await rig.client.get_samples(["a", "b"], "p", ["x"])
            finally:
                hold.go.set()

        put, looked = await at_once(client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, [{}, {}]), look())
        assert looked is None
        assert put.size == 2
        assert (await rig.client.depth("p")) == 2
