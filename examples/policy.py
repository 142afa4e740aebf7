"""The learning half of the example: a small policy that learns to sort digits by GRPO.

A prompt is two to four digits and SEP; the right completion is the same digits in ascending order and END. Prompts and
completions differ in length, so every per-token field is ragged, as in real post-training. Nothing here knows of a data
plane: rollouts are plain 1D tensors, one per sample and field, that can be stored, lost and fetched row by row.

The algorithm is GRPO (Shao et al. 2024, arXiv:2402.03300): the advantage of a sample is its reward minus the mean of
its group, over the group's standard deviation. The loss is PPO's clipped surrogate, averaged over tokens instead of
samples and with a wider upper clip (Yu et al. 2025, arXiv:2503.14476). The importance ratio is taken against the log
probabilities recorded when a token was sampled, so samples from older weights may be trained on.

A loop without a data plane, 16 prompts with 8 samples each:

    prompts = task.prompts(16, rng)
    rollouts = policy.sample(prompts, 8, rng)
    rewards = [task.score(prompts[i // 8], completion) for i, completion in enumerate(rollouts.completions())]
    advantages = grpo_advantages(torch.tensor(rewards), [i // 8 for i in range(len(rollouts))])
    train_step(policy, optimizer, rollouts, advantages)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

END: Final = 10
"""Ends a completion. A digit is its own token; a policy emits digits and END only."""
SEP: Final = 11
"""Ends a prompt."""
PAD: Final = 12
"""Fills batches inside this module; never part of a prompt, a completion or a stored row."""
MIN_DIGITS: Final = 2
MAX_DIGITS: Final = 4
_EMITTED: Final = END + 1
_VOCABULARY: Final = PAD + 1
_PROMPT_WIDTH: Final = MAX_DIGITS + 1
_COMPLETION_WIDTH: Final = MAX_DIGITS + 1

_KeysAndValues = tuple[Tensor, Tensor]
"""What a layer remembers of the tokens so far: two tensors of (B, heads, T, width / heads)."""


@dataclass(frozen=True)
class Task:
    """Sort the digits of a prompt. The `held_out` prompts are kept for `evaluate` and never drawn for training."""

    held_out: tuple[tuple[int, ...], ...]

    def prompts(self, n: int, rng: torch.Generator) -> list[Tensor]:
        """Draw n training prompts, int64, (k + 1,): k digits, k uniform in 2..4, then SEP."""
        kept = frozenset(self.held_out)
        allowed = (digits for digits in _draw_digits(rng) if digits not in kept)
        return [_as_prompt(next(allowed)) for _ in range(n)]

    def score(self, prompt: Tensor, completion: Tensor) -> float:
        """Reward in [0, 1]: half for the share of tokens right in place, half for the whole completion being right.

        The target is the sorted digits and END. The share is of the longer one of target and completion, so neither
        stopping early nor rambling on pays.
        """
        target: list[int] = [*sorted(_ints(prompt[:-1])), END]
        given = _ints(completion)
        right = sum(a == b for a, b in zip(target, given, strict=False))
        return 0.5 * right / max(len(target), len(given)) + 0.5 * (given == target)


def make_task(seed: int, held_out: int = 128) -> Task:
    """Make the task with `held_out` distinct evaluation prompts, chosen by the seed."""
    kept: set[tuple[int, ...]] = set()
    digits = _draw_digits(torch.Generator().manual_seed(seed))
    while len(kept) < held_out:
        kept.add(next(digits))
    return Task(tuple(sorted(kept)))


def _draw_digits(rng: torch.Generator) -> Iterator[tuple[int, ...]]:
    while True:
        count = int(torch.randint(MIN_DIGITS, MAX_DIGITS + 1, (), generator=rng))
        yield tuple(_ints(torch.randint(0, 10, (count,), generator=rng)))


def _ints(row: Tensor) -> list[int]:
    """Return the numbers of a row."""
    return [int(one) for one in row]


def _as_prompt(digits: Sequence[int]) -> Tensor:
    return torch.tensor([*digits, SEP])


@dataclass(frozen=True)
class Rollouts:
    """Samples as ragged rows; row i has P_i in 3..5 prompt tokens and C_i in 1..5 completion tokens."""

    input_ids: Sequence[Tensor]
    """int64, (P_i + C_i,): prompt, then completion."""
    logprobs: Sequence[Tensor]
    """float32, (C_i,): log probability of each completion token under the weights that sampled it."""
    mask: Sequence[Tensor]
    """bool, (P_i + C_i,): true at completion tokens, the ones that are trained on."""

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.input_ids)

    def completions(self) -> list[Tensor]:
        """Cut out the completions, int64, (C_i,); each ends with END unless it ran into the limit of five tokens."""
        return [ids[mask] for ids, mask in zip(self.input_ids, self.mask, strict=True)]


@dataclass(frozen=True)
class PolicyConfig:
    """Size of the transformer and the seed of its random start. The default has 0.1 million weights."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    seed: int = 0


