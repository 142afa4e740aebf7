"""Promise 3a: a put by a meta or a group writes only the lives that it names."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import (
    DataPlaneBadRequest,
    KVBatchMeta,
    StaleSlotError,
    kv_first_write,
    write_columns,
)

from ..faults import CLEAR, PUT, Watch
from ..rig import at_once, declare
from ..same import check_same
from ..steps import claim, claimed_by, put
from .bound_steps import REMOVALS, WRITERS, BoundBase, by_meta, claimed, group_of, there

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ..rig import Rig

__all__ = ["BoundPuts"]


class BoundPuts(BoundBase):
    """Promise 3a: a put by a meta or a group writes only the lives that it names."""

    @pytest.mark.parametrize("removal", REMOVALS)
    @pytest.mark.parametrize("writer", WRITERS)
    async def test_a_score_that_comes_late_revives_nothing(self, rig: Rig, writer: str, removal: str) -> None:
        """U1: scoring rows that were removed after the claim raises StaleSlotError with their ids and writes no row."""
        meta = await claimed(rig, *"abc")
        await getattr(rig.client, removal)(["c", "a"], "p")
        with pytest.raises(StaleSlotError, match="'a'") as caught:
            await WRITERS[writer](rig.mate, meta)
        err = caught.value
        assert err.sample_ids == ("a", "c")
        assert (err.op, err.ambiguous, err.retryable, err.attempts) == ("put_samples", False, False, 1)
        assert await there(rig) == {"b": {"x"}}
        assert not rig.leftovers()

    @pytest.mark.parametrize("writer", ["meta", "columns", "tags"])
    async def test_a_score_that_comes_late_is_not_written_to_the_next_life(self, rig: Rig, writer: str) -> None:
        """U1: if the id was put anew, the scorer of the old row writes no field and no tag to the new one."""
        meta = await claimed(rig, *"ab")
        await rig.client.evict(["a"], "p")
        await put(rig.client, "a")
        with pytest.raises(StaleSlotError) as caught:
            await WRITERS[writer](rig.mate, meta)
        assert caught.value.sample_ids == ("a",)
        assert await there(rig) == {"a": {"x"}, "b": {"x"}}
        assert await claim(rig.client, 9, "score") == ["a"]

    async def test_a_meta_of_a_partition_declared_anew_is_stale(self, rig: Rig) -> None:
        """U1: after a partition was dropped and declared anew, the same ids are different rows."""
        meta = await claimed(rig, "a")
        await rig.client.drop_partition("p")
        with pytest.raises(DataPlaneBadRequest, match="'p'"):
            await by_meta(rig.mate, meta)
        await claimed(rig, "a", by=rig.client)
        with pytest.raises(StaleSlotError):
            await by_meta(rig.mate, meta)
        assert await there(rig) == {"a": {"x"}}

    async def test_rows_that_live_are_written(self, rig: Rig) -> None:
        """A put by meta writes the fields, keeps the claims, and makes the rows ready for tasks that need the field."""
        meta = await claimed(rig, *"ab")
        await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)})  # replacing a field keeps the life
        done = await rig.mate.put_samples(meta, "p", {"y": torch.tensor([1.0, 2.0])}, [{"k": 1}, {"k": 2}])
        check_same((await rig.client.get_samples(["b", "a"], "p", ["y"]))["y"], torch.tensor([2.0, 1.0]))
        assert done.created == [False, False]
        assert set(await claimed_by(rig.client, "score")) == {"a", "b"}
        assert await claim(rig.client, 9, "train", "x", "y") == ["a", "b"]

    async def test_the_meta_of_a_put_by_meta_goes_on_from_it(self, rig: Rig) -> None:
        """The returned meta has the written fields, the task, claims and tags, and can be put by, read and popped."""
        await declare(rig.client, "x", "y", tasks=("score",))
        await put(rig.client, "a", "b", input_lengths=3, k=0)
        meta = await rig.mate.claim_meta("p", "score", ["x"], 2)
        meta.extra_info["step"] = 7
        done = await rig.mate.put_samples(meta, "p", {"y": torch.zeros(2)}, [{"k": 1}, {"k": 2}])
        assert (done.partition_id, done.task_name, done.sample_ids, done.fields) == ("p", "score", ["a", "b"], ["y"])
        assert (done.sequence_lengths, done.extra_info) == ([3, 3], {"step": 7})
        assert done.tags is not None
        assert [(row["input_lengths"], row["k"]) for row in done.tags] == [(3, 1), (3, 2)]
        assert done.handles == meta.handles
        again = await rig.mate.put_samples(pickle.loads(pickle.dumps(done)), "p", {"y": torch.ones(2)})
        check_same((await rig.mate.get_data(again))["y"], torch.ones(2))
        await rig.mate.release_claim(again.subset([0]))
        await rig.mate.pop(again.subset([1]), "p")
        assert await there(rig) == {"a": {"x", "y"}}

    @pytest.mark.parametrize("writer", ["fields", "tags"])
    async def test_stale_rows_can_be_left_out(self, rig: Rig, writer: str) -> None:
        """stale="skip" writes the rows that live and returns a meta of only those, with task and claims."""
        meta = await claimed(rig, *"abcd")
        await rig.client.evict(["a", "c"], "p")
        await put(rig.client, "c")
        what: dict[str, Any] = {"tags": [{"score": n} for n in range(4)]}
        if writer == "fields":
            what["fields"] = {"y": torch.arange(4.0)}
        done = await rig.mate.put_samples(meta, "p", **what, stale="skip")
        assert (done.sample_ids, done.task_name, done.created) == (["b", "d"], "score", [False, False])
        assert meta.handles is not None
        assert done.handles == [meta.handles[1], meta.handles[3]]
        more = {"score", "x"} | ({"y"} if writer == "fields" else set())
        assert await there(rig) == {"b": more, "c": {"x"}, "d": more}
        if writer == "fields":
            check_same((await rig.client.get_samples(["b", "d"], "p", ["y"]))["y"], torch.tensor([1.0, 3.0]))
        assert not rig.leftovers()
        await rig.mate.pop(done, "p")
        assert set(await there(rig)) == {"c"}

    async def test_where_all_rows_are_stale_skipping_writes_nothing(self, rig: Rig) -> None:
        """The put returns an empty meta, writes no row and no bytes, and does not fix the type of the field."""
        meta = await claimed(rig, *"ab")
        await rig.client.clear_samples(["a", "b"], "p")
        done = await rig.mate.put_samples(meta, "p", {"y": torch.zeros(2, 3)}, stale="skip")
        assert (done.size, done.task_name, done.fields) == (0, "score", ["y"])
        info = await rig.client.describe("p")
        assert (info.size, info.size_bytes, info.fields["y"]) == (0, 0, "")
        assert await rig.client.list_metadata("p") == []
        await rig.client.put_samples(["a"], "p", {"y": torch.tensor([1])})

    async def test_rows_left_out_keep_no_space(self, rig: Rig) -> None:
        """After fifty puts that each leave out half of their rows, only the rows that live occupy space."""
        await declare(rig.client, "x", "y")
        for _ in range(50):
            meta = await put(rig.client, *"abcd")
            await rig.client.clear_samples(["b", "d"], "p")
            done = await rig.mate.put_samples(meta, "p", {"y": torch.zeros(4, 64)}, stale="skip")
            assert done.sample_ids == ["a", "c"]
            await rig.client.clear_samples(["a", "c"], "p")
        info = await rig.client.describe("p")
        assert (info.size, info.size_bytes) == (0, 0)
        assert not rig.leftovers()

    async def test_a_meta_without_handles_means_rows_that_live(self, rig: Rig) -> None:
        """A put by such a meta is like only="existing": it writes to any life and creates no row."""
        await claimed(rig, *"ab")
        meta = KVBatchMeta("p", sample_ids=["a", "ghost"])
        with pytest.raises(StaleSlotError) as caught:
            await by_meta(rig.mate, meta)
        assert caught.value.sample_ids == ("ghost",)
        done = await rig.mate.put_samples(["ghost", "a"], "p", {"y": torch.zeros(2)}, only="existing", stale="skip")
        assert (done.sample_ids, done.created) == (["a"], [False])
        assert await there(rig) == {"a": {"x", "y"}, "b": {"x"}}
        assert (await by_meta(rig.mate, meta.subset([0]))).handles[0] is not None

    async def test_new_rows_only(self, rig: Rig) -> None:
        """only="new" is refused with the ids that live, also if tagged only or claimed, and writes nothing."""
        await claimed(rig, "a")
        await rig.client.put_samples(["t"], "p", tags=[{"k": 1}])
        for living in ("a", "t"):
            with pytest.raises(DataPlaneBadRequest, match=f"'{living}'") as caught:
                await rig.mate.put_samples(["b", living], "p", {"x": torch.ones(2)}, only="new")
            assert caught.value.sample_ids == (living,)
            assert not caught.value.ambiguous
        assert set(await there(rig)) == {"a", "t"}
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.zeros(1))
        done = await rig.mate.put_samples(["b", "c"], "p", {"x": torch.ones(2)}, only="new")
        assert done.created == [True, True]
        await rig.client.clear_samples(["b"], "p")
        await rig.mate.put_samples(["b"], "p", {"x": torch.ones(1)}, only="new")
        assert not rig.leftovers()

    async def test_of_many_that_create_a_row_one_does(self, rig: Rig) -> None:
        """Of eight concurrent puts with only="new" from two clients, one succeeds and the others are refused."""
        await declare(rig.client)
        clients = [rig.client, rig.mate] * 4
        puts = [c.put_samples(["a"], "p", {"x": torch.tensor([n])}, only="new") for n, c in enumerate(clients)]
        got = await at_once(*puts)
        (winner,) = [at for at, answer in enumerate(got) if isinstance(answer, KVBatchMeta)]
        assert all(isinstance(answer, DataPlaneBadRequest) for at, answer in enumerate(got) if at != winner)
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.tensor([winner]))

    async def test_a_put_says_which_rows_it_created(self, rig: Rig) -> None:
        """Promise 3: a caller that has to undo a put must not remove the rows that the put only replaced."""
        await declare(rig.client)
        await put(rig.client, *"ac")
        done = await put(rig.mate, *"abcd")
        assert done.created == [False, True, False, True]
        assert done.subset([1, 3, 0]).created == [True, True, False]
        assert (await put(rig.mate, "b")).created == [False]
        own = done.subset([at for at, new in enumerate(done.created) if new])
        await rig.mate.evict(own, "p")
        assert set(await there(rig)) == {"a", "c"}

    async def test_a_full_plane_takes_puts_to_rows_that_live(self, rig: Rig) -> None:
        """A put by meta needs no capacity: it writes to rows that live and is stale for others, but never "full"."""
        client = await rig.open(storage_capacity=2)
        await declare(client, "x", "y")
        meta = await put(client, "a", "b")
        await by_meta(client, meta)
        await client.clear_samples(["a"], "p")
        await put(client, "c")
        with pytest.raises(StaleSlotError) as caught:
            await by_meta(client, meta)
        assert caught.value.sample_ids == ("a",)

    async def test_groups_are_full_without_the_rows_left_out(self, rig: Rig) -> None:
        """grpo_group_size counts present rows: those left out do not make a group too large."""
        await declare(rig.client, "x", "y", grpo_group_size=2)
        ids = ["g_g0", "g_g1"]
        meta = await put(rig.client, *ids, group_id="g")
        await rig.client.evict(ids, "p")
        await put(rig.client, "g_g2", "g_g3", group_id="g")
        tags = [{"group_id": "g"}] * 2
        done = await rig.client.put_samples(meta, "p", {"y": torch.zeros(2)}, tags, stale="skip")
        assert done.size == 0
        assert (await group_of(rig)).keys == ("g_g2", "g_g3")

    async def test_what_contradicts_itself_is_refused_by_name(self, rig: Rig) -> None:
        """The combinations of only, stale, a meta's partition and duplicate ids are checked before anything is sent."""
        watch = Watch(PUT, CLEAR)
        client = await rig.attach(watch)
        meta = await claimed(rig, *"ab")
        x = {"x": torch.ones(2)}
        wrong: dict[str, Awaitable[Any]] = {
            "only": client.put_samples(meta, "p", x, only="new"),
            "stale": client.put_samples(["a", "b"], "p", x, stale="skip"),
            "partition": client.put_samples(meta, "q", x),
            "twice": client.put_samples(meta.concat(meta), "p", {"x": torch.ones(4)}),
            "fields": client.put_samples(meta, "p"),
            "'some'": client.put_samples(["a", "b"], "p", x, only="some"),  # type: ignore[arg-type]
            "'drop'": client.put_samples(meta, "p", x, stale="drop"),  # type: ignore[arg-type]
            "of partition": client.evict(meta, "q"),
        }
        for named, call in wrong.items():
            with pytest.raises(DataPlaneBadRequest, match=named):
                await call
        assert not watch.seen

    async def test_a_put_of_no_rows_by_meta_is_no_request(self, rig: Rig) -> None:
        """P0: this happens with an empty shard of a claim."""
        meta = await claimed(rig, "a")
        done = await rig.mate.put_samples(meta.subset([]), "p", {"y": torch.zeros(0)})
        assert (done.size, done.task_name, done.created) == (0, "score", [])
        for verb in REMOVALS:
            await getattr(rig.mate, verb)(meta.subset([]), "p")
        assert await there(rig) == {"a": {"x"}}

    async def test_a_whole_rollout_can_be_written_as_new_rows(self, rig: Rig) -> None:
        """kv_first_write(only="new"): ids that live are refused by name; write_columns binds to what it returns."""
        await declare(rig.client, "input_lengths", "ids", "y")
        batch = {"input_lengths": torch.tensor([2, 1]), "ids": torch.ones(2, 2)}

        async def write() -> KVBatchMeta:
            return await kv_first_write(
                batch, sample_ids=["a", "b"], dp_client=rig.client, partition_id="p", only="new"
            )

        meta = await write()
        assert meta.created == [True, True]
        with pytest.raises(DataPlaneBadRequest, match="'a'"):
            await write()
        await write_columns(rig.client, meta, {"y": torch.ones(2)})
        await rig.mate.evict(["a", "b"], "p")
        await write()
        with pytest.raises(StaleSlotError):
            await write_columns(rig.client, meta, {"y": torch.ones(2)})
        done = await write_columns(
            rig.client, meta.subset([0]).concat(await put(rig.client, "c")), {"y": torch.ones(2)}, stale="skip"
        )
        assert done.sample_ids == ["c"]

    async def test_metas_of_batches_are_bound(self, rig: Rig) -> None:
        """The metas of batches() can be put by, and are stale after their rows were removed."""
        await declare(rig.client, "x", "y")
        await put(rig.client, *"ab")
        async for meta, _ in rig.mate.batches("p", "train", ["x"], 1):
            if meta.sample_ids == ["a"]:
                await by_meta(rig.mate, meta)
                continue
            await rig.client.evict(["b"], "p")
            with pytest.raises(StaleSlotError):
                await by_meta(rig.mate, meta)
            break
        assert await there(rig) == {"a": {"x", "y"}}

    async def test_metas_of_other_projects_are_taken(self, rig: Rig) -> None:
        """Every verb accepts an object with the attributes of a meta; without handles it refers to any life."""
        meta = await claimed(rig, *"abcd")
        assert meta.handles is not None
        like: dict[str, Any] = {
            "partition_id": "p",
            "task_name": "score",
            "sample_ids": list(meta.sample_ids),
            "fields": ["x"],
            "sequence_lengths": None,
            "extra_info": None,
            "tags": None,
        }

        def foreign(**more: Any) -> Any:
            return SimpleNamespace(**like | more)

        check_same((await rig.mate.get_data(foreign()))["x"], torch.zeros(4))
        done = await rig.mate.put_samples(foreign(), "p", {"y": torch.ones(4)})
        assert (done.task_name, done.sample_ids) == ("score", list("abcd"))
        await rig.client.evict(["a"], "p")
        with pytest.raises(StaleSlotError):
            await rig.mate.put_samples(foreign(handles=meta.handles), "p", {"y": torch.ones(4)})
        with pytest.raises(StaleSlotError):
            await write_columns(rig.mate, foreign(handles=meta.handles), {"y": torch.ones(4)})
        await put(rig.client, "a")
        await rig.mate.release_claim(foreign(sample_ids=["d"], handles=meta.handles[3:]))
        await rig.mate.pop(foreign(sample_ids=list("abc"), handles=meta.handles[:3]), "p")
        assert set(await there(rig)) == {"a", "d"}
        with pytest.raises(DataPlaneBadRequest, match="handle"):
            await rig.mate.evict(foreign(handles=[1, 2, 3, 4]), "p")
