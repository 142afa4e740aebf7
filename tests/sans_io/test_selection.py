import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdp.meta import DataPlaneGroupMeta, RowHandle
from asyncdp.recovery.reservations import Ages, Listing, is_reservation, reservation_id, reservation_tags
from asyncdp.recovery.selection import Selector, Verdict


def group(
    name: str,
    version: int | None = 5,
    *,
    created: float = 0.0,
    rows: int = 2,
    expected: int = 2,
    committed: bool = True,
    failed: int = 0,
    lost: int = 0,
    **tags: Any,
) -> DataPlaneGroupMeta:
    """Make a listed group; its first rows are the failed ones, its last ones the lost ones."""
    keys = tuple(f"{name}_g{i}" for i in range(rows))
    all_tags = tuple({**tags, **({"status": "failed"} if i < failed else {})} for i in range(rows))
    handles = tuple(RowHandle(i) for i in range(rows))
    gone = keys[rows - lost :]
    return DataPlaneGroupMeta("p", name, keys, version, created, committed, expected, 0, all_tags, gone, handles)


def names(groups: Any) -> list[str]:
    """Return their ids."""
    return [one.group_id for one in groups]


def reservation(name: str, version: int | None = 5, *, token: str = "t", owner: str = "w") -> DataPlaneGroupMeta:
    """Make a listed reservation."""
    row = reservation_id(name)
    tags = (reservation_tags(name, owner, token, version),)
    return DataPlaneGroupMeta(
        "p", row, (row,), version, 0.0, committed=False, expected_num_keys=1, size_bytes=0, tags=tags
    )


# -- reservations


def test_a_reservation_says_for_what_and_whose_it_is() -> None:
    """It is a group of its own, of one row, not committed, and no rollout is one."""
    assert reservation_id("g") == "reservation:g"
    assert reservation_tags("g", "worker", "t0", 3) == {
        "group_id": "reservation:g",
        "expected_num_keys": 1,
        "committed": False,
        "reservation_for": "g",
        "reservation_owner": "worker",
        "reservation_token": "t0",
        "weight_version": 3,
    }
    assert "weight_version" not in reservation_tags("g", "worker", "t0", None)
    assert is_reservation(reservation("g"))
    assert not is_reservation(group("g"))
    assert not is_reservation(group("g", rows=0))


def test_a_listing_is_sorted() -> None:
    """Reservations are apart; those of whole groups are not needed any more, nor where a GroupWriter has ended."""
    half = group("half", rows=1)
    uncommitted = group("uncommitted", committed=False)
    ended = group("ended", failed=2, group_writer="t")
    mixed = replace(group("mixed", failed=2), tags=({"group_writer": "t"}, {"status": "failed"}))
    tagless = replace(group("tagless", rows=1), tags=())
    listed = [
        *(ended, reservation("ended", None)),
        *(mixed, reservation("mixed", None)),
        *(tagless, reservation("tagless", None)),
        group("whole"),
        reservation("whole", token="t1", owner="w1"),
        half,
        reservation("half", 6),
        uncommitted,
        reservation("uncommitted"),
        reservation("alone", 7),
        reservation("untagged", None),
        group("free"),
    ]
    listing = Listing(listed)
    assert names(listing.groups) == ["ended", "mixed", "tagless", "whole", "half", "uncommitted", "free"]
    others = ["mixed", "tagless"]
    assert list(listing.reservations) == ["ended", *others, "whole", "half", "uncommitted", "alone", "untagged"]
    assert (listing.owner("whole"), listing.token("whole")) == ("w1", "t1")
    assert listing.versions() == [7]
    assert listing.finished() == ["ended", "whole"]
    listing.drop(["ended", "whole", "half"])
    assert list(listing.reservations) == [*others, "uncommitted", "alone", "untagged"]
    assert listing.versions() == [7]


def test_a_reservation_of_another_release_has_no_owner() -> None:
    """Tags that are missing read as nobody, not as an error."""
    row = replace(reservation("g"), tags=({"reservation_for": "g"},))
    listing = Listing([row])
    assert (listing.owner("g"), listing.token("g")) == ("", "")


def test_ages_count_from_when_something_was_first_seen() -> None:
    """What is not seen for once begins anew; of what was never seen the age is nothing."""
    ages = Ages()
    ages.see(["a", "b"], 10.0)
    ages.see(["a"], 15.0)
    assert (ages.age_s("a", 18.0), ages.age_s("b", 18.0), ages.age_s("c", 18.0)) == (8.0, 0.0, 0.0)
    ages.see(["a", "b"], 20.0)
    assert (ages.age_s("a", 21.0), ages.age_s("b", 21.0)) == (11.0, 1.0)