class Policy(nn.Module):
    """A causal transformer. Prompts are padded on the left, so that SEP stands at one position in every row."""

    def __init__(self, config: PolicyConfig) -> None:
        """Start from random weights that depend on config.seed only, never on the global generator."""
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, config.width)
        self.positions = nn.Embedding(_PROMPT_WIDTH + _COMPLETION_WIDTH, config.width)
        self.blocks = nn.ModuleList(_Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, _EMITTED)
        rng = torch.Generator().manual_seed(config.seed)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, generator=rng)
            elif isinstance(module, nn.Linear):
                bound = 1 / math.sqrt(module.in_features)
                nn.init.uniform_(module.weight, -bound, bound, generator=rng)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map left-padded rows, int64 (B, T), to log probabilities of the next token, float32 (B, T, 11)."""
        return self._read(tokens, tokens != PAD, None)[0]

    def _read(
        self, tokens: Tensor, seen: Tensor, past: Sequence[_KeysAndValues] | None
    ) -> tuple[Tensor, list[_KeysAndValues]]:
        """Read tokens (B, T) that come after `past`; seen (B, S), S >= T, is false where the whole row has PAD."""
        columns = torch.arange(seen.shape[1])
        positions = columns[-tokens.shape[1] :]
        # PAD sees itself, else its softmax would be over nothing; nobody else sees it.
        visible = (seen[:, None] & (columns <= positions[:, None])) | (columns == positions[:, None])
        x = self.tokens(tokens) + self.positions(positions)
        present: list[_KeysAndValues] = []
        for i, block in enumerate(self.blocks):
            x, read = block(x, visible[:, None], past[i] if past else None)
            present.append(read)
        logits: Tensor = self.head(self.norm(x))
        return logits.log_softmax(-1), present

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Tensor], n_per_prompt: int, generator: torch.Generator, *, greedy: bool = False
    ) -> Rollouts:
        """Complete each prompt n_per_prompt times; rows come prompt by prompt. Greedy takes the likeliest token.

        The same weights, prompts and generator state give the same rollouts.
        """
        tokens = torch.full((len(prompts), _PROMPT_WIDTH), PAD)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[-len(prompt) :] = prompt
        after_prompt, past = self._read(tokens, tokens != PAD, None)
        # A prompt is read once: its keys and values serve its whole group.
        tokens = tokens.repeat_interleave(n_per_prompt, 0)
        after = after_prompt[:, -1].repeat_interleave(n_per_prompt, 0)
        past = [(k.repeat_interleave(n_per_prompt, 0), v.repeat_interleave(n_per_prompt, 0)) for k, v in past]
        logprobs = torch.empty(len(tokens), 0)
        ends = torch.full((len(tokens),), _PROMPT_WIDTH)
        going = torch.ones(len(tokens), dtype=torch.bool)
        while True:
            token = after.argmax(-1, keepdim=True) if greedy else after.exp().multinomial(1, generator=generator)
            tokens = torch.cat((tokens, token), 1)
            logprobs = torch.cat((logprobs, after.gather(1, token)), 1)
            ends += going
            going &= token[:, 0] != END
            if logprobs.shape[1] == _COMPLETION_WIDTH or not going.any():
                return _as_rows(tokens, logprobs, ends)
            last, past = self._read(token, tokens != PAD, past)
            after = last[:, -1]

    def state(self) -> dict[str, Tensor]:
        """Copy the weights: plain float32 tensors by name, safe to keep and send while training goes on."""
        return {name: weight.detach().clone() for name, weight in self.named_parameters()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite the weights in place with what `state` gave; missing or unknown names are a KeyError."""
        weights = dict(self.named_parameters())
        if weights.keys() != state.keys():
            raise KeyError(*sorted(weights.keys() ^ state.keys()))
        for name, weight in weights.items():
            weight.copy_(state[name])


