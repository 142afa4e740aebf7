"""Each guard is proved: with it taken out, the test that is there for it fails."""

from functools import partial
from typing import Any

import pytest

from asyncdp import AttemptTimeout, BatchRetry, PortRotation, Reconcile, SlotRetry, TypedErrors
from asyncdp.middleware.policy.budget import RetryBudget
from asyncdp.testing import run_virtual
from asyncdp.transports.memory.host import Host
from tests.layers import test_ambiguity as ambiguity
from tests.layers import test_cancel as cancel
from tests.layers import test_ports as ports
from tests.layers import test_retries as retries
from tests.layers import test_slots as slots
from tests.layers import test_time as time
from tests.layers.rig import swapped
from tests.planted.hosts import (
    BelievesLateFinishes,
    BusyIsStale,
    FreesUnderReaders,
    NoEpoch,
    NoGeneration,
    OneReaderBlocksAll,
)
from tests.planted.ports import Forgiving, Grudging, Hasty, LeaksProbes, LonePort
from tests.planted.puts import Careless, Endless, Heedless, LookingAtTheClock, Meddling, Swallowing, Trusting
from tests.planted.retries import (
    AsksStaleAgain,
    DenyList,
    Impatient,
    ManyLives,
    NeverSpends,
    NewName,
    PayForPatience,
    PayPerSlot,
    Reckless,
    Vague,
    WholeRetry,
    WholeRounds,
)

#: (what is replaced, by what, the test that must fail, its arguments).
GUARDS: list[tuple[type[Any], type[Any], Any, dict[str, Any]]] = [
    (PortRotation, LeaksProbes, ports.test_a_cancelled_probe_is_given_back, {}),
    (PortRotation, LeaksProbes, time.test_200_cancelled_tasks_leave_both_ports_usable, {}),
    (PortRotation, LonePort, ports.test_a_dead_port_costs_one_refused_connection, {}),
    (PortRotation, Forgiving, ports.test_a_dead_port_costs_one_refused_connection, {}),
    (PortRotation, Forgiving, ports.test_a_silent_port_costs_one_attempt_timeout, {}),
    (PortRotation, Hasty, ports.test_a_slow_first_contact_is_no_quarantine, {}),
    (PortRotation, Hasty, ports.test_a_cold_host_is_waited_for, {}),
    (PortRotation, Grudging, ports.test_what_is_not_the_ports_fault_is_not_held_against_it, {}),
    (PortRotation, Grudging, ports.test_a_busy_host_is_not_held_against_its_port, {}),
    (
        SlotRetry,
        DenyList,
        time.test_a_native_cancel_is_obeyed_at_once,
        {"when": "attempt", "verb": "get_samples"},
    ),
    (SlotRetry, DenyList, retries.test_what_may_not_pass_is_not_retried, {"error": "ValueError"}),
    (SlotRetry, AsksStaleAgain, slots.test_a_recycled_slot_is_stale_at_once, {"how": "cleared"}),
    (SlotRetry, AsksStaleAgain, slots.test_a_stale_answer_is_believed, {}),
    (SlotRetry, WholeRetry, retries.test_only_the_slots_that_failed_are_asked_again, {}),
    (SlotRetry, PayPerSlot, ports.test_256_slots_that_fail_as_values_cost_one_token, {}),
    (SlotRetry, PayForPatience, retries.test_waiting_for_a_full_plane_costs_no_budget, {}),
    (SlotRetry, Impatient, retries.test_a_passing_fault_is_retried_with_full_jitter, {}),
    (SlotRetry, NewName, ambiguity.test_a_put_whose_reply_was_lost_happens_once, {}),
    (SlotRetry, NewName, ambiguity.test_a_lost_put_reply_does_not_bring_the_old_value_back, {}),
    (SlotRetry, NewName, ambiguity.test_a_lost_clear_reply_does_not_delete_a_newer_row, {}),
    (
        SlotRetry,
        NewName,
        ambiguity.test_a_lost_claim_is_the_same_batch_again,
        {"raises": "TimeoutError"},
    ),
    (SlotRetry, Reckless, ambiguity.test_a_touched_put_is_not_sent_again, {"other": "put"}),
    (SlotRetry, Reckless, ambiguity.test_a_touched_clear_is_not_sent_again, {}),
    (SlotRetry, Vague, retries.test_a_storm_does_not_feed_itself, {}),
    (RetryBudget, NeverSpends, retries.test_a_storm_does_not_feed_itself, {}),
    (RetryBudget, NeverSpends, retries.test_slots_and_rounds_pay_from_one_purse, {}),
    (BatchRetry, WholeRounds, retries.test_a_second_round_asks_for_the_one_row, {}),
    (BatchRetry, ManyLives, retries.test_no_row_is_of_two_lives_over_rounds, {}),
    (AttemptTimeout, Endless, ports.test_all_ports_silent_ends_by_the_timeout, {}),
    (
        AttemptTimeout,
        Endless,
        time.test_every_verb_ends_within_its_timeout,
        {"verb": "ping", "fault": "silent"},
    ),
    (AttemptTimeout, LookingAtTheClock, time.test_a_reply_that_came_in_time_counts, {}),
    (
        TypedErrors,
        Swallowing,
        time.test_a_native_cancel_is_obeyed_at_once,
        {"when": "attempt", "verb": "put_samples"},
    ),
    (TypedErrors, Trusting, ports.test_a_truncating_port_is_left, {}),
    (TypedErrors, Trusting, slots.test_a_corrupt_payload_comes_again, {}),
    (Reconcile, Heedless, ambiguity.test_a_cancelled_put_that_arrives_late_is_refused, {}),
    (Reconcile, Heedless, ambiguity.test_a_cancelled_claim_is_given_back, {}),
    (Reconcile, Careless, ambiguity.test_a_cancelled_put_that_arrives_late_is_refused, {}),
    (Reconcile, Meddling, ambiguity.test_a_claim_under_way_is_not_given_back_by_another, {}),
    (Reconcile, Meddling, ambiguity.test_debts_are_paid_by_mutations_of_the_same_ids_only, {}),
    (Host, NoGeneration, slots.test_a_recycled_slot_is_stale_at_once, {"how": "reborn"}),
    (Host, NoGeneration, slots.test_a_moved_row_is_read_where_it_lies_now, {"times": 1}),
    (Host, NoEpoch, slots.test_another_epoch_is_stale, {}),
    (Host, BusyIsStale, slots.test_a_slot_under_read_is_read_by_others, {}),
    (Host, FreesUnderReaders, slots.test_a_slot_cleared_under_its_reader_is_freed_by_it, {}),
    (Host, OneReaderBlocksAll, slots.test_a_slot_cleared_under_its_reader_is_freed_by_it, {}),
    (Host, BelievesLateFinishes, slots.test_a_late_finish_changes_nothing, {}),
]
#: Broken layers that the cancel sweep must notice, with an op and a fault where it does.
SWEEPS: list[tuple[type[Any], type[Any], str, str, str]] = [
    (PortRotation, LeaksProbes, "get", "slow", "scope"),
    (SlotRetry, DenyList, "put", "slow", "native"),
    (Reconcile, Heedless, "claim", "lost replies", "scope"),
    (TypedErrors, Swallowing, "get", "slow", "native"),
]


