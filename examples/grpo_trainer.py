"""The trainer: turns rewards into advantages, trains, removes what it trained on, hands out new weights."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import torch

from asyncdp import ClaimNotReady, PartialReadError, SampleNotFound, StaleSlotError
from asyncdp.examples.grpo_plane import ADVANTAGE, FAULTS, POLICY, ROLLOUTS, SAMPLE_FIELDS, TRAIN, WEIGHTS, insist
from asyncdp.examples.policy import (
    GrpoConfig,
    Policy,
    PolicyConfig,
    Rollouts,
    Task,
    evaluate,
    grpo_advantages,
    make_optimizer,
    train_step,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensordict import TensorDict

    from asyncdp import Client, KVBatchMeta
    from asyncdp.examples.grpo_account import Account
    from asyncdp.examples.grpo_plane import DemoConfig
    from asyncdp.examples.grpo_progress import Progress

__all__ = ["Trainer"]


class Trainer:
    """Trains until told to stop, or until it has reached its goal; then it sets ``stop`` itself.

    Two rules see to it that nobody evicts what another is about to train on. A sample that the trainer has claimed may
    be evicted by others for its age only. And the trainer looks at the age when it begins with a batch, and publishes
    the next version of the weights, which makes everything older, only after it has popped that batch.

    Args:
        plane: A client of its own.
    """

    def __init__(self, plane: Client, config: DemoConfig, task: Task, account: Account, progress: Progress) -> None:
        self.plane = plane
        self.config = config
        self.task = task
        self.account = account
        self.progress = progress
        self.policy = Policy(PolicyConfig(seed=config.seed))
        self.version = 0
        self._optimizer = make_optimizer(self.policy, GrpoConfig())
        self._rng = torch.Generator().manual_seed(config.seed)

    async def run(self, stop: anyio.Event) -> None:
        """Train; each round claims, learns, removes and publishes."""
        reward = await self._evaluate()
        await self._publish()
        while not stop.is_set():
            await self._add_advantages()
            if not await self._train():
                continue
            if self.version % self.config.evaluate_every == 0:
                reward = await self._evaluate()
            if reward >= self.config.goal or self.version >= self.config.max_steps:
                stop.set()
        await self._evaluate()

    async def _add_advantages(self) -> None:
        """Claim groups that have rewards, and write their advantages beside them."""
        batch = await self._claim(ADVANTAGE, ["rewards"], wait_s=2.0)
        if batch is None:
            return
        meta, data = batch
        advantages = grpo_advantages(data["rewards"], _groups(meta))
        try:
            # By meta: groups that the controller evicted meanwhile are left out, not brought back.
            await self.plane.put_samples(meta, ROLLOUTS, {"advantages": advantages}, stale="skip")
        except FAULTS:
            # Written or not, the same advantages may be written again: let a later round claim these groups once more.
            await self._release(meta)

    async def _train(self) -> bool:
        """Claim groups that have advantages and take a step on them; return whether there were any."""
        batch = await self._claim(TRAIN, [*SAMPLE_FIELDS, "advantages"], wait_s=0.0)
        if batch is None:
            return False
        meta, data = batch
        rollouts = Rollouts(data["input_ids"].unbind(), data["logprobs"].unbind(), data["mask"].unbind())
        await anyio.to_thread.run_sync(train_step, self.policy, self._optimizer, rollouts, data["advantages"])
        self.account.trained(meta.sample_ids)
        self.progress.trained(data["rewards"].tolist(), [self.version - v for v in _versions(meta)])
        await insist(lambda: self.plane.pop(meta, ROLLOUTS))
        self.version += 1
        await self._publish()
        return True

    async def _publish(self) -> None:
        """Replace the weights in the plane."""
        fields = {name: weight[None] for name, weight in self.policy.state().items()}
        fields["version"] = torch.tensor([self.version])
        with suppress(*FAULTS):  # the next version comes soon, and workers go on with the one they have
            await self.plane.put_samples([POLICY], WEIGHTS, fields, [{"weight_version": self.version}])

    async def _claim(self, task: str, fields: Sequence[str], wait_s: float) -> tuple[KVBatchMeta, TensorDict] | None:
        """Claim whole groups for a task and read them; None where nothing came."""
        size = self.config.groups_per_step * self.config.group_size
        try:
            claimed = await self.plane.claim_meta(
                ROLLOUTS, task, fields, size, blocking=wait_s > 0, timeout_s=wait_s or None
            )
        except ClaimNotReady:
            return None  # rollout is behind; nothing was claimed
        except FAULTS:
            return None  # if it was claimed all the same, the client gives it back before its next claim
        stale = [i for i, v in zip(claimed.sample_ids, _versions(claimed), strict=True) if v < self._oldest]
        await self._evict(stale, "stale")
        return await self._read(claimed.drop(stale))

    async def _read(self, meta: KVBatchMeta | None) -> tuple[KVBatchMeta, TensorDict] | None:
        """Read a claimed batch; groups with a row that did not come are left out, as a whole."""
        while meta is not None:
            try:
                return meta, await self.plane.get_data(meta)
            except PartialReadError as err:
                errors = dict(zip(err.failed.sample_ids, err.errors.values(), strict=True))
            except FAULTS as err:  # no row came
                errors = dict.fromkeys(meta.sample_ids, err)
            gone = {sample_id for sample_id, err in errors.items() if _for_good(err)}
            if len(gone) < len(errors):
                gone |= errors.keys() & await self._lost_keys()
            lost, away = _whole_groups(meta, gone), _whole_groups(meta, errors)
            await self._evict([meta.sample_ids[at] for at in lost], "gone")
            later = meta.subset(sorted(away - lost))
            if later.size:
                await self._release(later)
            meta = meta.drop(lost | away)
        return None

    async def _lost_keys(self) -> set[str]:
        """Ask the plane which samples were lost with the storage that held them."""
        with suppress(*FAULTS):
            return {key for group in await self.plane.list_metadata(ROLLOUTS) for key in group.lost_keys}
        return set()

    @property
    def _oldest(self) -> int:
        return self.version - self.config.max_age

    async def _evict(self, sample_ids: Sequence[str], reason: str) -> None:
        if sample_ids:
            await insist(lambda: self.plane.evict(sample_ids, ROLLOUTS))
            self.account.evicted(sample_ids, reason)

    async def _release(self, meta: KVBatchMeta) -> None:
        """Give claimed groups back, to be claimed again later; failing that, they stay claimed until they are old."""
        with suppress(*FAULTS):
            await self.plane.release_claim(meta)

    async def _evaluate(self) -> float:
        given = await anyio.to_thread.run_sync(evaluate, self.policy, self.task, self._rng)
        self.progress.evaluated(given.sampled)
        return given.sampled


def _groups(meta: KVBatchMeta) -> list[str]:
    return [tags["group_id"] for tags in meta.tags or ()]


def _versions(meta: KVBatchMeta) -> list[int]:
    return [tags["weight_version"] for tags in meta.tags or ()]


def _whole_groups(meta: KVBatchMeta, sample_ids: Iterable[str]) -> set[int]:
    """Positions of all rows whose group has one of the samples."""
    groups, chosen = _groups(meta), set(sample_ids)
    touched = {groups[at] for at, sample_id in enumerate(meta.sample_ids) if sample_id in chosen}
    return {at for at, group in enumerate(groups) if group in touched}


def _for_good(err: Exception) -> bool:
    """Whether a row is gone, not only out of reach for now."""
    return isinstance(err, (StaleSlotError, SampleNotFound))
