"""Clients that somebody else wrote, with the verbs only, sync or async, work under the stack."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from tensordict import TensorDict

from asyncdp import (
    Adapter,
    DataPlaneError,
    DataPlaneGroupMeta,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
    KVBatchMeta,
    MemoryTransport,
    Metrics,
    RowHandle,
    SlotMapping,
    StaleSlotError,
    stack,
    write_columns,
)
from asyncdp.service import layers_of
from asyncdp.testing.contract.same import check_same

pytestmark = pytest.mark.anyio


class Shelf:
    """A dict of rows: what both clients keep."""

    def __init__(self) -> None:
        """Begin empty."""
        self.rows: dict[str, torch.Tensor] = {}
        self.claimed: set[str] = set()
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.fail: list[Exception] = []
        self.closed = 0
        #: A slow call waits for it.
        self.turned = threading.Event()
        self.turned.set()

    def note(self, verb: str) -> None:
        """Note a call; fail if told so."""
        self.calls.append(verb)
        self.threads.add(threading.get_ident())
        if self.fail:
            raise self.fail.pop()

    def put(self, sample_ids: list[str], fields: Any) -> Any:
        """Keep rows."""
        self.note("put_samples")
        self.rows.update(zip(sample_ids, fields["x"], strict=True))
        return SimpleNamespace(partition_id="p", sample_ids=sample_ids, fields=["x"])

    def get(self, sample_ids: list[str], select_fields: list[str]) -> TensorDict:
        """Return the rows that are there; silently fewer, as some do."""
        self.note("get_samples")
        found = [self.rows[i] for i in sample_ids if i in self.rows]
        return TensorDict({name: torch.stack(found) for name in select_fields}, batch_size=[len(found)])

    def claim(self, batch_size: int) -> Any:
        """Return rows that nobody claimed."""
        self.note("claim_meta")
        ids = [i for i in self.rows if i not in self.claimed][:batch_size]
        self.claimed.update(ids)
        return SimpleNamespace(
            partition_id="p", task_name="train", sample_ids=ids, fields=["x"], tags=[{"k": i} for i in ids]
        )


class SyncClient:
    """Blocking, without timeouts, with few verbs."""

    def __init__(self) -> None:
        """Keep a shelf."""
        self.shelf = Shelf()

    def register_partition(
        self, partition_id: str, fields: Any, num_samples: int, consumer_tasks: Any, grpo_group_size: Any, enums: Any
    ) -> None:
        """Take note."""
        self.shelf.note("register_partition")

    def put_samples(self, sample_ids: Any, partition_id: str, fields: Any = None, tags: Any = None) -> Any:
        """Put."""
        return self.shelf.put(sample_ids, fields)

    def get_samples(self, sample_ids: Any, partition_id: str, select_fields: Any) -> Any:
        """Get, slowly."""
        time.sleep(0.01)
        self.shelf.turned.wait(5)
        return self.shelf.get(sample_ids, select_fields)

    def claim_meta(
        self, partition_id: str, task_name: str, required_fields: Any, batch_size: int, *, blocking: bool = True
    ) -> Any:
        """Claim."""
        return self.shelf.claim(batch_size)

    def clear_samples(self, sample_ids: Any, partition_id: str) -> None:
        """Clear."""
        self.shelf.note("clear_samples")
        for i in sample_ids:
            self.shelf.rows.pop(i, None)

    def close(self) -> None:
        """Close."""
        self.shelf.closed += 1


class AsyncClient:
    """The same, async."""

    def __init__(self) -> None:
        """Keep a shelf."""
        self.shelf = Shelf()

    async def register_partition(
        self, partition_id: str, fields: Any, num_samples: int, consumer_tasks: Any, grpo_group_size: Any, enums: Any
    ) -> None:
        """Take note."""
        self.shelf.note("register_partition")

    async def put_samples(self, sample_ids: Any, partition_id: str, fields: Any = None, tags: Any = None) -> Any:
        """Put."""
        return self.shelf.put(sample_ids, fields)

    async def get_samples(self, sample_ids: Any, partition_id: str, select_fields: Any) -> Any:
        """Get, slowly."""
        await anyio.sleep(0.01)
        while not self.shelf.turned.is_set():  # noqa: ASYNC110 - the event is one of threads, for both clients
            await anyio.sleep(0.001)
        return self.shelf.get(sample_ids, select_fields)

    async def claim_meta(
        self, partition_id: str, task_name: str, required_fields: Any, batch_size: int, *, blocking: bool = True
    ) -> Any:
        """Claim."""
        return self.shelf.claim(batch_size)

    async def clear_samples(self, sample_ids: Any, partition_id: str) -> None:
        """Clear."""
        self.shelf.note("clear_samples")
        for i in sample_ids:
            self.shelf.rows.pop(i, None)

    async def close(self) -> None:
        """Close."""
        self.shelf.closed += 1


@pytest.fixture(params=[SyncClient, AsyncClient], ids=["sync", "async"])
def theirs(request: pytest.FixtureRequest) -> Any:
    """Give a client of somebody else's."""
    return request.param()