#: What a broken class raises that is itself written wrongly, for example since a method that it calls was renamed.
MISTAKES = (AttributeError, ImportError, NameError, TypeError)


@pytest.mark.parametrize(
    ("guard", "variant", "test", "kwargs"), GUARDS, ids=[f"{v.__name__}-{t.__name__}" for _, v, t, _ in GUARDS]
)
def test_a_broken_guard_is_noticed(guard: type[Any], variant: type[Any], test: Any, kwargs: dict[str, Any]) -> None:
    """The test that proves a guard fails without the guard, and not because the broken class cannot run."""
    check = getattr(test, "check", None)
    run = partial(test, **kwargs) if check is None else partial(run_virtual, partial(check, **kwargs), limit_s=2000.0)
    with swapped({guard: variant}), pytest.raises((Exception, BaseExceptionGroup, pytest.fail.Exception)) as caught:
        run()
    err = caught.value
    assert not (err.subgroup(MISTAKES) if isinstance(err, BaseExceptionGroup) else isinstance(err, MISTAKES))


@pytest.mark.parametrize(("guard", "variant", "op", "fault", "how"), SWEEPS)
def test_the_cancel_sweep_notices(guard: type[Any], variant: type[Any], op: str, fault: str, how: str) -> None:
    """A layer that leaves something behind at some await point, or swallows a cancel there, is found by the sweep."""
    with swapped({guard: variant}), pytest.raises((Exception, BaseExceptionGroup, pytest.fail.Exception)):
        cancel.test_a_cancel_at_any_point_leaves_nothing_behind(op, fault, "asyncio", how)
