"""One Client over any Service: the verbs, what it adds, and the names that are kept for one version."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

import asyncdp
from asyncdp import (
    ClaimNotReady,
    Client,
    DataPlaneClient,
    DataPlaneClosed,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
    Layer,
    MemoryTransport,
    Service,
    SlotMapping,
    default_layers,
    stack,
)
from asyncdp.calls import Ping, handles
from asyncdp.calls.slots import TryPartition
from asyncdp.protocol import VERBS
from asyncdp.service import layers_of
from asyncdp.testing import run_virtual

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
X = {"x": torch.arange(2.0)}


async def use(client: Any) -> None:
    """Put, claim, read, remove."""
    await client.register_partition("p", ["x"], 2, ["t"])
    await client.put_samples(["a", "b"], "p", X)
    meta = await client.claim_meta("p", "t", ["x"], 2, timeout_s=5)
    assert (await client.get_data(meta))["x"].tolist() == [0.0, 1.0]
    await client.pop(meta, "p")
    await client.wait_partition("p")
    assert await client.depth("p") == 0


@BACKENDS
def test_a_client_over_a_transport_is_a_plane_without_layers(backend: str) -> None:
    """Slot mapping is above it, once, and nothing else; no error is marked as tried by layers."""

    async def check() -> None:
        transport = MemoryTransport()
        async with Client(transport) as client:
            assert [type(one) for one in layers_of(client)] == [SlotMapping, MemoryTransport]
            await use(client)
            again = Client(SlotMapping(MemoryTransport(transport.attach_config(), bootstrap=False)))
            assert [type(one) for one in layers_of(again)] == [SlotMapping, MemoryTransport]
            assert await again.depth("p") == 0
            for host in transport.plane.hosts.values():
                host.crash()
            with pytest.raises((DataPlaneUnavailable, asyncdp.DataPlaneNotReady)) as caught:
                await client.put_samples(["c"], "p", {"x": torch.ones(1)})
            assert caught.value.retryable
        with pytest.raises(DataPlaneClosed):
            await client.ping()

    run_virtual(check, backend)


def test_a_look_without_time_says_what_is_missing() -> None:
    """A claim with timeout_s=0 looks once, without layers, too, and names the fields that rows lack."""

    async def check() -> None:
        async with Client(MemoryTransport()) as client:
            await client.register_partition("p", ["x", "y"], 2, ["t"])
            await client.put_samples(["a", "b"], "p", X)
            with pytest.raises(ClaimNotReady) as caught:
                await client.claim_meta("p", "t", ["x", "y"], 2, timeout_s=0)
            assert caught.value.missing_fields == {"y": 2}

    run_virtual(check)


def test_stack_takes_the_transport_out_of_a_client_without_layers() -> None:
    """The client's own slot mapping is not a layer that stack() has put there."""
    transport = MemoryTransport()
    kinds = [type(one) for one in layers_of(stack(Client(transport)))]
    assert kinds == [type(one) for one in layers_of(stack(transport))]
    assert type(Layer(Client(transport)).inner) is MemoryTransport


@pytest.mark.anyio
async def test_a_client_without_layers_is_pickled_by_its_transport() -> None:
    """Unpickled, it attaches; a layer alone is not pickled."""
    async with Client(MemoryTransport()) as client:
        await client.register_partition("p", ["x"], 2, ["t"])
        async with pickle.loads(pickle.dumps(client)) as again:
            assert "x" in (await again.describe("p")).fields
        with pytest.raises(TypeError, match="Layer is pickled as part of the client"):
            pickle.dumps(Layer(client))


@pytest.mark.parametrize("verb", [*VERBS, "close", "get_capabilities", "attach_config"])
def test_help_tells_what_a_verb_does(verb: str) -> None:
    """help(Client.get_data) shows the whole text of the protocol."""
    told = inspect.getdoc(getattr(Client, verb))
    assert told
    if verb in VERBS:
        assert told == inspect.getdoc(getattr(DataPlaneClient, verb))
        assert (
            inspect.signature(getattr(Client, verb)).parameters
            == inspect.signature(getattr(DataPlaneClient, verb)).parameters
        )


def test_capabilities_are_asked_for_once() -> None:
    """Layers keep what the transport said when they were made; calls never ask again."""
    asked: list[int] = []

    class Asked(MemoryTransport):
        def get_capabilities(self) -> asyncdp.DataPlaneCapabilities:
            asked.append(1)
            return super().get_capabilities()

    async def check() -> None:
        async with stack(Asked()) as client:
            before = len(asked)
            await use(client)
            assert client.get_capabilities().slot_writes
            assert len(asked) == before

    run_virtual(check)


# --- layers that know verbs only


