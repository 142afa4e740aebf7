"""What a user gives by mistake is refused by name, before anything is sent."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from typer.testing import CliRunner

from asyncdp import DataPlaneBadRequest, MemoryTransport, stack
from asyncdp.cli.app import app
from asyncdp.rows.pack import column_from_leaf
from asyncdp.settings import verb_arguments as check

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from asyncdp.client import Client

HUGE = 10**400


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Give a client with one partition."""
    async with stack(MemoryTransport()) as client:
        await client.register_partition("p", ["f"], 4, ["t"])
        yield client


# --- fields

NO_FIELDS: dict[str, Any] = {
    "int": 3,
    "None": None,
    "tuple": (1, 2),
    "str": "ab",
    "float32": np.float32(3),
    "object": object(),
}


@pytest.mark.anyio
@pytest.mark.parametrize(
    "leaf",
    [np.array(3), NonTensorData(np.array(3)), np.array("ab"), np.array(None, dtype=object)],
    ids=["number", "in a TensorDict", "text", "object"],
)
async def test_an_array_without_rows_is_refused_by_field(client: Client, leaf: Any) -> None:
    """One value in an array is no column of two rows, nor are the letters of a text: the field is named."""
    with pytest.raises(DataPlaneBadRequest, match="'f'") as caught:
        await client.put_samples(["a", "b"], "p", {"f": leaf})
    assert caught.value.field == "f"


@pytest.mark.anyio
@pytest.mark.parametrize("kind", NO_FIELDS)
async def test_what_is_no_field_is_told_what_a_field_may_be(client: Client, kind: str) -> None:
    """The message says what a field is and what this is; not to take apart what has no leaves."""
    with pytest.raises(DataPlaneBadRequest, match=f"'f': a field is a tensor or array .*this is .*{kind}") as caught:
        await client.put_samples(["a", "b"], "p", {"f": NO_FIELDS[kind]})
    assert "leaves" not in caught.value.message


@pytest.mark.anyio
@pytest.mark.parametrize("leaf", [{"x": 1}, TensorDict({"x": torch.zeros(2)}, [2])], ids=["dict", "TensorDict"])
async def test_what_has_leaves_is_told_to_give_them_as_fields(client: Client, leaf: Any) -> None:
    """A nested dict or TensorDict can be taken apart, and the message says so."""
    with pytest.raises(DataPlaneBadRequest, match=r"'f'.*put its leaves as fields"):
        await client.put_samples(["a", "b"], "p", {"f": leaf})


@pytest.mark.anyio
async def test_rows_of_two_kinds_are_refused_as_such(client: Client) -> None:
    """A lazy stack of a tensor and a text has no leaves to put otherwise."""
    rows = LazyStackedTensorDict(TensorDict({"f": torch.ones(2)}, []), TensorDict({"f": "text"}, []))
    with pytest.raises(DataPlaneBadRequest, match=r"'f'.*some of its rows are tensors, some are objects"):
        await client.put_samples(["a", "b"], "p", rows)


@pytest.mark.anyio
@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "bool", "complex64"])
async def test_an_array_in_a_plain_dict_is_a_tensor(client: Client, dtype: str) -> None:
    """Numbers of an array come back as a tensor of the same dtype, as those of a TensorDict do."""
    array = np.array([[0, 1], [2, 3]]).astype(dtype)
    await client.put_samples(["a", "b"], "p", {"f": array})
    got = (await client.get_samples(["a", "b"], "p", ["f"]))["f"]
    assert torch.equal(got, torch.from_numpy(array))
    assert got.dtype == torch.from_numpy(array).dtype


def test_a_refusal_needs_no_transport() -> None:
    """The packing itself names the field."""
    with pytest.raises(DataPlaneBadRequest, match=r"'f'.*this is None"):
        column_from_leaf("f", None, 2, MemoryTransport().object_codec)