async def test_a_clients_verbs_are_enough(theirs: Any) -> None:
    """Put, get, claim, get_data, pop, close through the default stack; Adapter is put around it without being asked."""
    async with stack(theirs, backoff_base_s=0.001) as client:
        await client.register_partition("p", ["x"], 2, ["train"])
        meta = await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)}, [{}, {}])
        assert (meta.partition_id, meta.sample_ids) == ("p", ["a", "b"])
        check_same((await client.get_samples(["b", "a"], "p", ["x"]))["x"], torch.tensor([1, 0]))
        claimed = await client.claim_meta("p", "train", ["x"], 1)
        assert (claimed.sample_ids, claimed.task_name, claimed.tags) == (["a"], "train", [{"k": "a"}])
        check_same((await client.get_data(claimed))["x"], torch.tensor([0]))
        await client.pop(claimed, "p")
        assert list(theirs.shelf.rows) == ["b"]
        kinds = [type(layer) for layer in layers_of(client)]
        assert kinds[0] is Metrics
        assert kinds[-1] is Adapter
        assert SlotMapping not in kinds
        assert client.snapshot()["ops"]["put"] == {"ok": 1}  # type: ignore[attr-defined]
    assert theirs.shelf.closed == 1


async def test_sync_verbs_run_in_threads(theirs: Any) -> None:
    """A blocking client does not block the loop: calls of others go on meanwhile."""
    client = stack(theirs)
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    in_loop = threading.get_ident() in theirs.shelf.threads
    assert in_loop == isinstance(theirs, AsyncClient)
    turned = theirs.shelf.turned

    async with anyio.create_task_group() as group:

        async def turn() -> None:
            for _ in range(3):
                await anyio.sleep(0.001)
            turned.set()

        turned.clear()
        group.start_soon(turn)
        await client.get_samples(["a"], "p", ["x"])  # returns once the loop has turned, or after a long while
        assert turned.is_set()
    await client.close()


async def test_what_a_client_raises_is_typed_and_retried_where_it_may_be(theirs: Any) -> None:
    """A refused connection is tried again; an error that nobody knows is not, and keeps its cause."""
    client = stack(theirs, backoff_base_s=0.001, round_backoff_base_s=0.001)
    theirs.shelf.fail = [ConnectionRefusedError("no")]
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    assert theirs.shelf.calls == ["put_samples"] * 2
    theirs.shelf.fail = [RuntimeError("odd")]
    with pytest.raises(DataPlaneReadError, match="odd") as caught:
        await client.get_samples(["a"], "p", ["x"])
    assert isinstance(caught.value.__cause__, RuntimeError)
    theirs.shelf.fail = [ConnectionRefusedError("no") for _ in range(99)]
    with pytest.raises(DataPlaneUnavailable):
        await client.get_samples(["a"], "p", ["x"])
    theirs.shelf.fail = []
    await client.close()


