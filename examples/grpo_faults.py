"""The faults that the example lives through: every kind that asyncdp.testing can inject, each a few times.

Some come at random, and some at a set part of the run: a port that is dead for a while, a silent one, a host cut off
from the network, one that crashes and returns empty. These need hosts that can be controlled from here; a plane of
processes has its own ways to die, see grpo_chaos.
"""

from __future__ import annotations

from asyncdp.testing import FaultPlan

__all__ = ["fault_plan"]


def fault_plan(seed: int, seconds: float, *, memory: bool = True) -> FaultPlan:
    """Make the plan of a run that lasts some ``seconds``. The seed chooses which requests are hit.

    Args:
        seed: Of the plan.
        seconds: How long the run lasts.
        memory: Whether it is for the memory transport: others have no checksum to notice a flipped bit by, and no hosts
            that can be controlled from here.
    """
    plan = FaultPlan(seed)

    # Single requests. Retries and other ports cure these; the trainer does not notice.
    plan.on().refuse(p=0.003)
    plan.on().reset(p=0.003)
    plan.on().delay(p50_s=0.01, p99_s=0.1, p=0.01)
    plan.on().error("OSError", "injected: no buffer space available", p=0.001)
    plan.on("put_samples").not_ready(0.02, p=0.01)

    # Lost requests and replies of what changes something: was it done or not? An op_id tells, so that the request can
    # be sent again and is done once all the same. Then, for a moment, no put is answered at all, however often it is
    # sent: its producer has to live without knowing.
    for verb in ("put_samples", "claim_meta", "pop", "evict"):
        plan.lose_request(verb, p=0.01)
        plan.lose_reply(verb, p=0.02)
    plan.lose_reply("claim_meta", raises=None, p=0.002)  # silence: only a timeout ends it
    plan.lose_reply("put_samples", at_s=0.80 * seconds, for_s=0.03 * seconds)

    # Payloads. Damage is noticed by length, schema or checksum and read again; what moved is looked up again; a slot
    # that is stale has lost its data, and the group goes.
    if memory:
        plan.corrupt(p=0.01)
    plan.corrupt(schema=True, p=0.003)
    plan.truncate(p=0.01)
    if memory:
        plan.recycle(how="moved", p=0.005)
    plan.on("get_data").stale(p=0.01)
    if not memory:
        return plan

    # Ports: one is dead, one accepts and never answers. Both are quarantined, and back when they work.
    plan.on(host="host-0", port=2).refuse(at_s=0.10 * seconds, for_s=0.25 * seconds)
    plan.on(host="host-1", port=5).silent(at_s=0.20 * seconds, for_s=0.25 * seconds)

    # Hosts: one is cut off for a moment, one crashes and comes back in a new epoch, without the rows it held.
    plan.cut("host-1", at_s=0.50 * seconds, for_s=0.03 * seconds)
    plan.crash_host("host-2", at_s=0.65 * seconds, restart_at_s=0.70 * seconds, adopt=False)
    return plan
