"""Each promise is broken at least once, and its test fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asyncdp import DataPlaneError, MemoryTransport
from asyncdp.calls.slots import WriteSlots
from asyncdp.factory import DEFAULT_LAYERS
from asyncdp.testing.contract import (
    Bound,
    Cancels,
    ClaimFaults,
    ClaimRelease,
    Claims,
    ClaimWaits,
    Clears,
    Deadlines,
    Forks,
    Groups,
    Interleavings,
    Metadata,
    PutFaults,
    PutLimits,
    Puts,
    ReadFaults,
    Reads,
    RecoveryVerbs,
    Rig,
    Rows,
    Stale,
)
from asyncdp.testing.contract import rig as rig_module
from asyncdp.testing.contract.faults import PUT, LoseReply
from asyncdp.testing.faults import fault as faults_module
from tests.contract.memory_planes import memory, with_hosts, with_planes
from tests.planted import hosts, planes, puts

pytestmark = pytest.mark.anyio

Check = Callable[[Rig], Awaitable[None]]

#: How a test fails: by an assertion, or by an error that it did not expect.
FAILED = (AssertionError, pytest.fail.Exception, DataPlaneError, TimeoutError, RuntimeError)


@pytest.fixture(scope="module", params=["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Make test runs on asyncio, make test-all on trio; the core, the test kit and cancels run on both in make test."""
    backend: str = request.param
    return backend


def of(check: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any) -> Check:
    """Give a parametrised test its parameters."""

    async def run(rig: Rig) -> None:
        await check(rig, *args, **kwargs)

    return run


def plane(kind: Any, check: Check, **settings: Any) -> Any:
    """Break the plane."""
    return pytest.param(with_planes(kind), settings, check, id=kind.__name__)


def host(kind: Any, check: Check, **settings: Any) -> Any:
    """Break the hosts."""
    return pytest.param(with_hosts(kind), settings, check, id=kind.__name__)


def wire(kind: Any, check: Check, name: str = "", **settings: Any) -> Any:
    """Break the transport."""
    return pytest.param(kind, settings, check, id=name or kind.__name__)


class HalfVisible(puts.HalfVisible):
    """The same in the partition of the contract."""

    partition = "p"


class ForgetsClaims(planes.ClaimsTwice):
    """Every claim is forgotten."""

    every = 1


GUARDS = [
    # 1
    host(hosts.Casts, of(Rows().test_every_dtype_comes_back_bit_for_bit, torch.bfloat16)),
    host(hosts.Squeezes, Rows().test_a_column_and_a_column_of_width_one_stay_apart),
    host(hosts.Reverses, Rows().test_a_dense_field_comes_back_dense),
    plane(planes.ForgetsNested, of(Rows().test_ragged_rows_keep_their_lengths, (2, 2, 2), ())),
    host(hosts.SharesMemory, Rows().test_changing_a_fetched_tensor_changes_no_stored_row),
    # 2
    wire(puts.ShortReads, Reads().test_one_unknown_id_of_three_keeps_the_other_rows),
    wire(puts.ShortReads, Reads().test_a_field_that_only_some_have_is_missing_for_the_others),
    wire(puts.ShortReads, Reads().test_an_unknown_id_alone_is_not_found),
    # 3
    wire(HalfVisible, Puts().test_a_reader_never_sees_half_a_put, rows_per_slot=1),
    plane(planes.KeepsWhatFits, PutLimits().test_a_put_over_capacity_leaves_nothing),
    plane(planes.ForgetsOpIds, of(Interleavings().test_a_clear_that_is_sent_again_spares_a_newer_row, "pop")),
    plane(planes.ForgetsOpIds, Interleavings().test_a_put_that_is_sent_again_spares_a_newer_value),
    plane(planes.ForgetsOpIds, Interleavings().test_an_abandoned_clear_does_not_remove_a_newer_row),
    plane(planes.ForgetsOpIds, Interleavings().test_an_abandoned_put_of_tags_does_not_come_back),
    plane(planes.WritesOtherLives, of(Bound().test_a_score_that_comes_late_is_not_written_to_the_next_life, "meta")),
    plane(planes.RevivesRows, of(Bound().test_a_score_that_comes_late_revives_nothing, "columns", "evict")),
    plane(planes.SkipsHalf, of(Bound().test_stale_rows_can_be_left_out, "fields")),
    plane(planes.RemovesOtherLives, of(Bound().test_a_removal_that_comes_late_spares_the_next_life, "group", "pop")),
    wire(puts.DecidesAnew, Bound().test_who_survived_is_decided_once),
    plane(planes.ForgetsOpIds, Bound().test_a_put_that_left_all_out_stays_empty),
    plane(planes.ReplacesAll, Puts().test_a_put_again_replaces_the_same_fields_only),
    plane(planes.OverwritesTags, Puts().test_tags_merge_by_key),
    # 4
    plane(ForgetsClaims, Claims().test_each_task_gets_each_sample_once),
    wire(puts.TagsLater, Claims().test_a_claim_right_after_a_put_has_the_tags),
    plane(planes.ClaimableAgain, Claims().test_each_task_gets_each_sample_once),
    plane(planes.NeverClaimableAgain, Claims().test_cleared_and_put_anew_a_sample_is_claimable_again),
    plane(planes.SplitsGroups, Groups().test_only_whole_groups_are_claimed),
    plane(planes.ClaimsUncommitted, of(Claims().test_uncommitted_and_failed_samples_are_skipped, {"committed": False})),
    plane(
        planes.LooksAway,
        of(ClaimWaits().test_a_misspelt_name_is_refused_at_once, "p", "mistyped", "x", blocking=False),
    ),
    plane(planes.ForgetsOpIds, Interleavings().test_a_claim_that_is_asked_again_does_not_take_a_second_batch),
    # 5
    plane(planes.TakesTooFew, ClaimWaits().test_too_few_in_time_is_claim_not_ready_with_nothing_claimed),
    plane(planes.LeaseUnchecked, of(ClaimRelease().test_pop_checks_that_the_claim_is_still_ones_own, "ids")),
    plane(planes.LeaseUnchecked, ClaimRelease().test_a_consumer_that_outlives_its_lease_has_lost_its_claim),
    # 6
    plane(planes.IgnoresIncarnations, Stale().test_a_meta_whose_row_lives_again_is_stale),
    plane(planes.IgnoresIncarnations, Stale().test_the_meta_of_a_put_is_a_reference_too),
    host(hosts.IgnoresGenerations, of(Stale().test_a_row_cleared_between_look_up_and_read_is_stale, again=True)),
    # 7
    plane(planes.ClearsLoudly, of(Clears().test_what_is_not_there_is_no_error, "clear_samples")),
    plane(planes.ClearsEverybodys, Clears().test_clearing_all_clears_what_this_owner_put),
    plane(planes.ClearsNothing, of(Clears().test_what_is_removed_is_gone, "evict")),
    # 8
    plane(planes.LookingConsumes, Metadata().test_looking_consumes_nothing),
    plane(planes.CountsTheUnfinished, Metadata().test_depth_counts_committed_complete_groups_until_popped),
    # 9
    plane(planes.RegisterResets, RecoveryVerbs().test_registering_again_unites_and_keeps),
    plane(planes.RegisterResetsCursors, RecoveryVerbs().test_registering_again_unites_and_keeps),
    # 10b
    plane(planes.LivesInChildren, Forks().test_a_child_may_open_a_client_of_its_own),
    # 11
    wire(puts.LeavesReaders, Cancels().test_of_many_cancelled_calls_none_disturbs_the_others),
    host(hosts.LeavesSlots, of(PutFaults().test_a_put_that_fails_at_any_step_leaves_nothing, WriteSlots)),
    host(hosts.LeavesSlots, of(PutFaults().test_a_cancelled_put_gives_its_space_back_with_the_next_one, WriteSlots)),
    plane(planes.GivesClaimsAway, ClaimFaults().test_closing_gives_back_what_nobody_got),
]