async def test_a_put_that_may_have_arrived_is_sent_again_if_nothing_else_touched_it(theirs: Any) -> None:
    """Without op_ids: a reset is ambiguous; alone, the put is sent again."""
    client = stack(theirs, backoff_base_s=0.001)
    theirs.shelf.fail = [ConnectionResetError("gone")]
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    assert theirs.shelf.calls == ["put_samples"] * 2
    await client.close()


async def test_a_put_that_may_have_arrived_is_not_sent_again_over_another() -> None:
    """Without op_ids: another put of this client on the same id began meanwhile: ambiguous goes up."""

    class Late(AsyncClient):
        async def put_samples(self, sample_ids: Any, partition_id: str, fields: Any = None, tags: Any = None) -> Any:
            if not self.shelf.calls:
                self.shelf.note("put_samples")
                await other()
                raise ConnectionResetError("gone")
            return self.shelf.put(sample_ids, fields)

    late = Late()
    client = stack(late, backoff_base_s=0.001)

    async def other() -> None:
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})

    with pytest.raises(DataPlaneUnavailable) as caught:
        await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    assert caught.value.ambiguous
    assert float(late.shelf.rows["a"]) == 1.0
    await client.close()


async def test_a_short_answer_is_an_error(theirs: Any) -> None:
    """Promise 2 holds for clients that silently return fewer rows."""
    client = stack(theirs)
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    with pytest.raises(DataPlaneReadError, match="1 rows came"):
        await client.get_samples(["a", "nobody"], "p", ["x"])
    await client.close()


async def test_missing_verbs_are_unsupported_by_name(theirs: Any) -> None:
    """What the client cannot do is DataPlaneUnsupported, naming the verb; pop and evict fall back to clear."""
    client = stack(theirs)
    for name, args in (("depth", ["p"]), ("list_metadata", ["p"]), ("list_claims", ["p", "train"]), ("ping", [])):
        with pytest.raises(DataPlaneUnsupported, match=name) as caught:
            await getattr(client, name)(*args)
        assert caught.value.capability == name
        assert caught.value.op == name
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    await client.evict(["a"], "p")
    assert theirs.shelf.rows == {}
    assert not any(vars_of(client.get_capabilities()).values())
    await client.close()


def vars_of(capabilities: Any) -> dict[str, bool]:
    """Return capabilities as a dict."""
    return {name: getattr(capabilities, name) for name in capabilities.__dataclass_fields__}


async def test_a_client_without_timeouts_is_bounded(theirs: Any) -> None:
    """Promise 10 holds for clients whose verbs know no timeout; a thread that hangs is left behind."""
    release = threading.Event()

    class Slow(type(theirs)):  # type: ignore[misc]
        if isinstance(theirs, SyncClient):

            def get_samples(self, *args: Any) -> Any:
                release.wait(5)

        else:

            async def get_samples(self, *args: Any) -> Any:
                await anyio.sleep(60)

    client = stack(Slow())
    began = time.monotonic()
    with pytest.raises(DataPlaneTimeout):
        await client.get_samples(["a"], "p", ["x"], timeout_s=0.1)
    assert time.monotonic() - began < 50  # what it waits for takes a minute
    release.set()
    await client.close()


async def test_a_timeout_is_passed_to_verbs_that_take_one() -> None:
    """timeout_s, the time left, where the signature has it; not where it has not."""
    seen: list[float] = []

    class Timed(AsyncClient):
        async def get_samples(self, sample_ids: Any, partition_id: str, select_fields: Any, *, timeout_s: float) -> Any:
            seen.append(timeout_s)
            return self.shelf.get(sample_ids, select_fields)

    client = stack(Timed())
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    await client.get_samples(["a"], "p", ["x"], timeout_s=3)
    assert 2.5 < seen[0] <= 3
    await client.close()


