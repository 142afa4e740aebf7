"""The directory by itself: what it refuses, remembers, and leaves to be swept."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdp.transports.directory import claims
from asyncdp.transports.directory.partition import Refused
from asyncdp.transports.transfer_queue.directory import units
from asyncdp.transports.transfer_queue.directory.units import UnitDirectory

CONFIG = {"capacity": 8, "group_pattern": r"(?P<group>.+)_g\d+", "strict_schema": False, "auto_register": False}
FORMS = {"x": ("d", "float32", (4,))}
SPECS = {"x": ("tensor", "float32", (4,), False, ())}
NEVER = float("inf")


class Time:
    """A clock to be set."""

    def __init__(self) -> None:
        """Begin at a thousand."""
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock() -> Time:
    """Give the directory's clock."""
    return Time()


@pytest.fixture
def directory(clock: Time) -> UnitDirectory:
    """Give a directory of two units with partition ``p``."""
    made = UnitDirectory(["u0", "u1"], CONFIG)
    made.monotonic = made.time = clock
    made.register("p", ["x"], 8, ["train"], None, {})
    return made


def put(directory: UnitDirectory, *ids: str, op_id: str = "put", owner: str = "me", **more: Any) -> list[int | None]:
    """Place and publish a put of ``x``."""
    placed = directory.place("p", ids, ["x"], op_id, 1, more.pop("avoid", ()), 10.0)
    if placed[0] == "done":
        return placed[1][0]
    return directory.publish("p", ids, op_id, NEVER, owner, None, placed[1], FORMS, SPECS, {"x": 16}, **more)[0]


def where(directory: UnitDirectory, *ids: str) -> dict[str, tuple[str, int]]:
    """Return unit and storage key of each id that is there."""
    groups, missing, *_ = directory.locate("p", ids, ["x"], None)
    found = {ids[row]: (unit, key) for unit, _, _, keys, rows in groups for key, row in zip(keys, rows, strict=True)}
    assert set(found) == {i for at, i in enumerate(ids) if at not in missing}
    return found


def garbage(directory: UnitDirectory, done: tuple[int, ...] = (), op_id: str = "") -> tuple[int, set[tuple[str, int]]]:
    """Return the ticket and all (unit, key) that are to be swept."""
    ticket, ranges = directory.sweep(list(done), op_id)
    return ticket, {
        (unit, key) for unit, spans in ranges.items() for first, n in spans for key in range(first, first + n)
    }


def test_a_put_sent_twice_happens_once(directory: UnitDirectory) -> None:
    """P14: the second one is answered with the first result, at place as well as at publish."""
    first = put(directory, "a", "b")
    before = where(directory, "a", "b")
    assert put(directory, "a", "b") == first
    assert where(directory, "a", "b") == before
    assert directory.samples == 2


def test_a_put_that_was_given_up_cannot_be_published(directory: UnitDirectory) -> None:
    """P15: resolved as refused, what arrives later changes nothing, and its storage keys are swept after a grace."""
    placed = directory.place("p", ["a"], ["x"], "late", 1, (), 10.0)
    assert directory.resolve("late", 0.0) == "refused"
    with pytest.raises(Refused, match="given up"):
        directory.publish("p", ["a"], "late", NEVER, "me", None, placed[1], FORMS, SPECS, {"x": 16})
    assert not directory.partitions["p"].rows
    assert garbage(directory) == (0, set())
    directory.monotonic.now += 6.0  # type: ignore[attr-defined]
    unit, key, _ = placed[1][0]
    assert garbage(directory)[1] == {(unit, key)}


def test_a_request_after_its_deadline_is_refused(directory: UnitDirectory, clock: Time) -> None:
    """A controller that was paused does not carry out what everybody has given up."""
    put(directory, "a")
    with pytest.raises(Refused) as caught:
        directory.clear("p", ["a"], "clear", clock.now - 1.0, "me", None)
    assert caught.value.kind == "DataPlaneTimeout"
    assert directory.samples == 1


