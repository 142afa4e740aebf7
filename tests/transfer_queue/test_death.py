"""Servers that are killed or paused: noticed soon, typed, and nobody else is hurt."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import (
    ClaimNotReady,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    PartialReadError,
    StaleSlotError,
    default_layers,
)
from asyncdp.transports.transfer_queue import TQTransport

if TYPE_CHECKING:
    from asyncdp.client import Client
    from tests.transfer_queue.servers import Servers

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Begin = Callable[..., "Client"]
#: Layers that do not ask again, so that what is measured is the notice, not the patience.
ONCE = {"max_attempts": 1, "max_rounds": 1}
IDS = [f"s{at}" for at in range(32)]


async def filled(plane: Begin, servers: Servers, **layers: Any) -> Client:
    """Begin a plane with 32 samples, half of them on each unit."""
    client = plane(servers, layers, transfer_queue={"split_bytes": 1})
    await client.register_partition("p", ["x"], 64, ["train"])
    await client.put_samples(IDS, "p", {"x": torch.arange(32.0)})
    return client


async def lost_keys(client: Client) -> set[str]:
    """Wait until the listing tells of lost rows; return their ids."""
    with anyio.fail_after(60):
        while True:
            if lost := {key for group in await client.list_metadata("p") for key in group.lost_keys}:
                return lost
            await anyio.sleep(0.05)


async def timed(call: Awaitable[Any]) -> tuple[float, Any]:
    """Return how long a call took, in seconds, and its result or error."""
    began = time.monotonic()
    try:
        return time.monotonic() - began, await call
    except DataPlaneError as err:
        return time.monotonic() - began, err


async def pending(client: Client, count: int = 8) -> list[tuple[float, Any]]:
    """Keep asking for the time, so that something is on its way whenever a server goes; return all endings."""
    seen: list[tuple[float, Any]] = []
    with anyio.move_on_after(60.0):
        while True:
            try:
                await client.ping(timeout_s=3.0)
            except DataPlaneError as err:
                seen.append((time.monotonic(), err))
                if len(seen) >= count:
                    break
    return seen


async def test_a_killed_controller_is_noticed_at_once(plane: Begin, servers: Servers) -> None:
    """A call under way and all later ones are DataPlaneUnavailable within 0.1 s or so, long before any timeout."""
    client = await filled(plane, servers, **ONCE)
    killed: list[float] = []

    async def kill() -> None:
        await anyio.sleep(0.2)
        killed.append(await anyio.to_thread.run_sync(servers.kill, servers.endpoints.controller))

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        seen = await pending(client, 1)
    assert isinstance(seen[0][1], DataPlaneUnavailable)
    assert seen[0][0] - killed[0] < 60.0  # not for ever
    for call in (
        client.ping(),
        client.depth("p"),
        client.get_samples(["s0"], "p", ["x"]),
        client.clear_samples(["s1"], "p"),
    ):
        took, err = await timed(call)
        assert isinstance(err, DataPlaneUnavailable)
        assert took < 60.0


async def test_a_paused_controller_is_noticed_within_its_heartbeats(plane: Begin, servers: Servers) -> None:
    """Silence is DataPlaneUnavailable after some 2 s; when it goes on, the same client works, and nothing is lost."""
    client = await filled(plane, servers, **ONCE)
    servers.pause(servers.endpoints.controller)
    began = time.monotonic()
    try:
        with pytest.raises(DataPlaneUnavailable):
            await client.depth("p", timeout_s=60)
        assert time.monotonic() - began < 60.0
    finally:
        servers.resume(servers.endpoints.controller)
    with anyio.fail_after(60):
        while True:
            try:
                assert await client.depth("p") == 32
                break
            except DataPlaneUnavailable:
                await anyio.sleep(0.05)


async def test_a_killed_unit_costs_only_its_own_rows(plane: Begin, servers: Servers) -> None:
    """The other unit's rows come, the lost are named, by the listing too; puts go on; popped, the lost are gone."""
    client = await filled(plane, servers, **ONCE)
    servers.kill(servers.endpoints.units[0])
    lost = await lost_keys(client)
    with pytest.raises(PartialReadError) as caught:
        await client.get_samples(IDS, "p", ["x"], timeout_s=30)
    assert sorted(caught.value.ok.sample_ids + caught.value.failed.sample_ids) == sorted(IDS)
    assert caught.value.ok.size == 16
    assert all(isinstance(err, DataPlaneUnavailable) for err in caught.value.errors.values())
    kept = [int(i[1:]) for i in caught.value.ok.sample_ids]
    assert caught.value.rows["x"].tolist() == kept
    assert lost == set(caught.value.failed.sample_ids)
    assert await client.depth("p") == 16
    await client.put_samples(["new1", "new2"], "p", {"x": torch.ones(2)})
    assert (await client.get_samples(["new1", "new2"], "p", ["x"]))["x"].tolist() == [1.0, 1.0]
    await client.pop(sorted(lost), "p")
    assert (await client.describe("p")).size == 18