async def test_a_client_of_ours_may_stand_in_as_theirs() -> None:
    """The verbs of one stack, wrapped as a stranger's client, serve another stack."""
    inner = stack(MemoryTransport())
    verbs = (
        *("register_partition", "put_samples", "get_samples", "get_data", "claim_meta", "depth", "pop", "close"),
        "get_capabilities",
    )
    stranger = SimpleNamespace(**{name: getattr(inner, name) for name in verbs})
    async with stack(stranger, backoff_base_s=0.001, round_backoff_base_s=0.001) as client:
        await client.register_partition("p", ["x"], 2, ["train"])
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)}, [{"k": 1}, {"k": 2}])
        meta = await client.claim_meta("p", "train", ["x"], 2, timeout_s=5)
        check_same((await client.get_data(meta))["x"], torch.arange(2))
        assert await client.depth("p") == 2
        with pytest.raises(DataPlaneError):
            await client.get_samples(["a", "nobody"], "p", ["x"])
        await client.pop(meta, "p")
        assert await client.depth("p") == 0


@pytest.mark.parametrize("bound", ["by meta", "only existing", "only new", "removal", "by group", "columns"])
async def test_what_a_client_cannot_bind_to_lives_is_never_done_unbound(bound: str) -> None:
    """3a: a client without bound_mutations gets no put by meta and no bound removal: DataPlaneUnsupported, not sent."""
    async with stack(SyncClient()) as client:
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        meta = KVBatchMeta("p", sample_ids=["a"], handles=[RowHandle(1)])
        group = DataPlaneGroupMeta(
            "p", "g", ("a",), None, 0.0, committed=True, expected_num_keys=1, size_bytes=4, tags=({},)
        )
        x = {"x": torch.zeros(1)}
        inner = list(layers_of(client))[-1]
        assert isinstance(inner, Adapter)
        before = list(inner.client.shelf.calls)
        call = {
            "by meta": lambda: client.put_samples(KVBatchMeta("p", sample_ids=["a"]), "p", x),
            "only existing": lambda: client.put_samples(["a"], "p", x, only="existing"),
            "only new": lambda: client.put_samples(["b"], "p", x, only="new"),
            "removal": lambda: client.clear_samples(meta, "p"),
            "by group": lambda: client.evict(group, "p"),
            "columns": lambda: write_columns(client, meta, x),
        }[bound]
        with pytest.raises(DataPlaneUnsupported) as caught:
            await call()
        assert caught.value.capability == "bound_mutations"
        assert inner.client.shelf.calls == before


async def test_a_client_that_binds_gets_the_meta() -> None:
    """3a: a stranger whose capabilities say bound_mutations is given lives and claims, and its errors come back."""
    inner = stack(MemoryTransport())
    verbs = (
        "register_partition",
        "put_samples",
        "claim_meta",
        "evict",
        "pop",
        "get_capabilities",
        "list_metadata",
        "close",
    )
    stranger = SimpleNamespace(**{name: getattr(inner, name) for name in verbs})
    async with stack(stranger) as client:
        await client.register_partition("p", ["x"], 2, ["train"])
        await client.put_samples(["a", "b", "c"], "p", {"x": torch.arange(3.0)})
        meta = await client.claim_meta("p", "train", ["x"], 3)
        await inner.evict(["a"], "p")
        await inner.put_samples(["a"], "p", {"x": torch.zeros(1)})
        with pytest.raises(StaleSlotError) as caught:
            await client.put_samples(meta, "p", {"x": torch.zeros(3)})
        assert caught.value.sample_ids == ("a",)
        done = await client.put_samples(meta, "p", {"x": torch.zeros(3)}, stale="skip")
        assert (done.sample_ids, done.task_name) == (["b", "c"], "train")
        await client.pop(meta, "p")
        assert [group.keys for group in await client.list_metadata("p")] == [("a",)]
