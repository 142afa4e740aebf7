"""The count of complete groups that the directory keeps is what a count of all rows says, whatever happened."""

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import HostRef, Publish, SlotRef
from asyncdp.errors import DataPlaneError
from asyncdp.rows.block import FieldSpec

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

_RUNS = itertools.count()
IDS = ["a_g0", "a_g1", "a_g2", "b_g0", "b_g1", "a", "G", "alone", "ü \udc80"]
#: The last one never sent a heartbeat, so its rows are lost.
HOSTS = [HostRef("h1", 1, (1,)), HostRef("h1", 2, (1,)), HostRef("ü", 1 << 50, (1,)), HostRef("gone", 1, (1,))]
TAGS = st.fixed_dictionaries(
    {},
    optional={
        "group_id": st.sampled_from(["G", "a", "alone"]),
        "expected_num_keys": st.sampled_from([0, 1, 2, 3]),
        "committed": st.booleans(),
        "status": st.sampled_from(["ok", "failed"]),
        "created_at": st.sampled_from([1.5, 7.0]),
    },
)
#: Step -> (how often it is taken, its arguments).
KINDS: dict[str, tuple[int, tuple[st.SearchStrategy[Any], ...]]] = {
    "put": (
        12,
        (
            st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True),
            st.lists(st.sampled_from(HOSTS + HOSTS[:1] * 9), max_size=2),
            st.none() | st.lists(TAGS, min_size=5, max_size=5),
        ),
    ),
    "clear": (3, (st.lists(st.sampled_from(IDS), min_size=1, max_size=4),)),
    "claim": (1, (st.integers(1, 4), st.sampled_from([None, 1e-6]))),
    "release": (1, ()),
    "size": (1, (st.sampled_from([2, 3]),)),
    "beat": (1, (st.sampled_from(HOSTS[:3]),)),
    "leave": (1, (st.sampled_from(HOSTS[1:3]),)),
    "drop": (1, ()),
}
NAMES = [name for name, (weight, _) in KINDS.items() for _ in range(weight)]
STEPS = st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), *KINDS[name][1]))


class Steps:
    """One directory, to which random things are done."""

    def __init__(self, directory: "Directory") -> None:
        """Begin with nothing."""
        self.directory = directory
        self.count = itertools.count(1)

    def mutation(self) -> Any:
        """Name a mutation."""
        from asyncdp.transports.ucxx.directory import OperationId

        return OperationId(f"op{next(self.count)}", 10.0)

    async def put(self, ids: list[str], hosts: list[HostRef], tags: list[dict[str, Any]] | None) -> None:
        """Publish each field on a host of its own; without hosts only tags."""
        n = len(ids)
        refs = tuple(
            SlotRef(host, next(self.count), 1, (name,), range(n), range(n))
            for name, host in zip("xy", hosts, strict=False)
        )
        names = [ref.fields[0] for ref in refs]
        told = None if tags is None else tuple(tags[:n])
        call = Publish(
            tuple(ids), "p", refs, told, dict.fromkeys(names, FieldSpec("object")), dict.fromkeys(names, (8,) * n)
        )
        await self.directory.publish(self.mutation(), call, "me")

    async def clear(self, ids: list[str]) -> None:
        """Remove rows."""
        await self.directory.clear(self.mutation(), "p", ids)

    async def claim(self, most: int, lease: float | None) -> None:
        """Claim rows; depth counts them all the same."""
        await self.directory.claim(self.mutation(), "p", "t", ["x"], max(most, 3), 1, "me", lease_s=lease)

    async def release(self) -> None:
        """Release all claims."""
        await self.directory.release_owner(self.mutation(), "p", "me")

    async def size(self, size: int) -> None:
        """Declare whole groups for rows that are there."""
        await self.directory.register(RegisterPartition("p", ("x", "y"), 9, ("t",), size))

    async def beat(self, host: HostRef) -> None:
        """A slot host is there."""
        from asyncdp.transports.ucxx.directory import HostInfo

        await self.directory.beat(HostInfo(host.id, host.epoch, ports=host.ports))

    async def leave(self, host: HostRef) -> None:
        """A slot host leaves."""
        await self.directory.leave(host.id, host.epoch)

    async def drop(self) -> None:
        """Remove the partition, and begin anew."""
        await self.directory.drop(self.mutation(), "p")
        await self.begin()

    async def begin(self) -> None:
        """Register the partition."""
        await self.directory.register(RegisterPartition("p", ("x", "y"), 9, ("t",)))

    async def recount(self) -> int:
        """Count complete groups by all rows."""
        found = 0
        for meta in await self.directory.list_metadata("p"):
            fit = {key for key, tags in zip(meta.keys, meta.tags, strict=True) if tags.get("status") != "failed"}
            found += meta.committed and len(fit) >= meta.expected_num_keys and not fit.intersection(meta.lost_keys)
        return found

    async def run(self, steps: list[tuple[Any, ...]]) -> None:
        """Do all steps, and compare after each."""
        await self.begin()
        for host in (HOSTS[0], HOSTS[2]):
            with contextlib.suppress(DataPlaneError):
                await self.beat(host)
        try:
            for name, *arguments in steps:
                with contextlib.suppress(DataPlaneError):  # such as too large a group, or an epoch that was overtaken
                    await getattr(self, name)(*arguments)
                counted, depth = await self.recount(), await self.directory.depth("p")
                assert counted == depth, (name, arguments)
            await self.directory.clear(self.mutation(), "p", IDS)
            left = await self.directory._link.command("HLEN", self.directory._key("p") + "d")
            assert left == 0
        finally:
            await self.directory.close()


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None, phases=[Phase.reuse, Phase.generate])
@given(steps=st.lists(STEPS, min_size=15, max_size=25))
def test_depth_is_what_a_count_of_all_rows_says(server: "EmbeddedServer", steps: list[tuple[Any, ...]]) -> None:
    """After every put, removal, claim, lease that ended, change of the group size, and slot host that came or went."""
    from asyncdp.transports.ucxx.directory import Directory, DirectorySettings

    chosen = DirectorySettings(namespace=f"depth{next(_RUNS)}", host_timeout_s=600.0)
    asyncio.run(Steps(Directory(server.url, settings=chosen)).run(steps))


