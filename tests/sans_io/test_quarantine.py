import math
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncdp.middleware.policy.permit import Change, Failure, Health, Permit, QuarantineRules, Verdict
from asyncdp.middleware.policy.quarantine import Quarantine

Port = tuple[str, int]

PORTS: list[Port] = [("host-a", port) for port in range(4)]
ONE: list[Port] = [("host-a", 0)]
EACH: list[list[Port]] = [[port] for port in PORTS]


def make(**times: float) -> Quarantine[Port]:
    """Begin with nothing known; times override the rules."""
    return Quarantine(random.Random(7), QuarantineRules(**times))


def answered(quarantine: Quarantine[Port], ports: list[Port], now: float = 0.0) -> None:
    """Let each port answer once, so that first contact is over."""
    for port in ports:
        quarantine.pick([port], now).succeeded(now)


def outrun(quarantine: Quarantine[Port], now: float) -> Verdict:
    """Let the one target be outrun."""
    return quarantine.pick(ONE, now).outrun(now)


def refuse(quarantine: Quarantine[Port], port: Port, now: float) -> Verdict:
    """Let one call to the port be refused."""
    return quarantine.pick([port], now).failed(Failure.REFUSED, now)


def slow(quarantine: Quarantine[Port], port: Port, now: float, until: float) -> Verdict:
    """Let one call to the port time out."""
    return quarantine.pick([port], now).failed(Failure.SLOW, until)


def make_seeded(seed: int) -> Quarantine[Port]:
    """Begin with nothing known, at a port of the seed's choice."""
    return Quarantine(random.Random(seed))


def health(quarantine: Quarantine[Port], port: Port, now: float) -> Health:
    """Say what the metrics would show."""
    return quarantine.snapshot(now)[port].health


class TestQuarantineAndProbe:
    """Out for a time, then one probe."""

    def test_a_failed_port_is_left_out(self) -> None:
        """A port that fails is not picked again before base_s have passed."""
        quarantine = make()
        assert refuse(quarantine, PORTS[0], 0.0) == Verdict(Change.QUARANTINED, failures=1, for_s=30.0)
        picked = {quarantine.pick(PORTS, 29.9).target for _ in range(20)}
        assert picked == set(PORTS[1:])

    def test_half_open_lets_one_probe_through(self) -> None:
        """After the quarantine exactly one call may try the port, the others go on without it."""
        quarantine = make()
        refuse(quarantine, PORTS[0], 0.0)
        permits = [quarantine.pick(PORTS, 30.0) for _ in range(20)]
        assert Counter(permit.target for permit in permits)[PORTS[0]] == 1
        assert [permit.target for permit in permits if permit.probe] == [PORTS[0]]

    def test_a_good_probe_brings_the_port_back(self) -> None:
        """A probe that succeeds makes the port healthy at once."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        assert quarantine.pick(ONE, 30.0).succeeded(30.5).change is Change.RECOVERED
        assert health(quarantine, ONE[0], 30.5) is Health.HEALTHY
        assert not quarantine.pick(ONE, 30.5).probe

    def test_failed_probes_double_up_to_the_limit(self) -> None:
        """Each failed probe doubles the quarantine, and it never exceeds max_s."""
        quarantine = make()
        now, lengths = 0.0, []
        for _ in range(2000):
            verdict = refuse(quarantine, ONE[0], now)
            assert verdict.change is Change.QUARANTINED
            lengths.append(verdict.for_s)
            now += verdict.for_s
        assert lengths[:6] == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0]
        assert max(lengths) == 300.0

    def test_a_released_probe_lets_the_next_call_probe(self) -> None:
        """A cancelled probe is no verdict: the port stays half-open and the next call may probe."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        probe = quarantine.pick(ONE, 30.0)
        assert probe.probe
        assert not quarantine.pick(ONE, 30.0).probe
        assert probe.released().change is Change.NONE
        assert health(quarantine, ONE[0], 30.0) is Health.HALF_OPEN
        assert quarantine.pick(ONE, 30.0).probe

    def test_a_release_of_a_healthy_port_changes_nothing(self) -> None:
        """A cancelled call to a healthy port is held against nobody."""
        quarantine = make()
        assert quarantine.pick(ONE, 0.0).released().change is Change.NONE
        assert quarantine.snapshot(0.0)[ONE[0]] == (Health.HEALTHY, 0, None, 0)


