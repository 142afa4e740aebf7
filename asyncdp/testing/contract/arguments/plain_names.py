"""Names and tag values are converted to built-in types before anything is sent, without classes of the caller."""

from __future__ import annotations

import enum
import pickle
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncdp import DataPlaneBadRequest

from ..base import Contract
from ..rig import declare
from ..same import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..rig import Rig

__all__ = ["PlainNames"]

#: Name of a module that can be imported only while a test creates its names.
ELSEWHERE = "asyncdp_names_of_elsewhere"


class _Text(str):
    __slots__ = ()


def _of_enum(text: str) -> Any:
    return enum.StrEnum("Word", {"ONE": text}, module=ELSEWHERE).ONE  # type: ignore[attr-defined]


def _of_mixed_enum(text: str) -> Any:
    return enum.Enum("Mixed", {"ONE": text}, module=ELSEWHERE, type=str).ONE  # type: ignore[attr-defined]


def _of_class(text: str) -> Any:
    return type("Text", (_Text,), {"__module__": ELSEWHERE})(text)


#: Ways to create an instance of str or of a subclass.
TEXTS: dict[str, Callable[[str], Any]] = {
    "StrEnum": _of_enum,
    "str and Enum": _of_mixed_enum,
    "subclass": _of_class,
    "numpy": np.str_,
}


def _number(base: type, value: Any) -> Any:
    return type("Number", (base,), {"__module__": ELSEWHERE})(value)


#: {description: (a tag value, the expected plain value)}
VALUES: dict[str, tuple[Callable[[], Any], Any]] = {
    **{name: (lambda make=make: make("v"), "v") for name, make in TEXTS.items()},  # type: ignore[misc]
    "IntEnum": (lambda: enum.IntEnum("Level", {"ONE": 3}, module=ELSEWHERE).ONE, 3),  # type: ignore[attr-defined]
    "subclass of int": (lambda: _number(int, 7), 7),
    "subclass of float": (lambda: _number(float, 0.5), 0.5),
    "numpy int": (lambda: np.int16(-3), -3),
    "numpy float64": (lambda: np.float64(0.1), 0.1),
    "numpy float32": (lambda: np.float32(0.5), 0.5),
    "numpy bool": (lambda: np.bool_(1), True),
    "numpy 0-d": (lambda: np.array(4), 4),
    "numpy 0-d text": (lambda: np.array("v"), "v"),
    "torch int": (lambda: torch.tensor(5), 5),
    "torch bool": (lambda: torch.zeros((), dtype=torch.bool), False),
    "torch bfloat16 with grad": (lambda: torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
}

NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"v",
    "an enum of its own": lambda: enum.Enum("Own", {"ONE": "v"}).ONE,  # type: ignore[attr-defined]
    "a date of numpy": lambda: np.datetime64("2024-01-01"),
    "bytes of numpy": lambda: np.bytes_(b"v"),
    "complex": lambda: np.complex64(1),
    "a row": lambda: torch.zeros(1),
    "a meta tensor": lambda: torch.zeros((), device="meta"),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged),
}


