"""Checkpoints: what is restored is what was saved, a crash leaves the old one, damage is found."""

import os
from pathlib import Path
from typing import Any, Self

import anyio
import pytest
import torch
from tensordict import NonTensorStack

from asyncdp import build_data_plane_client
from asyncdp.checkpoint import CheckpointError, contents, restore, save, verify
from asyncdp.errors import DataPlaneBadRequest

pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytestmark = pytest.mark.anyio
FIELDS = ["dense", "half", "ragged", "uneven", "words", "mood"]


def plane() -> Any:
    """Return a client of a new memory plane."""
    return build_data_plane_client({"enabled": True, "impl": "memory"})


def rows(n: int) -> dict[str, Any]:
    """Return fields of most kinds."""
    return {
        "dense": torch.arange(n * 3).view(n, 3),
        "half": torch.randn(n, 2).to(torch.bfloat16),
        "ragged": torch.nested.nested_tensor([torch.arange(i % 4) for i in range(n)], layout=torch.jagged),
        "words": NonTensorStack(*[{"a": (i, None)} for i in range(n)]),
        "mood": ["sad" if i % 2 else "glad" for i in range(n)],
    }


async def fill(client: Any, n: int = 10) -> None:
    """Put n rows, and one that has one field only."""
    await client.register_partition("p", FIELDS, n, ["train"], enums={"mood": ["sad", "glad"]})
    ids = [f"s{i}" for i in range(n)]
    data = rows(n)
    await client.put_samples(ids, "p", data, [{"weight_version": i, "group_id": f"g{i // 2}"} for i in range(n)])
    for i, name in enumerate(ids):  # rows of two lengths, put dense: they are read back dense where one length is asked
        await client.put_samples([name], "p", {"uneven": torch.full((1, 1 + i % 2), i)})
    await client.put_samples(["late"], "p", {"dense": torch.ones(1, 3, dtype=torch.int64)}, [{"note": "x"}])


async def state(client: Any) -> Any:
    """Return all that a reader sees of the partition."""
    groups = {g.group_id: (g.keys, g.tags, g.expected_num_keys) for g in await client.list_metadata("p")}
    ids = sorted(key for keys, *_ in groups.values() for key in keys if key != "late")
    data = await client.get_samples(ids, "p", FIELDS)
    even = await client.get_samples(ids[:1], "p", ["uneven"])
    assert not even["uneven"].is_nested
    found = {name: data[name] for name in FIELDS}
    listed = {n: [t.tolist() for t in v.unbind()] if isinstance(v, torch.Tensor) else list(v) for n, v in found.items()}
    return groups, listed, {n: getattr(v, "dtype", None) for n, v in found.items()}


async def test_what_is_restored_is_what_was_saved(tmp_path: Path) -> None:
    """Fields of each kind, tags, groups and declarations come back in another plane, from chunks of a few rows."""
    async with plane() as one, plane() as two:
        await fill(one)
        seen = []
        done = await save(one, tmp_path / "c", chunk_bytes=200, progress=lambda *at: seen.append(at))
        assert done.partitions == {"p": 11}
        assert not done.left_out
        assert seen[-1] == (11, 11)
        assert verify(tmp_path / "c") == contents(tmp_path / "c") == done
        await restore(two, tmp_path / "c")
        assert await state(two) == await state(one)
        assert one.snapshot()["wall_ms"]["save"]["p99"] < 1e3 * one.call_timeout_s  # not since the clock began
        before, after = await one.describe("p"), await two.describe("p")
        assert (after.consumer_tasks, after.enums, after.size) == (before.consumer_tasks, before.enums, before.size)
        assert (await two.claim_meta("p", "train", ["dense"], 4)).sample_ids == ["s0", "s1", "s2", "s3"]


async def test_a_partition_with_rows_is_refused_unless_told(tmp_path: Path) -> None:
    """Restoring over rows is DataPlaneBadRequest and changes nothing; replace=True drops them."""
    async with plane() as one:
        await fill(one)
        await save(one, tmp_path)
        await one.put_samples(["new"], "p", {"dense": torch.ones(1, 3, dtype=torch.int64)})
        with pytest.raises(DataPlaneBadRequest, match="12 rows"):
            await restore(one, tmp_path)
        await restore(one, tmp_path, replace=True)
        assert (await one.describe("p")).size == 11


