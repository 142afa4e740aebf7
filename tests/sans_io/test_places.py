import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdp.recovery.places import Phase, Places

NAMES = ["a", "b", "c", "d"]


def test_a_group_takes_one_place_from_its_reservation_to_its_removal() -> None:
    """Asked for, reserved, held, free: one place all the time."""
    places = Places(2)
    assert (places.capacity, places.used, places.free_places) == (2, 0, 2)
    assert places.take("a")
    assert (places.used, places.free_places, places.phase("a")) == (1, 1, Phase.ASKED)
    places.reserve("a")
    assert (places.used, places.phase("a"), places.of(Phase.RESERVED)) == (1, Phase.RESERVED, ["a"])
    places.hold("a")
    assert (places.used, places.phase("a"), places.of(Phase.RESERVED)) == (1, Phase.HELD, [])
    places.free("a")
    assert (places.used, places.free_places, places.phase("a")) == (0, 2, None)


def test_no_more_places_than_there_are() -> None:
    """The last place is taken; the next group gets none, without effect, until one is free."""
    places = Places(1)
    assert places.take("a")
    assert places.take("b") is False
    assert places.phase("b") is None
    places.free("a")
    assert places.take("b")


def test_a_group_does_not_get_a_second_place() -> None:
    """Whoever asks again for the same group is told what it is."""
    places = Places(3)
    places.take("a")
    with pytest.raises(ValueError, match="group 'a' has a place already: it is asked"):
        places.take("a")
    assert places.used == 1


@pytest.mark.parametrize("capacity", [0, -1])
def test_there_is_a_place(capacity: int) -> None:
    """A ledger without places would let nobody work."""
    with pytest.raises(ValueError, match=f"capacity must be at least 1, not {capacity}"):
        Places(capacity)


def test_rows_that_are_there_outweigh_a_reservation() -> None:
    """A group whose rows were listed while its reservation was answered is held."""
    places = Places(1)
    places.take("a")
    places.hold("a")
    places.reserve("a")
    assert places.phase("a") is Phase.HELD


def test_more_may_be_there_than_was_reserved() -> None:
    """After a restart with fewer places, or beside producers that reserve nothing, no place is free; none is owed."""
    places = Places(1)
    places.apply(places.mark(), reserved=["a"], held=["a", "b"])
    assert (places.used, places.free_places) == (2, 0)
    assert (places.phase("a"), places.phase("b")) == (Phase.HELD, Phase.HELD)
    assert places.of(Phase.HELD) == ["a", "b"]


def test_a_listing_does_not_undo_what_came_after_it() -> None:
    """What was taken, held or freed since the request was sent stays so; the rest is as listed."""
    places = Places(9)
    places.apply(places.mark(), reserved=["old", "gone", "done"], held=["kept"])
    mark = places.mark()
    places.take("new")
    places.reserve("new")
    places.free("gone")
    places.hold("done")
    places.apply(mark, reserved=["gone", "done"], held=["kept"])
    assert places.phase("new") is Phase.RESERVED
    assert places.phase("gone") is None
    assert places.phase("done") is Phase.HELD
    assert places.phase("old") is None
    assert places.phase("kept") is Phase.HELD


def test_every_change_is_newer_than_the_one_before() -> None:
    """However many there were before the mark."""
    places = Places(9)
    for name in ("a", "b"):
        places.take(name)
        places.reserve(name)
    mark = places.mark()
    places.take("c")
    places.reserve("c")
    places.free("b")
    places.apply(mark, reserved=["a", "b"], held=[])
    assert places.of(Phase.RESERVED) == ["a", "c"]


def test_the_next_listing_does() -> None:
    """A change is older than a listing that is requested after it."""
    places = Places(9)
    places.take("a")
    places.reserve("a")
    places.free("b")
    places.apply(places.mark(), reserved=["b"], held=[])
    assert (places.phase("a"), places.phase("b")) == (None, Phase.RESERVED)


