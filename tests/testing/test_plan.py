import subprocess
import sys
from collections.abc import Callable

import pytest

from asyncdp import DataPlaneNotReady, MemoryTransport, default_layers, stack
from asyncdp.testing import FaultPlan, Injected, Rule, faulty_stack, pair


def full_plan() -> FaultPlan:
    """Every kind of rule once."""
    plan = FaultPlan(seed=7).on("get_samples", port=2).silent(after=3, for_s=10)
    plan.lose_reply("claim_meta", times=1).lose_request("put_samples", raises=None, p=0.5)
    plan.stale("sample-3").recycle("sample-4", how="moved", times=2).corrupt(p=0.01).corrupt(schema=True, times=1)
    plan.truncate(at_s=3).delay(p50_s=0.01, p99_s=0.5).delay(0.2, reply=True)
    plan.on(host="host-0").refuse(at_s=1, for_s=2).on(partition="p", call="Locate").reset().not_ready(0.5, times=1)
    plan.on(sample="a").error(DataPlaneNotReady, "later", attributes={"retry_after_s": 2.0})
    return plan.cut("host-1", for_s=5).crash_host("host-0", at_s=3, restart_at_s=6, adopt=False)


def test_a_plan_survives_json() -> None:
    """A plan written as JSON and read again has the same seed and rules."""
    plan = full_plan()
    again = FaultPlan.from_json(plan.to_json())
    assert (again.seed, again.rules) == (7, plan.rules)
    assert again.to_json() == plan.to_json()


def test_a_fresh_plan_has_done_nothing() -> None:
    """fresh() keeps the rules and forgets what they did."""
    plan = full_plan()
    plan.live[0].strikes(0.0)
    assert plan.fresh().rules == plan.rules
    assert plan.fresh().live[0].matched == 0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Rule("explode"), "kind.*explode"),
        (lambda: FaultPlan().refuse(p=-0.1), "p: -0.1"),
        (lambda: FaultPlan().refuse(p=1.5), "p: 1.5"),
        (lambda: FaultPlan().refuse(p=float("nan")), "p: nan"),
        (lambda: FaultPlan().refuse(times=0), "times: 0"),
        (lambda: FaultPlan().refuse(after=-1), "after: -1"),
        (lambda: FaultPlan().refuse(for_s=0), "for_s: 0"),
        (lambda: FaultPlan().refuse(at_s=-1), "at_s: -1"),
        (lambda: FaultPlan().on("get_sample").refuse(), "verb: 'get_sample'"),
        (lambda: FaultPlan().on(call="ReadSlot").refuse(), "call: 'ReadSlot'"),
        (lambda: FaultPlan().on(port=-1).refuse(), "port: .*-1"),
        (lambda: FaultPlan().on(host="").refuse(), "host: "),
        (lambda: FaultPlan().delay(), "seconds: "),
        (lambda: FaultPlan().delay(1.0, p50_s=1.0), "seconds: "),
        (lambda: FaultPlan().delay(-1.0), "seconds: -1.0"),
        (lambda: FaultPlan().delay(p50_s=1.0, p99_s=0.5), "p99_s: 0.5"),
        (lambda: FaultPlan().error("NoSuchError"), "error: 'NoSuchError'"),
        (lambda: FaultPlan().error("KeyboardInterrupt"), "error: 'KeyboardInterrupt'"),
        (lambda: FaultPlan().error("PartialReadError"), "error: PartialReadError"),
        (lambda: FaultPlan().lose_reply(raises="Nope"), "error: 'Nope'"),
        (lambda: FaultPlan().recycle(how="melted"), "how: 'melted'"),
        (lambda: FaultPlan().on("get_samples").lose_reply("put_samples"), "verb: "),
        (lambda: FaultPlan().crash_host("host-0", at_s=5, restart_at_s=5), "restart_at_s: 5"),
        (lambda: Rule("cut"), "host: "),
        (lambda: Rule("silent", options={"seconds": 3}), "seconds: "),
        (lambda: FaultPlan.from_json('{"rules": [{"verb": "ping"}]}'), "kind: missing"),
        (lambda: FaultPlan.from_json('{"rule": []}'), "rule: "),
        (lambda: FaultPlan.from_json("[]"), "object"),
        (lambda: FaultPlan.from_json('{"rules": {"kind": "silent"}}'), "rules: must be a list"),
        (lambda: FaultPlan.from_json('{"rules": ["silent"]}'), "object with a kind, not 'silent'"),
        (lambda: FaultPlan.from_json('{"seed": "7"}'), "seed: must be a whole number, not '7'"),
        (lambda: FaultPlan.from_json("{"), "Expecting"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Callable[[], object], named: str) -> None:
    """A rule that could never strike as meant is a ValueError that names the culprit, when it is written."""
    with pytest.raises(ValueError, match=named):
        make()