# -- selection


def test_windowed_takes_the_lowest_version_and_of_these_the_oldest() -> None:
    """So slow prompts, which come late with old weights, do not starve."""
    groups = [
        group("young", 5, created=1.0),
        group("late", 4, created=9.0),
        group("early", 4, created=2.0),
        group("b", 5, created=1.0),
    ]
    chosen = Selector(max_staleness=1).look(groups, 5, 0.0, count=3)
    assert names(chosen.chosen) == ["early", "late", "b"]
    assert (chosen.ready, chosen.fallen, chosen.waiting, chosen.failed_rows) == (4, {}, {}, 0)


def test_what_is_too_old_falls_out_and_what_is_ahead_stays() -> None:
    """At version 5 with two versions of staleness, 3 to 5 may be trained on."""
    groups = [group(str(v), v) for v in range(8)]
    look = Selector(max_staleness=2).look(groups, 5, 0.0, count=9, least=1)
    assert names(look.chosen) == ["3", "4", "5"]
    assert {verdict: names(some) for verdict, some in look.fallen.items()} == {Verdict.STALE: ["0", "1", "2"]}
    assert look.waiting == {Verdict.AHEAD: 2}


def test_one_version_of_staleness_where_nothing_is_said() -> None:
    """Groups of the last version are still trained on."""
    look = Selector().look([group("a", 3), group("b", 4)], 5, 0.0, count=1)
    assert (names(look.chosen), names(look.fallen[Verdict.STALE])) == (["b"], ["a"])


def test_too_few_are_none() -> None:
    """A step gets as many groups as it wants, at least ``least``; without it, all."""
    groups = [group("a"), group("b", created=1.0), group("c", created=2.0)]
    assert Selector().look(groups, 5, 0.0, count=4).chosen == ()
    assert names(Selector().look(groups, 5, 0.0, count=4, least=3).chosen) == ["a", "b", "c"]
    assert Selector().look(groups, 5, 0.0, count=5, least=4).chosen == ()
    assert names(Selector().look(groups, 5, 0.0, count=3).chosen) == ["a", "b", "c"]
    assert names(Selector().look(groups, 5, 0.0, count=2, least=1).chosen) == ["a", "b"]
    assert Selector().look(groups, 5, 0.0).chosen == ()
    assert Selector().look(groups, 5, 0.0).ready == 3


def test_the_chosen_rows_are_a_batch_without_failed_ones() -> None:
    """A meta of the fit rows, bound to their lives, group after group."""
    groups = [group("a", rows=3, failed=1), group("b", created=1.0)]
    look = Selector().look(groups, 5, 0.0, count=2)
    meta = look.meta()
    assert meta is not None
    assert meta.sample_ids == ["a_g1", "a_g2", "b_g0", "b_g1"]
    assert meta.handles == [RowHandle(1), RowHandle(2), RowHandle(0), RowHandle(1)]
    assert look.failed_rows == 1
    assert Selector().look([], 5, 0.0, count=1).meta() is None


def test_weight_fifo_trains_one_version_to_its_end() -> None:
    """It waits for the lowest version that is there or being made, and takes no other one before."""
    fifo = Selector("weight_fifo", max_staleness=2)
    ready = [group("a4", 4), group("b4", 4), group("a5", 5)]
    look = fifo.look(ready, 5, 0.0, count=3, least=1)
    assert (names(look.chosen), look.ready) == (["a4", "b4"], 2)
    half = [*ready, group("half3", 3, rows=1)]
    assert fifo.look(half, 5, 0.0, count=3, least=1, in_flight=["half3"]).chosen == ()
    assert fifo.look(ready, 5, 0.0, count=3, least=1, in_flight_versions=[3]).chosen == ()
    assert names(fifo.look(ready, 5, 0.0, count=3, least=1, in_flight_versions=[4, 5, 6]).chosen) == ["a4", "b4"]


def test_weight_fifo_does_not_wait_for_what_is_out_of_its_window() -> None:
    """What is being made with weights that are too old, or ahead, holds nobody up; at its edges it does."""
    fifo = Selector("weight_fifo", max_staleness=2)
    ready = [group("a", 5)]
    assert names(fifo.look(ready, 5, 0.0, count=1, in_flight_versions=[2, 6]).chosen) == ["a"]
    assert fifo.look(ready, 5, 0.0, count=1, in_flight_versions=[3]).chosen == ()
    assert names(fifo.look(ready, 5, 0.0, count=1, in_flight_versions=[5]).chosen) == ["a"]
    late = [group("a", 5), group("old", 2, rows=1), group("new", 9)]
    assert names(fifo.look(late, 5, 0.0, count=1, in_flight=["old"]).chosen) == ["a"]
    assert fifo.look([], 5, 0.0, count=1, in_flight_versions=[5]).chosen == ()


