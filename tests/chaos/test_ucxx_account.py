"""The account and the rows of the chaos tell what is wrong: each is broken once here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.ucxx_account import balance
from tests.chaos.ucxx_rows import WrongBytesError, fields_of, versions


def note(at: float, what: str, *ids: str, **told: Any) -> dict[str, Any]:
    """An entry of a journal."""
    return {"what": what, "at": at, "ids": list(ids), **told}


def lived(**more: Any) -> dict[str, list[dict[str, Any]]]:
    """Journals of one put that was trained; ``more`` is added."""
    worker = [note(0, "begun", "a", "b"), note(1, "acked", "a", "b")]
    trainer = [note(2, "claimed", "a", "b"), note(3, "read", "a", "b"), note(4, "popped", "a", "b")]
    return {"worker": worker, "trainer": trainer, **more}


def test_a_life_without_faults_adds_up() -> None:
    """All that was acknowledged was trained."""
    assert balance(lived(), (), (), lossy=False)["trained"] == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"other": [note(5, "claimed", "a")]}, "claimed by"),
        ({"other": [note(0, "begun", "c"), note(1, "acked", "c")]}, "never trained"),
        ({"other": [note(5, "claimed", "nobody's")]}, "is unknown"),
        (
            {"other": [note(0, "begun", "c"), note(1, "failed", "c", ambiguous=False), note(2, "claimed", "c")]},
            "failed",
        ),
        ({"other": [note(0, "begun", "c", "d"), note(2, "claimed", "c"), note(2, "popped", "c")]}, "in part"),
        ({"other": [note(5, "unreadable", "a")]}, "could not be read"),
        ({"other": [note(5, "wrong bytes", "a")]}, "wrong bytes"),
    ],
)
def test_what_does_not_add_up_is_said(more: dict[str, Any], said: str) -> None:
    """Claimed twice, lost, invented, half a put, unreadable, wrong."""
    with pytest.raises(AssertionError, match=said):
        balance(lived(**more), (), (), lossy=False)


def test_a_claim_that_was_given_back_may_be_claimed_again() -> None:
    """Its owner is dead, and the controller said so."""
    more = {"dead": [note(1.5, "claimed", "a")]}
    assert balance(lived(**more), {"dead"}, (), lossy=False)["claimed again after a death"] == 1


def test_rows_of_another_put_or_mixed_ones_are_seen() -> None:
    """Every element carries id and version."""
    right = fields_of(["a", "b"], 3)
    assert versions(["a", "b"], right) == {"a": 3, "b": 3}
    with pytest.raises(WrongBytesError):
        versions(["b", "a"], right)
    right["x"][1, 4001] = 2
    with pytest.raises(WrongBytesError):
        versions(["a", "b"], right)