async def test_a_flipped_bit_in_any_file_is_found_and_named(tmp_path: Path) -> None:
    """One bit of each file, at its begin, middle and end: verify and restore name the file, and nothing is put."""
    async with plane() as one, plane() as two:
        await fill(one, 4)
        await save(one, tmp_path)
        for file in [tmp_path / name for name in os.listdir(tmp_path) if name != "lock"]:  # noqa: PTH208
            whole = file.read_bytes()
            for at in (0, 9, len(whole) // 2, len(whole) - 1):
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
                with pytest.raises(CheckpointError, match=file.name):
                    verify(tmp_path)
                with pytest.raises(CheckpointError, match=file.name):
                    await restore(two, tmp_path)
            file.write_bytes(whole)
        assert await two.list_partitions() == []


class TornFile:
    """A file of which one write is cut in the middle, as on a full disk."""

    def __init__(self, file: Any, fails: Any) -> None:
        self._file = file
        self._fails = fails

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        """Write all, or half."""
        data = bytes(data)
        if self._fails():
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise OSError(28, "No space left on device")
        return int(self._file.write(data))


async def test_a_crash_at_any_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system fails at each write, fsync and rename in turn: the error names the file, the old one is whole."""
    async with plane() as one:
        await fill(one, 6)
        old = await save(one, tmp_path)
        for name in (f"s{i}" for i in range(6)):
            await one.put_samples([name], "p", {"dense": torch.zeros(1, 3, dtype=torch.int64)})
        calls = 0
        fails_at = 1
        fsync, replace, open_ = os.fsync, Path.replace, Path.open

        def fails() -> bool:
            nonlocal calls
            calls += 1
            return calls == fails_at

        def failing(real: Any) -> Any:
            def call(*args: Any) -> Any:
                if fails():
                    raise OSError(28, "No space left on device")
                return real(*args)

            return call

        def opened(file: Path, mode: str = "r", *args: Any) -> Any:
            whole = open_(file, mode, *args)
            return TornFile(whole, fails) if mode == "xb" else whole

        monkeypatch.setattr(os, "fsync", failing(fsync))
        monkeypatch.setattr(Path, "replace", failing(replace))
        monkeypatch.setattr(Path, "open", opened)
        failed = 0
        while True:
            calls = 0
            try:
                new = await save(one, tmp_path, chunk_bytes=24)
                break
            except CheckpointError as err:
                told = str(err)
            assert told.startswith(f"{tmp_path}/")
            assert told.endswith(": cannot be written: No space left on device")
            failed += 1
            now = verify(tmp_path)
            assert now == old or now.generation == old.generation + 1  # only the folder was not synced
            old = now
            fails_at += 1
        assert failed >= 20
        assert verify(tmp_path) == new


async def test_rows_that_are_replaced_after_they_were_read_are_read_again(tmp_path: Path) -> None:
    """What is put between the read and the next listing: values and tags are those of one put."""
    async with plane() as one, plane() as two:
        await one.register_partition("p", ["a"], 4, ["train"])
        ids = [f"s{i}" for i in range(4)]

        async def put(turn: int) -> None:
            await one.put_samples(ids, "p", {"a": torch.full((4, 2), turn)}, [{"turn": turn}] * 4)

        await put(0)
        get_data, turns = one.get_data, iter((1, 2))

        async def read(*args: Any, **kwargs: Any) -> Any:
            data = await get_data(*args, **kwargs)
            for turn in turns:
                await put(turn)
                break
            return data

        one.get_data = read
        await save(one, tmp_path)
        await restore(two, tmp_path)
        assert (await two.get_samples(ids, "p", ["a"]))["a"].unique().tolist() == [2]
        assert [tags["turn"] for meta in await two.list_metadata("p") for tags in meta.tags] == [2] * 4


async def test_rows_that_come_and_go_meanwhile_are_in_whole_or_not_at_all(tmp_path: Path) -> None:
    """While rows are replaced and removed, each saved row has the values and the tag of one put."""
    async with plane() as one, plane() as two:
        await one.register_partition("p", ["a", "b"], 8, ["train"])
        ids = [f"s{i}" for i in range(8)]

        async def put(turn: int) -> None:
            data = {name: torch.full((8, 2), turn) for name in ("a", "b")}
            await one.put_samples(ids, "p", data, [{"turn": turn}] * 8)

        async def keep_putting() -> None:
            for turn in range(1, 12):
                await put(turn)
                if turn % 3 == 0:
                    await one.clear_samples(ids[:2], "p")

        await put(0)
        async with anyio.create_task_group() as group:
            group.start_soon(keep_putting)
            await save(one, tmp_path, chunk_bytes=32)
        await restore(two, tmp_path)
        for meta in await two.list_metadata("p"):
            got = await two.get_samples(list(meta.keys), "p", ["a", "b"])
            assert got["a"].unique().tolist() == got["b"].unique().tolist() == [meta.tags[0]["turn"]]
