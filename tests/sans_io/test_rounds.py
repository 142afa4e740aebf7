from collections.abc import Iterable, Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncdp.middleware.policy.rounds import Rounds


def test_all_rows_at_once() -> None:
    """A batch whose rows all come is done after one round."""
    rounds = Rounds[str](3)
    assert rounds.pending() == (0, 1, 2)
    assert rounds.record([2, 0, 1], {}) == ()
    assert (rounds.done, rounds.give_up, rounds.errors, rounds.used) == (True, False, {}, 1)


def test_a_batch_has_three_rounds_where_nothing_is_said() -> None:
    """Of a row that fails each time, the third error is the last word."""
    rounds = Rounds[str](1)
    assert (rounds.n, rounds.max_rounds) == (1, 3)
    for number in (1, 2, 3):
        assert rounds.pending() == (0,)
        rounds.record([], {0: (f"error {number}", True)})
    assert rounds.give_up
    assert rounds.errors == {0: "error 3"}


def test_only_the_failed_row_is_asked_for_again() -> None:
    """One of 64 rows fails once: the second round asks for that one only."""
    rounds = Rounds[str](64)
    assert rounds.record([p for p in range(64) if p != 7], {7: ("timeout", True)}) == (7,)
    assert not rounds.done
    assert not rounds.give_up
    assert rounds.record([7], {}) == ()
    assert rounds.done


def test_pending_keeps_the_order_of_the_request() -> None:
    """However the errors come, rows are asked for in the order of the request."""
    rounds = Rounds[str](5)
    assert rounds.record([1], {4: ("x", True), 0: ("x", True), 3: ("x", True), 2: ("x", True)}) == (0, 2, 3, 4)


def test_errors_that_stay_are_final_at_once() -> None:
    """A row that is not retryable is not asked for again, and its error stands while others go on."""
    rounds = Rounds[str](3)
    assert rounds.record([0], {1: ("not found", False), 2: ("timeout", True)}) == (2,)
    assert rounds.errors == {1: "not found"}
    rounds.record([2], {})
    assert (rounds.done, rounds.give_up, rounds.errors) == (False, True, {1: "not found"})


def test_nothing_retryable_gives_up_early() -> None:
    """With rounds left but nothing that may be asked for again, it is over."""
    rounds = Rounds[str](2)
    assert rounds.record([0], {1: ("stale", False)}) == ()
    assert (rounds.give_up, rounds.used) == (True, 1)


def test_rounds_are_used_up() -> None:
    """After max_rounds a row that failed each time ends with its latest error."""
    rounds = Rounds[str](1, max_rounds=2)
    assert rounds.record([], {0: ("first", True)}) == (0,)
    assert rounds.record([], {0: ("second", True)}) == ()
    assert (rounds.give_up, rounds.errors) == (True, {0: "second"})


def test_errors_come_in_the_order_of_the_request() -> None:
    """Errors of different rounds are in the order of the request."""
    rounds = Rounds[str](3)
    rounds.record([], {2: ("a", False), 0: ("b", True), 1: ("c", False)})
    rounds.record([], {0: ("d", False)})
    assert list(rounds.errors.items()) == [(0, "d"), (1, "c"), (2, "a")]


def test_an_empty_batch_is_done() -> None:
    """A batch of no rows is done before it begins."""
    rounds = Rounds[str](0)
    assert (rounds.done, rounds.give_up, rounds.pending()) == (True, False, ())
    rounds.stop()
    assert rounds.done


def test_stop_ends_what_is_pending_with_its_error() -> None:
    """Without time or budget the rest ends with its latest error, before the rounds are used up."""
    rounds = Rounds[str](3)
    rounds.record([0], {1: ("gone", False), 2: ("timeout", True)})
    rounds.stop()
    assert (rounds.pending(), rounds.give_up, rounds.errors) == ((), True, {1: "gone", 2: "timeout"})


def test_stop_before_the_first_round_is_refused() -> None:
    """Rows that were never asked for have no error to end with."""
    with pytest.raises(ValueError, match="before the first round"):
        Rounds[str](1).stop()


@pytest.mark.parametrize(
    ("ok", "errors", "says"),
    [
        ([0, 1, 2], {}, "not pending: \\[2\\]"),
        ([0, 1], {-1: ("x", True)}, "not pending: \\[-1\\]"),
        ([0], {}, "without an outcome: \\[1\\]"),
        ([], {0: ("x", True)}, "without an outcome: \\[1\\]"),
        ([0, 1, 1], {}, "more than one outcome: \\[1\\]"),
        ([0, 1], {1: ("x", False)}, "more than one outcome: \\[1\\]"),
    ],
)
def test_answers_that_do_not_fit_are_refused(
    ok: Iterable[int], errors: Mapping[int, tuple[str, bool]], says: str
) -> None:
    """Rows not asked for, rows left out and rows named twice are refused, and nothing changes."""
    rounds = Rounds[str](2)
    with pytest.raises(ValueError, match=says):
        rounds.record(ok, errors)
    assert (rounds.pending(), rounds.errors, rounds.used) == ((0, 1), {}, 0)


