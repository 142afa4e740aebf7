"""Checks of a history, each for one promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from .claims import doubled_claims, foreign_pops, misshapen_batches, untagged_claims
from .liveness import still_failing
from .lives import groundless_refusals, unbound_puts
from .outcomes import late_calls, raw_errors, short_batches
from .ports import doubled_probes
from .presence import phantom_claims, wrong_listings
from .registers import wrong_reads
from .stale_errors import groundless_stale_errors, other_lives
from .whole_rows import half_puts, torn_rows
from .wire import (
    crowded_outages,
    endless_waits,
    overspent_budgets,
    stale_asked_again,
    too_many_requests,
)

if TYPE_CHECKING:
    from ..recording.history import History
    from ..recording.violation import Violation

__all__ = ["CHECKS", "Check", "check"]

Check = Callable[["History"], "Iterable[Violation]"]

#: All checks by name.
CHECKS: Final[Mapping[str, Check]] = {
    "wrong reads": wrong_reads,
    "torn rows": torn_rows,
    "half puts": half_puts,
    "wrong listings": wrong_listings,
    "groundless stale errors": groundless_stale_errors,
    "other lives": other_lives,
    "unbound puts": unbound_puts,
    "groundless refusals": groundless_refusals,
    "doubled claims": doubled_claims,
    "foreign pops": foreign_pops,
    "misshapen batches": misshapen_batches,
    "untagged claims": untagged_claims,
    "phantom claims": phantom_claims,
    "short batches": short_batches,
    "late calls": late_calls,
    "raw errors": raw_errors,
    "overspent budgets": overspent_budgets,
    "too many requests": too_many_requests,
    "stale slots asked again": stale_asked_again,
    "crowded outages": crowded_outages,
    "endless waits": endless_waits,
    "doubled probes": doubled_probes,
    "failures in the calm": still_failing,
}


def check(history: History, checks: Iterable[str] | None = None) -> list[Violation]:
    """Check a history, by all or some of :data:`CHECKS`, and return the violations; empty if all promises hold.

    Raises:
        KeyError: A check does not exist.
    """

    def found() -> Iterator[Violation]:
        for name in CHECKS if checks is None else checks:
            yield from CHECKS[name](history)

    return list(found())
