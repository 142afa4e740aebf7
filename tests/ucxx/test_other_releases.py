"""A directory that another release filled: served as it was meant, or refused by name."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from asyncdp.calls.slots import Publish
from asyncdp.errors import DataPlaneUnavailable, StaleSlotError

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory

pytestmark = pytest.mark.anyio

RIDS = [b"1795964104590043", b"1795964104590044", b"1795964104590045", b"1795964104590046"]
IDS = [b"g_g0", b"g_g1", b"h_g0", b"h_g1"]
PAD = b"\xff" * 65
ROW = (
    b"\x9d\xa4%b\xa1%b\x08\x08\xae\x91\x94\xa6\x94\xa1h\x05\x03\x07%c\x91\x01\x91\x08\xb4\x82\xa1n%c\xaeweight_version\x02"
    b"\xa2me\xcbA\xda\xc3\x0f2%%\xd3\xbf\x01\x01\x00\x00\x91\x01"
)
GROUP = b"\x99\x00\x02\xd9 %b%b\xb0%b\xa0\x00\x00\x81\xa3\xa1h\x05\x02\xc2"
#: What format 2 keeps, after the namespace, of a partition of whole groups of two: four rows in one slot; a claim.
HASHES: dict[str, dict[bytes, bytes]] = {
    "{p}:C": {b"c1": b"\x97\xa2me\x01\x91\xa1x\xcbA\xda\xc3\x0f2%\xd9j\xc2\x02\xa11"},
    "{p}:R": {b"c1": RIDS[0] + RIDS[1]},
    "{p}:d": {b"\xa1h\x05": b"2"},
    "{p}:g": {
        b"g": GROUP % (*RIDS[:2], RIDS[0]),
        b"h": GROUP % (*RIDS[2:], RIDS[2]),
        PAD: b"\x99\x00\x00\xa0\xa0\xa0\x00\x00\x90\xc2",
    },
    "{p}:i": {**dict(zip(IDS, RIDS, strict=True)), PAD: b""},
    "{p}:k:1": {RIDS[0]: b"c1", RIDS[1]: b"c1", PAD: b""},
    "{p}:p": {
        b"born": b"1795964104590042",
        b"bytes": b"32",
        b"doc": b"\x84\xa6fields\x91\x97\xa1x\xc3\xa6tensor\xa7float32\x91\x02\xc2\x90\xa5tasks\x92\xa5score\xa5train"
        b"\xabnum_samples\x04\xaagroup_size\x02",
        b"gone": b"0",
        b"gsize": b"2",
        b"inc": RIDS[3],
        b"ix": b"\x91\x93\x01\x01\x91\x01",
        b"ixn": b"1",
        b"nt": b"2",
        b"seq": b"1",
        b"ver": b"1795964104591049",
    },
    "{p}:r:1795964104590": {
        rid: ROW % (name, name[:1], at, at) for at, (rid, name) in enumerate(zip(RIDS, IDS, strict=True))
    },
}


async def fill(directory: "Directory", namespace: str) -> None:
    """Make of an empty server one that another release has left."""
    command = directory._link.command
    for key, rows in HASHES.items():
        await command("HSET", f"{namespace}:{key}", *(part for pair in rows.items() for part in pair))
    await command("ZADD", f"{namespace}:{{p}}:q:1", 1, RIDS[2] + b"h")
    await command("ZADD", f"{namespace}:{{p}}:s", 0, RIDS[0][:13])
    await command("SADD", f"{namespace}:partitions", "p")
    await command("SET", f"{namespace}:format", "2")
    await command("SET", f"{namespace}:plane", "233aa1183fc74edeb408d2bcb0cf7482")


async def test_a_directory_of_another_release_with_this_format_is_served(
    connect: Callable[..., "Directory"], namespace: str
) -> None:
    """Rows, groups, tags, claims and ready indexes are what they were; puts and removals are bound to their lives."""
    from asyncdp.transports.ucxx.directory import HostInfo, OperationId

    directory = connect()
    await fill(directory, namespace)
    groups = await directory.list_metadata("p")
    assert [(group.keys, group.weight_version, group.size_bytes) for group in groups] == [
        (("g_g0", "g_g1"), 2, 16),
        (("h_g0", "h_g1"), 2, 16),
    ]
    assert [str(handle.incarnation).encode() for group in groups for handle in group.handles if handle] == RIDS
    assert [info.sample_ids for info in await directory.list_claims("p", "score")] == [("g_g0", "g_g1")]
    await directory.beat(HostInfo("h", 5, ports=(1,)))
    assert await directory.depth("p") == 2
    claimed = await directory.claim(OperationId("c2", 10.0), "p", "score", ["x"], 4, 1, "me")
    assert claimed.meta.sample_ids == ["h_g0", "h_g1"]
    cleared = await directory.clear(OperationId("clear", 10.0), "p", ["g_g0"], lives=[int(RIDS[0])])
    assert (cleared.count, [(cell.slot.slot, cell.index) for cell in cleared.freed]) == (1, [(3, (0,))])
    late: dict[str, Any] = {"only": "existing", "lives": (int(RIDS[0]), int(RIDS[1]))}
    call = Publish(("g_g0", "g_g1"), "p", (), ({"n": 9}, {"n": 9}), {}, **late)
    with pytest.raises(StaleSlotError) as caught:
        await directory.publish(OperationId("late", 10.0), call, "me")
    assert caught.value.sample_ids == ("g_g0",)


async def test_a_directory_of_another_format_is_refused_by_name(
    connect: Callable[..., "Directory"], namespace: str
) -> None:
    """A release that keeps its data in another form says so; this one does not touch what it would misread."""
    first, second = connect(), connect()
    await first.ping()
    command = first._link.command
    assert await command("GET", f"{namespace}:format") == b"2"
    await command("SET", f"{namespace}:format", "3")
    with pytest.raises(DataPlaneUnavailable, match=r"holds a plane of data format 3, .* reads 2: use the"):
        await second.list_partitions()


async def test_a_directory_of_the_first_releases_is_refused_by_name(
    connect: Callable[..., "Directory"], namespace: str
) -> None:
    """They stored no format, which is format 1; it is not overwritten."""
    command = connect()._link.command
    await command("SET", f"{namespace}:plane", "233aa1183fc74edeb408d2bcb0cf7482")
    for _ in range(2):
        with pytest.raises(DataPlaneUnavailable, match=r"holds a plane of data format 1, .* reads 2: use the"):
            await connect().list_partitions()