# --- ids


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [set, frozenset])
async def test_ids_without_an_order_are_refused(client: Client, kind: Callable[..., Any]) -> None:
    """Rows would go to whichever id comes first in a set; keys of a dict have an order and are taken."""
    with pytest.raises(DataPlaneBadRequest, match=r"sample_ids.*order") as caught:
        await client.put_samples(kind(("a", "b")), "p", {"f": torch.zeros(2)})
    assert caught.value.field == "sample_ids"
    await client.put_samples({"a": 0, "b": 1}.keys(), "p", {"f": torch.arange(2)})  # type: ignore[arg-type]
    with pytest.raises(DataPlaneBadRequest, match=r"sample_ids.*order"):
        await client.get_samples(kind(("a", "b")), "p", ["f"])
    await client.evict(kind(("a", "b")), "p")  # nothing comes back by the order of these
    assert (await client.describe("p")).size == 0


@pytest.mark.anyio
async def test_a_late_duplicate_does_not_hold_up_the_loop(client: Client) -> None:
    """The last of many ids twice is found in one pass, and named."""
    ids = [f"s{at}" for at in range(50_000)]
    began = time.perf_counter()
    with pytest.raises(DataPlaneBadRequest, match="'s49999' twice"):
        await client.put_samples([*ids, ids[-1]], "p", {"f": torch.zeros(len(ids) + 1)})
    assert time.perf_counter() - began < 30  # looking through all of them for each one took a minute


def test_the_first_duplicate_is_named() -> None:
    """The first value that repeats; None where none does."""
    assert check.first_duplicate(["a", "b", "c", "b", "a"]) == "b"
    assert check.first_duplicate(["a", "b"]) is None


# --- tags

BAD_TAGS: dict[str, dict[str, Any]] = {
    "not a number": {"created_at": math.nan},
    "never": {"created_at": math.inf},
    "long before": {"created_at": -math.inf},
    "beyond floats": {"created_at": HUGE},
    "beyond print": {"created_at": 10**5000},
    "a group of none": {"expected_num_keys": 0},
    "fewer than none": {"expected_num_keys": -1},
    "no size": {"size_bytes": -1},
    "no length": {"input_lengths": -1},
}


@pytest.mark.anyio
@pytest.mark.parametrize("what", BAD_TAGS)
async def test_a_tag_that_the_plane_cannot_count_with_is_refused(client: Client, what: str) -> None:
    """DataPlaneBadRequest that names the tag; nothing is put."""
    (key,) = BAD_TAGS[what]
    with pytest.raises(DataPlaneBadRequest, match=key) as caught:
        await client.put_samples(["a"], "p", None, [BAD_TAGS[what]])
    assert caught.value.field == key
    assert (await client.describe("p")).size == 0


@pytest.mark.anyio
async def test_the_least_that_tags_may_be_is_taken(client: Client) -> None:
    """Bounds are inclusive, None is no number, and times before 1970 are times."""
    tags = {"expected_num_keys": 1, "size_bytes": 0, "input_lengths": 0, "created_at": -1}
    await client.put_samples(["a", "b"], "p", None, [tags, dict.fromkeys(tags)])


# --- seconds and flags


@pytest.mark.anyio
async def test_more_seconds_than_a_clock_can_count_are_refused(client: Client) -> None:
    """An int too large for a float is named; infinity is a timeout like others."""
    with pytest.raises(DataPlaneBadRequest, match="timeout_s") as caught:
        await client.ping(HUGE)
    assert (caught.value.field, caught.value.op) == ("timeout_s", "ping")
    await client.ping(math.inf)


@pytest.mark.anyio
@pytest.mark.parametrize("value", ["no", 0, 1, None], ids=repr)
async def test_only_a_bool_says_whether_to_wait(client: Client, value: Any) -> None:
    """blocking="no" would have waited."""
    with pytest.raises(DataPlaneBadRequest, match="blocking") as caught:
        await client.claim_meta("p", "t", ["f"], 1, blocking=value, timeout_s=0)
    assert caught.value.field == "blocking"


# --- the command line


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_the_demo_looks_for_the_folder_first(option: str, tmp_path: Path) -> None:
    """A file that cannot be written is a usage error that names the option, not a traceback after the run."""
    for place in (tmp_path / "nowhere" / "x", tmp_path):
        began = time.perf_counter()
        done = CliRunner().invoke(app, ["demo", "--seconds", "60", option, str(place)])
        assert (done.exit_code, option in done.output) == (2, True), done.output
        assert time.perf_counter() - began < 30