class TestManyAtOnce:
    """Many permits are out at once."""

    def test_256_failures_in_one_moment_are_one(self) -> None:
        """Calls that fail together quarantine once, for base_s."""
        quarantine = make()
        permits = [quarantine.pick(ONE, 0.0) for _ in range(256)]
        changes = [permit.failed(Failure.REFUSED, 1.0) for permit in permits]
        assert changes[0] == Verdict(Change.QUARANTINED, failures=1, for_s=30.0)
        assert {verdict.change for verdict in changes[1:]} == {Change.NONE}
        assert quarantine.snapshot(1.0)[ONE[0]] == (Health.QUARANTINED, 1, 31.0, 0)

    def test_an_old_success_does_not_lift_a_quarantine(self) -> None:
        """A success that was sent before the quarantine began says nothing about the port since."""
        quarantine = make()
        old = quarantine.pick(ONE, 0.0)
        refuse(quarantine, ONE[0], 1.0)
        assert old.succeeded(2.0).change is Change.NONE
        assert health(quarantine, ONE[0], 2.0) is Health.QUARANTINED

    def test_an_old_failure_does_not_undo_a_recovery(self) -> None:
        """A call from before the quarantine that fails after the recovery does not begin another one."""
        quarantine = make()
        old = quarantine.pick(ONE, 0.0)
        refuse(quarantine, ONE[0], 1.0)
        quarantine.pick(ONE, 31.0).succeeded(31.0)
        assert old.failed(Failure.REFUSED, 32.0).change is Change.NONE
        assert health(quarantine, ONE[0], 32.0) is Health.HEALTHY

    def test_a_success_sent_since_lifts_it(self) -> None:
        """A call that had to use a quarantined port and succeeds brings it back, probe or not."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        forced = quarantine.pick(ONE, 1.0)
        assert not forced.probe
        assert forced.succeeded(1.5) == Verdict(Change.RECOVERED, failures=1)

    def test_there_is_never_a_second_probe_while_one_is_out(self) -> None:
        """A probe that hangs through recovery and a new quarantine still counts as the one probe."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        hanging, forced = quarantine.pick(ONE, 30.0), quarantine.pick(ONE, 30.0)
        forced.succeeded(30.0)
        refuse(quarantine, ONE[0], 31.0)
        assert not quarantine.pick(ONE, 500.0).probe
        assert hanging.failed(Failure.SLOW, 501.0).change is Change.NONE
        assert quarantine.pick(ONE, 501.0).probe

    @pytest.mark.parametrize("how", ["succeeded", "failed", "released"])
    def test_a_probe_that_ends_after_the_recovery_gives_its_place_back(self, how: str) -> None:
        """A probe overtaken by another call's success does not keep the next quarantine from being probed."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        overtaken, forced = quarantine.pick(ONE, 30.0), quarantine.pick(ONE, 30.0)
        forced.succeeded(30.0)
        assert end(overtaken, how, 31.0).change is Change.NONE
        refuse(quarantine, ONE[0], 32.0)
        assert quarantine.pick(ONE, 500.0).probe


class TestNeverStarves:
    """With every port out the least bad one is used."""

    def test_the_soonest_released_is_used(self) -> None:
        """With every port out the one that is released first is used."""
        quarantine = make()
        for now, port in enumerate((PORTS[2], PORTS[0], PORTS[1], PORTS[3])):
            refuse(quarantine, port, float(now))
        permit = quarantine.pick(PORTS, 5.0)
        assert (permit.target, permit.probe) == (PORTS[2], False)

    def test_fewest_failures_break_a_tie(self) -> None:
        """Of ports that are released at the same time the one that failed less often is used."""
        quarantine = make()
        refuse(quarantine, PORTS[0], 0.0)
        refuse(quarantine, PORTS[0], 30.0)  # until 90
        refuse(quarantine, PORTS[1], 60.0)  # until 90
        for _ in range(5):
            assert quarantine.pick(PORTS[:2], 61.0).target == PORTS[1]

    def test_ports_that_are_being_probed_are_equally_soon(self) -> None:
        """Of ports whose time is over and whose probes are out, the one that failed less often is used."""
        quarantine = make()
        refuse(quarantine, PORTS[0], 0.0)
        refuse(quarantine, PORTS[0], 30.0)  # until 90
        refuse(quarantine, PORTS[1], 70.0)  # until 100
        probes = [quarantine.pick([port], 100.0).probe for port in PORTS[:2]]
        assert probes == [True, True]
        assert quarantine.pick(PORTS[:2], 100.0).target == PORTS[1]

    def test_an_outage_of_all_ports_tries_each_in_turn(self) -> None:
        """When the least bad port fails too, its time starts over, so the next call tries another."""
        quarantine = make()
        for port in PORTS:
            refuse(quarantine, port, 0.0)
        tried = []
        for now in range(1, 9):
            permit = quarantine.pick(PORTS, float(now))
            tried.append(permit.target)
            assert permit.failed(Failure.REFUSED, float(now)) == Verdict(Change.EXTENDED, failures=1, for_s=30.0)
        assert Counter(tried) == dict.fromkeys(PORTS, 2)

    def test_a_short_outage_under_load_costs_no_more_than_base_s(self) -> None:
        """Thousands of failures while all ports are out do not lengthen the quarantine: only failed probes do."""
        quarantine = make()
        for call in range(4000):
            quarantine.pick(PORTS, call / 4000).failed(Failure.REFUSED, call / 4000)
        assert all(state.until is not None and state.until <= 31.0 for state in quarantine.snapshot(1.0).values())

    def test_a_failure_beside_the_probe_does_not_count(self) -> None:
        """While a probe is out, another call's failure leaves the verdict to the probe."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        probe, forced = quarantine.pick(ONE, 30.0), quarantine.pick(ONE, 30.0)
        assert forced.failed(Failure.REFUSED, 30.0).change is Change.NONE
        assert probe.failed(Failure.REFUSED, 31.0) == Verdict(Change.QUARANTINED, failures=2, for_s=60.0)

    def test_no_targets_is_refused(self) -> None:
        """Nothing can be picked from nothing."""
        with pytest.raises(ValueError, match="no targets"):
            make().pick([], 0.0)