def test_a_clear_sent_again_leaves_the_newer_row(directory: UnitDirectory) -> None:
    """P13: its reply was lost, another put was acknowledged, the clear arrives again: the new row lives."""
    put(directory, "a", op_id="one")
    assert directory.clear("p", ["a"], "clear", NEVER, "me", None) == (1, ("u0",))
    put(directory, "a", op_id="two")
    assert directory.clear("p", ["a"], "clear", NEVER, "me", None) == (1, ("u0",))
    assert where(directory, "a")


def test_a_request_that_found_nothing_changes_nothing_when_it_comes_again(directory: UnitDirectory) -> None:
    """P13: nothing was there, its reply was lost, another put was acknowledged, it arrives again: the new row lives."""
    clear = lambda: directory.clear("p", ["a"], "clear", NEVER, "me", None)  # noqa: E731
    drop = lambda: directory.drop("q", "drop", NEVER)  # noqa: E731
    release = lambda: directory.release_owner("p", "you", "release", NEVER)  # noqa: E731
    assert clear()[0] == drop()[0] == 0
    release()
    put(directory, "a")
    directory.register("q", ["x"], 8, ["train"], None, {})
    directory.claim("p", "train", ["x"], 1, 1, "claim", NEVER, "you", None)
    assert clear()[0] == drop()[0] == 0
    release()
    assert set(where(directory, "a")) == {"a"}
    assert directory.has("q")
    assert [one[0] for one in directory.list_claims("p", "train")] == ["claim"]


@pytest.mark.parametrize("how", ["clear", "drop"])
def test_a_claim_whose_rows_are_gone_is_refused_when_it_comes_again(directory: UnitDirectory, how: str) -> None:
    """C3: its batch is not there to be given a second time."""
    claim = lambda: directory.claim("p", "train", ["x"], 1, 1, "claim", NEVER, "me", None)  # noqa: E731
    put(directory, "a")
    assert claim()[1] == ["a"]
    if how == "clear":
        directory.clear("p", ["a"], "clear", NEVER, "me", None)
    else:
        directory.drop("p", "drop", NEVER)
        directory.register("p", ["x"], 8, ["train"], None, {})
    put(directory, "a", op_id="again")
    with pytest.raises(Refused, match="given up"):
        claim()


