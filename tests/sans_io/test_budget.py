import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncdp.middleware.policy.budget import RetryBudget


def drain(budget: RetryBudget, now: float) -> int:
    """Withdraw one token after the other; how many there were."""
    return sum(budget.withdraw(now) for _ in range(10_000))


def wire_requests(budget: RetryBudget, rng: random.Random, *, seconds: int, calls_per_s: int, failing: float) -> int:
    """Run calls of up to five attempts, each of which fails with this probability; count the attempts."""
    sent = 0
    for call in range(seconds * calls_per_s):
        now = call / calls_per_s
        budget.deposit(now)
        sent += 1
        for _ in range(4):
            if rng.random() >= failing or not budget.withdraw(now):
                break
            sent += 1
    return sent


@pytest.mark.parametrize("failing", [0.5, 1.0])
@pytest.mark.parametrize("calls_per_s", [10, 100, 1000])
def test_a_storm_is_bounded(calls_per_s: int, failing: float) -> None:
    """However many attempts fail, wire requests stay within 1.3 per call plus the floor."""
    seconds = 60
    calls = seconds * calls_per_s
    sent = wire_requests(RetryBudget(0.0), random.Random(1), seconds=seconds, calls_per_s=calls_per_s, failing=failing)
    assert sent <= 1.3 * calls + 10 * (seconds + 10)


def test_the_storm_would_not_be_bounded_without() -> None:
    """With a budget for everything the same storm sends nearly two requests per call: the bound is the budget's."""
    sent = wire_requests(RetryBudget(0.0, ratio=4.0), random.Random(1), seconds=60, calls_per_s=1000, failing=0.5)
    assert sent > 1.9 * 60_000


def test_rare_faults_are_always_paid_for() -> None:
    """Where one attempt in ten fails, every retry finds its token."""
    budget, rng = RetryBudget(0.0, floor_per_s=0.0), random.Random(3)
    for call in range(1000):
        budget.deposit(call / 100)  # something to start from
    for call in range(20_000):
        now = 10 + call / 100
        budget.deposit(now)
        while rng.random() < 0.1:
            assert budget.withdraw(now)


def test_it_starts_with_the_floor() -> None:
    """The first calls of a client can be retried: one window of the floor is there from the start."""
    budget = RetryBudget(100.0)
    assert budget.balance(100.0) == 100.0
    assert drain(budget, 100.0) == 100


def test_the_floor_refills_with_time_and_no_further() -> None:
    """Ten tokens a second come without calls, up to one window of them."""
    budget = RetryBudget(0.0)
    drain(budget, 0.0)
    assert drain(budget, 1.0) == 10
    assert drain(budget, 1.5) == 5
    assert drain(budget, 10_000.0) == 100


def test_a_call_pays_in_a_fifth() -> None:
    """Five calls pay for one retry, four do not."""
    budget = RetryBudget(0.0, floor_per_s=0.0)
    for _ in range(4):
        budget.deposit(0.0)
    assert not budget.withdraw(0.0)
    budget.deposit(0.0)
    assert drain(budget, 0.0) == 1


def test_rounding_takes_no_token_away() -> None:
    """Ten times a tenth pay for one retry, though they sum up to less in floating point."""
    budget = RetryBudget(0.0, ratio=0.1, floor_per_s=0.0)
    for _ in range(10):
        budget.deposit(0.0)
    assert budget.balance(0.0) < 1.0
    assert drain(budget, 0.0) == 1


def test_a_withdrawal_is_whole_or_nothing() -> None:
    """More tokens than there are leaves all of them there."""
    budget = RetryBudget(0.0, window_s=1.0)
    assert not budget.withdraw(0.0, tokens=11)
    assert budget.balance(0.0) == 10.0
    assert budget.withdraw(0.0, tokens=10)
    assert budget.withdraw(0.0, tokens=0)
    assert not budget.withdraw(0.0)


def test_quiet_times_do_not_pay_for_a_storm() -> None:
    """After an hour without faults one to two windows of calls are saved and one of the floor, and no more."""
    budget = RetryBudget(0.0)
    for call in range(360_000):
        budget.deposit(call / 100)
    assert 0.2 * 100 * 10 + 100 <= drain(budget, 3599.99) <= 0.2 * 100 * 20 + 100


