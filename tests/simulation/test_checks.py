"""Each check of a history, on the smallest history that breaks its promise and on one that nearly does."""

from typing import Any

import anyio
import pytest
import torch

from asyncdp import (
    ClaimLost,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    MemoryTransport,
    PartialReadError,
    SampleNotFound,
    StaleSlotError,
    stack,
)
from asyncdp.testing import run_virtual
from asyncdp.testing.simulation import Budgets, History, Operation, Recorded, WireRequest, check
from asyncdp.testing.simulation.checks import CHECKS
from asyncdp.testing.simulation.recording.history import Event


def put(history: History, value: int | None, client: str = "w", **known: Any) -> Operation:
    """Begin a put of sample a."""
    return history.begin(client, "put_samples", "p", ["a"], values={"x": [value]}, **known)


def read(history: History, value: int | None, error: Exception | None = None, verb: str = "get_samples") -> Operation:
    """Read sample a, from beginning to end."""
    op = history.begin("r", verb, "p", ["a"], fields=("x",))
    if error is not None:
        return history.ended(op, error)
    return history.ended(op, values={"x": [value]}, came=[0])


def messages(history: History) -> str:
    """What is wrong."""
    return "; ".join(map(str, check(history)))


def done(history: History, *values: int) -> None:
    """Put some values one after the other."""
    for value in values:
        history.ended(put(history, value))


def clear(history: History, **known: Any) -> Operation:
    """Clear sample a."""
    return history.ended(history.begin("w", "clear_samples", "p", ["a"], **known))


def test_what_was_put_is_read() -> None:
    """A value that stands, one that is just being put, and one of a put that timed out may be read."""
    history = History()
    done(history, 1)
    read(history, 1)
    second = put(history, 2)
    read(history, 1)
    read(history, 2)
    history.ended(second, DataPlaneTimeout("late", ambiguous=True))
    assert second.outcome == "unknown"
    read(history, 2)
    clear(history)
    read(history, None, SampleNotFound())
    assert check(history) == []


def test_an_older_value_is_wrong() -> None:
    """A value that another put replaced, for sure, must not be read; nor one that was seen replaced."""
    history = History()
    done(history, 1, 2)
    read(history, 1)
    assert "what was gone came back" in messages(history)
    history = History()
    done(history, 1)
    put(history, 2)  # it never came back
    read(history, 2)
    read(history, 1)
    assert "what was gone came back" in messages(history)
    history = History()
    one, two = put(history, 1), put(history, 2)
    history.ended(one)
    history.ended(two)
    for value in (1, 2, 1, 2):
        read(history, value)
    assert "an older value came back" in messages(history)


def test_a_value_that_nobody_put_there_is_wrong() -> None:
    """Another's value is named as such; one from nowhere as well; one from the future, too."""
    history = History()
    done(history, 1)
    history.ended(history.begin("w", "put_samples", "p", ["b"], values={"x": [7]}))
    read(history, 7)
    assert "belongs to field 'x' of 'b'" in messages(history)
    history = History()
    read(history, 9)
    assert "nobody put" in messages(history)
    put(history, 9)
    assert "before that was put" in messages(history)


def test_what_was_cleared_does_not_come_back() -> None:
    """After an acknowledged clear the value is gone, unless a put was still under way."""
    history = History()
    done(history, 1)
    clear(history)
    read(history, 1)
    assert "what was gone came back" in messages(history)
    history = History()
    late = put(history, 1)
    clear(history)
    read(history, 1)
    history.ended(late)
    assert check(history) == []


def test_what_was_acknowledged_is_there() -> None:
    """A put that was acknowledged and never removed is found, unless a fault took it away."""
    history = History()
    done(history, 1)
    read(history, None, SampleNotFound())
    assert "never removed, and is not there" in messages(history)
    history = History()
    done(history, 1)
    history.lose("p", ["a"])
    read(history, None, SampleNotFound())
    assert check(history) == []


def test_a_clear_removes_once() -> None:
    """One clear cannot have removed the value before a put, and the value of the put."""
    history = History()
    done(history, 1)
    op = history.begin("c", "clear_samples", "p", ["a"])
    read(history, None, SampleNotFound())
    done(history, 2)
    read(history, None, SampleNotFound())
    history.ended(op)
    assert "removed once, put again, and is gone again" in messages(history)


