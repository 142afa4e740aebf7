"""Any sequence of verbs, by several clients: the plane shows what a plain dict shows; with faults, before or after."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncdp import (
    ClaimLost,
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    KVBatchMeta,
    PartialReadError,
    SampleNotFound,
    StaleSlotError,
)
from asyncdp.transports.memory.plane import Plane
from tests.fuzz.plain_model import Model
from tests.fuzz.plane_under_test import FIELDS, PlaneUnderTest, column, plain
from tests.fuzz.scale import examples, steps
from tests.planted import planes

#: What a backend in trouble may be reported as, once the layers have given up.
TROUBLE = (CorruptPayload, DataPlaneNotReady, DataPlaneTimeout, DataPlaneUnavailable, DataPlaneWriteError)

WHO = st.sampled_from(["anna", "bert", "carl"])
TASKS = st.sampled_from(["train", "score"])
#: Partition ``p`` holds samples, ``g`` groups of two.
IDS = {"p": ["a", "b", "c", "d"], "g": ["k_g0", "k_g1", "l_g0", "l_g1"]}
PID = st.sampled_from(sorted(IDS))
SOME = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
NAMES = st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True)
NEEDED = st.sampled_from([["x"], ["x"], ["x"], ["x", "r"], ["o"]])
TAGS = st.fixed_dictionaries(
    {},
    optional={
        "k": st.integers(0, 3),
        "weight_version": st.integers(0, 3),
        "committed": st.booleans(),
        "status": st.sampled_from(["failed", "fine"]),
    },
)
GROUPED = st.fixed_dictionaries(
    {}, optional={"group_id": st.sampled_from(["G", "H"]), "expected_num_keys": st.integers(1, 3)}
)


def check(is_fine: object, told: Any) -> None:
    """Fail, and tell."""
    assert is_fine, told


class Verbs(RuleBasedStateMachine):
    """Clients that do anything, one verb after another."""

    faulty = False
    plane_class: type[Plane] = Plane

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.number = 0
        self.metas: list[tuple[str, KVBatchMeta, int, dict[str, int]]] = []
        #: What each client was given: {(who, partition, id): {task: claim}}
        self.given: dict[tuple[str, str, str], dict[str, int]] = {}

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        """Start a plane with two partitions."""
        self.world = PlaneUnderTest(seed if self.faulty else None)
        self.world.plane.__class__ = self.plane_class
        for pid, size in (("p", None), ("g", 2)):
            call = self.world.observer.register_partition(pid, ["x"], 8, ["train"], size, {"e": ["u", "v", "w"]})
            self.world.run(call)
            self.model.register(pid, ["x"], ["train"], size, {"e": ["u", "v", "w"]})
            self.begin_anew(pid)

    def begin_anew(self, pid: str) -> None:
        """Put what there is to claim."""
        numbers = [self.fresh() for _ in IDS[pid]]
        call = self.world.observer.put_samples(IDS[pid], pid, {"x": column("x", numbers)})
        self.world.run(call)
        self.model.put(pid, IDS[pid], self.world.observer.owner, {"x": [plain("x", n) for n in numbers]}, None)

    def fresh(self) -> int:
        """Return a number that no value was made of yet."""
        self.number += 1
        return self.number

    def teardown(self) -> None:
        """Close all, and look at what is left."""
        if hasattr(self, "world"):
            self.world.end()

    # -- a verb, and what may come of it

    def attempt(
        self, who: str, call: Callable[[Any], Any], change: Callable[[Model], Any], fails: tuple[Any, ...] = ()
    ) -> tuple[bool, Any]:
        """Do a verb that changes something, and compare the plane with the model.

        Args:
            who: The client.
            call: Makes the verb's coroutine, of that client.
            change: What it does to the model.
            fails: Errors that it may end with for its own sake; it then changes nothing.

        Returns:
            Whether it was done, and what ``change`` returned.
        """
        after = copy.deepcopy(self.model)
        try:
            told = change(after)
        except KeyError:
            told = None  # there is no such partition
        try:
            self.result = self.world.run(call(self.world.client(who)))
        except DataPlaneError as err:
            own = isinstance(err, fails)  # after trouble, one that was refused does not know of its earlier attempts
            if not own or err.ambiguous:
                check(self.faulty and (own or isinstance(err, TROUBLE)), err)
            if not err.ambiguous:
                self.expect(self.model)
                return False, told
            there = self.world.view()
            check(there in (self.model.view(), after.view()), (err, there))
            self.model = after if there == after.view() else self.model
            return False, told
        self.model = after
        self.expect(after)
        return True, told

    def expect(self, model: Model) -> None:
        """Fail unless the plane shows what the model shows."""
        assert self.world.view() == model.view()

    # -- verbs

    @rule(who=WHO, pid=PID, task=TASKS, names=NAMES)
    def register(self, who: str, pid: str, task: str, names: list[str]) -> None:
        """Unite a declaration with what is there."""
        size = 2 if pid == "g" else None
        plain_ones = [name for name in names if name != "e"]
        words = {"e": ["w", "u", "v"]}
        self.attempt(
            who,
            lambda c: c.register_partition(pid, plain_ones, 1, [task], size, words),
            lambda m: m.register(pid, plain_ones, [task], size, words),
        )

    @rule(
        who=WHO, pid=PID, at=SOME, names=NAMES, tags=st.none() | st.lists(TAGS, min_size=4, max_size=4), group=GROUPED
    )
    def put(
        self,
        who: str,
        pid: str,
        at: list[int],
        names: list[str],
        tags: list[dict[str, Any]] | None,
        group: dict[str, Any],
    ) -> None:
        """Put some fields of some samples, and tags."""
        ids = [IDS[pid][i] for i in at]
        numbers = [self.fresh() for _ in ids]
        more = group if pid == "p" else {}
        rows = None if tags is None else [{**tags[i], **more} for i in range(len(ids))]
        known = pid in self.model.parts
        self.attempt(
            who,
            lambda c: c.put_samples(ids, pid, {name: column(name, numbers) for name in names}, rows),
            lambda m: m.put(pid, ids, who, {name: [plain(name, n) for n in numbers] for name in names}, rows),
            () if known and self.can_hold(pid) else (DataPlaneBadRequest,),
        )

    def can_hold(self, pid: str) -> bool:
        """Whether the vocabulary is declared: without one, a field of words is a field of objects."""
        return bool(self.model.parts[pid].enums)

    @rule(who=WHO, pid=PID, at=SOME, tags=TAGS)
    def tag(self, who: str, pid: str, at: list[int], tags: dict[str, Any]) -> None:
        """Put tags only."""
        ids = [IDS[pid][i] for i in at]
        rows = [dict(tags) for _ in ids]
        fails = () if pid in self.model.parts else (DataPlaneBadRequest,)
        self.attempt(
            who, lambda c: c.put_samples(ids, pid, None, rows), lambda m: m.put(pid, ids, who, {}, rows), fails
        )

    @rule(who=WHO, pid=PID, at=SOME, names=NAMES)
    def get(self, who: str, pid: str, at: list[int], names: list[str]) -> None:
        """Read: all of it, or what is missing by position."""
        ids = [IDS[pid][i] for i in at]
        rows = self.model.parts[pid].rows if pid in self.model.parts else {}
        missing = {i for i, name in enumerate(ids) if name not in rows or any(f not in rows[name].cells for f in names)}
        try:
            got = self.world.run(self.world.client(who).get_samples(ids, pid, names))
        except PartialReadError as err:
            strange = {i: e for i, e in err.errors.items() if not isinstance(e, SampleNotFound)}
            check(not strange or self.faulty, strange)
            check(all(isinstance(e, TROUBLE) for e in strange.values()), strange)
            check(set(err.errors) - set(strange) == missing - set(strange), err.errors)
            there = [i for i in range(len(ids)) if i not in err.errors]
            check(err.ok.sample_ids == [ids[i] for i in there], err.ok)
            got, ids = err.rows, err.ok.sample_ids
        except SampleNotFound:
            assert len(missing) == len(ids)
            return
        except DataPlaneBadRequest:
            assert pid not in self.model.parts
            return
        except TROUBLE:
            assert self.faulty
            return
        else:
            assert not missing
        assert self.world.values(got, names) == [{f: rows[name].cells[f] for f in names} for name in ids]

    @rule(who=WHO, pid=PID, task=TASKS, needed=NEEDED, most=st.integers(1, 4))
    def claim(self, who: str, pid: str, task: str, needed: list[str], most: int) -> None:
        """Claim what is ready, first ready first, whole groups."""
        part = self.model.parts.get(pid)
        refused = (
            part is None
            or task not in part.tasks
            or any(name not in part.fields for name in needed)
            or (part.group_size is not None and most < part.group_size)
        )
        before = copy.deepcopy(self.model)
        done, told = self.attempt(
            who,
            lambda c: c.claim_meta(pid, task, needed, most, blocking=False),
            lambda m: None if refused else m.claim(pid, task, needed, most, who),
            (DataPlaneBadRequest,) if refused else (),
        )
        if done:
            assert not refused
            number, ids = told
            assert self.result.sample_ids == ids
            lives = {name: self.model.parts[pid].rows[name].life for name in ids}
            if ids:
                self.metas.append((who, self.result, number, lives))
            for name in ids:
                self.given.setdefault((who, pid, name), {})[task] = number
        elif not refused:  # nobody knows; who closes gives back what it may have got
            self.replaced(who)
            self.model = before
            self.expect(before)

    def replaced(self, who: str) -> None:
        """Let another client of its name take its place."""
        self.world.replace(who)
        self.given = {key: claims for key, claims in self.given.items() if key[0] != who}

    def is_held(self, meta: KVBatchMeta, number: int, name: str) -> bool:
        """Whether a sample is still claimed as it was when the batch was."""
        part = self.model.parts.get(meta.partition_id)
        row = None if part is None else part.rows.get(name)
        return row is not None and row.claims.get(str(meta.task_name), (0, ""))[0] == number

    @precondition(lambda self: self.metas)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Give a batch back: all of it, or ClaimLost."""
        who, meta, number, _ = data.draw(st.sampled_from(self.metas), label="meta")
        held = all(self.is_held(meta, number, name) for name in meta.sample_ids)
        pid, task = meta.partition_id, str(meta.task_name)
        done, _ = self.attempt(
            who,
            lambda c: c.release_claim(meta),
            lambda m: m.release(pid, task, meta.sample_ids) if held else None,
            () if held else (ClaimLost, DataPlaneBadRequest),
        )
        if done:
            assert held
            for name in meta.sample_ids:
                self.given.get((who, pid, name), {}).pop(task, None)

    @rule(who=WHO, pid=PID, owner=WHO)
    def release_all(self, who: str, pid: str, owner: str) -> None:
        """Give back what an owner claimed."""
        self.attempt(who, lambda c: c.release_claims(pid, owner), lambda m: m.release_owner(pid, owner))

    @precondition(lambda self: self.metas)
    @rule(data=st.data())
    def pop_batch(self, data: st.DataObject) -> None:
        """Remove a batch that was claimed, or ClaimLost; rows that live again are others, and stay."""
        who, meta, number, lives = data.draw(st.sampled_from(self.metas), label="meta")
        pid = meta.partition_id
        alive = self.alive(meta, lives)
        sure = all(self.is_held(meta, number, name) for name in meta.sample_ids)
        lost = any(not self.is_held(meta, number, name) for name in alive)
        done, _ = self.attempt(
            who,
            lambda c: c.pop(meta, pid),
            lambda m: m.clear(pid, alive, who),
            () if sure else (ClaimLost,),
        )
        assert not (done and lost)
        if done:
            self.forget(who, pid, meta.sample_ids, lives)

    def alive(self, meta: KVBatchMeta, lives: dict[str, int]) -> list[str]:
        """Return those samples of a batch that live in the life that was claimed."""
        rows = self.model.parts[meta.partition_id].rows if meta.partition_id in self.model.parts else {}
        return [name for name in meta.sample_ids if name in rows and rows[name].life == lives[name]]

    @precondition(lambda self: self.metas)
    @rule(data=st.data(), who=WHO, verb=st.sampled_from(["clear_samples", "evict"]))
    def remove_batch(self, data: st.DataObject, who: str, verb: str) -> None:
        """Remove a batch that was claimed, whoever holds it, in the lives that were claimed."""
        _, meta, _, lives = data.draw(st.sampled_from(self.metas), label="meta")
        pid, alive = meta.partition_id, self.alive(meta, lives)
        done, _ = self.attempt(who, lambda c: getattr(c, verb)(meta, pid), lambda m: m.clear(pid, alive, who))
        if done:
            self.forget(who, pid, meta.sample_ids, lives)

    @precondition(lambda self: self.metas)
    @rule(data=st.data(), who=WHO, name=st.sampled_from(["x", "r"]), stale=st.sampled_from(["raise", "skip"]))
    def put_batch(self, data: st.DataObject, who: str, name: str, stale: Any) -> None:
        """Put a field of a batch that was claimed: of the rows that live in the life that was claimed, or of none."""
        _, meta, _, lives = data.draw(st.sampled_from(self.metas), label="meta")
        pid, alive = meta.partition_id, self.alive(meta, lives)
        self.write(who, meta, pid, alive, {"stale": stale}, name)

    @rule(who=WHO, pid=PID, at=SOME, stale=st.sampled_from(["raise", "skip"]))
    def put_existing(self, who: str, pid: str, at: list[int], stale: Any) -> None:
        """Put to samples that live, in any life."""
        ids = [IDS[pid][i] for i in at]
        rows = self.model.parts[pid].rows if pid in self.model.parts else {}
        self.write(who, ids, pid, [name for name in ids if name in rows], {"only": "existing", "stale": stale})

    def write(self, who: str, named: Any, pid: str, alive: list[str], how: dict[str, Any], field: str = "x") -> None:
        """Put a field of rows, of which some live."""
        ids: list[str] = named.sample_ids if isinstance(named, KVBatchMeta) else named
        numbers = {name: self.fresh() for name in ids}
        whole = len(alive) == len(ids)
        done, _ = self.attempt(
            who,
            lambda c: c.put_samples(named, pid, {field: column(field, list(numbers.values()))}, **how),
            lambda m: (
                m.put(pid, alive, who, {field: [plain(field, numbers[n]) for n in alive]}, None) if alive else None
            ),
            (*(() if whole else (StaleSlotError,)), *(() if pid in self.model.parts else (DataPlaneBadRequest,))),
        )
        if done:
            assert whole or how["stale"] == "skip"
            assert self.result.sample_ids == alive
            assert self.result.created == [False] * len(alive)

    @rule(who=WHO, pid=PID, at=SOME)
    def put_new(self, who: str, pid: str, at: list[int]) -> None:
        """Put samples that do not live."""
        ids = [IDS[pid][i] for i in at]
        rows = self.model.parts[pid].rows if pid in self.model.parts else {}
        fine = pid in self.model.parts and not any(name in rows for name in ids)
        numbers = [self.fresh() for _ in ids]
        done, _ = self.attempt(
            who,
            lambda c: c.put_samples(ids, pid, {"x": column("x", numbers)}, only="new"),
            lambda m: m.put(pid, ids, who, {"x": [plain("x", n) for n in numbers]}, None),
            () if fine else (DataPlaneBadRequest,),
        )
        if done:
            assert fine
            assert self.result.created == [True] * len(ids)

    @rule(who=WHO, pid=PID, at=SOME, verb=st.sampled_from(["clear_samples", "evict", "pop"]))
    def remove(self, who: str, pid: str, at: list[int], verb: str) -> None:
        """Remove by id; what is not there is no error, and what was given to this client has to be its own still."""
        ids = [IDS[pid][i] for i in at]
        rows = self.model.parts[pid].rows if pid in self.model.parts else {}

        def is_lost(name: str) -> bool:
            given = self.given.get((who, pid, name))
            return bool(given) and not (
                name in rows and given.items() & {t: n for t, (n, _) in rows[name].claims.items()}.items()
            )

        suspects = [name for name in ids if verb == "pop" and is_lost(name)]
        done, _ = self.attempt(
            who,
            lambda c: getattr(c, verb)(ids, pid),
            lambda m: m.clear(pid, ids, who),
            (ClaimLost,) if suspects else (),
        )
        assert not (done and any(name in rows for name in suspects))
        if done:
            self.forget(who, pid, ids)

    @precondition(lambda self: self.metas)
    @rule(who=WHO)
    def bring_back(self, who: str) -> None:
        """Remove the batch that was claimed last, and put its ids anew: other rows of the same names."""
        meta = self.metas[-1][1]
        pid, ids = meta.partition_id, meta.sample_ids
        numbers = [self.fresh() for _ in ids]
        done, _ = self.attempt(who, lambda c: c.evict(ids, pid), lambda m: m.clear(pid, ids, who))
        if done:
            self.forget(who, pid, ids)
        self.attempt(
            who,
            lambda c: c.put_samples(ids, pid, {"x": column("x", numbers)}),
            lambda m: m.put(pid, ids, who, {"x": [plain("x", n) for n in numbers]}, None),
            () if pid in self.model.parts else (DataPlaneBadRequest,),
        )

    @rule(who=WHO, pid=PID)
    def clear_own(self, who: str, pid: str) -> None:
        """Remove what this owner put."""
        done, _ = self.attempt(who, lambda c: c.clear_samples(None, pid), lambda m: m.clear(pid, None, who))
        if done:
            self.forget(who, pid, IDS[pid])

    def forget(self, who: str, pid: str, ids: list[str], lives: dict[str, int] | None = None) -> None:
        """Note that a client forgets what it was given, as it does with what it removed."""
        claimed = {number: told for _, _, number, told in self.metas}
        for name in ids:
            given = self.given.pop((who, pid, name), {})
            others = {t: n for t, n in given.items() if lives is not None and claimed[n][name] != lives[name]}
            if others:
                self.given[who, pid, name] = others

    @precondition(lambda self: self.metas)
    @rule(data=st.data(), who=WHO, name=st.sampled_from(["x", "x", "r", "o"]))
    def get_batch(self, data: st.DataObject, who: str, name: str) -> None:
        """Read by reference: the values of now, or that the row is another one."""
        _, meta, _, lives = data.draw(st.sampled_from(self.metas), label="meta")
        pid = meta.partition_id
        rows = self.model.parts[pid].rows if pid in self.model.parts else {}
        good = [n for n in meta.sample_ids if n in rows and rows[n].life == lives[n] and name in rows[n].cells]
        try:
            got = self.world.run(self.world.client(who).get_data(meta, [name]))
        except PartialReadError as err:
            for at, one in err.errors.items():
                check(meta.sample_ids[at] not in good or (self.faulty and isinstance(one, TROUBLE)), one)
            got, ids = err.rows, err.ok.sample_ids
            assert set(ids) <= set(good)
        except (StaleSlotError, SampleNotFound, DataPlaneBadRequest):
            assert not good
            return
        except TROUBLE:
            assert self.faulty
            return
        else:
            ids = meta.sample_ids
            assert good == ids
        assert self.world.values(got, [name]) == [{name: rows[n].cells[name]} for n in ids]

    @rule(who=WHO, pid=PID)
    def drop(self, who: str, pid: str) -> None:
        """Remove a partition; then begin it anew, so that there is something to do."""
        done, _ = self.attempt(who, lambda c: c.drop_partition(pid), lambda m: m.parts.pop(pid, None))
        if done:
            self.forget(who, pid, IDS[pid])
        size = 2 if pid == "g" else None
        self.attempt(
            who,
            lambda c: c.register_partition(pid, ["x"], 8, ["train"], size, {"e": ["u", "v", "w"]}),
            lambda m: m.register(pid, ["x"], ["train"], size, {"e": ["u", "v", "w"]}),
        )
        if pid in self.model.parts:
            self.begin_anew(pid)

    @rule(who=WHO)
    def leave(self, who: str) -> None:
        """Close a client; what it claimed stays claimed, and another of its name comes."""
        self.world.client(who)
        self.replaced(who)
        self.expect(self.model)

    @invariant()
    def nothing_is_pending_without_faults(self) -> None:
        """A call that ended well leaves nothing to settle."""
        if hasattr(self, "world") and not self.faulty:
            assert not [
                outcome.call for client in self.world.clients.values() for outcome in client.env.pending_outcomes
            ]


