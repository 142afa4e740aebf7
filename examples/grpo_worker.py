"""A rollout worker: samples groups with its copy of the policy and puts them into the plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread
import torch

from asyncdp import DataPlaneNotReady
from asyncdp.examples.grpo_plane import FAULTS, POLICY, ROLLOUTS, WEIGHTS
from asyncdp.examples.policy import Policy, PolicyConfig, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp import Client
    from asyncdp.examples.grpo_account import Account
    from asyncdp.examples.grpo_plane import DemoConfig

__all__ = ["RolloutWorker"]


class _Samples(NamedTuple):
    """Samples of some groups, ready to be put."""

    sample_ids: list[str]
    fields: dict[str, torch.Tensor]
    tags: list[dict[str, Any]]


class RolloutWorker:
    """Samples and puts, some whole groups at a time, until told to stop.

    Args:
        number: Which worker this is; its sample ids begin with it.
        plane: A client of its own.
    """

    def __init__(self, number: int, plane: Client, config: DemoConfig, task: Task, account: Account) -> None:
        self.name = f"w{number}"
        self.plane = plane
        self.config = config
        self.task = task
        self.account = account
        self.policy = Policy(PolicyConfig(seed=config.seed))
        self.version = 0
        self._rng = torch.Generator().manual_seed(config.seed * 1000 + number)
        self._groups = 0

    async def run(self, stop: anyio.Event) -> None:
        """Work until ``stop`` is set; what is under way is finished, so that the account can be closed."""
        while not stop.is_set():
            await self._refresh()
            if await self._crowded():
                await anyio.sleep(0.05)
                continue
            await self._put(await anyio.to_thread.run_sync(self._roll_out), stop)

    async def _refresh(self) -> None:
        """Fetch the newest weights, if they are newer than ours."""
        try:
            there = await self.plane.list_metadata(WEIGHTS)
            if not there or there[0].weight_version == self.version:
                return
            row = await self.plane.get_samples([POLICY], WEIGHTS, [*self.policy.state(), "version"])
        except FAULTS:
            return  # older weights do as well; how old is for the controller to judge
        # The tag may be older than the row that came after it: what counts is the version inside.
        self.version = int(row["version"][0])
        self.policy.load_state({name: row[name][0] for name in self.policy.state()})

    async def _crowded(self) -> bool:
        """Whether the trainer has enough to do already."""
        try:
            return await self.plane.depth(ROLLOUTS) >= self.config.max_depth
        except FAULTS:
            return True  # not the moment to add more

    def _roll_out(self) -> _Samples:
        """Complete some prompts, group_size times each, and score them. Runs in a thread."""
        size = self.config.group_size
        prompts = self.task.prompts(self.config.groups_per_rollout, self._rng)
        rollouts = self.policy.sample(prompts, size, self._rng)
        rewards = [self.task.score(prompts[i // size], made) for i, made in enumerate(rollouts.completions())]
        groups = [f"{self.name}-{self._groups + number}" for number in range(len(prompts))]
        self._groups += len(prompts)
        return _Samples(
            sample_ids=[f"{group}_g{i}" for group in groups for i in range(size)],
            fields={
                # Rows of different lengths travel as one jagged tensor, without padding.
                "input_ids": _jagged(rollouts.input_ids),
                "logprobs": _jagged(rollouts.logprobs),
                "mask": _jagged(rollouts.mask),
                "rewards": torch.tensor(rewards),
            },
            tags=[
                {
                    "group_id": groups[i // size],
                    "weight_version": self.version,
                    "expected_num_keys": size,
                    "input_lengths": len(input_ids),
                }
                for i, input_ids in enumerate(rollouts.input_ids)
            ],
        )

    async def _put(self, samples: _Samples, stop: anyio.Event) -> None:
        """Put samples; wait where the plane is full, give them up where the put failed."""
        while not stop.is_set():
            self.account.unanswered(samples.sample_ids)  # until there is an answer, whatever becomes of this worker
            try:
                await self.plane.put_samples(samples.sample_ids, ROLLOUTS, samples.fields, samples.tags)
            except FAULTS as err:
                if err.ambiguous:
                    # They may have arrived. Putting them again could bring back what has been trained on and popped
                    # meanwhile, so leave it unanswered: if they are there, somebody will come across them.
                    return
                if isinstance(err, DataPlaneNotReady):
                    await anyio.sleep(err.retry_after_s or 0.1)  # nothing was written: the same samples again
                    continue
                break
            self.account.produced(samples.sample_ids)
            return
        self.account.given_up(samples.sample_ids)


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    nested: Any = torch.nested  # its functions have no types
    jagged: torch.Tensor = nested.nested_tensor(list(rows), layout=torch.jagged)
    return jagged