def test_a_failed_put_is_not_seen() -> None:
    """An error that is not ambiguous says that nothing happened, a timeout as well as any other."""
    for error in (DataPlaneUnavailable("refused"), DataPlaneTimeout("not sent")):
        history = History()
        history.ended(put(history, 1), error)
        read(history, 1)
        assert "said that it did nothing" in messages(history)


def test_a_timeout_is_never_a_failure() -> None:
    """Timeouts, ambiguous errors, cancels and strange exceptions are unknown; other typed errors are failures."""
    history = History()
    ambiguous = DataPlaneUnavailable("reset", ambiguous=True)
    for error in (DataPlaneTimeout("late"), ambiguous, KeyboardInterrupt(), OSError()):
        assert history.ended(put(history, 1), error).outcome == "unknown"
    assert history.ended(put(history, 1), DataPlaneUnavailable("refused")).outcome == "fail"


def test_what_a_client_settled_does_not_happen_later() -> None:
    """A put that was given up may show up at any time, but not after its client's next mutation of the same sample."""
    for settles in (True, False):
        history = History(settles={"w"} if settles else set())
        history.ended(put(history, 1), DataPlaneTimeout("late", ambiguous=True))
        clear(history)
        read(history, 1)
        assert ("which its client had reconciled" in messages(history)) == settles


def test_a_row_is_whole() -> None:
    """Fields of two puts that each wrote both, or of two lives, do not come in one row."""
    for mixed in (True, False):
        history = History()
        for value in (1, 2):
            op = history.begin("w", "put_samples", "p", ["a"], values={"x": [value], "y": [value]})
            history.ended(op)
        begun = history.begin("r", "get_samples", "p", ["a"], fields=("x", "y"))
        begun.start = 0
        history.ended(begun, values={"x": [2], "y": [1 if mixed else 2]}, came=[0])
        assert ("both puts wrote both fields" in messages(history)) == mixed


def test_a_put_is_listed_whole() -> None:
    """A listing that shows one sample of a put and not the other is wrong, unless the other was removed."""
    for removed in (True, False):
        history = History()
        history.ended(history.begin("w", "put_samples", "p", ["a", "b"], values={"x": [1, 2]}))
        if removed:
            history.begin("w", "clear_samples", "p", ["b"])
        history.ended(history.begin("r", "list_metadata", "p"), ids=("a",), came=range(1))
        assert ("but not the others" in messages(history)) != removed


def test_a_stale_error_has_a_reason() -> None:
    """StaleSlotError needs somebody who touched the sample."""
    history = History()
    done(history, 1)
    read(history, None, StaleSlotError())
    assert "nobody touched" in messages(history)
    history = History()
    done(history, 1)
    put(history, 2)
    read(history, None, StaleSlotError())
    assert check(history, ["groundless stale errors"]) == []


def claim(history: History, claim_id: str, client: str = "t", life: int = 1) -> Operation:
    """Claim sample a."""
    op = history.begin(client, "claim_meta", "p", task="train", asked=4)
    return history.ended(op, ids=("a",), lives=[life], claims=[claim_id])


def test_a_sample_is_claimed_once() -> None:
    """Once in each life; again after a release, or when the lease is over."""
    history = History()
    claim(history, "1")
    claim(history, "2", life=2)
    assert check(history) == []
    claim(history, "3")
    assert "was given sample 'a' twice" in messages(history)
    history = History()
    claim(history, "1")
    history.ended(history.begin("t", "release_claim", "p", ["a"]))
    claim(history, "2")
    assert check(history) == []
    history = History(lease_s=2.0)
    claim(history, "1")
    history.tick()
    claim(history, "2")
    assert check(history) == []


def test_only_the_holder_pops() -> None:
    """A pop by a claim that another has taken over must not go well."""
    for claim_id in ("1", "2"):
        history = History(lease_s=0.0)
        claim(history, "1")
        claim(history, "2")
        history.ended(history.begin("t", "pop", "p", ["a"], claims=[claim_id]))
        assert ("had taken over" in messages(history)) == (claim_id == "1")


