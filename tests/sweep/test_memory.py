"""The sweep on the transport in memory: every verb at every checkpoint, on both loops, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdp import MemoryTransport
from asyncdp.testing import FaultPlan, run_virtual
from asyncdp.testing.contract import by_config
from asyncdp.testing.sweep import VERBS, cancellation_sweep
from tests.sweep.slice import EVERYTHING, all_verbs

if TYPE_CHECKING:
    from collections.abc import Callable

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
FAULTS: dict[str, Callable[[], FaultPlan]] = {
    "refused": lambda: FaultPlan().refuse(times=2),
    "slow": lambda: FaultPlan().delay(0.1),
    "late": lambda: FaultPlan().delay(0.1, reply=True),
    "lost replies": lambda: FaultPlan().lose_reply(times=1).lose_reply(after=2, times=1),
    "silent": lambda: FaultPlan().silent(after=1, times=1).on(host="host-0").silent(times=1),
    "truncated": lambda: FaultPlan().truncate(times=2).not_ready(0.1, after=2, times=1),
}
#: Those of make test: an error, an answer that never comes, and none at all.
SHORT = ("refused", "lost replies", "silent")
#: Verbs that are made of several requests, or wait: where faults open other ways to be cancelled in.
LONG = ("claim_meta, waiting", "get_samples", "put_samples, again", "clear_samples", "batches, ahead", "close")


def slots(transport: Any) -> Callable[[], dict[str, int]]:
    """Tell which slots are not free: none, when every sample of a run was dropped."""
    plane = transport.plane

    def held() -> dict[str, int]:
        counts = {f"{h.ref.id} {state}": n for h in plane.hosts.values() for state, n in h.counts().items()}
        return {name: n for name, n in counts.items() if n and not name.endswith(" free")}

    return held


MEMORY = by_config(MemoryTransport, leftovers=slots)


@BACKENDS
@all_verbs()
def test_a_verb_cancelled_at_any_checkpoint_leaves_nothing(verb: str, backend: str) -> None:
    """T2, promise 11: by scope, natively, by wait_for; no permit, slot, task, byte; no claim is forgotten."""
    swept = run_virtual(lambda: cancellation_sweep(MEMORY, verb), backend, limit_s=1e6)
    ways = 3 if backend == "asyncio" else 1
    assert swept.steps >= 1
    assert swept.cancels.total() == swept.steps * ways
    assert len(swept.cancels) == ways


@BACKENDS
@pytest.mark.parametrize(
    "fault", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
@pytest.mark.parametrize("verb", VERBS if EVERYTHING else LONG)
def test_cancelled_under_faults_it_leaves_nothing_either(verb: str, fault: str, backend: str) -> None:
    """While it retries, rotates, waits, settles: the same."""
    run_virtual(
        lambda: cancellation_sweep(MEMORY, verb, faults=FAULTS[fault], attempt_timeout_s=0.5), backend, limit_s=1e6
    )