@pytest.mark.parametrize("later", [19.9, 20.0])
def test_tokens_expire(later: float) -> None:
    """A token is gone two windows after its call, whether or not anybody looked in between."""
    budget = RetryBudget(0.0, floor_per_s=0.0)
    for _ in range(50):
        budget.deposit(0.0)
    assert budget.balance(later) == pytest.approx(10.0 if later < 20.0 else 0.0)
    assert budget.balance(20.0) == 0.0


@pytest.mark.parametrize("name", ["ratio", "floor_per_s", "window_s"])
@pytest.mark.parametrize("number", [-0.1, float("nan"), float("inf")])
def test_wrong_settings_are_refused(name: str, number: float) -> None:
    """A setting that is no amount is refused by name."""
    with pytest.raises(ValueError, match=f"^{name} must"):
        RetryBudget(0.0, **{name: number})


def test_a_window_of_nothing_is_refused() -> None:
    """Tokens that expire at once would be no budget."""
    with pytest.raises(ValueError, match="window_s"):
        RetryBudget(0.0, window_s=0.0)


def test_negative_withdrawals_are_refused() -> None:
    """A negative number of tokens is a ValueError: it would add to the budget."""
    with pytest.raises(ValueError, match="tokens"):
        RetryBudget(0.0).withdraw(0.0, tokens=-1)


class BudgetMachine(RuleBasedStateMachine):
    """Deposits, withdrawals and time in any order, against the full list of both."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 1000.0
        self.now = self.start
        self.deposits: list[float] = []
        self.withdrawals: list[tuple[float, int]] = []

    @initialize(
        ratio=st.sampled_from([0.0, 0.2, 1.0]),
        floor=st.sampled_from([0.0, 0.5, 10.0]),
        window=st.sampled_from([1.0, 10.0]),
    )
    def begin(self, ratio: float, floor: float, window: float) -> None:
        """Choose the settings."""
        self.ratio, self.floor, self.window = ratio, floor, window
        self.budget = RetryBudget(self.now, ratio=ratio, floor_per_s=floor, window_s=window)

    @rule(seconds=st.one_of(st.sampled_from([0.5, 1.0, 9.5, 10.0, 20.0]), st.floats(0.0, 25.0)))
    def time_passes(self, seconds: float) -> None:
        """Go on."""
        self.now += seconds

    @rule(calls=st.integers(1, 30))
    def deposit(self, calls: int) -> None:
        """Pay in for some calls."""
        for _ in range(calls):
            self.budget.deposit(self.now)
            self.deposits.append(self.now)

    @rule(tokens=st.integers(0, 40))
    def withdraw(self, tokens: int) -> None:
        """Take all or nothing, and all exactly when it is there."""
        before = self.budget.balance(self.now)
        granted = self.budget.withdraw(self.now, tokens)
        assert granted == (before + 1e-9 >= tokens)
        assert self.budget.balance(self.now) == pytest.approx(before - tokens if granted else before, abs=1e-6)
        if granted:
            self.withdrawals.append((self.now, tokens))

    @invariant()
    def what_is_there_was_paid_in(self) -> None:
        """The balance is never negative, and no more than two windows of calls and one of the floor."""
        balance = self.budget.balance(self.now)
        recent = sum(when > self.now - 2 * self.window for when in self.deposits)
        assert 0.0 <= balance <= self.ratio * recent + self.floor * self.window + 1e-6

    @invariant()
    def what_was_paid_in_is_there(self) -> None:
        """Tokens of the last window are there unless they were withdrawn, and so is the floor."""
        balance = self.budget.balance(self.now)
        young = sum(when > self.now - self.window for when in self.deposits)
        spent = sum(tokens for when, tokens in self.withdrawals if when > self.now - self.window)
        floor = self.floor * min(self.window, self.now - self.start)
        assert balance >= self.ratio * young + floor - spent - 1e-6

    @invariant()
    def retries_are_bounded(self) -> None:
        """From any withdrawal on, no more is spent than the docstring says."""
        for begin in {when for when, _ in self.withdrawals}:
            spent = sum(tokens for when, tokens in self.withdrawals if when >= begin)
            calls = sum(when > begin - 2 * self.window for when in self.deposits)
            assert spent <= self.ratio * calls + self.floor * (self.window + self.now - begin) + 1e-6


BudgetMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBudgetMachine = BudgetMachine.TestCase