def check_plain(value: Any) -> None:
    """Fail if a name or value in a meta, a listing or a description is an instance of a subclass."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        for one in value:
            check_plain(one)
    elif isinstance(value, dict):
        check_plain([*value.keys(), *value.values()])
    else:
        assert type(value) in {str, int, float, bool, type(None)}, f"{value!r} is a {type(value)}"


def _names(info: Any, leave_out: tuple[str, ...] = ("handles", "extra_info")) -> Iterator[Any]:
    return (getattr(info, name) for name in type(info).__slots__ if name not in leave_out)


class PlainNames(Contract):
    """Names and tag values are converted to built-in types before anything is sent, without classes of the caller."""

    @pytest.mark.parametrize("kind", TEXTS)
    async def test_a_name_of_any_kind_of_str_is_that_str(self, rig: Rig, kind: str) -> None:
        """U9: other clients get exact str for ids, fields, tasks, partitions, vocabularies and owners."""
        make = TEXTS[kind]
        p, x, e, a, task = (make(text) for text in ("p", "x", "e", "a", "train"))
        client = await rig.attach(owner=make("me"))
        await client.register_partition(p, [x], 4, [task], None, {e: [make("stop"), make("length")]})
        meta = await client.put_samples([a], p, {x: torch.ones(1), e: [make("length")]}, [{make("k"): make("v")}])
        columns = {x: torch.ones(1), e: np.array(["stop"])}
        await client.put_samples([make("b")], p, columns)
        await client.put_samples([make("c")], p, TensorDict({x: torch.ones(1)}, batch_size=[1]))
        assert (meta.partition_id, meta.sample_ids, meta.fields) == ("p", ["a"], ["x", "e"])
        claimed = await client.claim_meta(p, task, [x, e], 1)
        for info in (meta, claimed, *await rig.mate.list_metadata("p"), *await rig.mate.list_claims("p", "train")):
            check_plain(list(_names(info)))
        (described,) = await rig.mate.list_partitions()
        check_plain(list(_names(described)))
        assert set(described.fields) == {"x", "e"}
        assert (described.consumer_tasks, described.enums) == (("train",), {"e": ("stop", "length")})
        assert pickle.loads(pickle.dumps(claimed)).tags[0]["k"] == "v"
        assert ELSEWHERE not in sys.modules
        got = await client.get_samples([a, make("b")], p, [x, e])
        assert all(type(name) is str for name in got.keys())  # noqa: SIM118 - a TensorDict iterates over rows
        assert rows_of(got.get("e")) == ["length", "stop"]
        assert (await rig.mate.list_claims("p", "train"))[0].owner == "me"
        assert await client.check_consumption_status(p, [task]) is False
        await client.pop([a], p)
        await client.release_claims(p, make("me"))
        await client.evict([make("b")], p)
        await client.clear_samples([make("c")], p)
        assert (await rig.mate.describe("p")).size == 0
        await client.wait_partition(p)
        await client.drop_partition(p)
        assert await rig.mate.list_partitions() == []

    async def test_a_tag_of_any_kind_of_scalar_is_its_value(self, rig: Rig) -> None:
        """U9: subclasses, and scalars of numpy and torch, are returned as exact str, int, float or bool."""
        wanted = {kind: value for kind, (_, value) in VALUES.items()}
        await declare(rig.client)
        tags = [{kind: make() for kind, (make, _) in VALUES.items()}]
        meta = await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)}, tags)
        claimed = await rig.mate.claim_meta("p", "train", ["x"], 1)
        for got in (meta.tags, claimed.tags):
            assert got is not None
            assert {kind: got[0][kind] for kind in wanted} == wanted
            assert [type(got[0][kind]) for kind in wanted] == [type(value) for value in wanted.values()]

    async def test_the_tags_that_the_plane_reads_are_made_plain_first(self, rig: Rig) -> None:
        """U9: this holds for all tags that the plane itself reads, such as status, group_id and created_at."""
        await declare(rig.client)
        level = VALUES["IntEnum"][0]()
        tags: dict[str, Any] = {
            "group_id": _of_enum("g"),
            "weight_version": level,
            "expected_num_keys": np.int64(2),
            "created_at": np.float64(5),
            "input_lengths": torch.tensor(6),
            "committed": np.bool_(1),
        }
        failed = {**tags, "status": _of_mixed_enum("failed"), "created_at": torch.tensor(7.0)}
        meta = await rig.client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, [tags, failed])
        assert meta.sequence_lengths == [6, 6]
        (group,) = await rig.mate.list_metadata("p")
        assert (group.group_id, group.weight_version, group.created_at, group.committed) == ("g", 3, 5.0, True)
        assert group.expected_num_keys == 2
        check_plain(list(_names(group)))
        assert (await rig.mate.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["a"]

    async def test_a_tag_that_has_no_plain_value_is_refused_by_name(self, rig: Rig) -> None:
        """U9: the put raises DataPlaneBadRequest with the tag and writes nothing; for an Enum it suggests the value."""
        await declare(rig.client)
        for kind, make in NOT_PLAIN.items():
            with pytest.raises(DataPlaneBadRequest, match="'odd'") as caught:
                await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)}, [{"odd": make()}])
            assert ("give its value, 'v'" in caught.value.message) == (kind == "an enum of its own")
        assert (await rig.client.describe("p")).size == 0

    async def test_a_name_that_is_no_text_is_refused_by_name(self, rig: Rig) -> None:
        """U9: numbers and bytes as id, field, task, partition, tag key or word raise DataPlaneBadRequest by name."""
        await declare(rig.client)
        rows = {"x": torch.ones(1)}
        names: list[Any] = [1, VALUES["IntEnum"][0](), np.int64(1), torch.tensor(1), b"a"]
        for odd in names:
            for what, call in {
                "sample_ids": rig.client.put_samples([odd], "p", rows),
                "fields": rig.client.put_samples(["a"], "p", {odd: torch.ones(1)}),
                "partition_id": rig.client.put_samples(["a"], odd, rows),
                "tags": rig.client.put_samples(["a"], "p", rows, [{odd: 1}]),
                "task_name": rig.client.claim_meta("p", odd, ["x"], 1),
                "required_fields": rig.client.claim_meta("p", "train", [odd], 1),
                "consumer_tasks": rig.client.register_partition("p", ["x"], 1, [odd]),
                "enums": rig.client.register_partition("p", ["x"], 1, [], None, {"e": [odd]}),
                "owner": rig.client.release_claims("p", odd),
            }.items():
                with pytest.raises(DataPlaneBadRequest, match=what):
                    await call
        assert (await rig.client.describe("p")).size == 0

    async def test_counts_and_times_of_numpy_and_torch_are_numbers(self, rig: Rig) -> None:
        """U9: batch_size=np.int64(2), timeout_s=np.float32(5) and blocking=np.bool_(0) are accepted as numbers."""
        await rig.client.register_partition("p", ["x"], np.int64(8), ["train"], torch.tensor(2))  # type: ignore[arg-type]
        await rig.client.put_samples(["g_g0", "g_g1"], "p", {"x": torch.zeros(2)}, timeout_s=np.float32(9))  # type: ignore[arg-type]
        meta = await rig.client.claim_meta(
            "p",
            "train",
            ["x"],
            np.int32(2),  # type: ignore[arg-type]
            blocking=np.bool_(0),  # type: ignore[arg-type]
            min_batch_size=np.uint8(2),  # type: ignore[arg-type]
        )
        assert meta.size == 2
        info = await rig.mate.describe("p")
        check_plain([info.num_samples, info.grpo_group_size])
        await rig.client.ping(torch.tensor(5))  # type: ignore[arg-type]