def test_in_order_takes_the_groups_of_the_step() -> None:
    """By the tag, whatever the weights; those of past steps fall out, later ones wait."""
    groups = [
        group("now", 1, target_step=5),
        group("past", 5, target_step=4),
        group("next", 5, target_step=6),
        group("none", 5),
    ]
    look = Selector("in_order").look(groups, 5, 0.0, count=1)
    assert names(look.chosen) == ["now"]
    assert {verdict: names(some) for verdict, some in look.fallen.items()} == {
        Verdict.STALE: ["past"],
        Verdict.UNTAGGED: ["none"],
    }
    assert look.waiting == {Verdict.AHEAD: 1}
    other = Selector("in_order", target_tag="step").look([group("a", 1, step=5)], 5, 0.0, count=1)
    assert names(other.chosen) == ["a"]


@pytest.mark.parametrize(
    ("untagged", "order", "evicted", "waiting"),
    [
        ("evict", ["b", "c"], ["a"], {}),
        ("keep", ["b", "c"], [], {Verdict.UNTAGGED: 1}),
        ("first", ["a", "b", "c"], [], {}),
        ("last", ["b", "c", "a"], [], {}),
    ],
)
def test_rows_without_a_version_have_a_policy(
    untagged: Any, order: list[str], evicted: list[str], waiting: dict[Verdict, int]
) -> None:
    """They are evicted, kept, or trained on before or after all others."""
    groups = [group("c", 5), group("a", None), group("b", 4)]
    look = Selector(untagged=untagged).look(groups, 5, 0.0, count=3, least=1)
    assert names(look.chosen) == order
    assert names(look.fallen.get(Verdict.UNTAGGED, ())) == evicted
    assert look.waiting == waiting


def test_weight_fifo_has_a_place_for_groups_without_a_version() -> None:
    """Before all versions, or when none is left."""
    groups = [group("a", None), group("b", 4)]
    first = Selector("weight_fifo", untagged="first").look(groups, 5, 0.0, count=2, least=1)
    last = Selector("weight_fifo", untagged="last").look(groups, 5, 0.0, count=2, least=1)
    assert (names(first.chosen), names(last.chosen)) == (["a"], ["b"])


def test_groups_are_lost_after_a_time_of_grace() -> None:
    """A slot host that comes back with its rows in time costs nothing; each absence counts anew."""
    selector = Selector(lost_grace_s=10.0)
    lost, back = [group("a", lost=1)], [group("a")]
    assert selector.look(lost, 5, 0.0).waiting == {Verdict.LOST: 1}
    assert selector.look(lost, 5, 9.9).fallen == {}
    assert selector.look(back, 5, 9.95).ready == 1
    assert selector.look(lost, 5, 10.0).fallen == {}
    assert names(selector.look(lost, 5, 20.0).fallen[Verdict.LOST]) == ["a"]
    assert names(Selector().look(lost, 5, 0.0).fallen[Verdict.LOST]) == ["a"]


def test_a_lost_row_that_has_failed_is_no_loss() -> None:
    """A lost row that is tagged as failed does not make its group lost: failed rows are not trained on."""
    failed_and_lost = group("a", rows=3, failed=3)
    one = replace(group("a", rows=3, failed=1), lost_keys=("a_g0",))
    assert names(Selector().look([one], 5, 0.0, count=1).chosen) == ["a"]
    assert names(Selector().look([failed_and_lost], 5, 0.0).fallen[Verdict.FAILED]) == ["a"]


def test_what_is_incomplete_falls_out_where_nobody_works_on_it() -> None:
    """Rows missing, or not committed: while it is reserved it stays; else for a time of grace."""
    selector = Selector(incomplete_grace_s=10.0)
    groups = [group("short", rows=1), group("open", committed=False), group("failed", rows=1, failed=1)]
    busy = ["short", "open", "failed"]
    look = selector.look(groups, 5, 0.0, in_flight=busy)
    assert (look.fallen, look.waiting) == ({}, {Verdict.INCOMPLETE: 2, Verdict.FAILED: 1})
    assert selector.look(groups, 5, 100.0, in_flight=busy).fallen == {}
    fallen = selector.look(groups, 5, 100.0).fallen
    assert {verdict: names(some) for verdict, some in fallen.items()} == {
        Verdict.INCOMPLETE: ["short", "open"],
        Verdict.FAILED: ["failed"],
    }
    again = Selector(incomplete_grace_s=10.0)
    assert again.look(groups, 5, 0.0).waiting == {Verdict.INCOMPLETE: 2, Verdict.FAILED: 1}
    assert again.look(groups, 5, 9.9).fallen == {}
    assert set(again.look(groups, 5, 10.0).fallen) == {Verdict.INCOMPLETE, Verdict.FAILED}