class TestDecay:
    """Failures are forgotten with health."""

    def test_one_failure_is_forgotten_per_decay_s(self) -> None:
        """Health steps the failure count down by one each decay_s."""
        quarantine = make()
        now = 0.0
        for _ in range(3):
            now += refuse(quarantine, ONE[0], now).for_s
        quarantine.pick(ONE, now).succeeded(now)
        counts = [quarantine.snapshot(now + past)[ONE[0]].failures for past in (0.0, 59.9, 60.0, 120.0, 180.0, 9999.0)]
        assert counts == [3, 3, 2, 1, 0, 0]

    def test_a_flapping_port_climbs_on(self) -> None:
        """A port that breaks again soon after it came back stays out for longer than before."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        quarantine.pick(ONE, 30.0).succeeded(30.0)
        assert refuse(quarantine, ONE[0], 40.0).for_s == 60.0

    def test_a_port_that_was_healthy_for_long_begins_anew(self) -> None:
        """From the top of the ladder, max_s of health forgets everything."""
        quarantine = make()
        now = 0.0
        for _ in range(50):
            now += refuse(quarantine, ONE[0], now).for_s
        quarantine.pick(ONE, now).succeeded(now)
        assert refuse(quarantine, ONE[0], now + 300.0).for_s == 30.0


class TestOutrun:
    """A port that was outrun several times in a row rests."""

    def test_three_in_a_row_without_an_answer(self) -> None:
        """Then others are preferred for 1 s, 2 s, ...; an answer begins the count anew, and is no recovery."""
        quarantine = make()
        answered(quarantine, PORTS)
        now = 1.0
        changes = [outrun(quarantine, now) for _ in range(2)]
        answered(quarantine, ONE)
        verdicts = [outrun(quarantine, now) for _ in range(3)]
        assert {verdict.change for verdict in (*changes, *verdicts[:2])} == {Change.NONE}
        assert verdicts[2] == Verdict(Change.RESTS, failures=0, for_s=1.0)
        assert quarantine.snapshot(now)[ONE[0]] == (Health.RESTING, 0, now + 1.0, 0)
        assert ONE[0] not in {quarantine.pick(PORTS, now + 0.9).target for _ in range(20)}
        for for_s in (2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            now += 40.0
            permit = quarantine.pick(ONE, now)
            assert permit.probe
            assert permit.outrun(now) == Verdict(Change.RESTS, failures=0, for_s=for_s)
        assert quarantine.pick(ONE, now + 40.0).succeeded(now + 40.0).change is Change.NONE
        assert health(quarantine, ONE[0], now + 40.0) is Health.HEALTHY

    def test_of_a_target_that_never_answered(self) -> None:
        """Three times, too."""
        quarantine = make()
        assert [outrun(quarantine, 1.0).change for _ in range(3)] == [Change.NONE, Change.NONE, Change.RESTS]

    def test_it_is_no_failure_and_forgets_none(self) -> None:
        """The count of failures stays as it is while a port rests."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        quarantine.pick(ONE, 30.0).succeeded(30.0)
        for _ in range(3):
            outrun(quarantine, 40.0)
        assert quarantine.snapshot(40.0)[ONE[0]] == (Health.RESTING, 1, 41.0, 0)

    def test_only_a_probe_lengthens_a_quarantine_so(self) -> None:
        """A port in quarantine is outrun as a last resort without more ado; as a probe it waits for the next one."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        assert [outrun(quarantine, 10.0).change for _ in range(4)] == [Change.NONE] * 4
        assert quarantine.snapshot(10.0)[ONE[0]].until == 30.0
        permit = quarantine.pick(ONE, 30.0)
        assert permit.probe
        assert permit.outrun(30.0).for_s > 0.0
        assert not quarantine.pick(ONE, 30.5).probe

    def test_a_permit_that_has_ended(self) -> None:
        """Changes nothing."""
        quarantine = make()
        permit = quarantine.pick(ONE, 0.0)
        permit.released()
        assert permit.outrun(0.0).change is Change.ENDED_TWICE


class TestFirstContact:
    """A port that never answered may be slow."""

    def test_a_slow_first_contact_is_no_verdict(self) -> None:
        """Before a first answer a timeout within first_contact_s does not quarantine and counts no failure."""
        quarantine = make()
        permits = [quarantine.pick(ONE, 0.0) for _ in range(8)]
        assert {permit.failed(Failure.SLOW, 29.0).change for permit in permits} == {Change.NONE}
        assert quarantine.snapshot(29.0)[ONE[0]] == (Health.RESTING, 0, 30.0, 0)

    def test_a_resting_port_is_passed_over(self) -> None:
        """A port that was slow at first contact is left alone while others are healthy, then gets one probe."""
        quarantine = make()
        slow(quarantine, PORTS[0], 0.0, 10.0)
        assert PORTS[0] not in {quarantine.pick(PORTS, 29.9).target for _ in range(20)}
        permits = [quarantine.pick(PORTS, 30.0) for _ in range(20)]
        assert [permit.target for permit in permits if permit.probe] == [PORTS[0]]
        assert Counter(permit.target for permit in permits)[PORTS[0]] == 1

    def test_a_port_that_is_mute_for_ever_is_quarantined(self) -> None:
        """Slow again when its first contact is over, a resting port is quarantined, for the first time."""
        quarantine = make()
        slow(quarantine, PORTS[0], 0.0, 10.0)
        assert slow(quarantine, PORTS[0], 30.0, 40.0) == Verdict(Change.QUARANTINED, failures=1, for_s=30.0)

    def test_a_resting_port_that_answers_is_healthy(self) -> None:
        """Any answer ends the rest, a late one too, and is no recovery: there was no quarantine."""
        quarantine = make()
        late = quarantine.pick(ONE, 0.0)
        slow(quarantine, ONE[0], 0.0, 10.0)
        assert late.succeeded(12.0).change is Change.NONE
        assert health(quarantine, ONE[0], 12.0) is Health.HEALTHY

    def test_resting_ports_are_used_if_no_other_is_healthy(self) -> None:
        """At a cold start with all ports slow they are used in turn, before those in quarantine."""
        quarantine = make()
        refuse(quarantine, PORTS[3], 0.0)
        for port in PORTS[:3]:
            slow(quarantine, port, 0.0, 10.0)
        permits = [quarantine.pick(PORTS, 11.0) for _ in range(9)]
        assert Counter(permit.target for permit in permits) == dict.fromkeys(PORTS[:3], 3)
        assert not any(permit.probe for permit in permits)

    def test_a_resting_port_that_refuses_is_quarantined(self) -> None:
        """Rest is patience with slowness only."""
        quarantine = make()
        slow(quarantine, ONE[0], 0.0, 10.0)
        assert refuse(quarantine, ONE[0], 11.0) == Verdict(Change.QUARANTINED, failures=1, for_s=30.0)

    def test_first_contact_begins_with_the_first_call(self) -> None:
        """A port that was only known by name has all its patience left when it is first used."""
        quarantine = next(q for q in map(make_seeded, range(50)) if q.pick(PORTS, 0.0).target != PORTS[0])
        assert slow(quarantine, PORTS[0], 100.0, 110.0).change is Change.NONE

    def test_patience_ends(self) -> None:
        """A port that has not answered after first_contact_s is quarantined for being slow."""
        quarantine = make()
        permit = quarantine.pick(ONE, 0.0)
        assert permit.failed(Failure.SLOW, 30.0).change is Change.QUARANTINED

    def test_patience_is_for_first_contact_only(self) -> None:
        """A port that answered once is quarantined when it is slow, however young."""
        quarantine = make()
        answered(quarantine, ONE)
        assert quarantine.pick(ONE, 1.0).failed(Failure.SLOW, 2.0).change is Change.QUARANTINED

    def test_being_refused_is_always_a_verdict(self) -> None:
        """A dead port is quarantined at its first use."""
        assert refuse(make(), ONE[0], 0.0).change is Change.QUARANTINED

    def test_a_slow_probe_of_a_port_that_refused_is_a_first_contact(self) -> None:
        """A port that refused and was let back in may be slow; its next probe waits for the end of first contact."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        assert slow(quarantine, ONE[0], 31.0, 41.0).change is Change.NONE
        assert PORTS[0] not in {quarantine.pick(PORTS, 59.9).target for _ in range(20)}
        probe = quarantine.pick(ONE, 60.0)
        assert probe.probe
        assert probe.failed(Failure.SLOW, 70.0) == Verdict(Change.QUARANTINED, failures=2, for_s=60.0)

    def test_a_slow_port_gets_no_second_patience(self) -> None:
        """A port that was quarantined for never answering is out again when its probe is slow."""
        quarantine = make()
        quarantine.pick(ONE, 0.0).failed(Failure.SLOW, 30.0)
        assert quarantine.pick(ONE, 60.0).failed(Failure.SLOW, 61.0).change is Change.QUARANTINED


