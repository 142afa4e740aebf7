"""A user's synchronous code with a blocking client, as mypy --strict and pyright's strict mode see it."""

from typing import TYPE_CHECKING, assert_type

from tensordict import TensorDict

from asyncdp import DataPlaneConfig, DataPlaneGroupMeta, KVBatchMeta
from asyncdp.blocking import BlockingClient, build_blocking_client

MEMORY: DataPlaneConfig = {"enabled": True, "impl": "memory"}


def use() -> None:
    """Verbs return what the async ones do, without await; arguments have the same names and defaults."""
    with build_blocking_client(MEMORY) as client:
        assert_type(client, BlockingClient)
        client.register_partition("p", ["x"], 4, ["train"], grpo_group_size=2)
        meta = client.claim_meta("p", "train", ["x"], 2, blocking=False, timeout_s=1.0)
        assert_type(meta, KVBatchMeta)
        assert_type(client.get_data(meta, select_fields=["x"]), TensorDict)
        assert_type(client.put_samples(meta, "p", {"y": [1.0]}, stale="skip"), KVBatchMeta)
        assert_type(client.depth("p"), int)
        assert_type(client.check_consumption_status("p", ["train"]), bool)
        assert_type(client.list_metadata("p"), list[DataPlaneGroupMeta])
        assert_type(client.ping(timeout_s=1.0), None)
        with client.batches("p", "train", ["x"], 2, prefetch=1) as batches:
            for batch, data in batches:
                assert_type(batch, KVBatchMeta)
                assert_type(data, TensorDict)
                client.pop(batch, "p")


if TYPE_CHECKING:

    def refuse(client: BlockingClient) -> None:
        """Wrong arguments are refused (warn_unused_ignores makes this a test)."""
        client.depth(3)  # type: ignore[arg-type]
        client.claim_meta("p", "train", ["x"])  # type: ignore[call-arg]