def test_an_incomplete_group_that_is_stale_falls_out_unless_it_is_reserved() -> None:
    """Its worker is not cut short; one that nobody has reserved could not be trained on anyway."""
    old = [group("a", 1, rows=1)]
    assert names(Selector(incomplete_grace_s=9.0).look(old, 5, 0.0).fallen[Verdict.STALE]) == ["a"]
    assert Selector().look(old, 5, 0.0, in_flight=["a"]).waiting == {Verdict.INCOMPLETE: 1}
    ahead = Selector().look([group("a", 9, rows=1)], 5, 0.0)
    assert ahead.waiting == {Verdict.AHEAD: 1}


def test_a_whole_group_is_ready_even_if_its_reservation_is_still_there() -> None:
    """And a stale one falls out."""
    look = Selector().look([group("a"), group("b", 1)], 5, 0.0, count=1, in_flight=["a", "b"])
    assert (names(look.chosen), names(look.fallen[Verdict.STALE])) == (["a"], ["b"])


def test_reservations_are_passed_over() -> None:
    """They are neither chosen nor evicted nor counted."""
    look = Selector().look([reservation("a", 1), reservation("b", None)], 5, 0.0, count=1, least=0)
    assert (look.chosen, look.ready, look.fallen, look.waiting, look.failed_rows) == ((), 0, {}, {}, 0)


def test_a_group_is_made_once_it_was_committed_with_all_its_rows() -> None:
    """Failed rows are not counted, lost ones are; more rows than expected are enough."""
    groups = [
        group("whole", created=1.0),
        group("open", committed=False),
        group("half-failed", failed=1),
        group("too-few", expected=3),
        group("lost", created=2.0, lost=2),
        group("one-to-spare", created=3.0, rows=3, failed=1),
        group("more", created=4.0, rows=3),
        group("words", created=5.0, status="done"),
    ]
    made = {("whole", 1.0), ("lost", 2.0), ("one-to-spare", 3.0), ("more", 4.0), ("words", 5.0)}
    assert Listing(groups).made() == made


@pytest.mark.parametrize("in_flight", [4, 5])
def test_weight_fifo_waits_for_all_versions_of_the_window(in_flight: int) -> None:
    """Also for those that are being made with the newest weights; groups without a version are last."""
    selector = Selector("weight_fifo", untagged="last")
    look = selector.look([group("a", None)], 5, 0.0, count=1, in_flight_versions=[in_flight])
    assert (names(look.chosen), look.ready) == ([], 0)
    look = selector.look([group("a", None)], 5, 0.0, count=1, in_flight_versions=[3, 6])
    assert (names(look.chosen), look.ready) == (["a"], 1)


