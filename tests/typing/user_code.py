"""A user's own layer and calls, as mypy --strict sees them."""

from typing import TYPE_CHECKING, assert_type

from tensordict import TensorDict

from asyncdp import (
    BaseClient,
    CallContext,
    DataPlaneClient,
    Depth,
    GetSamples,
    KVBatchMeta,
    Layer,
    MemoryTransport,
    PutSamples,
    default_layers,
    handles,
    stack,
)


class CountPuts(Layer):
    """The layer of the README."""

    puts = 0

    @handles(PutSamples)
    async def count(self, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
        """Count, and pass on."""
        self.puts += len(call.sample_ids)
        return await self.inner.execute(call, ctx)


async def use(ctx: CallContext) -> None:
    """The result type of a call follows from its class."""
    client = stack(MemoryTransport(), [CountPuts, *default_layers()])
    assert_type(client, BaseClient)
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


if TYPE_CHECKING:

    async def refuse(client: BaseClient, ctx: CallContext) -> None:
        """A wrong result type is refused (warn_unused_ignores makes this a test)."""
        wrong: str = await client.execute(Depth("p"), ctx)  # type: ignore[arg-type]
        del wrong
