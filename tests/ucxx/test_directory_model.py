"""The directory gives the same answers as the memory plane, whatever is asked in whatever order."""

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from asyncdp.calls import RegisterPartition
from asyncdp.calls.answers import claim_try
from asyncdp.calls.slots import Publish, SlotRef, TryClaim
from asyncdp.errors import DataPlaneError
from asyncdp.meta import ClaimInfo, PartitionInfo, RowHandle
from asyncdp.rows.block import PICKLE, Block, FieldSpec
from asyncdp.transports.memory.host import Host, State
from asyncdp.transports.memory.plane import Plane

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import EmbeddedServer

PATTERN = r"(?P<group>.+)_g\d+"
IDS = ["a_g0", "a_g1", "a_g2", "b_g0", "b_g1", "ü \udc80", "s1", "s2"]
FIELDS = ["x", "y", "z"]
TASKS = ["train", "score"]
PARTITIONS = ["p", "q{}%"]
OWNERS = ["me", "you"]
_RUNS = itertools.count()


tags = st.fixed_dictionaries(
    {},
    optional={
        "group_id": st.sampled_from([None, "G", "H", "a"]),
        "expected_num_keys": st.sampled_from([None, 0, 1, 2, 3, 5]),
        "committed": st.sampled_from([True, True, False, None]),
        "status": st.sampled_from(["ok", "ok", "failed", None]),
        "created_at": st.sampled_from([None, 1.5, 7, 2.5e9]),
        "weight_version": st.sampled_from([None, 1, 2**40]),
        "size_bytes": st.sampled_from([3]),
        "input_lengths": st.integers(0, 2**31),
        "n": st.sampled_from([3.0, 2**63, -(2**63), 1e300, True, None, "", "ü\udc80" * 20, "k" * 300]),
    },
)
puts = st.fixed_dictionaries(
    {
        "ids": st.lists(st.sampled_from(IDS), min_size=1, max_size=6, unique=True),
        "fields": st.sampled_from([["x"]] * 3 + [["x", "y"]] * 2 + [["y"], ["z", "x"], ["y", "z", "x"], []]),
        "dtype": st.sampled_from([torch.float32] * 20 + [torch.int64]),
        "widths": st.lists(st.integers(1, 3), min_size=1, max_size=3),
        "cut": st.integers(0, 6),
        "owner": st.sampled_from(OWNERS),
        "tags": st.none() | st.lists(tags, min_size=6, max_size=6),
    }
)
#: What a put is bound to, and whether it leaves stale rows out.
bounds = st.sampled_from(
    [(None, False)] * 6
    + [("new", False), ("existing", False), ("existing", True)]
    + [("lives", False), ("lives", True)] * 2
)
partitions = st.sampled_from(PARTITIONS[:1] * 5 + PARTITIONS)