def be_impatient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Do not wait long for what will not happen."""
    for module in (rig_module, faults_module):
        monkeypatch.setattr(module, "PATIENCE_S", seconds)


@pytest.mark.parametrize(("kind", "settings", "check"), GUARDS)
async def test_a_transport_that_breaks_a_promise_fails_its_test(
    kind: type[MemoryTransport], settings: dict[str, Any], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise's test fails on a transport that breaks it."""
    be_impatient(monkeypatch, 2.0)
    with pytest.raises(FAILED):
        async with Rig(memory(kind, **settings)) as rig:
            await check(rig)


@pytest.mark.parametrize(("kind", "settings", "check"), GUARDS)
async def test_a_broken_transport_is_broken_in_one_way_only(
    kind: type[MemoryTransport], settings: dict[str, Any], check: Check
) -> None:
    """It puts, gets and claims: a guard fails for what is broken, not because nothing works."""
    async with Rig(memory(kind, **settings)) as rig:
        await rig.client.register_partition("p", ["x"], 1, ["train"])
        await rig.client.put_samples(["a"], "p", {"x": torch.ones(1, 2)})
        assert float((await rig.client.get_samples(["a"], "p", ["x"]))["x"].sum()) == 2.0
        assert (await rig.client.claim_meta("p", "train", ["x"], 1)).sample_ids == ["a"]


#: Promises that the layers keep: (layers left out, a test that fails without them).
LAYERS: list[tuple[str, Check]] = [
    ("attempt_timeout", of(Deadlines().test_a_backend_that_never_answers_hangs_no_verb, "ping")),  # 10
    ("attempt_timeout", of(Deadlines().test_a_backend_that_never_answers_hangs_no_verb, "claim_meta")),
    ("reconcile", of(Interleavings().test_nothing_comes_back_after_a_cancelled_put_and_a_clear, PUT)),
    ("reconcile", ClaimFaults().test_closing_gives_back_what_nobody_got),
    ("slot_retry batch_retry", ReadFaults().test_only_the_row_that_failed_is_asked_for_again),
    ("slot_retry", of(PutFaults().test_a_put_whose_answer_is_lost_is_sent_again_and_is_there_once, LoseReply)),
    ("typed_errors", ReadFaults().test_a_raw_error_of_the_backend_is_typed),
]


@pytest.mark.parametrize(("layer", "check"), LAYERS, ids=[f"{name}-{at}" for at, (name, _) in enumerate(LAYERS)])
async def test_a_stack_without_a_layer_fails_its_test(
    layer: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10, 11, 3: what the layers promise, a stack without them does not."""
    assert set(layer.split()) <= set(DEFAULT_LAYERS)
    be_impatient(monkeypatch, 0.4)
    with pytest.raises(FAILED):
        async with Rig(memory(MemoryTransport), without=tuple(layer.split())) as rig:
            await check(rig)


async def leave_a_reader(rig: Rig) -> None:
    """Do what no test would notice by itself."""
    await rig.client.register_partition("p", ["x"], 1, ["train"])
    await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)})
    (slot,) = [s for h in rig.transport().plane.hosts.values() for s in h.slots]
    slot.readers.add(-1)


async def test_a_slot_that_is_left_behind_fails_whatever_test_it_was() -> None:
    """11: the rig itself looks for leftovers at the end of each test."""
    with pytest.raises(AssertionError):
        async with Rig(memory(MemoryTransport)) as rig:
            await leave_a_reader(rig)
