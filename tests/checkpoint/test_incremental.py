"""A later save into the same folder writes what is new, and refers to earlier files for the rest."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncdp.checkpoint import contents, restore, save, verify
from asyncdp.checkpoint.earlier import MOST_SMALL
from tests.checkpoint.test_checkpoints import fill, plane, state

pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytestmark = pytest.mark.anyio


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return name, inode and time of change of each chunk."""
    found = {name: (folder / name).stat() for name in os.listdir(folder) if name.endswith(".safetensors")}  # noqa: PTH208
    return {name: (one.st_ino, one.st_mtime_ns) for name, one in found.items()}


async def put(client: Any, ids: list[str], value: float, **tags: Any) -> None:
    """Put rows of 400 bytes."""
    await client.put_samples(ids, "p", {"x": torch.full((len(ids), 100), value)}, [tags] * len(ids))


async def test_only_new_cells_are_written(tmp_path: Path) -> None:
    """Nothing new: no file; a tag: no file, and it is saved; a field of one row: that field; a row: that row."""
    async with plane() as one, plane() as two:
        await fill(one)
        first = await save(one, tmp_path)
        assert first.written_bytes == first.size_bytes > 0
        before = files(tmp_path)
        assert (await save(one, tmp_path)).written_bytes == 0
        await one.put_samples(["s0"], "p", tags=[{"note": "later"}])
        second = await save(one, tmp_path)
        assert (second.written_bytes, second.size_bytes, second.generation) == (0, first.size_bytes, 3)
        assert files(tmp_path) == before
        await one.put_samples(["s1"], "p", {"dense": torch.full((1, 3), 7)})
        await one.put_samples(["new"], "p", {"dense": torch.full((1, 3), 8)})
        third = await save(one, tmp_path)
        assert files(tmp_path).items() >= before.items()
        assert len(files(tmp_path)) == len(before) + 1  # both have the same field
        assert verify(tmp_path) == third
        await restore(two, tmp_path)
        assert (await two.get_samples(["s1", "new"], "p", ["dense"]))["dense"].tolist() == [[7] * 3, [8] * 3]
        await one.clear_samples(["new"], "p")
        await two.clear_samples(["new"], "p")
        assert await state(two) == await state(one)
        assert ("s0", "later") in [(g.keys[0], g.tags[0].get("note")) for g in await two.list_metadata("p")]


async def test_files_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    """Chunks whose rows are gone go; one of which less than half lives is written again, one with half is kept."""
    async with plane() as one:
        await one.register_partition("p", ["x"], 8, ["train"])
        ids = [f"s{i}" for i in range(12)]
        await put(one, ids, 1.0)
        await save(one, tmp_path, chunk_bytes=1600)
        assert len(files(tmp_path)) == 3
        before = files(tmp_path)
        await one.clear_samples([*ids[:4], *ids[4:6], *ids[8:11]], "p")  # a whole chunk, half of one, three of four
        done = await save(one, tmp_path, chunk_bytes=1600)
        kept = files(tmp_path).keys() & before.keys()
        assert len(kept) == 1
        assert len(files(tmp_path)) == 2
        assert 400 <= done.written_bytes < 1600
        assert verify(tmp_path).partitions == {"p": 3}
        await one.clear_samples(None, "p")
        await save(one, tmp_path)
        assert files(tmp_path) == {}


async def test_many_small_chunks_are_put_together(tmp_path: Path) -> None:
    """Of saves of a row each there are at most MOST_SMALL small files; the rows are all there."""
    async with plane() as one, plane() as two:
        await one.register_partition("p", ["x"], 8, ["train"])
        most = 0
        for turn in range(3 * MOST_SMALL):
            await put(one, [f"s{turn}"], float(turn))
            await save(one, tmp_path)
            most = max(most, len(files(tmp_path)))
        assert MOST_SMALL <= most <= MOST_SMALL + 1
        await restore(two, tmp_path)
        rows = await two.get_samples([f"s{i}" for i in range(3 * MOST_SMALL)], "p", ["x"])
        assert rows["x"][:, 0].tolist() == list(range(3 * MOST_SMALL))


@pytest.mark.parametrize("harm", ["removed", "shorter"])
async def test_a_lost_file_is_written_again(tmp_path: Path, harm: str) -> None:
    """A chunk of the earlier save that is missing, or not as long as it was, is not referred to."""
    async with plane() as one:
        await fill(one)
        await save(one, tmp_path)
        file = tmp_path / next(iter(files(tmp_path)))
        if harm == "removed":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
        assert (await save(one, tmp_path)).written_bytes > 0
        assert verify(tmp_path).partitions == {"p": 11}


async def test_another_plane_refers_to_nothing(tmp_path: Path) -> None:
    """Its hosts, slots and ids have the same names; its rows are other lives, and are all written."""
    async with plane() as one, plane() as two, plane() as three:
        for client, value in ((one, 1.0), (two, 2.0)):
            await client.register_partition("p", ["x"], 8, ["train"])
            await put(client, ["a", "b"], value)
            done = await save(client, tmp_path)
            assert done.written_bytes == done.size_bytes
        await restore(three, tmp_path)
        assert (await three.get_samples(["a", "b"], "p", ["x"]))["x"].unique().tolist() == [2.0]


@pytest.mark.parametrize("seed", range(3))
async def test_a_history_of_saves_keeps_what_is_there(tmp_path: Path, seed: int) -> None:
    """Rows are put, removed, put again, and fields replaced in any order between saves: each save is the plane."""
    rng = random.Random(seed)
    async with plane() as one:
        await one.register_partition("p", ["x", "y"], 8, ["train"])
        ids = [f"s{i}" for i in range(12)]
        for turn in range(12):
            for _ in range(4):
                some = rng.sample(ids, rng.randint(1, 5))
                names = rng.sample(["x", "y"], rng.randint(1, 2))
                if rng.random() < 0.3:
                    await one.clear_samples(some, "p")
                else:
                    data = {name: torch.full((len(some), 9), rng.random()) for name in names}
                    await one.put_samples(some, "p", data, [{"turn": turn}] * len(some))
            await save(one, tmp_path, chunk_bytes=rng.choice([80, 300, 10000]))
            assert verify(tmp_path).partitions["p"] == (await one.describe("p")).size
            async with plane() as two:
                await restore(two, tmp_path)
                assert await seen(two) == await seen(one)
    assert contents(tmp_path).generation == 12


async def seen(client: Any) -> dict[str, Any]:
    """Return tags and values by row."""
    found: dict[str, Any] = {}
    for group in await client.list_metadata("p"):
        for key, tags in zip(group.keys, group.tags, strict=True):
            found[key] = dict(tags)
            for name in ("x", "y"):
                try:
                    found[key][name] = (await client.get_samples([key], "p", [name]))[name].tolist()
                except LookupError:
                    found[key][name] = None
    return found
