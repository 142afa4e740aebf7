import pytest

from asyncdp.examples.grpo_account import Account


def _ids(name: str, count: int = 4) -> list[str]:
    return [f"{name}_g{i}" for i in range(count)]


def _clean() -> Account:
    """Three groups: one trained on, one evicted, one left."""
    account = Account()
    for name in ("a", "b", "c"):
        account.produced(_ids(name))
    account.trained(_ids("a"))
    account.evicted(_ids("b"), "stale")
    return account


def test_a_clean_run_adds_up() -> None:
    """Every sample has one fate: the numbers add up and say so."""
    balance = _clean().balance(_ids("c"))
    assert (balance.produced, balance.trained, balance.evicted, balance.left) == (12, 4, 4, 4)
    assert balance.adds_up
    assert balance.lines() == [
        "produced 12 = trained 4 + evicted 4 + left 4",
        "lost 0, trained twice 0",
        "the account adds up",
    ]


def test_a_lost_sample_is_found_by_its_id() -> None:
    """One sample that the plane no longer holds is lost, and the account does not add up."""
    balance = _clean().balance(_ids("c")[1:])
    assert balance.lost == 1
    assert not balance.adds_up
    assert "THE ACCOUNT DOES NOT ADD UP" in balance.lines()


def test_a_loss_is_not_hidden_by_a_stranger() -> None:
    """A lost sample and an unknown one make the same sum: both are seen all the same."""
    balance = _clean().balance([*_ids("c")[1:], "x_g0"])
    assert balance.produced == balance.trained + balance.evicted + balance.left
    assert (balance.lost, balance.unheard_of) == (1, 1)
    assert not balance.adds_up


def test_training_twice_is_found() -> None:
    """A sample that two steps were taken on counts as trained once, and as trained twice."""
    account = _clean()
    account.trained(_ids("a")[:1])
    balance = account.balance(_ids("c"))
    assert (balance.trained, balance.trained_twice) == (4, 1)
    assert not balance.adds_up


@pytest.mark.parametrize("left", [_ids("a")[:1], _ids("b")[:1]])
def test_two_fates_of_one_sample_are_a_contradiction(left: list[str]) -> None:
    """What was trained on or evicted must not be in the plane any more."""
    balance = _clean().balance([*_ids("c"), *left])
    assert balance.contradictory == 1
    assert not balance.adds_up


def test_trained_and_evicted_is_a_contradiction() -> None:
    """A sample is not evicted after it was trained on."""
    account = _clean()
    account.evicted(_ids("a")[:1], "stale")
    assert account.balance(_ids("c")).contradictory == 1


def test_an_unanswered_put_counts_once_it_is_seen() -> None:
    """A put without an answer counts as produced if its samples turn up, else as nothing."""
    account = _clean()
    account.unanswered(_ids("d"))
    account.unanswered(_ids("e"))
    balance = account.balance([*_ids("c"), *_ids("d")])
    assert balance.produced == 16
    assert balance.adds_up
    assert account.puts == {"given_up": 0, "unanswered": 8, "arrived_unanswered": 4}


@pytest.mark.parametrize("answer", ["produced", "given_up"])
def test_an_answer_ends_the_doubt(answer: str) -> None:
    """Each put is unanswered from before it is sent until it is answered."""
    account = _clean()
    account.unanswered(_ids("d"))
    getattr(account, answer)(_ids("d"))
    assert account.puts["unanswered"] == 0
    assert account.balance([*_ids("c"), *(_ids("d") if answer == "produced" else ())]).adds_up


def test_the_order_of_entries_does_not_matter() -> None:
    """From another process it may come later that a put was sent than that its samples were trained on."""
    account = _clean()
    account.trained(_ids("d"))
    account.unanswered(_ids("d"))
    balance = account.balance(_ids("c"))
    assert balance.adds_up
    assert balance.produced == 16


def test_half_of_an_unanswered_put_is_a_loss() -> None:
    """A put is whole or absent: if only part of it turns up, the rest is lost."""
    account = _clean()
    account.unanswered(_ids("d"))
    balance = account.balance([*_ids("c"), *_ids("d")[:3]])
    assert balance.lost == 1


def test_evictions_are_counted_by_their_first_reason() -> None:
    """Evicting again what is gone already changes nothing."""
    account = _clean()
    account.evicted(_ids("b"), "gone")
    assert account.evicted_by_reason == {"stale": 4}
    assert account.counts == {"produced": 12, "trained": 4, "evicted": 4}