def test_who_waits_in_a_large_partition_does_not_hold_up_the_controller(
    directory: UnitDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5, C6: which rows wait, and what they lack, is looked for now and then only; how many are ready is exact."""
    ticks = iter(range(1000))
    directory.monotonic = lambda: float(next(ticks))  # a look takes a second
    look = lambda at: directory.claim("p", "train", ["x"], 8, 8, f"claim {at}", NEVER, "me", None)  # noqa: E731
    tag = lambda name: directory.publish("p", [name], name, NEVER, "me", None, [], {}, {}, {})  # noqa: E731
    tag("a")
    assert look(0)[3] == ("a",)
    tag("b")
    assert look(1)[3] == ("a", "b")
    monkeypatch.setattr(claims, "FULL_SCAN_ROWS", 1)
    assert look(2)[3] == ("a", "b")
    tag("c")
    assert look(3)[1:] == (0, 0.0, ("a", "b"), {"x": 2})
    put(directory, "d")
    assert look(4)[1] == 1
    for _ in range(int(claims.SCAN_PAUSE_FACTOR)):
        directory.monotonic()
    assert look(5)[3:] == (("a", "b", "c"), {"x": 3})


def test_no_group_grows_beyond_its_size(directory: UnitDirectory) -> None:
    """A tag that moves a sample into a full group, or a size below a group that is there, would stop all claims."""
    directory.register("g", ["x"], 8, ["train"], 2, {})
    tag = lambda op_id, ids, name: directory.publish(  # noqa: E731
        "g", ids, op_id, NEVER, "me", [{"group_id": name}] * len(ids), [], {}, {}, {}
    )
    tag("1", ["a", "b"], "full")
    tag("2", ["c"], "other")
    with pytest.raises(Refused, match="group 'full' would have 3 rows"):
        tag("3", ["c"], "full")
    tag("4", ["a"], "full")  # where it is already
    tag("5", ["a"], "other")
    assert {facts[0]: facts[1] for facts in directory.groups("g", 0)[0]} == {"full": ("b",), "other": ("a", "c")}
    directory.register("p", ["x"], 8, ["train"], None, {})
    put(directory, "q_g0", "q_g1", "q_g2")
    with pytest.raises(Refused, match="group 'q' has 3 rows already"):
        directory.register("p", [], 8, [], 2, {})
    directory.register("p", [], 8, [], 3, {})


def test_committed_means_the_same_to_all(directory: UnitDirectory) -> None:
    """None is no False: what may be claimed is counted, and listed as committed."""
    directory.publish("p", ["a"], "put", NEVER, "me", [{"committed": None}], [], {}, {}, {})
    assert directory.claim("p", "train", [], 1, 1, "claim", NEVER, "me", None)[1] == ["a"]
    assert directory.depth("p", frozenset()) == 1
    assert directory.groups("p", 0)[0][0][4] is True


def test_storage_keys_are_never_used_twice(directory: UnitDirectory) -> None:
    """P8, S1: a reference that outlived its data finds nothing, never another sample's bytes."""
    seen = set()
    for step in range(50):
        put(directory, "a", op_id=f"put-{step}")
        seen.add(where(directory, "a")["a"])
        directory.clear("p", ["a"], f"clear-{step}", NEVER, "me", None)
    assert len({key for _, key in seen}) == 50
    other = UnitDirectory(["u0", "u1"], CONFIG)
    assert abs(other.next_key - directory.next_key) > 1 << 32, "planes that share units have keys far apart"


def test_what_a_put_replaces_is_swept_once(directory: UnitDirectory, clock: Time) -> None:
    """P17: the old place is garbage, the new one is not; a ticket that is never reported done comes back."""
    put(directory, "a", op_id="one")
    old = where(directory, "a")["a"]
    put(directory, "a", op_id="two")
    assert where(directory, "a")["a"] != old
    ticket, keys = garbage(directory, op_id="two")
    assert keys == {old}
    assert garbage(directory) == (0, set())
    assert garbage(directory, op_id="two")[1] == {old}, "asked again under the same op_id: the same garbage"
    clock.now += 31.0
    ticket, keys = garbage(directory)
    assert keys == {old}
    clock.now += 31.0
    assert garbage(directory, (ticket,)) == (0, set())


def test_a_field_that_is_added_keeps_the_others_where_they_are(directory: UnitDirectory) -> None:
    """P16: what a later put adds lies by itself; nothing becomes garbage."""
    put(directory, "a", op_id="one")
    placed = directory.place("p", ["a"], ["y"], "two", 1, (), 10.0)
    spec = {"y": ("tensor", "int64", (), False, ())}
    directory.publish("p", ["a"], "two", NEVER, "me", None, placed[1], {"y": ("d", "int64", ())}, spec, {"y": 8})
    groups, missing, *_ = directory.locate("p", ["a"], ["x", "y"], None)
    assert not missing
    assert len({group[3][0] for group in groups}) == 2
    assert garbage(directory) == (0, set())


def test_a_writer_that_died_gives_its_space_back(directory: UnitDirectory, clock: Time) -> None:
    """P12: it placed and never published: capacity returns, and the keys are swept."""
    directory.place("p", [f"s{at}" for at in range(8)], ["x"], "dead", 1, (), 10.0)
    with pytest.raises(Refused) as caught:
        directory.place("p", ["a"], ["x"], "other", 1, (), 10.0)
    assert caught.value.kind == "DataPlaneNotReady"
    clock.now += 700.0
    put(directory, "a", op_id="a third")
    clock.now += 10.0
    put(directory, "b", op_id="a fourth")
    assert len(garbage(directory)[1]) == 8


def test_a_unit_that_is_to_be_avoided_gets_nothing(directory: UnitDirectory) -> None:
    """Puts go to the units that answer; where none does, the put is refused."""
    put(directory, "a", "b", avoid=("u0",))
    assert {unit for unit, _ in where(directory, "a", "b").values()} == {"u1"}
    with pytest.raises(Refused) as caught:
        put(directory, "c", op_id="two", avoid=("u0", "u1"))
    assert caught.value.kind == "DataPlaneUnavailable"


def test_the_end_of_a_plane_names_every_key(directory: UnitDirectory) -> None:
    """Published, pending, garbage: nothing stays in units that others use too."""
    put(directory, "a", op_id="one")
    put(directory, "b", op_id="two")
    directory.clear("p", ["a"], "clear", NEVER, "me", None)
    directory.place("p", ["c"], ["x"], "pending", 1, (), 10.0)
    assert sum(count for spans in directory.all_keys().values() for _, count in spans) == 3


def test_groups_come_in_pages(directory: UnitDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing holds up the controller for a page at a time, and tells every group once."""
    monkeypatch.setattr(units, "PAGE_ROWS", 2)
    ids = ("a_g0", "b_g0", "a_g1", "c_g0", "d_g0")
    put(directory, *ids)
    seen, after, pages = [], 0, 0
    while after is not None:
        page, after = directory.groups("p", after)
        seen += [group[0] for group in page]
        pages += 1
    assert sorted(seen) == ["a", "b", "c", "d"]
    assert pages > 1


def test_a_bound_put_that_is_refused_leaves_nothing_behind(directory: UnitDirectory) -> None:
    """3a: what was written for it is garbage in the step that refuses it; sent again, it is refused again."""
    lives = put(directory, "a", "b")
    directory.clear("p", ["b"], "clear", NEVER, "me", None)
    garbage(directory)
    for _ in range(2):
        placed = directory.place("p", ["a", "b"], ["x"], "late", 1, (), 10.0, "existing")
        written = placed[1][0]
        with pytest.raises(Refused) as caught:
            directory.publish(
                *("p", ["a", "b"], "late", NEVER, "me", None, placed[1], FORMS, SPECS, {"x": 16}),
                bound=("existing", lives, False),
            )
        assert (caught.value.kind, caught.value.info["sample_ids"]) == ("StaleSlotError", ("b",))
        assert not directory.pending
        assert garbage(directory)[1] == {(written[0], written[1]), (written[0], written[1] + 1)}
    assert where(directory, "a", "b").keys() == {"a"}


def test_a_put_that_leaves_rows_out_is_remembered_with_who_survived(directory: UnitDirectory) -> None:
    """3a: the storage keys of rows that are left out are garbage at once; sent again, it leaves out the same ones."""
    lives = put(directory, "a", "b")
    directory.clear("p", ["b"], "clear", NEVER, "me", None)
    garbage(directory)
    (unit, first, _), *_ = directory.place("p", ["b", "a"], ["x"], "late", 1, (), 10.0, "existing")[1]
    late = lambda: directory.publish(  # noqa: E731
        *("p", ["b", "a"], "late", NEVER, "me", None, [(unit, first, 2)], FORMS, SPECS, {"x": 16}),
        bound=("existing", lives[::-1], True),
    )
    assert late() == ([None, lives[0]], [False, False])
    put(directory, "b", op_id="anew")
    assert late() == ([None, lives[0]], [False, False])
    assert where(directory, "a") == {"a": (unit, first + 1)}
    assert (unit, first) in garbage(directory)[1]


def test_rows_that_live_need_no_room(directory: UnitDirectory) -> None:
    """3a: in a full plane a bound put is told who is stale, not that there is no room."""
    room = directory.config["capacity"]
    ids = [f"r{at}" for at in range(room)]
    put(directory, *ids)
    with pytest.raises(Refused, match="do not fit"):
        directory.place("p", ["more"], ["x"], "unbound", 1, (), 10.0)
    assert directory.place("p", ["more"], ["x"], "bound", 1, (), 10.0, "existing")[0] == "shares"