class _Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, visible: Tensor, past: _KeysAndValues | None) -> tuple[Tensor, _KeysAndValues]:
        projected = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind()
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        x = x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return x, (key, value)


def _as_rows(tokens: Tensor, logprobs: Tensor, ends: Tensor) -> Rollouts:
    """Cut the padding off; rows are copies, so that storing one row does not store the batch it came from."""
    spans = list(zip(_ints((tokens == PAD).sum(1)), _ints(ends), strict=True))
    return Rollouts(
        input_ids=[row[start:end].clone() for row, (start, end) in zip(tokens, spans, strict=True)],
        logprobs=[row[: end - _PROMPT_WIDTH].clone() for row, (_, end) in zip(logprobs, spans, strict=True)],
        mask=[torch.arange(start, end) >= _PROMPT_WIDTH for start, end in spans],
    )


class _Batch(NamedTuple):
    tokens: Tensor
    """int64, (B, 10): PAD, prompt (its SEP at column 4), completion, PAD."""
    sampled_logprobs: Tensor
    """float32, (B, 5): the rollouts' logprobs, then zeros."""
    trained: Tensor
    """bool, (B, 5): true at the tokens of the completion."""


def _as_batch(rollouts: Rollouts) -> _Batch:
    """Put the padding back; the inverse of _as_rows."""
    lengths = torch.tensor([len(row) for row in rollouts.input_ids])
    completed = torch.tensor([len(row) for row in rollouts.logprobs])
    starts = (_PROMPT_WIDTH - lengths + completed)[:, None]
    columns = torch.arange(_PROMPT_WIDTH + _COMPLETION_WIDTH)
    tokens = torch.full((len(rollouts), len(columns)), PAD)
    tokens[(starts <= columns) & (columns < starts + lengths[:, None])] = torch.cat(list(rollouts.input_ids))
    trained = torch.arange(_COMPLETION_WIDTH) < completed[:, None]
    logprobs = torch.zeros(trained.shape)
    logprobs[trained] = torch.cat(list(rollouts.logprobs))
    return _Batch(tokens, logprobs, trained)


@dataclass(frozen=True)
class GrpoConfig:
    """How to train. The defaults were chosen by measurement, on samples that are up to four weight versions old."""

    learning_rate: float = 1e-3
    """At 2e-3 the reward rises faster, then falls back at times."""
    weight_decay: float = 0.01
    clip_below: float = 0.2
    """A token whose probability fell below 1 - this, relative to when it was sampled, is pushed down no further."""
    clip_above: float = 0.28
    """A token whose probability rose above 1 + this is pushed up no further."""
    clip_bad: float = 3.0
    """Largest ratio for tokens of bad samples: PPO alone has none (dual clip, Ye et al. 2020, arXiv:1912.09729)."""
    entropy_bonus: float = 0.01
    max_grad_norm: float = 1.0


def make_optimizer(policy: Policy, config: GrpoConfig) -> torch.optim.AdamW:
    """Make AdamW over the policy's weights, with a second moment short enough (0.95) for runs of some hundred steps."""
    return torch.optim.AdamW(
        policy.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )


def grpo_advantages(rewards: Tensor, group_ids: Sequence[str | int]) -> Tensor:
    """Normalise rewards, float32 (N,), within their groups: (reward - mean) / (standard deviation + 0.01), (N,).

    Rows of a group may stand anywhere and may be fewer than were sampled. A group of one, or of equal rewards, gets 0.
    The 0.01 keeps groups whose rewards hardly differ from being blown up.
    """
    number: dict[str | int, int] = {}
    group = torch.tensor([number.setdefault(group_id, len(number)) for group_id in group_ids], dtype=torch.int64)
    zeros = torch.zeros(len(number))
    count = zeros.index_add(0, group, torch.ones(len(group)))
    centred = rewards - (zeros.index_add(0, group, rewards) / count)[group]
    deviation = (zeros.index_add(0, group, centred.square()) / count).sqrt()
    return centred / (deviation[group] + 0.01)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: GrpoConfig) -> Tensor:
    """Objective per token, to be raised, of ratio and advantages that broadcast: PPO's, with the dual clip."""
    clipped = ratio.clamp(1 - config.clip_below, 1 + config.clip_above)
    worst = torch.minimum(ratio * advantages, clipped * advantages)
    return torch.where(advantages < 0, torch.maximum(worst, config.clip_bad * advantages), worst)


def grpo_loss(
    policy: Policy, rollouts: Rollouts, advantages: Tensor, config: GrpoConfig
) -> tuple[Tensor, dict[str, float]]:
    """Loss of N >= 1 samples with advantages (N,), averaged over all their completion tokens, and its metrics.

    entropy: of the policy, in nats; clip_fraction: share of tokens whose ratio was clipped; behaviour_gap: mean of the
    recorded minus the present log probability, which is near 0 for fresh samples and grows with their age.
    """
    batch = _as_batch(rollouts)
    # Column t predicts the token at t + 1, so predictions of the completion begin at SEP.
    predicted = policy(batch.tokens[:, :-1])[:, _PROMPT_WIDTH - 1 :][batch.trained]
    completed = batch.tokens[:, _PROMPT_WIDTH:][batch.trained]
    gap = batch.sampled_logprobs[batch.trained] - predicted.gather(1, completed[:, None])[:, 0]
    ratio = (-gap).exp()
    per_token = advantages[:, None].expand(batch.trained.shape)[batch.trained]
    objective = clipped_surrogate(ratio, per_token, config)
    entropy = -(predicted.exp() * predicted).sum(-1)
    metrics = {
        "entropy": entropy.mean().item(),
        "clip_fraction": (objective != ratio * per_token).float().mean().item(),
        "behaviour_gap": gap.mean().item(),
    }
    return -(objective + config.entropy_bonus * entropy).mean(), metrics


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages: Tensor,
    config: GrpoConfig | None = None,
) -> dict[str, float]:
    """Take one step on N >= 1 samples with advantages (N,); return the metrics of grpo_loss, loss and grad_norm."""
    config = config or GrpoConfig()
    loss, metrics = grpo_loss(policy, rollouts, advantages, config)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    norm = nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    optimizer.step()
    return {"loss": loss.item(), **metrics, "grad_norm": norm.item()}


@dataclass(frozen=True)
class Evaluation:
    """Mean reward on the held-out prompts, in [0, 1]."""

    greedy: float
    sampled: float


def evaluate(policy: Policy, task: Task, generator: torch.Generator, samples_per_prompt: int = 4) -> Evaluation:
    """Score the policy on the held-out prompts: one greedy completion and some sampled ones of each."""
    prompts = [_as_prompt(digits) for digits in task.held_out]

    def mean_reward(n_per_prompt: int, *, greedy: bool) -> float:
        given = policy.sample(prompts, n_per_prompt, generator, greedy=greedy).completions()
        rewards = [task.score(prompts[i // n_per_prompt], completion) for i, completion in enumerate(given)]
        return sum(rewards) / len(rewards)

    return Evaluation(mean_reward(1, greedy=True), mean_reward(samples_per_prompt, greedy=False))