class VerbsUnderFaults(Verbs):
    """The same, on a plane in trouble."""

    faulty = True


@pytest.mark.parametrize("machine", [Verbs, pytest.param(VerbsUnderFaults, marks=pytest.mark.slow)])
def test_the_plane_shows_what_a_plain_dict_shows(machine: type[Verbs]) -> None:
    """After every verb, through every look: values, tags, groups, claims, counts. Ambiguous is before or after."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(20),
            stateful_step_count=steps(30),
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


class ClaimsAgain(planes.ForgetsOpIds):
    """Answers a claim that is asked again with another batch."""

    def claim(
        self,
        partition_id: str,
        task: str,
        fields: Sequence[str],
        most: int,
        least: int,
        claim_id: str,
        not_after: float,
        owner: str,
        lease_s: float | None,
    ) -> tuple[Any, ...]:
        """Take the first ready samples, whatever this claim took before."""
        return self.take(partition_id, task, fields, most, least, claim_id, owner, lease_s)


BROKEN = {
    planes.ReplacesAll: Verbs,
    planes.OverwritesTags: Verbs,
    planes.SplitsGroups: Verbs,
    planes.IgnoresIncarnations: Verbs,
    planes.ClearsEverybodys: Verbs,
    planes.CountsTheUnfinished: Verbs,
    ClaimsAgain: VerbsUnderFaults,
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if at else ()) for at, kind in enumerate(BROKEN)],
    ids=lambda kind: kind.__name__,
)
def test_a_plane_that_breaks_a_promise_is_found(kind: type[Plane]) -> None:
    """The model notices, within as many examples as a usual run has."""
    machine = type(kind.__name__, (BROKEN[kind],), {"plane_class": kind})
    with pytest.raises((AssertionError, DataPlaneError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=100,
                stateful_step_count=40,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
                print_blob=False,
            ),
        )