class TestEndsOnce:
    """A permit ends once."""

    @pytest.mark.parametrize("first", ["succeeded", "failed", "released"])
    @pytest.mark.parametrize("second", ["succeeded", "failed", "released"])
    def test_ending_again_changes_nothing(self, first: str, second: str) -> None:
        """The second end of a permit is reported and has no effect, whichever they are."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        permit = quarantine.pick(ONE, 30.0)
        end(permit, first, 30.0)
        before = quarantine.snapshot(30.0)
        assert end(permit, second, 30.0).change is Change.ENDED_TWICE
        assert quarantine.snapshot(30.0) == before

    def test_a_probe_ended_twice_does_not_free_the_next_one(self) -> None:
        """A late second end of an old probe leaves the present probe alone."""
        quarantine = make()
        refuse(quarantine, ONE[0], 0.0)
        old = quarantine.pick(ONE, 30.0)
        old.released()
        quarantine.pick(ONE, 30.0)
        old.released()
        assert not quarantine.pick(ONE, 30.0).probe


class TestRotation:
    """Who is next."""

    def test_healthy_ports_take_turns(self) -> None:
        """Healthy ports are used evenly and never twice in a row."""
        quarantine = make()
        picked = [quarantine.pick(PORTS, 0.0).target for _ in range(400)]
        assert Counter(picked) == dict.fromkeys(PORTS, 100)
        assert all(one != other for one, other in pairwise(picked))

    def test_the_neighbour_of_a_broken_port_gets_one_share(self) -> None:
        """The turns of a port that is out are spread over all others."""
        quarantine = make(base_s=300.0)
        refuse(quarantine, PORTS[1], 0.0)
        picked = Counter(quarantine.pick(PORTS, 1.0).target for _ in range(300))
        assert picked == dict.fromkeys((PORTS[0], PORTS[2], PORTS[3]), 100)

    def test_hosts_that_alternate_use_all_their_ports(self) -> None:
        """Turns are counted per host: alternating between two hosts of two ports uses all four evenly."""
        quarantine = make()
        hosts: list[list[Port]] = [[("host-a", 0), ("host-a", 1)], [("host-b", 0), ("host-b", 1)]]
        picked = Counter(quarantine.pick(hosts[call % 2], 0.0).target for call in range(400))
        assert set(picked.values()) == {100}

    def test_clients_do_not_all_begin_at_the_first_port(self) -> None:
        """The random source spreads where the clients begin."""
        begins = {Quarantine[Port](random.Random(seed)).pick(PORTS, 0.0).target for seed in range(50)}
        assert begins == set(PORTS)

    def test_excluded_ports_are_passed_over(self) -> None:
        """A call's second try goes to a port it has not tried, even if that one is out."""
        quarantine = make()
        refuse(quarantine, PORTS[1], 0.0)
        for _ in range(10):
            assert quarantine.pick(PORTS[:2], 0.0, exclude={PORTS[0]}).target == PORTS[1]

    def test_a_shrunken_host_is_served(self) -> None:
        """A list of targets that got shorter is used from its beginning again."""
        quarantine = make()
        for _ in range(3):
            quarantine.pick(PORTS, 0.0)
        assert {quarantine.pick(PORTS[:2], 0.0).target for _ in range(4)} == set(PORTS[:2])

    def test_with_all_excluded_one_is_used_all_the_same(self) -> None:
        """Excluding everything excludes nothing: the choice is as good as any other."""
        quarantine = make()
        refuse(quarantine, PORTS[1], 0.0)
        for _ in range(4):
            assert quarantine.pick(PORTS[:2], 1.0, exclude=PORTS).target == PORTS[0]