class Twins:
    """Asks both the same and compares."""

    def __init__(self, url: str) -> None:
        """Begin with empty twins."""
        self.loop = asyncio.Runner()
        self.hosts = [Host(f"h{i}", (10 * i + 1, 10 * i + 2), None, None) for i in range(2)]
        self.plane = Plane(14, self.hosts, PATTERN, strict_schema=False, auto_register=False)
        self.directory: Any = self.connect(url)
        self.ops = itertools.count()
        self.done: list[Callable[[], None]] = []  # mutations, to be sent again
        self.claims: list[tuple[str, str, str, list[str]]] = []  # claim id, partition, task, ids
        self.handles: dict[str, list[tuple[RowHandle, RowHandle]]] = {}
        self.live: set[tuple[str, int, int, int]] = set()
        self.half: set[tuple[str, int, int, int, str]] = set()
        self.twin: dict[int, int] = {}

    def connect(self, url: str) -> Any:
        """Return a client of an empty directory."""
        from asyncdp.transports.ucxx.directory import Directory, DirectorySettings, HostInfo, OperationId

        self.host_info, self.op = HostInfo, OperationId
        chosen = DirectorySettings(namespace=f"model{next(_RUNS)}", capacity_age_s=0.0, host_timeout_s=600.0)
        return Directory(url, capacity=14, group_pattern=PATTERN, settings=chosen)

    def teardown(self) -> None:
        """Close the client."""
        self.loop.run(self.directory.close())
        self.loop.close()

    def until(self, left_s: float) -> float:
        """Return a deadline by the memory plane's clock."""
        return self.plane.monotonic() + left_s

    # -- comparing

    def both(self, memory: Callable[[], Any], other: Callable[[], Awaitable[Any]]) -> tuple[Any, Any] | None:
        """Ask both; None where both refused in the same words."""

        async def ask() -> tuple[Any, Any]:
            answers = []
            for question in (memory, other):
                try:
                    got = question()
                    answers.append(await got if asyncio.iscoroutine(got) else got)
                except DataPlaneError as err:
                    answers.append(err)
            return answers[0], answers[1]

        a, b = self.loop.run(ask())
        if isinstance(a, DataPlaneError) or isinstance(b, DataPlaneError):
            assert (type(a), str(a.message), a.field, a.sample_ids, a.retryable) == (
                type(b),
                str(b.message),
                b.field,
                b.sample_ids,
                b.retryable,
            ), (a, b)
            return None
        return a, b

    def same_incarnation(self, a: RowHandle | None, b: RowHandle | None) -> None:
        """Each incarnation of one has one of the other."""
        if a is None or b is None:
            assert a is b
            return
        assert a.claim_id == b.claim_id
        assert self.twin.setdefault(a.incarnation, b.incarnation) == b.incarnation
        assert len(set(self.twin.values())) == len(self.twin)

    @staticmethod
    def near(a: Any, b: Any) -> None:
        """Clocks differ a little."""
        assert a == b or abs(a - b) < 60.0, (a, b)

    def same_tags(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        """Same keys, same values, same types."""
        assert a.keys() == b.keys()
        for key, value in a.items():
            if key == "created_at" and isinstance(value, float):
                self.near(value, b[key])
            else:
                assert (type(value), value) == (type(b[key]), b[key]), key

    def refs(self, found: Sequence[SlotRef]) -> set[Any]:
        """Refs as a set of single cells."""
        return {
            (r.host.id, r.host.epoch, r.host.ports, r.slot, r.generation, name, index, row)
            for r in found
            for name in r.fields
            for index, row in zip(r.index, r.rows, strict=True)
        }

    def kill(self, dead: Sequence[Any]) -> None:
        """Do what hosts do with cells that died."""
        for cells in dead:
            for index in cells.index:
                name = (cells.slot.host, cells.slot.slot, cells.slot.generation, index)
                if cells.fields is None:
                    assert name in self.live
                    self.live.discard(name)
                    self.half = {half for half in self.half if half[:4] != name}
                else:
                    self.half.update((*name, field) for field in cells.fields)

    def hosts_agree(self) -> None:
        """What the directory said died is what died in the memory plane's hosts."""
        live, half = set(), set()
        for host in self.hosts:
            for slot in host.slots:
                if slot.state is State.READY:
                    live |= {(host.id, slot.number, slot.generation, i) for i in slot.live}
                    half |= {(host.id, slot.number, slot.generation, i, f) for i, f in slot.replaced if i in slot.live}
        assert live == self.live
        assert half == self.half

    # -- asking

    def begin(self, size: int | None) -> None:
        """Register the hosts and a partition."""
        self.beat()
        self.register("p", ["x"], TASKS, size, None)

    def beat(self) -> None:
        """Register the hosts."""
        for host in self.hosts:
            self.loop.run(self.directory.beat(self.host_info(host.id, host.ref.epoch, ports=host.ref.ports)))

    def register(self, p: str, fields: list[str], tasks: list[str], size: int | None, words: list[str] | None) -> None:
        """register_partition."""
        enums = {} if words is None else {"z": tuple(words)}
        call = RegisterPartition(p, tuple(fields), 3, tuple(tasks), size, enums)
        mine = (p, call.fields, call.num_samples, call.consumer_tasks, size, enums)
        self.both(lambda: self.plane.register(*mine), lambda: self.directory.register(call))

    def lives(self, data: st.DataObject, ids: Sequence[str]) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Choose which life of each sample is meant: any, one that was seen, mostly the last of these."""
        seen = [self.handles.get(sample_id, []) for sample_id in ids]
        meant = [data.draw(st.sampled_from([*past, *past[-1:] * 9, None])) for past in seen]
        mine, theirs = ([None if pair is None else pair[at].incarnation for pair in meant] for at in (0, 1))
        return tuple(mine), tuple(theirs)

    def put(
        self,
        data: st.DataObject,
        p: str,
        put: dict[str, Any],
        left_s: float,
        given_up: object,
        bound: tuple[str | None, bool],
    ) -> None:
        """publish, of slots that were written before."""
        op = f"put{next(self.ops)}"
        ids = put["ids"]
        if given_up:
            self.resolve(p, op)
        refs, specs, nbytes = self.loop.run(self.write(op, put))
        rows = None if put["tags"] is None else tuple(put["tags"][: len(ids)])
        only, skip = bound
        mine, theirs = self.lives(data, ids) if only == "lives" else (None, None)
        how: dict[str, Any] = {"only": "existing" if only == "lives" else only, "skip_stale": skip}
        calls = [
            Publish(tuple(ids), p, tuple(refs), rows, specs, nbytes, lives=meant, **how) for meant in (mine, theirs)
        ]

        def send() -> None:
            got = self.both(
                lambda: self.plane.once(op, self.until(left_s), lambda: self.plane.publish(calls[0], put["owner"])),
                lambda: self.directory.publish(self.op(op, left_s), calls[1], put["owner"]),
            )
            if got is None:
                return
            for at, (sample_id, a, b) in enumerate(zip(ids, got[0].handles, got[1].handles, strict=True)):
                self.same_incarnation(a, b)
                if a is not None:
                    assert got[0].created[at] is got[1].created[at]
                    self.handles.setdefault(sample_id, []).append((a, b))
            if op not in published:
                published.add(op)
                self.live |= {(r.host.id, r.slot, r.generation, i) for r in refs for i in r.index}
                self.kill(got[1].dead)

        published: set[str] = set()
        send()
        if published:
            self.done.append(send)
        else:
            for host in self.hosts:
                host.abort(op, 0.0)

    async def write(self, op: str, put: dict[str, Any]) -> tuple[list[SlotRef], dict[str, FieldSpec], dict[str, Any]]:
        """Reserve and write slots on both hosts."""
        ids, names = put["ids"], put["fields"]
        n = len(ids)
        if not names:
            return [], {}, {}
        wide = {
            name: torch.zeros(n, width, dtype=put["dtype"])
            for name, width in zip(names, itertools.cycle(put["widths"]), strict=False)
        }
        block = Block.from_fields(TensorDict(wide, [n]), n, {}, PICKLE)
        nbytes = {name: tuple(column.row_nbytes().tolist()) for name, column in block.columns.items()}
        refs = []
        cut = min(put["cut"], n)
        for host, first, last in ((self.hosts[0], 0, cut), (self.hosts[1], cut, n)):
            if first < last:
                now = self.plane.clock.time()
                got = host.reserve(op, tuple(names), last - first, first, now + 1e6, now)
                host.write(op, got, block.take(range(first, last)))
                refs += got
        return refs, block.observed(), nbytes

    def claim(
        self, p: str, task: str, fields: list[str], most: int, least: int, owner: str, lease: float | None
    ) -> None:
        """claim_meta's look."""
        op = f"claim{next(self.ops)}"
        least = min(least, most)

        def send() -> None:
            def memory() -> Any:
                answer = self.plane.claim(p, task, fields, most, least, op, self.until(5.0), owner, lease)
                return claim_try(TryClaim(p, task, tuple(fields), most, least), op, answer)

            what = (p, task, fields, most, least, owner)
            other = lambda: self.directory.claim(self.op(op, 5.0), *what, lease_s=lease, explain=True)  # noqa: E731
            got = self.both(memory, other)
            if got is not None:
                self.same_try(*got)
                if got[0].meta.size:
                    self.claims.append((op, p, task, list(got[0].meta.sample_ids)))

        send()
        self.done.append(send)

    def same_try(self, a: Any, b: Any) -> None:
        """Compare two looks."""
        assert (a.meta.sample_ids, a.meta.fields, a.meta.task_name) == (
            b.meta.sample_ids,
            b.meta.fields,
            b.meta.task_name,
        )
        assert a.meta.sequence_lengths == b.meta.sequence_lengths
        assert a.ready == b.ready
        assert a.waiting_ids == b.waiting_ids
        assert a.missing_fields == b.missing_fields
        self.near(a.oldest_wait_s or 0.0, b.oldest_wait_s or 0.0)
        for one, other in zip(a.meta.tags, b.meta.tags, strict=True):
            self.same_tags(one, other)
        for one, other in zip(a.meta.handles, b.meta.handles, strict=True):
            self.same_incarnation(one, other)

    def pick(self, data: st.DataObject) -> tuple[str, str, str, list[str]] | None:
        """Choose a claim that was made."""
        return data.draw(st.sampled_from(self.claims)) if self.claims else None

    def release(self, data: st.DataObject, part: int, extra: str | None) -> None:
        """release_claim, of some rows, with another one among them at times."""
        chosen = self.pick(data)
        if chosen is None:
            return
        claim_id, p, task, ids = chosen
        ids = list(dict.fromkeys(ids[:part] + ([] if extra is None else [extra])))
        op, held = f"release{next(self.ops)}", [claim_id] * len(ids)

        def send() -> None:
            self.both(
                lambda: self.plane.release(p, task, ids, held, op, self.until(5.0)),
                lambda: self.directory.release(self.op(op, 5.0), p, ids, held, task),
            )

        send()
        self.done.append(send)

    def rarely(self, data: st.DataObject, what: str) -> None:
        """What would leave little to look at if it happened often."""
        if what == "release_owner":
            self.release_owner(data.draw(partitions), data.draw(st.sampled_from(OWNERS)))
        elif what == "abandon":
            self.abandon(data)
        elif what == "resolve":
            self.resolve(data.draw(partitions), "never sent")
        elif data.draw(st.integers(0, 5)) == 0:
            self.drop(data.draw(partitions))
        else:
            self.drop(PARTITIONS[1])

    def release_owner(self, p: str, owner: str) -> None:
        """release_claims."""
        op = f"owner{next(self.ops)}"
        self.both(
            lambda: self.plane.release_owner(p, owner, op, self.until(5.0)),
            lambda: self.directory.release_owner(self.op(op, 5.0), p, owner),
        )

    def abandon(self, data: st.DataObject) -> None:
        """Give back a claim that nobody got."""
        chosen = self.pick(data)
        if chosen is not None:
            self.both(
                lambda: self.plane.abandon(chosen[1], chosen[0]), lambda: self.directory.abandon(chosen[1], chosen[0])
            )

    def clear(self, data: st.DataObject, p: str, ids: list[str], how: int, bound: object) -> None:
        """clear_samples, pop: of ids, of lives, of what an owner put, with a claim or without."""
        op = f"clear{next(self.ops)}"
        wanted: list[str] | None = ids
        held: list[Any] | None = None
        owner = data.draw(st.sampled_from(OWNERS))
        chosen = self.pick(data)
        if how == 0:
            wanted = None
        elif how == 1 and chosen is not None:
            wanted = list(dict.fromkeys([*chosen[3], *ids]))
            held = [(chosen[0], "other") if sample_id in chosen[3] else None for sample_id in wanted]
            p = chosen[1]
        mine, theirs = self.lives(data, wanted) if bound and wanted is not None else (None, None)
        cleared: list[bool] = []

        def send() -> None:
            got = self.both(
                lambda: self.plane.clear(p, wanted, op, self.until(5.0), owner, held, mine),
                lambda: self.directory.clear(self.op(op, 5.0), p, wanted, owner, held, theirs),
            )
            if got is not None:
                assert got[0][0] == got[1].count
                if not cleared:
                    self.kill(got[1].freed)
                if got[0][0]:
                    cleared.append(True)

        send()
        self.done.append(send)

    def drop(self, p: str) -> None:
        """drop_partition."""
        op = f"drop{next(self.ops)}"
        got = self.both(
            lambda: self.plane.drop(p, op, self.until(5.0)),
            lambda: self.directory.drop(self.op(op, 5.0), p),
        )
        assert got is not None
        self.kill(got[1])

    def again(self, data: st.DataObject) -> None:
        """The reply of some mutation was lost: it is sent again, much later."""
        if self.done:
            data.draw(st.sampled_from(self.done))()

    def resolve(self, p: str, op: str) -> None:
        """Resolve."""
        got = self.both(lambda: self.plane.resolve(op, 0.0), lambda: self.directory.resolve(op, p))
        assert got is not None
        assert got[0] == got[1].state

    def locate(self, data: st.DataObject, p: str, ids: list[str], fields: list[str], meant: object) -> None:
        """Locate, with handles of former times or without."""
        pairs = [data.draw(st.sampled_from([*self.handles.get(i, []), (None, None)])) for i in ids] if meant else None
        mine = None if pairs is None else [a for a, _ in pairs]
        theirs = None if pairs is None else [b for _, b in pairs]
        got = self.both(
            lambda: self.plane.locate(p, ids, fields, mine), lambda: self.directory.locate(p, ids, fields, theirs)
        )
        if got is None:
            return
        a, b = got
        assert self.refs(a.refs) == self.refs(b.refs)
        assert a.specs == b.specs
        for one, other in zip(a.handles, b.handles, strict=True):
            self.same_incarnation(one, other)
        assert {at: (type(e), e.message, e.field) for at, e in a.missing.items()} == {
            at: (type(e), e.message, e.field) for at, e in b.missing.items()
        }

    def look(self, p: str) -> None:
        """describe, list_metadata, depth."""
        got = self.both(lambda: PartitionInfo(*self.plane.describe(p)), lambda: self.directory.describe(p))
        assert got is None or got[0] == got[1], got
        got = self.both(lambda: self.plane.depth(p, self.plane.gone()), lambda: self.directory.depth(p))
        assert got is None or got[0] == got[1], got
        got = self.both(lambda: self.plane.groups(p), lambda: self.directory.list_metadata(p))
        if got is None:
            return
        ages = [meta.created_at for meta in got[1]]
        assert ages == sorted(ages)
        for a, b in zip(*(sorted(metas, key=lambda meta: meta.group_id) for metas in got), strict=True):
            assert a.group_id == b.group_id
            assert (a.keys, a.weight_version, a.committed, a.expected_num_keys, a.size_bytes, a.lost_keys) == (
                b.keys,
                b.weight_version,
                b.committed,
                b.expected_num_keys,
                b.size_bytes,
                b.lost_keys,
            )
            self.near(a.created_at, b.created_at)
            for one, other in zip(a.tags, b.tags, strict=True):
                self.same_tags(one, other)
            for mine, theirs in zip(a.handles, b.handles, strict=True):
                self.same_incarnation(mine, theirs)

    def look_at_claims(self, p: str, task: str) -> None:
        """list_claims, check_consumption_status, list_partitions."""
        mine = lambda: [ClaimInfo(*one) for one in self.plane.list_claims(p, task)]  # noqa: E731
        got = self.both(mine, lambda: self.directory.list_claims(p, task))
        for a, b in zip(*(got or ((), ())), strict=True):
            assert (a.claim_id, a.owner, a.task_name, a.sample_ids) == (b.claim_id, b.owner, b.task_name, b.sample_ids)
            self.near(a.claimed_at, b.claimed_at)
            self.near(a.expires_at or 0.0, b.expires_at or 0.0)
        got = self.both(lambda: self.plane.consumed(p, [task]), lambda: self.directory.consumed(p, [task]))
        assert got is None or got[0] is got[1]
        got = self.both(
            lambda: [PartitionInfo(*one) for one in self.plane.listing()],
            self.directory.list_partitions,
        )
        assert got is not None
        assert got[0] == got[1]


#: Step -> (how often it is taken, its arguments).
STEPS: dict[str, tuple[int, dict[str, Any]]] = {
    "register": (
        1,
        {
            "p": st.sampled_from(PARTITIONS),
            "fields": st.lists(st.sampled_from(FIELDS), max_size=2),
            "tasks": st.lists(st.sampled_from(TASKS), max_size=2),
            "size": st.sampled_from([None] * 6 + [2, 3]),
            "words": st.none() | st.lists(st.sampled_from(["u", "v"]), min_size=1),
        },
    ),
    "put": (
        8,
        {
            "p": partitions,
            "put": puts,
            "left_s": st.sampled_from([5.0] * 9 + [-1.0]),
            "given_up": st.sampled_from([False] * 9 + [True]),
            "bound": bounds,
        },
    ),
    "claim": (
        5,
        {
            "p": partitions,
            "task": st.sampled_from(TASKS),
            "fields": st.sampled_from([["x"]] * 3 + [[], ["x", "y"]]),
            "most": st.integers(1, 7),
            "least": st.sampled_from([1] * 6 + [2, 3, 7]),
            "owner": st.sampled_from(OWNERS),
            "lease": st.sampled_from([None, None, 1e-6, 1e6]),
        },
    ),
    "release": (2, {"part": st.integers(1, 7), "extra": st.sampled_from([None] * 4 + IDS)}),
    "rarely": (1, {"what": st.sampled_from(["release_owner", "abandon", "resolve", "drop"])}),
    "clear": (
        2,
        {
            "p": partitions,
            "ids": st.lists(st.sampled_from(IDS), max_size=4),
            "how": st.integers(0, 3),
            "bound": st.booleans(),
        },
    ),
    "again": (2, {}),
    "locate": (
        2,
        {
            "p": partitions,
            "ids": st.lists(st.sampled_from(IDS), max_size=6),
            "fields": st.lists(st.sampled_from([*FIELDS, "no such"]), max_size=3, unique=True),
            "meant": st.booleans(),
        },
    ),
    "look": (3, {"p": partitions}),
    "look_at_claims": (2, {"p": partitions, "task": st.sampled_from(TASKS)}),
}
NAMES = [name for name, (weight, _) in STEPS.items() for _ in range(weight)]


def play(twins: Twins, data: st.DataObject, size: int | None) -> None:
    """Take 40 steps, after each of which both directories have to agree; ``size`` is that of groups."""
    try:
        twins.begin(size)
        for _ in range(40):
            name = data.draw(st.sampled_from(NAMES))
            arguments = data.draw(st.fixed_dictionaries(STEPS[name][1]), label=name)
            step = getattr(twins, name)
            if "data" in inspect.signature(step).parameters:
                arguments["data"] = data
            step(**arguments)
            twins.hosts_agree()
    finally:
        twins.teardown()


@pytest.mark.slow
# No shrinking: a failure then takes minutes to be told; the steps are printed as they were.
@settings(max_examples=50, suppress_health_check=list(HealthCheck), phases=[Phase.reuse, Phase.generate])
@given(data=st.data(), size=st.sampled_from([None, 2, 3]))
def test_the_directory_answers_as_the_memory_plane_does(
    server: "EmbeddedServer", data: st.DataObject, size: int | None
) -> None:
    """Ids in order, incarnations, tags with their types, claims, freed cells, errors with their texts: all the same."""
    play(Twins(server.url), data, size)