def test_a_row_that_came_is_not_taken_again() -> None:
    """A position that has its outcome cannot get another one in a later round."""
    rounds = Rounds[str](2)
    rounds.record([0], {1: ("timeout", True)})
    with pytest.raises(ValueError, match="not pending"):
        rounds.record([1], {0: ("late", True)})


def test_nothing_is_recorded_after_the_end() -> None:
    """A batch that is done or given up takes no more answers, not even empty ones."""
    rounds = Rounds[str](1)
    rounds.record([0], {})
    with pytest.raises(ValueError, match="nothing is pending"):
        rounds.record([], {})


@pytest.mark.parametrize(("n", "max_rounds"), [(-1, 3), (1, 0)])
def test_wrong_sizes_are_refused(n: int, max_rounds: int) -> None:
    """A batch has rows or none, and at least one round."""
    with pytest.raises(ValueError, match="must"):
        Rounds[str](n, max_rounds)


class RoundsMachine(RuleBasedStateMachine):
    """Rounds with any outcomes, wrong answers among them, against a list of what each position got."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.came: set[int] = set()
        self.final: dict[int, str] = {}
        self.stopped = False

    @initialize(n=st.integers(0, 8), max_rounds=st.integers(1, 4))
    def begin(self, n: int, max_rounds: int) -> None:
        """Choose a batch."""
        self.n, self.max_rounds = n, max_rounds
        self.rounds = Rounds[str](n, max_rounds)
        self.asked = [0] * n
        self.waiting: dict[int, str] = {}  # retryable, with its latest error

    @precondition(lambda self: self.rounds.pending())
    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        """Answer one round: each row comes, fails for now or fails for good."""
        pending = self.rounds.pending()
        outcomes = data.draw(st.fixed_dictionaries(dict.fromkeys(pending, st.sampled_from(["ok", "again", "never"]))))
        errors: dict[int, tuple[str, bool]] = {}
        for position in data.draw(st.permutations(pending)):
            self.asked[position] += 1
            self.waiting.pop(position, None)
            text = f"{position} in round {self.rounds.used}"
            if outcomes[position] == "ok":
                self.came.add(position)
                continue
            errors[position] = (text, outcomes[position] == "again")
            if outcomes[position] == "again" and self.asked[position] < self.max_rounds:
                self.waiting[position] = text
            else:
                self.final[position] = text
        now_pending = self.rounds.record((p for p in pending if outcomes[p] == "ok"), errors)
        assert now_pending == self.rounds.pending()

    @rule(data=st.data(), strays=st.sets(st.integers(-2, 9), min_size=1), ok=st.booleans())
    def record_what_was_not_asked(self, data: st.DataObject, strays: set[int], ok: bool) -> None:  # noqa: FBT001 drawn
        """Answer for positions that are not pending, with or without the pending ones: refused, nothing changed."""
        strays -= set(self.rounds.pending())
        before = (self.rounds.pending(), self.rounds.errors, self.rounds.used)
        answered = [*data.draw(st.sampled_from([self.rounds.pending(), ()])), *strays]
        if strays or (before[0] and not answered):
            with pytest.raises(ValueError, match="pending"):
                self.rounds.record(answered if ok else (), {} if ok else dict.fromkeys(answered, ("stray", True)))
        assert (self.rounds.pending(), self.rounds.errors, self.rounds.used) == before

    @precondition(lambda self: self.rounds.used)
    @rule()
    def stop(self) -> None:
        """Ask no more."""
        self.rounds.stop()
        self.final |= self.waiting
        self.waiting = {}

    @invariant()
    def each_position_has_one_outcome(self) -> None:
        """Every position is there, failed for good or pending, and never two of them; none is asked too often."""
        pending = set(self.rounds.pending())
        assert not pending & self.came
        assert not pending & self.rounds.errors.keys()
        assert not self.came & self.rounds.errors.keys()
        assert pending | self.came | self.rounds.errors.keys() == set(range(self.n))
        assert all(times <= self.max_rounds for times in self.asked)

    @invariant()
    def pending_is_what_may_be_asked_again(self) -> None:
        """In the order of the request; before the first round everything, then what failed for now."""
        expected = sorted(self.waiting) if self.rounds.used else list(range(self.n))
        assert list(self.rounds.pending()) == expected

    @invariant()
    def errors_are_final_and_the_latest(self) -> None:
        """The errors are those of the last time each position was asked for."""
        assert self.rounds.errors == self.final
        assert list(self.rounds.errors) == sorted(self.final)

    @invariant()
    def it_ends_in_one_of_two_ways(self) -> None:
        """Done with every row, given up with an error, or going on: exactly one of them."""
        assert [self.rounds.done, self.rounds.give_up, bool(self.rounds.pending())].count(True) == 1
        assert self.rounds.done == (len(self.came) == self.n)


RoundsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=15, deadline=None)
TestRoundsMachine = RoundsMachine.TestCase