class TestMemory:
    """What is remembered, and for how long; settings."""

    def test_unused_targets_are_forgotten(self) -> None:
        """Hosts that come and go do not grow the memory: ports unused for forget_s are dropped, dead ones too."""
        quarantine = make()
        for generation in range(100):
            now = generation * 1000.0
            ports: list[Port] = [(f"host-{generation}", port) for port in range(4)]
            answered(quarantine, ports[1:], now)
            refuse(quarantine, ports[0], now)
        assert len(quarantine) == 4

    def test_what_is_out_or_in_use_is_kept(self) -> None:
        """A port with a call on its way or in quarantine is not forgotten, however long ago it was picked."""
        quarantine = make(forget_s=20.0)
        refuse(quarantine, PORTS[0], 0.0)
        in_use = quarantine.pick([PORTS[1]], 0.0)
        answered(quarantine, [PORTS[2]])
        assert quarantine.prune(25.0) == 1
        assert set(quarantine.snapshot(25.0)) == set(PORTS[:2])
        in_use.released()
        assert quarantine.prune(30.0) == 2

    @pytest.mark.parametrize("name", ["base_s", "max_s", "decay_s", "first_contact_s", "forget_s"])
    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_wrong_times_are_refused(self, name: str, seconds: float) -> None:
        """A time that is none is refused when the rules are made, by name."""
        with pytest.raises(ValueError, match=name):
            QuarantineRules(**{name: seconds})

    def test_a_limit_below_the_base_is_refused(self) -> None:
        """max_s below base_s would make the first quarantine the longest."""
        with pytest.raises(ValueError, match="max_s"):
            QuarantineRules(base_s=30.0, max_s=29.0)