def test_only_the_holder_gives_back() -> None:
    """A release by a claim that another has taken over must not go well, and frees nothing."""
    history = History(lease_s=0.0)
    claim(history, "1")
    claim(history, "2")
    history.ended(history.begin("t", "release_claim", "p", ["a"], task="train", claims=["1"]))
    assert "was given back by a claim that another holder had taken over" in messages(history)
    for freed, known in (
        (True, {"claims": ["1"], "task": "train"}),
        (False, {"claims": ["9"]}),
        (False, {"task": "u"}),
    ):
        history = History()
        claim(history, "1")
        history.ended(history.begin("t", "release_claim", "p", ["a"], **known))
        claim(history, "2")
        assert ("was given sample 'a' twice" in messages(history)) != freed


def test_a_life_that_nobody_tells_ends_with_a_removal() -> None:
    """Where metas have no handles, a sample may be claimed again once it was popped, or its partition dropped."""
    for verb, ids in (("pop", ["a"]), ("drop_partition", [])):
        history = History()
        done(history, 1)
        history.ended(history.begin("t", "claim_meta", "p", task="t", asked=1), ids=("a",))
        history.ended(history.begin("t", verb, "p", ids))
        done(history, 2)
        history.ended(history.begin("t", "claim_meta", "p", task="t", asked=1), ids=("a",))
        assert check(history) == []


def test_what_is_claimed_is_there() -> None:
    """A claim of what was cleared, or of a field that nobody had put by then, is wrong."""
    for gone, fields in ((False, ("x",)), (True, ("x",)), (False, ("x", "y"))):
        history = History()
        done(history, 1)
        if gone:
            clear(history)
        history.ended(history.begin("t", "claim_meta", "p", task="t", asked=1, fields=fields), ids=("a",))
        history.ended(history.begin("w", "put_samples", "p", ["a"], values={"y": [2]}))
        assert ("which was not there" in messages(history)) == (gone or fields != ("x",))


def test_a_listing_shows_what_is_there() -> None:
    """A sample that was acknowledged and never removed is listed, one that was removed is not."""
    for removed in (False, True):
        for ids in ((), ("a",)):
            history = History()
            done(history, 1)
            if removed:
                clear(history)
            history.ended(history.begin("r", "list_metadata", "p"), ids=ids)
            wanted = "is listed, and was not there" if removed else "is not listed"
            assert (wanted in messages(history)) == (bool(ids) == removed)
    history = History()
    done(history, 1)
    removal = history.begin("w", "clear_samples", "p", ["a"])
    history.ended(history.begin("r", "list_metadata", "p"), ids=())
    history.ended(removal)
    history.ended(history.begin("r", "list_metadata", "p"), ids=())
    assert check(history) == []


def test_a_dropped_partition_is_empty() -> None:
    """Dropping removes every sample."""
    for value in (1, None):
        history = History()
        done(history, 1)
        history.ended(history.begin("w", "drop_partition", "p"))
        read(history, value, None if value else SampleNotFound())
        assert bool(check(history)) == (value == 1)


def test_a_settled_clear_does_not_hit_what_settled_it() -> None:
    """What a client's own next put stands on is over before that put; of a client that does not settle nobody knows."""
    for settles in (True, False):
        history = History(settles={"w"} if settles else set())
        done(history, 1)
        late = history.begin("w", "clear_samples", "p", ["a"])
        history.ended(late, DataPlaneTimeout("late", ambiguous=True))
        done(history, 2)
        read(history, None, SampleNotFound())
        assert bool(check(history)) == settles


def test_a_loss_takes_what_was_there() -> None:
    """What is put after a host lost its slots has to stay; of what was there before nobody knows."""
    for anew in (True, False):
        history = History()
        done(history, 1)
        history.lose("p", ["a"])
        if anew:
            done(history, 2)
        read(history, None, SampleNotFound())
        assert bool(check(history)) == anew


def test_values_are_of_one_row() -> None:
    """A value that two rows carry tells nothing: said, with both calls."""
    for ids in (["a"], ["b"]):
        history = History()
        done(history, 1)
        history.ended(history.begin("w", "put_samples", "p", ids, values={"x": [1]}))
        with pytest.raises(ValueError, match="put as 1 by call #1, and so was that of 'a' by #0"):
            check(history)