def test_a_group_whose_tags_are_not_those_of_its_keys_is_no_group() -> None:
    """A listing that is cut is not taken for a smaller group."""
    with pytest.raises(ValueError, match="shorter"):
        Selector().look([replace(group("a"), tags=({},))], 5, 0.0, count=1)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"order": "lifo"}, "order must be one of windowed, weight_fifo, in_order, not 'lifo'"),
        ({"untagged": "maybe"}, "untagged must be one of evict, first, last, keep, not 'maybe'"),
        ({"max_staleness": -1}, "max_staleness must be an int of at least 0, not -1"),
        ({"max_staleness": "2"}, "max_staleness must be an int of at least 0, not '2'"),
        ({"max_staleness": True}, "max_staleness must be an int of at least 0, not True"),
        ({"lost_grace_s": "x"}, "lost_grace_s must be a number of seconds, not 'x'"),
        ({"lost_grace_s": -0.5}, "lost_grace_s must not be negative, but is -0.5"),
        ({"target_tag": ""}, "target_tag must be a non-empty string, not ''"),
        ({"incomplete_grace_s": float("nan")}, "incomplete_grace_s must not be negative, but is nan"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(settings_: dict[str, Any], message: str) -> None:
    """At once, not at the first look."""
    with pytest.raises(ValueError, match=message):
        Selector(**settings_)


def test_the_smallest_settings_make_sense() -> None:
    """No staleness is on-policy, no grace is at once."""
    look = Selector(max_staleness=0).look([group("a", 4), group("b", 5)], 5, 0.0, count=1)
    assert (names(look.chosen), names(look.fallen[Verdict.STALE])) == (["b"], ["a"])


GROUPS = st.lists(
    st.builds(
        dict,
        version=st.one_of(st.none(), st.integers(0, 6)),
        created=st.integers(0, 3),
        rows=st.integers(1, 3),
        committed=st.booleans(),
        failed=st.integers(0, 3),
        lost=st.integers(0, 1),
        in_flight=st.booleans(),
    ),
    max_size=8,
)


def play(order: str, untagged: str, staleness: int, looks: list[list[dict[str, Any]]], version: int) -> None:
    """Look several times, ten seconds apart; the model writes down for each group what a person would say."""
    selector = Selector(
        order,  # type: ignore[arg-type]
        max_staleness=staleness,
        untagged=untagged,  # type: ignore[arg-type]
        lost_grace_s=10.0,
        incomplete_grace_s=20.0,
    )
    trouble: dict[str, tuple[str, float]] = {}
    for number, listed in enumerate(looks):
        now = 10.0 * number
        groups, busy, expect, line = [], [], {}, []
        seen: dict[str, tuple[str, float]] = {}
        for at, one in enumerate(listed):
            name = f"g{at}"
            kwargs = {k: v for k, v in one.items() if k != "in_flight"}
            made = group(name, **{**kwargs, "failed": min(one["failed"], one["rows"])})
            groups.append(made)
            if one["in_flight"]:
                busy.append(name)
            fit = [i for i in range(one["rows"]) if i >= one["failed"]]
            lost_fit = [i for i in range(one["rows"] - one["lost"], one["rows"]) if i in fit]
            whole = one["committed"] and len(fit) >= 2
            wanted = None if order == "in_order" else one["version"]
            oldest = version if order == "in_order" else version - staleness
            rules = [
                (not fit, "failed"),
                (bool(lost_fit), "lost"),
                (not whole and one["in_flight"], "incomplete"),
                (wanted is None and untagged in ("evict", "keep"), "untagged"),
                (wanted is not None and wanted < oldest, "stale"),
                (wanted is not None and wanted > version, "ahead"),
                (not whole, "incomplete"),
                (True, "ready"),
            ]
            kind = next(name for holds, name in rules if holds)
            family = "unfinished" if kind in ("failed", "incomplete") else kind
            since = trouble[name][1] if trouble.get(name, ("", 0))[0] == family else now
            seen[name] = (family, since)
            falls = {
                "ready": False,
                "ahead": False,
                "stale": True,
                "untagged": untagged == "evict",
                "lost": now - since >= 10.0,
                "failed": not one["in_flight"] and now - since >= 20.0,
                "incomplete": not one["in_flight"] and now - since >= 20.0,
            }[kind]
            expect[name] = (kind, falls)
            rank = wanted if wanted is not None else (-100 if untagged == "first" else 100)
            line.append((rank, one["created"], name, kind, falls))
        trouble = seen
        look = selector.look(groups, version, now, count=3, least=1, in_flight=busy)
        ready = sorted(one[:3] for one in line if one[3] == "ready")
        if order == "weight_fifo":
            blocks = [
                one[0]
                for one in line
                if one[3] == "incomplete" and not one[4] and version - staleness <= one[0] <= version
            ]
            lowest = min([*blocks, *(one[0] for one in ready)], default=None)
            ready = [one for one in ready if one[0] == lowest]
        assert names(look.chosen) == [one[2] for one in ready[:3]]
        fallen = {name: verdict for verdict, some in look.fallen.items() for name in names(some)}
        assert fallen == {name: kind for name, (kind, falls) in expect.items() if falls}
        stay = [kind for kind, falls in expect.values() if kind != "ready" and not falls]
        assert look.waiting == {kind: len(list(some)) for kind, some in itertools.groupby(sorted(stay))}


HISTORY = st.tuples(
    st.sampled_from(["windowed", "weight_fifo", "in_order"]),
    st.sampled_from(["evict", "keep", "first", "last"]),
    st.integers(0, 3),
    st.lists(GROUPS, max_size=4),
    st.integers(0, 6),
)


@settings(max_examples=50)
@given(history=HISTORY)
def test_selection_is_what_the_model_says(history: Any) -> None:
    """Fifty random partitions, looked at several times."""
    play(*history)


@pytest.mark.slow
@settings(max_examples=1000)
@given(history=HISTORY)
def test_selection_is_what_the_model_says_for_long(history: Any) -> None:
    """A thousand of them."""
    play(*history)


def test_verdicts_are_told_by_these_words() -> None:
    """Counters have them."""
    assert list(Verdict) == ["ready", "incomplete", "ahead", "stale", "untagged", "lost", "failed"]