class VerbsOnly:
    """Somebody's layer: it overrides verbs, keeps its client under a name of its own, and gives no time on."""

    def __init__(self, client: Client) -> None:
        self.next = client

    async def ping(self) -> None:
        """Pass on, without the time."""
        await self.next.ping(timeout_s=600.0)

    async def wait_partition(self, partition_id: str) -> None:
        """Wait twice as long as anybody would."""
        await self.next.wait_partition(partition_id, timeout_s=600.0)

    async def put_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Put."""
        return await self.next.put_samples(*args, **kwargs)


@BACKENDS
def test_a_layer_of_verbs_ends_with_its_caller(backend: str) -> None:
    """What it asks below has the deadline of the verb that it serves, however much time it gives."""

    async def check() -> None:
        transport = MemoryTransport()
        async with stack(transport, [VerbsOnly, *default_layers()]) as client:
            began = anyio.current_time()
            with pytest.raises(DataPlaneTimeout):
                await client.wait_partition("nowhere", timeout_s=2.0)
            assert 1.0 <= anyio.current_time() - began <= 2.1
            await client.ping()
        assert transport._owned is not None
        assert transport._owned.closed

    run_virtual(check, backend)


def test_what_a_layer_of_verbs_leaves_behind_has_its_own_time() -> None:
    """A task that it starts in a verb and that goes on is not bound to the deadline of that verb."""

    async def check() -> None:
        async with anyio.create_task_group() as group:
            done = anyio.Event()

            class Later(VerbsOnly):
                async def ping(self) -> None:
                    group.start_soon(self.afterwards)

                async def afterwards(self) -> None:
                    await anyio.sleep(100.0)
                    await self.next.ping()
                    done.set()

            async with stack(MemoryTransport(), [Later, *default_layers()]) as client:
                await client.ping(timeout_s=1.0)
                await done.wait()

    run_virtual(check)


def test_a_layer_of_verbs_is_one_user_call() -> None:
    """The retry budget gets one deposit for a verb, not another one for what its layer asks below."""

    async def check() -> None:
        async with stack(MemoryTransport(), [VerbsOnly, *default_layers()]) as client:
            deposits: list[float] = []
            client.env.budget = SimpleNamespace(deposit=deposits.append)  # type: ignore[assignment]
            await client.ping()
            assert len(deposits) == 1

    run_virtual(check)


# --- names that are kept for one version


@pytest.mark.anyio
async def test_verbs_of_a_transport_work_and_say_what_to_use() -> None:
    """For one version: a transport or a layer has the verbs, with a DeprecationWarning."""
    for make in (MemoryTransport, lambda: Layer(MemoryTransport())):
        service: Any = make()
        with pytest.warns(DeprecationWarning, match=r"use stack\(\.\.\.\), or Client\(\.\.\.\)"):
            await use(service)
        async with service as same:
            assert same is service
        with pytest.raises(DataPlaneClosed), pytest.warns(DeprecationWarning, match="ping"):
            await service.ping()
    assert not hasattr(MemoryTransport(), "no_such_verb")


@pytest.mark.anyio
async def test_a_transport_that_derives_from_transport_works() -> None:
    """For one version: its sample calls are made of its own slot calls; it is warned where it is defined."""
    with pytest.warns(DeprecationWarning, match="asyncdp.Transport is kept"):
        base = asyncdp.Transport
    with pytest.warns(DeprecationWarning, match="Theirs derives from Transport: derive from asyncdp.Service"):

        class Theirs(base):  # type: ignore[misc,valid-type]
            closed = 0

            @handles(TryPartition)
            async def there(self, call: Any, ctx: Any) -> bool:
                return True

            @handles(Ping)
            async def answer(self, call: Any, ctx: Any) -> None:
                return None

            async def on_close(self) -> None:
                self.closed += 1

    theirs = Theirs()
    async with stack(theirs) as client:
        await client.ping()
        await client.wait_partition("p")
        with pytest.raises(DataPlaneUnsupported, match="Locate"):
            await client.get_samples(["a"], "p", ["x"])
    assert theirs.closed == 1


def test_what_had_verbs_is_a_base_client() -> None:
    """For one version: isinstance(x, BaseClient) of clients, layers and transports; the layer by its old name."""
    with pytest.warns(DeprecationWarning, match="asyncdp.Settle is kept"):
        assert asyncdp.Settle is asyncdp.Reconcile
    with pytest.warns(DeprecationWarning, match="asyncdp.BaseClient is kept"):
        base = asyncdp.BaseClient
    transport = MemoryTransport()
    assert all(isinstance(one, base) for one in (stack(transport), Layer(transport), transport, Service()))
    assert not isinstance(object(), base)