@pytest.mark.anyio
async def test_depth_reads_no_rows(directory: "Directory", monkeypatch: pytest.MonkeyPatch) -> None:
    """One request whose answer has an entry for each set of homes, however many rows there are."""
    steps = Steps(directory)
    await steps.begin()
    await steps.beat(HOSTS[0])
    await steps.put([f"{at}" for at in range(500)], HOSTS[:1], None)
    asked: list[str] = []
    functions = directory._link.functions

    async def counted(calls: Any) -> Any:
        asked.extend(verb for verb, *_ in calls)
        replies = await functions(calls)
        assert all(len(reply[1]) < 300 for reply in replies)
        return replies

    monkeypatch.setattr(directory._link, "functions", counted)
    assert await directory.depth("p") == 500
    assert sorted(asked) == ["depth", "hosts"]


@pytest.mark.anyio
@pytest.mark.parametrize("other", ["put", "clear", "clear again and again"])
async def test_a_listing_in_pages_has_all_rows_of_a_put_or_none(
    connect: Any, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Rows that are put between its pages are not in it; where rows go it is read again, at last in one request."""
    directory = connect(list_rows=1000)
    steps, writer = Steps(directory), Steps(connect())
    writer.count = itertools.count(10_000)
    await steps.begin()
    for first in range(0, 4000, 500):
        await steps.put([f"{at}" for at in range(first, first + 500)], HOSTS[:1], None)
    pipeline, pages = directory._link.pipeline, itertools.count()

    async def disturbed(commands: Any) -> Any:
        page = next(pages) if commands[0][0] == "HGETALL" else 0
        if page and other == "put":
            await writer.put([f"new{page}_{at}" for at in range(300)], HOSTS[:1], None)
        elif page == 2 or (page and other == "clear again and again"):
            await writer.clear([f"{at}" for at in range(500 * (page // 2), 500 * (page // 2) + 250)])
        return await pipeline(commands)

    monkeypatch.setattr(directory._link, "pipeline", disturbed)
    listed = {key for group in await directory.list_metadata("p") for key in group.keys}
    monkeypatch.undo()
    assert next(pages) > 2
    there = {key for group in await directory.list_metadata("p") for key in group.keys}
    if other == "put":
        assert listed == {f"{at}" for at in range(4000)} < there
    else:
        assert listed == there


@pytest.mark.anyio
async def test_few_short_entries_are_a_table(directory: "Directory") -> None:
    """What each put and claim looks up is no list that the server goes through for each of 256 rows."""
    steps = Steps(directory)
    await steps.begin()
    await steps.put(["a_g0", "a_g1", "b"], HOSTS[:1], None)
    await steps.claim(3, None)
    for name in ("i", "g", "k:1"):
        encoding = await directory._link.command("OBJECT", "ENCODING", directory._key("p") + name)
        assert encoding == b"hashtable", name
    assert (await directory.describe("p")).size == 3
    assert await directory.consumed("p", ["t"])
    await steps.clear(["a_g0", "a_g1", "b"])
    assert (await directory.describe("p")).size == 0
