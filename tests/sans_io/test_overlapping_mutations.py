from types import SimpleNamespace
from typing import Any

import pytest

from asyncdp.middleware.policy.overlapping_mutations import OverlappingMutations, Watch


def call(partition_id: str, *ids: str, all_of_it: bool = False) -> Any:
    """A mutation of some ids, or of a whole partition."""
    return SimpleNamespace(partition_id=partition_id, sample_ids=None if all_of_it else ids)


def test_a_mutation_alone_is_not_touched() -> None:
    """Nothing else was under way: it may be sent again."""
    touches = OverlappingMutations()
    with touches.watch(call("p", "a")) as watch:
        assert watch == watch  # noqa: PLR0124 - told apart by identity
        assert not watch.touched
    assert not watch.touched


def test_two_on_one_id_touch_each_other() -> None:
    """Whichever began first, neither may be sent again over the other."""
    touches = OverlappingMutations()
    with touches.watch(call("p", "a", "b")) as first, touches.watch(call("p", "b", "c")) as second:
        assert (first.touched, second.touched) == (True, True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call("p", "a"), call("p", "b")),
        (call("p", "a"), call("q", "a")),
        (call("p", all_of_it=True), call("q", all_of_it=True)),
    ],
    ids=["other ids", "another partition", "two partitions"],
)
def test_what_has_no_id_in_common_leaves_each_other_alone(one: Any, other: Any) -> None:
    """Other ids, or another partition."""
    touches = OverlappingMutations()
    with touches.watch(one) as first, touches.watch(other) as second:
        assert (first.touched, second.touched) == (False, False)


@pytest.mark.parametrize("whole_first", [True, False])
def test_a_whole_partition_touches_all_in_it(*, whole_first: bool) -> None:
    """A clear of all, a drop: every id of the partition."""
    whole, one = call("p", all_of_it=True), call("p", "a")
    touches = OverlappingMutations()
    begin, then = (whole, one) if whole_first else (one, whole)
    with touches.watch(begin) as first, touches.watch(then) as second:
        assert (first.touched, second.touched) == (True, True)


def test_a_call_that_names_nothing_is_about_a_whole_partition_of_no_name() -> None:
    """Such calls touch each other and nothing else."""
    touches = OverlappingMutations()
    with touches.watch(SimpleNamespace()) as first, touches.watch(call("p", "a")) as other:  # type: ignore[arg-type]
        assert (first.partition_id, first.ids, first.touched, other.touched) == ("", None, False, False)
        with touches.watch(SimpleNamespace()):  # type: ignore[arg-type]
            assert first.touched


def test_what_has_ended_touches_nothing_also_after_an_error() -> None:
    """Only what is under way counts."""
    touches = OverlappingMutations()
    with pytest.raises(RuntimeError), touches.watch(call("p", "a")):
        raise RuntimeError
    with touches.watch(call("p", "a")) as watch:
        assert not watch.touched


def test_a_third_touches_those_it_overlaps_only() -> None:
    """Three under way: the middle one overlaps both."""
    touches = OverlappingMutations()
    with touches.watch(call("p", "a")) as first, touches.watch(call("p", "c")) as second:
        assert not first.touched
        assert not second.touched
        with touches.watch(call("p", "c", "d")) as third:
            assert (first.touched, second.touched, third.touched) == (False, True, True)


def test_overlap_is_mutual() -> None:
    """Either way round."""
    some, whole, none = Watch("p", frozenset("ab")), Watch("p", None), Watch("p", frozenset("c"))
    assert some.overlaps(whole)
    assert whole.overlaps(some)
    assert not some.overlaps(none)
    assert not none.overlaps(some)
