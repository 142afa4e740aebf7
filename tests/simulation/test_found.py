"""What the simulator found: each fault by itself, small."""

import random
from typing import Any

import anyio
import pytest
import torch

from asyncdp import ClaimNotReady, Client, Layer, MemoryTransport, PartialReadError, stack
from asyncdp.calls import Call, CallContext, ClearSamples
from asyncdp.calls.slots import ReadSlots, TryClaim
from asyncdp.errors import StaleSlotError
from asyncdp.factory import default_layers
from asyncdp.testing import run_virtual

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Late(Layer):
    """Keeps the first request of a kind on its way, fails it, and delivers it when told."""

    def __init__(self, inner: Client, kind: type[Call[Any]]) -> None:
        super().__init__(inner)
        self.kind = kind
        self.held: tuple[Any, CallContext] | None = None
        self.seen: list[Any] = []

    async def execute(self, call: Any, ctx: CallContext) -> Any:
        """Hold the first back."""
        if type(call) is self.kind:
            self.seen.append(call)
            if self.held is None:
                self.held = (call, ctx)
                await anyio.sleep(0.01)
                raise ConnectionResetError
        return await self.inner.execute(call, ctx)

    async def deliver(self) -> Any:
        """Let it arrive."""
        assert self.held is not None
        return await self.inner.execute(*self.held)


def client_of(transport: MemoryTransport, kind: type[Call[Any]]) -> tuple[Client, Late]:
    """Make a client whose first request of a kind is late."""
    late: list[Late] = []

    def layer(inner: Client) -> Late:
        late.append(Late(inner, kind))
        return late[0]

    return stack(transport, [*default_layers(), layer], rng=random.Random(1)), late[0]


@BACKENDS
def test_a_late_clear_that_found_nothing_the_first_time_removes_nothing(backend: str) -> None:
    """A clear sent twice whose second request found nothing is over: the first, late, spares what was put since."""

    async def main() -> None:
        client, late = client_of(MemoryTransport(), ClearSamples)
        await client.register_partition("p", ["x"], 1, [])
        await client.clear_samples(["a"], "p")
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        await late.deliver()
        assert (await client.get_samples(["a"], "p", ["x"]))["x"].tolist() == [1.0]
        await client.close()

    run_virtual(main, backend)


@BACKENDS
@pytest.mark.parametrize("blocking", [True, False])
def test_a_late_look_claims_nothing_for_nobody(backend: str, *, blocking: bool) -> None:
    """A look that failed, was asked again and found nothing, and then arrives: what it claims is given back."""

    async def main() -> None:
        owner = Client(MemoryTransport())
        client, late = client_of(MemoryTransport(owner.attach_config(), bootstrap=False), TryClaim)
        await owner.register_partition("p", ["x"], 1, ["t"])
        if blocking:
            with pytest.raises(ClaimNotReady):
                await client.claim_meta("p", "t", ["x"], 1, timeout_s=0.5)
        else:
            assert not (await client.claim_meta("p", "t", ["x"], 1, blocking=False)).size
        await owner.put_samples(["a"], "p", {"x": torch.ones(1)})
        assert (await late.deliver()).meta.sample_ids == ["a"]
        assert (await client.claim_meta("p", "t", ["x"], 1, timeout_s=1.0)).sample_ids == ["a"]
        await client.close()
        await owner.close()

    run_virtual(main, backend)


@BACKENDS
def test_a_slot_that_is_gone_is_asked_once_though_its_rows_share_another(backend: str) -> None:
    """Rows whose slot is gone are not asked for there again because their other slot holds rows that were well."""

    async def main() -> None:
        transport = MemoryTransport()
        client, late = client_of(transport, ReadSlots)
        late.held = (None, None)  # type: ignore[assignment] # nothing is late, it only watches
        await client.register_partition("p", ["x", "y"], 4, [])
        ids = ["a", "b", "c", "d"]
        await client.put_samples(ids[:2], "p", {"x": torch.ones(2)})
        (first,) = (host for host in transport.plane.hosts.values() if host.rows)
        transport.plane.hosts[first.id].crash()
        await client.put_samples(ids[2:], "p", {"x": torch.ones(2)})
        await client.put_samples(ids, "p", {"y": torch.ones(4)})
        first.restart(adopt=False)
        with pytest.raises(PartialReadError) as caught:
            await client.get_samples(ids, "p", ["x", "y"])
        assert {at: type(err) for at, err in caught.value.errors.items()} == {0: StaleSlotError, 1: StaleSlotError}
        assert len([call for call in late.seen if call.host.id == first.id]) == 1
        await client.close()

    run_virtual(main, backend)