def end(permit: Permit[Port], how: str, now: float) -> Verdict:
    """End a permit by the name of its outcome."""
    if how == "succeeded":
        return permit.succeeded(now)
    if how == "released":
        return permit.released()
    return permit.failed(Failure.SLOW if how == "slow" else Failure.REFUSED, now)


@dataclass
class Believed:
    """What the test believes about one port, kept by event numbers instead of eras."""

    last_used: float
    used: bool = False
    patient_until: float = 0.0
    answered: bool = False
    out: bool = False
    rest: bool = False
    until: float = 0.0
    changed: int = 0
    failures: int = 0
    healthy_since: float = 0.0
    permits: list[Permit[Port]] = field(default_factory=list)

    @property
    def probes(self) -> int:
        """Count the probes that are out."""
        return sum(permit.probe for permit in self.permits)

    @property
    def aside(self) -> bool:
        """Say whether it is passed over, for one reason or the other."""
        return self.out or self.rest

    def rests(self, now: float) -> bool:
        """Say whether it is only its first contact that it is passed over for."""
        return self.rest and now < self.until

    def failures_at(self, now: float) -> int:
        """Count the failures that are not forgotten: one fewer after each minute of health."""
        minutes = 0 if self.out else math.floor((now - self.healthy_since) / 60.0)
        return max(0, self.failures - minutes)


HOW = st.sampled_from(["succeeded", "refused", "refused", "slow", "slow", "released"])