def test_groups_are_claimed_whole() -> None:
    """A part of a group is no batch, unless the rest of it may have gone meanwhile."""
    for gone in (False, True):
        history = History(group_sizes={"p": 2})
        for ids in (("a", "b"), ("a",)):
            op = history.begin("t", "claim_meta", "p", task="t", asked=4)
            if gone and len(ids) == 1:
                history.ended(history.begin("w", "evict", "p", ["b"]))
            known = {"ids": ids, "groups": ["g"] * len(ids), "lives": [op.number] * len(ids)}
            history.ended(op, **known)
        assert ("1 samples of group 'g', which has 2" in messages(history)) != gone


def test_a_batch_is_of_the_size_asked_for() -> None:
    """It is neither larger nor smaller, and holds no sample twice."""
    history = History()
    history.ended(history.begin("t", "claim_meta", "p", task="t", asked=4, least=2), ids=("a",))
    assert "1 samples for a batch of at least 2" in messages(history)
    history = History()
    history.ended(history.begin("t", "claim_meta", "p", task="t", asked=1), ids=("a", "b"))
    assert "2 samples for a batch of 1" in messages(history)
    history = History()
    history.ended(history.begin("t", "claim_meta", "p", task="t", asked=2), ids=("a", "a"), lives=[1, 2])
    assert "holds a sample twice" in messages(history)


def test_each_sample_has_one_outcome() -> None:
    """A read that answers for fewer samples or fields than it was asked for is wrong."""
    history = History()
    history.ended(history.begin("w", "put_samples", "p", ["a", "b"], values={"x": [1, 2]}))
    short = history.begin("r", "get_samples", "p", ["a", "b"], fields=("x",))
    history.ended(short, values={"x": [1]}, came=[0])
    assert "the outcomes are for positions [0]" in messages(history)


def test_calls_end_in_time() -> None:
    """A call that outlives its timeout, or its cancel, or never ends, is named."""
    history = History()
    history.ended(history.begin("r", "ping", timeout_s=0.5))
    assert "ping took 1.000 s" in messages(history)
    history = History()
    op = history.begin("r", "ping")
    history.ended(op, KeyboardInterrupt())
    op.cancelled_at = op.began + 0.1
    assert "after it was cancelled" in messages(history)
    history = History()
    history.begin("r", "ping")
    assert "ping never ended" in messages(history)


def request(at: float, kind: str = "ReadSlots", **known: Any) -> WireRequest:
    """Make a request of client w that took 0.1 s."""
    return WireRequest(at, "w", known.pop("op_id", "w-1"), "get_samples", kind, "h", 1, done_at=at + 0.1, **known)


SLOT = ("h", 1, 0, 1, ("x",), (0,))


def test_retries_are_within_the_budget() -> None:
    """One call that asks twenty times again is more than a tight budget allows; an untried one is not."""
    for count in (20, 2):
        history = History(budgets={"w": Budgets(0.2, 1.0, 2.0)})
        history.ended(history.begin("w", "ping"))
        history.requests += [request(0.01 * n, "Ping", fault=True, ended="x") for n in range(count)]
        assert ("its budget allows" in messages(history)) == (count == 20)


def test_requests_are_within_the_ceiling() -> None:
    """A slot is not asked for more often than rounds, attempts and ports allow."""
    for count in (3, 4):
        history = History(budgets={"w": Budgets(per_slot=3)})
        history.requests += [request(n, slots=(SLOT,)) for n in range(count)]
        assert ("3 is most" in messages(history)) == (count == 4)


def outage_over(at: float) -> Event:
    """Tell that what client w waited for answers again."""
    return Event(at, "w", "outage_over", {})


def test_a_wait_that_ended_pays_for_one_request() -> None:
    """After it one request costs nothing, and a slot may be asked for once more: not without it, and not twice."""
    for waits in (0, 1, 2):
        history = History(budgets={"w": Budgets(0.2, 1.0, 2.0, per_slot=4, after_wait=1)})
        history.ended(history.begin("w", "ping"))
        history.requests += [request(0.01 * n, slots=(SLOT,), fault=True, ended="x") for n in range(6)]
        history.events += [outage_over(0.04)] * waits
        assert ("its budget allows" in messages(history)) == (waits < 2)
        assert (f"{4 + waits} is most" in messages(history)) == (waits < 2)