async def test_a_unit_that_dies_in_mid_put_is_left_for_another(plane: Begin, servers: Servers) -> None:
    """The put succeeds on the unit that lives, and reads back whole."""
    client = await filled(plane, servers, **ONCE)
    servers.pause(servers.endpoints.units[1])  # it takes the request and never answers
    try:
        await client.put_samples(["a", "b"], "p", {"x": torch.tensor([5.0, 6.0])}, timeout_s=20)
    finally:
        servers.resume(servers.endpoints.units[1])
    assert (await client.get_samples(["a", "b"], "p", ["x"]))["x"].tolist() == [5.0, 6.0]


async def test_a_clear_with_a_silent_unit_is_not_reported_done(plane: Begin, servers: Servers) -> None:
    """The samples are gone for every reader, the error says what may still be held, and later it is swept."""
    client = await filled(plane, servers, **ONCE)
    unit = servers.endpoints.units[0]
    servers.pause(unit)
    try:
        with pytest.raises((DataPlaneUnavailable, DataPlaneTimeout), match="may still hold"):
            await client.clear_samples(IDS, "p", timeout_s=6)
        assert (await client.describe("p")).size == 0
    finally:
        servers.resume(unit)
    with anyio.fail_after(60):
        while True:  # its heartbeat has to see it
            try:
                await client.put_samples(["z"], "p", {"x": torch.zeros(1)})
                break
            except DataPlaneUnavailable:
                await anyio.sleep(0.05)
    assert (await client.get_samples(["z"], "p", ["x"]))["x"].tolist() == [0.0]


@pytest.mark.parametrize("verb", ["evict", "pop", "clear", "clear all", "drop"])
async def test_removing_the_rows_of_a_dead_unit_is_done(plane: Begin, servers: Servers, verb: str) -> None:
    """U11: what lay on it went with it; the other unit's rows are removed, and both may be put anew."""
    client = await filled(plane, servers)
    other = servers.endpoints.units[1].id
    transport: Any = TQTransport(client.attach_config(), bootstrap=False)
    link = await transport._connection.link(anyio.current_time() + 5)
    groups, *_ = await link.ask("locate", ("p", IDS, ("x",), None), anyio.current_time() + 5)
    keys = {unit: keys for unit, _, _, keys, _ in groups}
    servers.kill(servers.endpoints.units[0])
    if verb == "evict":  # as a controller does that recovers
        lost = await lost_keys(client)
        assert len(lost) == 16
        await client.evict(sorted(lost), "p")
        assert await client.depth("p") == 16
        assert not [key for group in await client.list_metadata("p") for key in group.lost_keys]
    await {
        "evict": lambda: client.evict(IDS, "p"),
        "pop": lambda: client.pop(IDS, "p"),
        "clear": lambda: client.clear_samples(IDS, "p"),
        "clear all": lambda: client.clear_samples(None, "p"),
        "drop": lambda: client.drop_partition("p"),
    }[verb]()
    with pytest.raises(StaleSlotError):
        await link.client.get(other, keys[other], ["x"])
    if verb == "drop":
        await client.register_partition("p", ["x"], 64, ["train"])
    assert (await client.describe("p")).size == 0
    await client.put_samples(IDS[:2], "p", {"x": torch.ones(2)})
    assert (await client.get_samples(IDS[:2], "p", ["x"]))["x"].tolist() == [1.0, 1.0]
    await transport.close()


async def test_claims_and_listing_go_on_without_a_unit(plane: Begin, servers: Servers) -> None:
    """What concerns metadata only needs the controller only."""
    client = await filled(plane, servers, **ONCE)
    servers.kill(servers.endpoints.units[0])
    claimed = await client.claim_meta("p", "train", ["x"], 8)
    assert claimed.size == 8
    await client.release_claim(claimed)
    assert len(await client.list_metadata("p")) == 32
    with pytest.raises(ClaimNotReady):
        await client.claim_meta("p", "train", ["x"], 64, timeout_s=0)


async def test_the_default_stack_sits_out_a_pause(plane: Begin, servers: Servers) -> None:
    """Three seconds without a controller cost time, not calls."""
    client = await filled(plane, servers)
    assert default_layers()
    servers.pause(servers.endpoints.controller)

    async def go_on() -> None:
        await anyio.sleep(3.0)
        servers.resume(servers.endpoints.controller)

    async with anyio.create_task_group() as group:
        group.start_soon(go_on)
        _, got = await timed(client.claim_meta("p", "train", ["x"], 4, timeout_s=30))
    assert not isinstance(got, Exception), got
    assert got.size == 4
    assert sum(len(claim.sample_ids) for claim in await client.list_claims("p", "train")) == 4
