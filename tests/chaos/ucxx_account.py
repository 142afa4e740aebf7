"""Adds up what everybody wrote down: nothing acknowledged is lost, nothing is claimed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

__all__ = ["balance"]


def balance(
    journals: dict[str, list[dict[str, Any]]], released: Collection[str], lost: Collection[str], *, lossy: bool
) -> dict[str, int]:
    """Return counts of rows.

    Args:
        journals: Entries by owner.
        released: Owners whose claims the controller gave back after their death.
        lost: Rows that the plane named as lost.
        lossy: Whether a host was killed for good, or began anew: only then may rows be unreadable.

    Raises:
        AssertionError: It does not add up.
    """
    acked, refused, open_puts = _puts(journals)
    claims, read, popped, unreadable = _claims(journals)
    problems = [f"{owner}: {entry}" for owner, told in journals.items() for entry in told if _is_wrong(entry)]
    known = acked | {sample_id for put in open_puts for sample_id in put}
    for sample_id, owners in claims.items():
        again = [owner for owner in owners[:-1] if owner not in released]
        if again or len(set(owners)) != len(owners):
            problems.append(f"{sample_id} was claimed by {owners}")
        if sample_id not in known:
            problems.append(
                f"{sample_id} was claimed, and its put {'failed' if sample_id in refused else 'is unknown'}"
            )
    if unreadable and not lossy:
        problems.append(f"rows that nobody lost could not be read: {sorted(unreadable)}")
    gone = acked - popped - set(lost) - unreadable
    if gone:
        problems.append(f"acknowledged, and never trained or named as lost: {sorted(gone)}")
    for put in open_puts:
        seen = [sample_id in claims or sample_id in lost for sample_id in put]
        if any(seen) and not all(seen):
            problems.append(f"a put that was cut off is there in part: {put}")
    assert not problems, "\n".join(problems)
    return {
        "acknowledged": len(acked),
        "trained": len(popped & acked),
        "claimed again after a death": sum(len(owners) > 1 for owners in claims.values()),
        "lost with a host": len(acked & (set(lost) | unreadable)),
        "refused": len(refused),
        "cut off, whole": sum(all(sample_id in claims for sample_id in put) for put in open_puts),
        "cut off, absent": sum(not any(sample_id in claims for sample_id in put) for put in open_puts),
        "read": len(read),
    }


def _is_wrong(entry: dict[str, Any]) -> bool:
    return entry["what"] in ("wrong bytes", "claim lost")


def _puts(journals: dict[str, list[dict[str, Any]]]) -> tuple[set[str], set[str], list[list[str]]]:
    """Rows that were acknowledged, rows that were refused, and puts of which the worker does not know."""
    acked: set[str] = set()
    refused: set[str] = set()
    begun: dict[str, list[str]] = {}
    for told in journals.values():
        for entry in told:
            if entry["what"] == "begun":
                begun[entry["ids"][0]] = entry["ids"]
            elif entry["what"] == "acked":
                acked.update(begun.pop(entry["ids"][0]))
            elif entry["what"] == "failed" and not entry["ambiguous"]:
                refused.update(begun.pop(entry["ids"][0]))
    return acked, refused, list(begun.values())


def _claims(
    journals: dict[str, list[dict[str, Any]]],
) -> tuple[dict[str, list[str]], Counter[str], set[str], set[str]]:
    """By whom rows were claimed in turn, how often they were read, which were popped, which could not be read."""
    claims: dict[str, list[str]] = {}
    read: Counter[str] = Counter()
    popped: set[str] = set()
    unreadable: set[str] = set()
    for entry, owner in sorted(
        ((entry, owner) for owner, told in journals.items() for entry in told), key=lambda pair: pair[0]["at"]
    ):
        if entry["what"] == "claimed":
            for sample_id in entry["ids"]:
                claims.setdefault(sample_id, []).append(owner)
        elif entry["what"] == "read":
            read.update(entry["ids"])
        elif entry["what"] == "popped":
            popped.update(entry["ids"])
        elif entry["what"] == "unreadable":
            unreadable.update(entry["ids"])
    return claims, read, popped - unreadable, unreadable
