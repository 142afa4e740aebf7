"""Asynchronous GRPO on a data plane: run it with ``asyncdp demo``.

Rollout workers sample with slightly old weights while the trainer trains; a SingleController watches and evicts what
got too old. They meet in the data plane only, each with a client of its own that attached by config. Here, on the
memory transport, all of them are tasks of one process; grpo_processes makes each a process. Read on in this order:

    grpo_plane       what lies in the plane, and how to connect to it
    grpo_worker      put_samples, depth, get_samples
    grpo_trainer     claim_meta, get_data, put_samples of one more field, pop, evict, release_claim
    grpo_controller  list_metadata, depth, evict: metadata only
    grpo_faults      what happens to them meanwhile
    grpo_account     what became of every sample
    policy           the learning itself, which knows of no data plane
    grpo_processes   the same roles as processes, on TransferQueue or UCXX; grpo_chaos kills some of them
"""

from __future__ import annotations

import logging
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import torch

from asyncdp.examples.grpo_account import Account, Balance
from asyncdp.examples.grpo_controller import SingleController
from asyncdp.examples.grpo_counts import count_events
from asyncdp.examples.grpo_faults import fault_plan
from asyncdp.examples.grpo_plane import DemoConfig, attach, register, start
from asyncdp.examples.grpo_progress import Progress
from asyncdp.examples.grpo_trainer import Trainer
from asyncdp.examples.grpo_worker import RolloutWorker
from asyncdp.examples.policy import make_task

__all__ = ["GRACE_S", "DemoConfig", "Report", "View", "be_small", "run", "time_is_up"]

GRACE_S = 120.0
"""Seconds that starting, finishing what is under way and closing the account may take on top of the training."""
CHECK_S = 0.25
"""Seconds between two looks at the reward, past the time."""
LEAST_GAIN = 0.1
"""How much the reward on held-out prompts has to rise: three times what it varies by chance."""
SWITCH_S = 0.001
"""Seconds between two switches of Python's threads: the event loop and the threads that sample and train share one
interpreter, and at the default of 5 ms each answer of the plane would wait that long for its turn."""


def be_small() -> None:
    """Fit this process to many small pieces of work."""
    torch.set_num_threads(1)  # the tensors are small: more threads would only wait for each other
    sys.setswitchinterval(SWITCH_S)
    # torch logs, once per process and from inside its own functions, that one of these will be renamed.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


class View(Protocol):
    """Shows a run to a person."""

    async def show(self, progress: Progress, account: Account, stop: anyio.Event) -> None:
        """Show the run until ``stop`` is set."""


@dataclass(frozen=True)
class Report:
    """What a run came to."""

    config: DemoConfig
    balance: Balance
    progress: Progress
    evicted_by_reason: dict[str, int]
    puts: dict[str, int]

    @property
    def reward_start(self) -> float:
        """Sampled reward on held-out prompts before training."""
        return self.progress.evaluations[0].value

    @property
    def reward_end(self) -> float:
        """The same after training."""
        return self.progress.evaluations[-1].value

    @property
    def rose(self) -> bool:
        """Whether training did something for the reward."""
        return self.reward_end >= self.reward_start + LEAST_GAIN

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        counts = self.progress.counts()
        return {
            "seed": self.config.seed,
            "transport": self.config.transport,
            **self.balance.as_dict(),
            "adds_up": self.balance.adds_up,
            "evicted_by_reason": self.evicted_by_reason,
            **self.puts,
            "reward_start": self.reward_start,
            "reward_end": self.reward_end,
            "steps": self.progress.steps,
            "elapsed_s": self.progress.elapsed_s(),
            "faults": dict(self.progress.faults),
            "retries": dict(count_events(counts, "retry", "reason")),
            "rotations": dict(count_events(counts, "rotation", "reason")),
            "rounds": dict(count_events(counts, "round", "reason")),
            "quarantines": dict(count_events(counts, "quarantine", "reason")),
            "settled": dict(count_events(counts, "settled", "state")),
            "chaos": self.progress.killed,
        }


async def run(config: DemoConfig, view: View | None = None) -> Report:
    """Train until time is up or the goal is reached, and close the account.

    Raises:
        TimeoutError: It did not come to an end.
    """
    with anyio.fail_after(2 * config.seconds + GRACE_S):
        return await _run(config, view)


async def _run(config: DemoConfig, view: View | None) -> Report:
    task, account, progress, stop = make_task(config.seed), Account(), Progress(), anyio.Event()
    plan = progress.plan = fault_plan(config.seed, config.seconds) if config.faults else None
    async with start(config, "controller", plan) as plane:
        await register(plane, config)
        progress.clients["controller"] = plane
        controller = SingleController(plane, config, account, progress)
        async with AsyncExitStack() as open_clients:
            for name in ("trainer", *(f"worker-{number}" for number in range(config.workers))):
                client = attach(plane.attach_config(), name, plan)
                progress.clients[name] = await open_clients.enter_async_context(client)
            trainer = Trainer(progress.clients["trainer"], config, task, account, progress)
            workers = [
                RolloutWorker(number, progress.clients[f"worker-{number}"], config, task, account)
                for number in range(config.workers)
            ]
            async with anyio.create_task_group() as roles:
                for role in (controller.run, trainer.run, *(worker.run for worker in workers)):
                    roles.start_soon(role, stop)
                if view is not None:
                    roles.start_soon(view.show, progress, account, stop)
                await time_is_up(config, progress, stop)
                stop.set()
        # The clients are closed: each has found out what became of what it sent, and nothing of theirs is under way.
        balance = account.balance(await controller.left())
        progress.ended()
    return Report(config, balance, progress, account.evicted_by_reason, account.puts)


async def time_is_up(config: DemoConfig, progress: Progress, stop: anyio.Event) -> None:
    """Wait until the run is to end; a machine that is busy otherwise gets as long again for a reward that is enough."""
    with anyio.move_on_after(config.seconds):
        await stop.wait()
    with anyio.move_on_after(config.seconds):
        while not stop.is_set() and progress.evaluations[-1].value < config.enough:
            with anyio.move_on_after(CHECK_S):
                await stop.wait()