def test_probes_cost_as_much_as_retries() -> None:
    """The first of a call, too."""
    for count in (20, 2):
        history = History(budgets={"w": Budgets(0.2, 1.0, 2.0)})
        history.ended(history.begin("w", "ping"))
        history.requests += [request(0.2 * n, "Probe", op_id=f"w-{n}") for n in range(count)]
        assert ("its budget allows" in messages(history)) == (count == 20)


def test_one_asks_for_all_who_wait() -> None:
    """Two probes of an outage at once are one too many; one after the other is right."""
    for at in (0.05, 0.2):
        history = History()
        history.requests = [request(0.0, "Probe"), request(at, "Probe", op_id="w-2")]
        assert ("asked twice at once whether h answers (w-1, w-2)" in messages(history)) == (at < 0.1)


def test_patience_ends() -> None:
    """Unanswered probes of one call are spread over its patience at most; what came between ended a wait."""
    for between, patience_s in ((False, 1.0), (False, 2.0), (True, 1.0)):
        history = History(budgets={"w": Budgets(patience_s=patience_s)})
        history.requests = [request(0.5 * n, "Probe", fault=True) for n in range(4)]
        if between:
            history.requests.append(request(0.7))
        assert ("waited 1.500 s for outages in one call" in messages(history)) == (not between and patience_s == 1.0)


def test_a_stale_slot_is_asked_once() -> None:
    """A call that was told that a slot is stale does not ask for it again; another call may."""
    for op_id in ("w-1", "w-2"):
        history = History()
        history.requests = [request(0.0, slots=(SLOT,), stale=(SLOT,)), request(1.0, slots=(SLOT,), op_id=op_id)]
        assert ("which it knew to be stale" in messages(history)) == (op_id == "w-1")


def test_one_probe_at_a_time() -> None:
    """Two probes of a port at once are one too many; one after the other is right."""
    for at in (0.05, 0.2):
        history = History()
        history.requests = [request(0.0, probe=True), request(at, probe=True)]
        assert ("probed port 1 of h twice" in messages(history)) == (at < 0.1)


def test_all_is_well_in_the_calm() -> None:
    """When the faults are over nothing fails but for what is lost, and that is told by a right name."""
    for lost, error, wrong in (
        (False, DataPlaneUnavailable("down"), True),
        (True, DataPlaneUnavailable("down"), False),
        (True, DataPlaneTimeout("late"), True),
        (True, SampleNotFound(), False),
        (True, ClaimLost("the lease was over"), False),
    ):
        history = History(calm_since=0.0)
        done(history, 1)
        if lost:
            history.lose("p", ["a"])
        read(history, None, error)
        assert ("after the last fault was over" in messages(history)) == wrong


def test_raw_errors_are_named() -> None:
    """What is no error of a data plane is a violation."""
    history = History()
    history.ended(history.begin("r", "ping"), OSError("raw"))
    assert "ping raised OSError: raw" in messages(history)


def test_some_checks_can_be_chosen() -> None:
    """By their names; an unknown name is a KeyError."""
    history = History()
    history.begin("r", "ping")
    assert check(history, ["wrong reads"]) == []
    assert check(history, ["late calls"])
    assert len(CHECKS) == 23
    with pytest.raises(KeyError):
        check(history, ["no such check"])