@pytest.mark.parametrize(
    "plan",
    [FaultPlan().on("get_samples", host="host-9").refuse(), FaultPlan().cut("host-9"), FaultPlan().crash_host("h")],
)
def test_a_host_that_is_not_there_is_refused(plan: FaultPlan) -> None:
    """A plan about a host that the transport does not have is refused when the stack is made."""
    with pytest.raises(ValueError, match=r"host: there is no '(host-9|h)'"):
        faulty_stack(MemoryTransport(), plan)


def test_a_plan_reads_as_it_is_meant() -> None:
    """Every sentence of the documentation is a rule that says the same."""
    plan = (
        FaultPlan(seed=7)
        .on("get_samples", port=2)
        .silent(after=3, for_s=10)
        .lose_reply("claim_meta", times=1)
        .stale("sample-3")
        .corrupt(p=0.01)
        .delay(p50_s=0.01, p99_s=0.5)
        .cut("host-a", for_s=5)
        .crash_host("host-a", at_s=3, restart_at_s=6)
    )
    assert plan.seed == 7
    assert [rule.to_dict() for rule in plan.rules] == [
        {"kind": "silent", "verb": "get_samples", "port": 2, "after": 3, "for_s": 10},
        {"kind": "lose_reply", "verb": "claim_meta", "times": 1, "raises": "ConnectionResetError"},
        {"kind": "stale", "sample": "sample-3"},
        {"kind": "corrupt", "p": 0.01},
        {"kind": "delay", "p50_s": 0.01, "p99_s": 0.5},
        {"kind": "cut", "host": "host-a", "for_s": 5},
        {"kind": "crash_host", "host": "host-a", "at_s": 3, "restart_at_s": 6, "adopt": True},
    ]


def test_a_misspelt_option_is_named() -> None:
    """An option that no fault has is refused where it is written."""
    with pytest.raises(TypeError, match="afer"):
        FaultPlan().silent(afer=3)  # type: ignore[call-arg]


def test_what_was_injected_reads_well() -> None:
    """A fault shows what there is to say, and no more; it can be compared with one that a test writes."""
    fault = Injected("refuse", verb="get_samples", call="ReadSlots", host="host-0", port=2, sample_ids=("a",), at=0.5)
    text = "Injected('refuse', verb='get_samples', call='ReadSlots', host='host-0', port=2, sample_ids=('a',), at=0.5)"
    assert repr(fault) == text
    assert eval(text) == fault
    assert repr(Injected("crash_host", host="host-0")) == "Injected('crash_host', host='host-0', at=0.0)"


def test_where_a_layer_sees_no_slots_faults_of_slots_are_refused() -> None:
    """Above SlotMapping, or around a client without slots, a rule that could never strike is a ValueError."""
    for plan in (FaultPlan().stale("a"), FaultPlan().on("get_samples", port=1).silent(), FaultPlan().cut("host-0")):
        with pytest.raises(ValueError, match=r"(stale|port|host): no request for a slot passes here"):
            stack(MemoryTransport(), [plan.layer, *default_layers()])
    with pytest.raises(ValueError, match="corrupt: no request for a slot"):
        stack(pair(slots=False).client, [FaultPlan().corrupt().layer])


def test_a_rule_added_in_use_is_checked_too() -> None:
    """A plan that a stack uses refuses a host or port that the stack does not have."""
    plan = FaultPlan()
    faulty_stack(MemoryTransport(), plan)
    with pytest.raises(ValueError, match=r"host: there is no 'host-9'; there are \['host-0', 'host-1'\]"):
        plan.cut("host-9")
    with pytest.raises(ValueError, match="port: there is no 9; there are"):
        plan.on("get_samples", port=9).refuse()
    with pytest.raises(ValueError, match=r"port: there is no 5; there are \[1, 2, 3, 4\]"):
        plan.on(host="host-0", port=5).refuse()
    assert plan.rules == ()


@pytest.mark.slow
def test_the_library_does_not_import_the_test_kit() -> None:
    """All public names of asyncdp can be loaded without asyncdp.testing."""
    code = (
        "import sys, asyncdp\n"
        "for name in asyncdp.__all__: getattr(asyncdp, name)\n"
        "assert not [m for m in sys.modules if m.startswith('asyncdp.testing')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