def test_what_was_asked_for_may_still_arrive() -> None:
    """A listing without the reservation does not free a place whose put has not ended; one with it settles it."""
    places = Places(2)
    places.take("a")
    places.apply(places.mark(), reserved=[], held=[])
    assert places.phase("a") is Phase.ASKED
    places.apply(places.mark(), reserved=["a"], held=[])
    assert places.phase("a") is Phase.RESERVED


def test_a_listing_that_is_older_than_another_one_is_ignored() -> None:
    """Of two listings whose answers come in the wrong order, the later request counts."""
    places = Places(9)
    early = places.mark()
    places.take("a")
    places.reserve("a")
    places.free("a")
    late = places.mark()
    places.apply(late, reserved=[], held=["b"])
    places.apply(early, reserved=["a"], held=[])
    assert (places.phase("a"), places.phase("b")) == (None, Phase.HELD)


class Model:
    """All that happened, in order; what holds is found by playing it from the newest listing on."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Phase | None]] = []
        self.listed: dict[str, Phase] = {}
        self.since = 0

    def now(self) -> dict[str, Phase]:
        """Return what holds."""
        state = dict(self.listed)
        for name, phase in self.log[self.since :]:
            state.pop(name, None) if phase is None else state.__setitem__(name, phase)
        return state

    def change(self, name: str, phase: Phase | None) -> None:
        """Write a change down; freeing what has no place is none."""
        if not (phase is None and name not in self.now()):
            self.log.append((name, phase))

    def apply(self, mark: int, listed: dict[str, Phase]) -> None:
        """Begin anew from a listing, unless a later one was taken."""
        if mark >= self.since:
            asked = {name: Phase.ASKED for name, phase in self.now().items() if phase is Phase.ASKED}
            self.since, self.listed = mark, asked | listed


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["take", "reserve", "hold", "free"]), st.sampled_from(NAMES)),
        st.tuples(st.just("mark"), st.just("")),
        st.tuples(
            st.just("apply"),
            st.tuples(st.integers(0, 3), st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["r", "h"]))),
        ),
    ),
    max_size=30,
)


def play(steps: list[tuple[str, object]], capacity: int) -> None:
    """Play steps on the places and on the model, and compare after each."""
    places, model = Places(capacity), Model()
    marks: list[tuple[int, int]] = []
    for what, arg in steps:
        before = model.now()
        if what == "mark":
            marks.append((places.mark(), len(model.log)))
        elif what == "apply":
            which, listed = arg  # type: ignore[misc]
            if marks:
                mark, length = marks[which % len(marks)]
                held = [name for name, one in listed.items() if one == "h"]
                places.apply(mark, reserved=list(listed), held=held)
                model.apply(length, {name: Phase.HELD if name in held else Phase.RESERVED for name in listed})
        elif what == "take":
            name = str(arg)
            if name in before:
                with pytest.raises(ValueError, match=name):
                    places.take(name)
            else:
                assert places.take(name) == (len(before) < capacity)
                if len(before) < capacity:
                    model.change(name, Phase.ASKED)
        elif what == "reserve":
            places.reserve(str(arg))
            if before.get(str(arg)) is not Phase.HELD:
                model.change(str(arg), Phase.RESERVED)
        else:
            getattr(places, what)(str(arg))
            model.change(str(arg), Phase.HELD if what == "hold" else None)
        now = model.now()
        assert {name: places.phase(name) for name in NAMES if places.phase(name)} == now
        assert (places.used, places.free_places) == (len(now), max(0, capacity - len(now)))


@settings(max_examples=50)
@given(steps=STEPS, capacity=st.integers(1, 4))
def test_places_are_what_the_model_says(steps: list[tuple[str, object]], capacity: int) -> None:
    """Fifty random histories of changes and of listings in any order."""
    play(steps, capacity)


@pytest.mark.slow
@settings(max_examples=1000)
@given(steps=STEPS, capacity=st.integers(1, 4))
def test_places_are_what_the_model_says_for_long(steps: list[tuple[str, object]], capacity: int) -> None:
    """A thousand of them."""
    play(steps, capacity)


def test_phases_are_told_by_these_words() -> None:
    """Errors and events have them."""
    assert list(Phase) == ["asked", "reserved", "held"]