class QuarantineMachine(RuleBasedStateMachine):
    """Picks, ends and time in any order, against a second account of what must happen."""

    def __init__(self) -> None:
        super().__init__()
        self.times = QuarantineRules()
        self.quarantine = make()
        self.now = 0.0
        self.events = 0
        self.ports: dict[Port, Believed] = {}
        self.open: list[tuple[Permit[Port], int]] = []  # with the number of the event that handed it out
        self.ended: list[Permit[Port]] = []

    # Mostly one step of the ladder; a long rest, after which all is forgotten, only now and then.
    @rule(seconds=st.sampled_from([0.5, 0.5, 20.0, 30.0, 30.0, 30.0, 60.0, 60.0, 120.0, 300.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        """Go on."""
        self.now += seconds

    @rule(host=st.sampled_from([PORTS[:3], PORTS[:2], PORTS[1:3], ONE]), exclude=st.sampled_from([[], [], *EACH]))
    def pick(self, host: list[Port], exclude: list[Port]) -> None:
        """Pick one that will do; without one, the least bad."""
        self.prune()
        before = self.quarantine.snapshot(self.now)
        permit = self.quarantine.pick(host, self.now, exclude)
        for port in self.quarantine.snapshot(self.now).keys() - before.keys():
            self.ports[port] = Believed(self.now)
        allowed = [port for port in host if port not in exclude] or host
        fit = [port for port in allowed if self.fit(port)]
        chosen = self.ports[permit.target]
        assert permit.probe == (chosen.aside and self.fit(permit.target))
        if fit:
            assert permit.target in fit
        else:
            badness = {port: self.badness(port, before[port].failures) for port in allowed}
            assert badness[permit.target] == min(badness.values())
        self.events += 1
        self.open.append((permit, self.events))
        chosen.permits.append(permit)
        chosen.last_used = self.now
        if not chosen.used:
            chosen.used, chosen.patient_until = True, self.now + self.times.first_contact_s

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=HOW)
    def end(self, data: st.DataObject, how: str) -> None:
        """End any permit that is open, in any way."""
        permit, taken = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        port = self.ports[permit.target]
        expected = self.expected(port, permit, taken, how)
        before = self.quarantine.snapshot(self.now)[permit.target]
        verdict = end(permit, how, self.now)
        after = self.quarantine.snapshot(self.now)[permit.target]
        port.permits = [other for other in port.permits if other is not permit]
        self.ended.append(permit)
        self.events += 1
        assert verdict.change is expected
        port.answered |= how == "succeeded"
        if expected is Change.NONE:
            if not self.rest_changes(port, permit, taken, how):
                assert after == before._replace(in_flight=before.in_flight - 1)
            return
        port.rest = False
        if expected is Change.RECOVERED:
            port.out, port.healthy_since = False, self.now
        else:
            if expected is Change.QUARANTINED:
                port.failures = min(5, port.failures_at(self.now) + 1)
            for_s = [30.0, 60.0, 120.0, 240.0, 300.0][port.failures - 1]
            assert verdict == Verdict(expected, port.failures, for_s)
            port.out, port.until = True, self.now + for_s
            if how == "refused":
                port.patient_until = port.until + self.times.first_contact_s
        if expected is not Change.EXTENDED:
            port.changed = self.events

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), how=HOW)
    def end_twice(self, data: st.DataObject, how: str) -> None:
        """End what has ended."""
        before = self.quarantine.snapshot(self.now)
        assert end(data.draw(st.sampled_from(self.ended)), how, self.now).change is Change.ENDED_TWICE
        assert self.quarantine.snapshot(self.now) == before

    @rule()
    def prune(self) -> None:
        """Forget at any time."""
        before = self.quarantine.snapshot(self.now).keys()
        gone = self.quarantine.prune(self.now)
        forgotten = before - self.quarantine.snapshot(self.now).keys()
        unused = {p for p, b in self.ports.items() if b.last_used <= self.now - 900.0 and not b.permits}
        assert forgotten == {p for p in unused if not self.ports[p].aside or self.ports[p].until <= self.now}
        assert gone == len(forgotten)
        for port in forgotten:
            del self.ports[port]

    @invariant()
    def one_probe_at_most(self) -> None:
        """No port is ever probed by two calls at once."""
        assert all(port.probes <= 1 for port in self.ports.values())

    @invariant()
    def permits_never_leak(self) -> None:
        """Each port counts the permits that are out, no more and no less."""
        in_flight = {port: state.in_flight for port, state in self.quarantine.snapshot(self.now).items()}
        assert in_flight == {port: len(believed.permits) for port, believed in self.ports.items()}

    @invariant()
    def states_are_as_believed(self) -> None:
        """Health and time left are what the events say, and failures decay."""
        for port, state in self.quarantine.snapshot(self.now).items():
            believed = self.ports[port]
            assert state.until == (believed.until if believed.aside else None)
            assert (state.health is Health.HEALTHY) == (not believed.aside)
            assert (state.health is Health.HALF_OPEN) == (believed.aside and believed.until <= self.now)
            assert (state.health is Health.RESTING) == believed.rests(self.now)
            assert state.failures == believed.failures_at(self.now)

    def teardown(self) -> None:
        """Whatever happened: once all permits have ended and time has passed, every port gets its chance."""
        for permit, _ in self.open:
            permit.released()
        for believed in self.ports.values():
            believed.permits.clear()
        self.now += self.times.max_s
        self.prune()
        for port, believed in self.ports.items():
            permit = self.quarantine.pick([port], self.now)
            assert permit.probe == believed.aside
            permit.succeeded(self.now)
            assert self.quarantine.snapshot(self.now)[port].health is Health.HEALTHY

    def fit(self, port: Port) -> bool:
        """Say whether the port takes a call: healthy, unknown, or half-open without a probe."""
        believed = self.ports.get(port)
        return believed is None or not believed.aside or (believed.until <= self.now and not believed.probes)

    def badness(self, port: Port, failures: int) -> tuple[float, int]:
        """Say how bad a choice a port is that does not take a call."""
        believed = self.ports[port]
        return (-math.inf, 0) if believed.rests(self.now) else (max(believed.until, self.now), failures)

    def rest_changes(self, port: Believed, permit: Permit[Port], taken: int, how: str) -> bool:
        """Note what a slow first contact, or an answer, does to a port's rest; say whether it did anything."""
        if taken <= port.changed:
            return False
        if how == "succeeded" and port.rest:
            port.rest, port.healthy_since = False, self.now
            return True
        if how != "slow" or port.answered or self.now >= port.patient_until or (port.out and not permit.probe):
            return False
        port.rest, port.until = not port.out, port.patient_until
        return True

    def expected(self, port: Believed, permit: Permit[Port], taken: int, how: str) -> Change:
        """Say what the end of a permit must do."""
        current = taken > port.changed
        if how == "released" or not current:
            return Change.NONE
        if how == "succeeded":
            return Change.RECOVERED if port.out else Change.NONE
        if how == "slow" and not port.answered and self.now < port.patient_until:
            return Change.NONE
        if not port.out or permit.probe:
            return Change.QUARANTINED
        return Change.NONE if port.probes else Change.EXTENDED


QuarantineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQuarantineMachine = QuarantineMachine.TestCase


class TestWhatIsTold:
    """Names and numbers that metrics and logs show."""

    @pytest.mark.parametrize("kind", [Failure, Change, Health])
    def test_a_state_is_told_by_its_name(self, kind: type[Failure | Change | Health]) -> None:
        """Each value is the member's name in small letters."""
        assert [member.value for member in kind] == [member.name.lower() for member in kind]

    def test_a_verdict_of_no_change_has_no_numbers(self) -> None:
        """Nothing happened: no failures, no time out; and so where a permit had ended before."""
        quarantine = make()
        permit = quarantine.pick(ONE, 0.0)
        assert permit.succeeded(0.0) == (Change.NONE, 0, 0.0)
        assert permit.succeeded(0.0) == (Change.ENDED_TWICE, 0, 0.0)
        assert permit.failed(Failure.SLOW, 0.0) == (Change.ENDED_TWICE, 0, 0.0)
        assert permit.released() == (Change.ENDED_TWICE, 0, 0.0)

    def test_a_recovery_tells_the_failures_before_it(self) -> None:
        """And is out no longer."""
        quarantine = make()
        refuse(quarantine, PORTS[0], 0.0)
        assert quarantine.pick(ONE, 30.0).succeeded(30.0) == (Change.RECOVERED, 1, 0.0)

    def test_the_times_that_hold_where_nothing_is_said(self) -> None:
        """As the rules document them."""
        assert QuarantineRules() == QuarantineRules(
            base_s=30.0, max_s=300.0, decay_s=60.0, first_contact_s=30.0, forget_s=900.0
        )

    def test_a_time_below_a_second_is_a_time(self) -> None:
        """Whatever is above zero."""
        assert QuarantineRules(base_s=0.25, max_s=0.25, decay_s=0.01).quarantine_s(1) == 0.25


class TestTheLeastBad:
    """Which one is used where none is healthy."""

    def test_one_that_only_rests_is_better_than_any_that_is_out(self) -> None:
        """However soon the other one may be probed."""
        quarantine = make()
        answered(quarantine, [PORTS[1]])
        refuse(quarantine, PORTS[1], 0.0)  # out until 30
        slow(quarantine, PORTS[0], 10.0, 12.0)  # rests until 40
        assert quarantine.pick(PORTS[:2], 15.0).target == PORTS[0]

    def test_one_that_refuses_again_while_it_is_out_is_at_its_first_contact_for_longer(self) -> None:
        """Its clock starts over, and so does our patience: slow at its next probe is no failure yet."""
        quarantine = make()
        refuse(quarantine, PORTS[0], 0.0)
        assert refuse(quarantine, PORTS[0], 20.0) == Verdict(Change.EXTENDED, failures=1, for_s=30.0)
        probe = quarantine.pick(ONE, 50.0)
        assert probe.probe
        assert probe.failed(Failure.SLOW, 70.0).change is Change.NONE


def test_a_target_is_forgotten_when_its_time_is_over_to_the_second() -> None:
    """Unused for forget_s: gone; for less: remembered."""
    quarantine = make(forget_s=100.0)
    answered(quarantine, ONE, 5.0)
    assert quarantine.prune(104.9) == 0
    assert quarantine.prune(105.0) == 1
    assert len(quarantine) == 0