def test_histories_of_processes_are_merged() -> None:
    """Two processes, each with its own history by a common clock, are checked as one."""
    times = iter([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    writer, reader = History(now=lambda: next(times)), History(now=lambda: next(times))
    done(writer, 1, 2)
    read(reader, 1)
    assert "what was gone came back" in messages(History.merged([reader, writer]))


def test_what_one_process_lost_is_lost_to_all() -> None:
    """A merged history knows what faults took away, and when the last was over."""
    times = iter(map(float, range(9)))
    writer, reader = History(now=lambda: next(times)), History(now=lambda: next(times))
    done(writer, 1)
    writer.lose("p", ["a"])
    writer.calm_since = 3.0
    read(reader, None, SampleNotFound())
    assert check(reader) == []
    merged = History.merged([reader, writer])
    assert merged.calm_since == 3.0
    assert check(merged) == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_users_own_plane_is_checked(backend: str) -> None:
    """Recorded clients write all that the checks need: values, lives, claims, errors per row."""
    history = History()

    async def main() -> None:
        plane = stack(MemoryTransport())
        await plane.register_partition("p", ["x", "r"], 4, ["t"])
        alice = Recorded(plane, history, "alice", tags=["v"])
        ragged = torch.nested.nested_tensor([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], layout=torch.jagged)
        fields = {"x": torch.tensor([[1, 1], [2, 2]]), "r": ragged}
        await alice.put_samples(["a", "b"], "p", fields, [{"v": 1}, {"v": 2}])
        with pytest.raises(PartialReadError):
            await alice.get_samples(["b", "nobody"], "p", ["x", "r"])
        meta = await alice.claim_meta("p", "t", ["x"], 2)
        await alice.get_data(meta, ["x"])
        await alice.release_claim(meta)
        await alice.pop(await alice.claim_meta("p", "t", ["x"], 2), "p")
        with anyio.move_on_after(0.01):
            await alice.claim_meta("p", "t", ["x"], 2)
        await alice.list_metadata("p")
        await alice.call("depth", "p")
        await alice.put_samples(["c"], "p", None, [{"v": 3}])
        await alice.clear_samples(["c"], "p")
        await alice.evict(["c"], "p")
        await alice.release_claims("p", "nobody")
        await plane.close()

    run_virtual(main, backend)
    assert check(history) == []
    partial = next(op for op in history.operations if op.verb == "get_samples")
    assert (partial.values, list(partial.came)) == ({"x": [(2, 2)], "r": [(2.0, 3.0)]}, [0])
    assert isinstance(partial.errors[1], SampleNotFound)
    claims = [op for op in history.operations if op.verb == "claim_meta"]
    assert [op.outcome for op in claims] == ["ok", "ok", "unknown"]
    assert claims[0].ids == ("a", "b")
    assert claims[0].values == {"#v": [1, 2]}
    assert history.counts()["pop", "ok"] == 1
    assert history.completed == len(history.operations)
    assert all(str(op).startswith(f"#{op.number} ") for op in history.operations)


def test_an_error_of_no_kind_is_no_reading() -> None:
    """A read that failed tells nothing about what is there."""
    history = History()
    done(history, 1)
    read(history, None, DataPlaneError("?"))
    assert check(history) == []


def bound(history: History, value: int, meant: int | None = None, **known: Any) -> Operation:
    """Begin a put of sample a to rows that live."""
    return put(history, value, only="existing", meant=[meant] if meant else (), **known)


def born(history: History, life: int, value: int) -> Operation:
    """Put sample a, which gets a life."""
    return history.ended(put(history, value), lives=[life], created=[True])


def test_a_bound_put_writes_the_life_that_it_means() -> None:
    """Another life, one that had ended, and one that it created are wrong; one that ends meanwhile is not."""
    history = History()
    born(history, 1, 1)
    history.ended(bound(history, 2, 1), lives=[1], created=[False])
    late = bound(history, 3, 1)
    clear(history)
    history.ended(late, lives=[1], created=[False])
    born(history, 2, 4)
    assert check(history) == []
    history.ended(bound(history, 5, 1), lives=[2], created=[False])
    assert "was written in life 2 by a put that meant life 1" in messages(history)
    history = History()
    born(history, 1, 1)
    clear(history)
    history.ended(bound(history, 5), lives=[9], created=[True])
    assert "was created by a put of existing rows" in messages(history)
    history = History()
    born(history, 1, 1)
    clear(history)
    history.ended(bound(history, 5, 1), lives=[1], created=[False])
    assert "in a life that had ended" in messages(history)
    history = History()
    born(history, 1, 1)
    born(history, 2, 2)  # somebody removed it in between
    history.ended(bound(history, 5, 1), lives=[1], created=[False])
    assert "in a life that had ended" in messages(history)


def test_new_rows_were_not_there() -> None:
    """A put of new rows that went well is wrong where a row stood, or where it created none."""
    history = History()
    born(history, 1, 1)
    gone = history.begin("v", "clear_samples", "p", ["a"])
    history.ended(put(history, 2, only="new"), lives=[2], created=[True])
    history.ended(gone)
    assert check(history) == []
    history = History()
    born(history, 1, 1)
    history.ended(put(history, 3, only="new"), lives=[3], created=[True])
    assert "was created although it was there" in messages(history)
    history = History()
    history.ended(put(history, 3, only="new"), lives=[3], created=[False])
    assert "was replaced by a put of new rows" in messages(history)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("meant", [None, 1])
def test_what_is_refused_or_left_out_is_gone(meant: int | None, *, skips: bool) -> None:
    """A row whose life nothing ended is not stale; one that is removed meanwhile, or lives again, is."""

    def refused(history: History, value: int) -> None:
        op = bound(history, value, meant)
        if skips:
            history.ended(op, ids=(), values={"x": []}, meant=(), lives=[], skipped={"a": meant})
        else:
            history.ended(op, StaleSlotError(sample_ids=["a"]))

    history = History()
    born(history, 1, 1)
    gone = history.begin("v", "clear_samples", "p", ["a"])
    refused(history, 2)
    history.ended(gone)
    refused(history, 3)
    assert check(history) == []
    history = History()
    born(history, 1, 1)
    refused(history, 2)
    assert "was said to be stale, and nothing ended its life" in messages(history)


def test_a_bound_removal_explains_the_end_of_its_life_only() -> None:
    """A row is gone after a removal of a former life: wrong; after one of its own life: right."""
    for meant, wrong in ((1, True), (2, False)):
        history = History()
        born(history, 1, 1)
        clear(history)
        born(history, 2, 2)
        clear(history, meant=[meant])
        read(history, None, SampleNotFound())
        assert ("is not there" in messages(history)) is wrong
    history = History()
    born(history, 1, 1)
    clear(history)
    born(history, 2, 2)
    clear(history, meant=[1])
    read(history, 2)
    assert check(history) == []


def test_what_was_left_out_was_not_written() -> None:
    """A value of a row that a put said it left out is nobody's."""
    history = History()
    born(history, 1, 1)
    op = bound(history, 2, 1)
    clear(history)
    history.ended(op, ids=(), values={"x": []}, meant=(), lives=[], skipped={"a": 1})
    read(history, 2)
    assert "that nobody put" in messages(history)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_bound_puts_and_removals_are_recorded(backend: str) -> None:
    """The recorder keeps which lives were meant, what was created, and what was left out."""
    history = History()

    async def main() -> None:
        plane = stack(MemoryTransport())
        alice = Recorded(plane, history, "alice")
        await alice.call("register_partition", "p", ["x"], 4, ["t"])
        meta = await alice.put_samples(["a", "b"], "p", {"x": torch.tensor([1, 2])}, only="new")
        await alice.evict(meta.subset([0]), "p")
        await alice.put_samples(["a"], "p", {"x": torch.tensor([3])})
        done = await alice.put_samples(meta, "p", {"x": torch.tensor([4, 5])}, stale="skip")
        assert done.sample_ids == ["b"]
        with pytest.raises(StaleSlotError):
            await alice.put_samples(meta, "p", {"x": torch.tensor([6, 7])})
        await alice.clear_samples(meta, "p")
        (group,) = await alice.list_metadata("p")
        await alice.evict(group, "p")
        await alice.get_samples(["a"], "p", ["x"])

    with pytest.raises(SampleNotFound):
        run_virtual(main, backend)
    assert check(history) == []
    puts = [op for op in history.operations if op.verb == "put_samples"]
    assert [op.only for op in puts] == ["new", "", "existing", "existing"]
    assert (puts[2].ids, list(puts[2].skipped), puts[2].values) == (("b",), ["a"], {"x": [5]})
    assert puts[0].created == [True, True]
    assert str(puts[2]).endswith("skipped=['a']")
    assert [bool(op.meant) for op in history.operations if op.verb in ("evict", "clear_samples")] == [True] * 3


def test_of_two_claims_at_once_either_may_be_the_first() -> None:
    """A claim whose answer took long may have been made, and its lease have ended, before one answered earlier."""
    clock = [0.0]
    history = History(now=lambda: clock[0], lease_s=1.0)
    born(history, 1, 1)
    slow = history.begin("w", "claim_meta", "p", task="t")
    clock[0] = 1.5
    fast = history.begin("w", "claim_meta", "p", task="t")
    clock[0] = 1.6
    history.ended(fast, ids=("a",), lives=[1], claims=["two"])
    clock[0] = 1.7
    history.ended(slow, ids=("a",), lives=[1], claims=["one"])
    assert "was given sample 'a' twice" not in messages(history)
