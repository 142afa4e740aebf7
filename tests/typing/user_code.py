"""U16: a user's own layer, transport and calls, as mypy --strict and pyright's strict mode see them."""

from typing import TYPE_CHECKING, assert_type

from tensordict import TensorDict

from asyncdp import (
    Client,
    DataPlaneClient,
    DataPlaneConfig,
    DataPlaneError,
    KVBatchMeta,
    Layer,
    MemoryTransport,
    Metrics,
    PartialReadError,
    Service,
    TQTransport,
    UCXXTransport,
    build_data_plane_client,
    default_layers,
    stack,
)
from asyncdp.calls import CallContext, Depth, GetSamples, Ping, PutSamples, handles
from asyncdp.metrics.snapshot import Snapshot
from asyncdp.service import layers_of

MEMORY: DataPlaneConfig = {"enabled": True, "impl": "memory"}


class CountPuts(Layer):
    """The layer of the README."""

    puts = 0

    @handles(PutSamples)
    async def count(self, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
        """Count, and pass on."""
        self.puts += len(call.sample_ids)
        return await self.inner.execute(call, ctx)


class Own(Service):
    """A transport of a user's own."""

    @handles(Ping)
    async def ping_it(self, call: Ping, ctx: CallContext) -> None:
        """Answer."""
        del call, ctx

    @handles(Depth)
    async def count_groups(self, call: Depth, ctx: CallContext) -> int:
        """Answer with a number."""
        del ctx
        return len(call.partition_id)


class Controller:
    """What keeps a client as an attribute."""

    def __init__(self, plane: DataPlaneClient) -> None:
        """Keep it, by its protocol."""
        self.plane = plane

    async def step(self) -> list[str]:
        """Read metadata, evict what is old."""
        groups = await self.plane.list_metadata("rollouts")
        old = [key for group in groups if (group.weight_version or 0) < 3 for key in group.keys]
        await self.plane.evict(old, "rollouts")
        return old


async def use(ctx: CallContext) -> None:
    """The result type of a call follows from its class."""
    client = stack(MemoryTransport(), [CountPuts, *default_layers()])
    assert_type(client, Client)
    protocol: DataPlaneClient = client
    assert_type(await protocol.depth("p"), int)
    assert_type(await client.execute(Depth("p"), ctx), int)
    assert_type(await client.execute(GetSamples(("a",), "p", ("x",)), ctx), TensorDict)
    assert_type(await client.get_samples(["a"], "p", ["x"]), TensorDict)
    async for meta, data in client.batches("p", "t", ["x"], 4):
        assert_type(meta, KVBatchMeta)
        assert_type(data, TensorDict)
        assert_type(await protocol.put_samples(meta, "p", data, stale="skip"), KVBatchMeta)
        await protocol.pop(meta, "p")
    for group in await protocol.list_metadata("p"):
        await protocol.evict(group, "p")


async def open_and_close(own: Own) -> None:
    """A plane is left as it was opened: by `async with`, as a client or by its protocol."""
    async with build_data_plane_client(MEMORY, layers=[CountPuts]) as client:
        assert_type(client, Client)
        await Controller(client).step()
        attached: DataPlaneClient = build_data_plane_client(client.attach_config(), bootstrap=False)
        async with attached as mate:
            assert_type(await mate.depth("p"), int)
            try:
                await mate.get_samples(["a"], "p", ["x"], timeout_s=1.0)
            except PartialReadError as err:
                assert_type(err.rows, TensorDict)
                assert_type(err.ok, KVBatchMeta)
            except DataPlaneError as err:
                assert_type(err.retryable, bool)
        assert_type(client.snapshot(), Snapshot)
    for layer in layers_of(client):
        if isinstance(layer, Metrics):
            assert_type(layer.snapshot(), Snapshot)
    async with stack(own) as mine:
        await mine.ping()


def transports() -> list[Service]:
    """All of ours are services, and take a config."""
    return [MemoryTransport(MEMORY), TQTransport(MEMORY), UCXXTransport(MEMORY, bootstrap=False)]


if TYPE_CHECKING:

    async def refuse(client: Client, ctx: CallContext) -> None:
        """A wrong result type is refused (warn_unused_ignores makes this a test)."""
        wrong: str = await client.execute(Depth("p"), ctx)  # type: ignore[arg-type]
        del wrong
