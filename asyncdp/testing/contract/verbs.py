"""Calls of every verb of a client, for partition ``p`` and the sample ``a``, which task ``train`` has claimed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import torch

from asyncdp import KVBatchMeta, RowHandle

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["MUTATIONS", "VERBS"]

#: {verb: call(client, timeout_s)}
VERBS: dict[str, Callable[[Client, float], Awaitable[Any]]] = {
    "register_partition": lambda c, t: c.register_partition("p", ["y"], 1, ["train"], timeout_s=t),
    "claim_meta": lambda c, t: c.claim_meta("p", "train", ["x"], 1, timeout_s=t),
    "get_data": lambda c, t: c.get_data(KVBatchMeta("p", sample_ids=["a"]), ["x"], timeout_s=t),
    "check_consumption_status": lambda c, t: c.check_consumption_status("p", ["train"], timeout_s=t),
    "put_samples": lambda c, t: c.put_samples(["b"], "p", {"x": torch.zeros(1)}, timeout_s=t),
    "get_samples": lambda c, t: c.get_samples(["a"], "p", ["x"], timeout_s=t),
    "clear_samples": lambda c, t: c.clear_samples(["c"], "p", timeout_s=t),
    "ping": lambda c, t: c.ping(timeout_s=t),
    "list_metadata": lambda c, t: c.list_metadata("p", timeout_s=t),
    "depth": lambda c, t: c.depth("p", timeout_s=t),
    "pop": lambda c, t: c.pop(["c"], "p", timeout_s=t),
    "evict": lambda c, t: c.evict(["c"], "p", timeout_s=t),
    "release_claim": lambda c, t: c.release_claim(
        KVBatchMeta("p", "train", ["a"], handles=[RowHandle(1, "claim")]), timeout_s=t
    ),
    "list_claims": lambda c, t: c.list_claims("p", "train", timeout_s=t),
    "release_claims": lambda c, t: c.release_claims("p", "nobody", timeout_s=t),
    "list_hosts": lambda c, t: c.list_hosts(timeout_s=t),
    "list_partitions": lambda c, t: c.list_partitions(timeout_s=t),
    "describe": lambda c, t: c.describe("p", timeout_s=t),
    "drop_partition": lambda c, t: c.drop_partition("q", timeout_s=t),
    "wait_partition": lambda c, t: c.wait_partition("p", timeout_s=t),
}
#: Verbs that change the plane, so that a lost answer makes them ambiguous.
MUTATIONS = frozenset(
    {
        "register_partition",
        "claim_meta",
        "clear_samples",
        "pop",
        "evict",
        "release_claim",
        "release_claims",
        "drop_partition",
    }
)
