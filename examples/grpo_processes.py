"""The example with each role in a process of its own: ``asyncdp demo --transport transfer_queue``, or ``ucxx``.

The roles are those of the memory demo, unchanged. What is here starts the plane and their processes, writes down what
they tell, and closes the account. Beside the files that async_grpo names, read

    grpo_role     what happens in the process of a role
    grpo_crew     starting, hearing and ending them
    grpo_chaos    killing some of them, and a part of the plane
"""

from __future__ import annotations

import importlib
import json
import logging
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.examples.async_grpo import GRACE_S, DemoConfig, Report, View, time_is_up
from asyncdp.examples.grpo_account import Account
from asyncdp.examples.grpo_chaos import strike
from asyncdp.examples.grpo_controller import SingleController
from asyncdp.examples.grpo_crew import Crew
from asyncdp.examples.grpo_plane import register, start
from asyncdp.examples.grpo_progress import Progress
from asyncdp.process.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from asyncdp import Client

__all__ = ["ray_for_the_plane", "run"]

START_S = 90.0
"""Seconds that the processes may take to start: each imports torch, and they share the cores."""
LOOPBACK = "127.0.0.2"
"""Where Ray and the plane listen: out of reach from elsewhere. For 127.0.0.1 Ray takes the address of the network."""
RAY_MEMORY = 75 << 20
"""Bytes of Ray's object store, the least it takes: samples do not go through it."""


async def run(config: DemoConfig, view: View | None = None, config_file: Path | None = None) -> Report:
    """Start the plane and the processes, train, end all of them, and close the account.

    Args:
        config: Of the run.
        view: Shows it to a person.
        config_file: Where to write what clients attach with, private to its owner; it stays when the run has ended.

    Raises:
        TimeoutError: It did not come to an end.
        RuntimeError: A process ended that nobody had told to.
    """
    with ray_for_the_plane() if config.transport == "transfer_queue" else nullcontext():
        async with start(config, "driver", None) as plane:
            if config_file is not None:
                write_private(config_file, json.dumps(plane.attach_config(), indent=2) + "\n")
            return await _run(config, view, plane)


async def _run(config: DemoConfig, view: View | None, plane: Client) -> Report:
    account, progress, stop = Account(), Progress(), anyio.Event()
    progress.clients["driver"] = plane
    with Crew(config, plane.attach_config(), account, progress) as crew:
        with anyio.fail_after(START_S):
            await register(plane, config)
            await crew.gather()
        progress.began = time.monotonic()
        with anyio.fail_after(2 * config.seconds + GRACE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(crew.perform, stop)
                if view is not None:
                    tasks.start_soon(view.show, progress, account, stop)
                if config.chaos:
                    tasks.start_soon(strike, crew, plane, stop)
                await time_is_up(config, progress, stop)
                stop.set()
            # All processes have ended: nothing is under way, and nobody trains on what is evicted here.
            end = SingleController(plane, config, account, progress)
            await end.evict_lost()
            balance = account.balance(await end.left())
            progress.ended()
    return Report(config, balance, progress, account.evicted_by_reason, account.puts)


@contextmanager
def ray_for_the_plane() -> Generator[None]:
    """Run a small Ray for the plane, unless this process is connected to one already."""
    from asyncdp.process.ray_niceness import workers_not_niced

    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        yield
        return
    with workers_not_niced():
        ray.init(
            "local",  # one of our own, whatever else runs on this machine
            num_cpus=3,  # one per actor: the controller and two storage units
            object_store_memory=RAY_MEMORY,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,  # that an actor was killed is known here
            _node_ip_address=LOOPBACK,
        )
    try:
        yield
    finally:
        ray.shutdown()
