import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from asyncdp.examples.policy import (
    END,
    PAD,
    SEP,
    GrpoConfig,
    Policy,
    PolicyConfig,
    Rollouts,
    Task,
    clipped_surrogate,
    evaluate,
    grpo_advantages,
    grpo_loss,
    make_optimizer,
    make_task,
    train_step,
)

SMALL = PolicyConfig(width=16, heads=2)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tests do not compete for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rng(seed: int = 0) -> torch.Generator:
    """Make a source of random numbers."""
    return torch.Generator().manual_seed(seed)


def some_rollouts(policy: Policy, seed: int = 0) -> Rollouts:
    """Sample 8 groups of 4."""
    return policy.sample(make_task(0).prompts(8, rng(seed)), 4, rng(seed))


def rewards_of(task: Task, prompts: list[torch.Tensor], rollouts: Rollouts) -> torch.Tensor:
    """Score rows that come prompt by prompt, (N,)."""
    n = len(rollouts) // len(prompts)
    return torch.tensor([task.score(prompts[i // n], given) for i, given in enumerate(rollouts.completions())])


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ([1, 3, 7, END], 1.0),
        ([1, 3, 7], 0.375),  # all digits, no END: three of four in place
        ([1, 3, 7, 7, END], 0.3),  # three of five in place
        ([1, 7, 3, END], 0.25),
        ([3, 1, END], 0.0),
        ([END], 0.0),
        ([], 0.0),
    ],
)
def test_a_score_is_half_what_is_in_place_and_half_for_all_of_it(completion: list[int], reward: float) -> None:
    """The reward is exactly as documented, and only the sorted digits with END earn all of it."""
    assert make_task(0).score(torch.tensor([7, 1, 3, SEP]), torch.tensor(completion, dtype=torch.int64)) == reward


def test_training_prompts_are_never_held_out() -> None:
    """What evaluate measures was not trained on, and prompts have all lengths."""
    task = make_task(3)
    drawn = {tuple(prompt.tolist()) for prompt in task.prompts(2000, rng())}
    assert {len(prompt) for prompt in drawn} == {3, 4, 5}
    assert all(prompt[-1] == SEP for prompt in drawn)
    assert len(set(task.held_out)) == 128
    assert not {prompt[:-1] for prompt in drawn} & set(task.held_out)


def test_a_task_and_its_prompts_depend_on_the_seed_only() -> None:
    """The same seeds give the same task and prompts, another seed another task."""
    assert make_task(1) == make_task(1) != make_task(2)
    first, second = (make_task(1).prompts(20, rng(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rollouts_are_ragged_rows_of_the_documented_shapes() -> None:
    """Each row is a prompt and its completion up to END or five tokens, with one logprob per completion token."""
    prompts = make_task(0).prompts(32, rng())
    rollouts = Policy(SMALL).sample(prompts, 4, rng())
    assert len(rollouts) == 128
    assert len({len(row) for row in rollouts.logprobs}) > 1
    for i, completion in enumerate(rollouts.completions()):
        ids, logprobs, mask = rollouts.input_ids[i], rollouts.logprobs[i], rollouts.mask[i]
        assert (ids.dtype, logprobs.dtype, mask.dtype) == (torch.int64, torch.float32, torch.bool)
        assert torch.equal(ids[~mask], prompts[i // 4])
        assert len(ids) == len(mask) == len(prompts[i // 4]) + len(logprobs)
        assert completion.max() <= END
        assert END not in completion[:-1]
        assert completion[-1] == END or len(completion) == 5
        assert (logprobs <= 0).all()


def test_a_row_owns_its_memory() -> None:
    """Sending one row does not send the batch it was sampled in."""
    rollouts = some_rollouts(Policy(SMALL))
    for row in (*rollouts.input_ids, *rollouts.logprobs, *rollouts.mask):
        assert row.untyped_storage().nbytes() == row.nbytes


def test_sampling_repeats_given_the_generator() -> None:
    """The same weights and generator state give the same rollouts, whatever the global generator does."""
    policy = Policy(SMALL)
    first = some_rollouts(policy, seed=1)
    torch.manual_seed(99)
    again, other = some_rollouts(policy, seed=1), some_rollouts(policy, seed=2)
    for name in ("input_ids", "logprobs", "mask"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(first, name), getattr(again, name), strict=True))
    assert [row.tolist() for row in first.input_ids] != [row.tolist() for row in other.input_ids]


def test_a_start_depends_on_its_seed_only() -> None:
    """Policies made at the same time in several threads, from one seed, begin with the same weights."""
    made: dict[int, dict[str, torch.Tensor]] = {}

    def make(i: int) -> None:
        made[i] = Policy(SMALL).state()

    threads = [threading.Thread(target=make, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(made[0][name], made[i][name]) for i in range(4) for name in made[0])
    assert not torch.equal(made[0]["head.weight"], Policy(replace(SMALL, seed=1)).state()["head.weight"])


def test_recorded_logprobs_are_those_of_the_whole_sequence() -> None:
    """Sampling step by step from a cache, among padded rows, records what one pass over the row alone computes."""
    policy = Policy(SMALL)
    rollouts = some_rollouts(policy)
    for i, completion in enumerate(rollouts.completions()):
        ids = rollouts.input_ids[i]
        padded = torch.cat((torch.full((5 + len(completion) - len(ids),), PAD), ids))
        alone = policy(padded[None])[0, 4:-1].gather(1, completion[:, None])[:, 0]
        torch.testing.assert_close(rollouts.logprobs[i], alone, atol=1e-5, rtol=0)


def test_padding_is_not_seen() -> None:
    """What PAD is embedded as changes no prediction at a real token."""
    policy = Policy(SMALL)
    row = torch.tensor([[PAD, PAD, 4, 2, SEP, 2]])
    before = policy(row)[:, 2:]
    with torch.no_grad():
        policy.tokens.weight[PAD] += 5
    assert torch.equal(policy(row)[:, 2:], before)


def test_a_prediction_does_not_see_later_tokens() -> None:
    """The policy is causal."""
    policy = Policy(SMALL)
    first, second = policy(torch.tensor([[PAD, 1, 4, 2, SEP, 2, 9], [PAD, 1, 4, 2, SEP, 2, 0]]))
    assert torch.equal(first[:6], second[:6])
    assert not torch.equal(first[6], second[6])


def test_greedy_takes_the_likeliest_token_and_no_random_number() -> None:
    """Greedy completions of one prompt are alike, and the generator is left as it was."""
    generator = rng()
    before = generator.get_state()
    rollouts = Policy(SMALL).sample(make_task(0).prompts(1, rng()), 3, generator, greedy=True)
    assert torch.equal(generator.get_state(), before)
    assert rollouts.input_ids[0].tolist() == rollouts.input_ids[1].tolist() == rollouts.input_ids[2].tolist()


def test_advantages_are_normalised_within_groups_wherever_their_rows_stand() -> None:
    """Mixed-up and partly lost groups get (reward - mean) / deviation of their own rows."""
    rewards = torch.tensor([1.0, 0.2, 0.0, 0.4, 0.5])
    advantages = grpo_advantages(rewards, ["a", "b", "a", "b", "a"])
    a, b = rewards[[0, 2, 4]], rewards[[1, 3]]
    torch.testing.assert_close(advantages[[0, 2, 4]], (a - a.mean()) / (a.std(correction=0) + 0.01))
    torch.testing.assert_close(advantages[[1, 3]], (b - b.mean()) / (b.std(correction=0) + 0.01))


def test_a_group_that_teaches_nothing_gets_zero() -> None:
    """A group of one row, or of equal rewards, has advantage 0, never NaN."""
    assert grpo_advantages(torch.tensor([0.7, 0.3, 0.3]), [1, 2, 2]).tolist() == [0, 0, 0]
    assert grpo_advantages(torch.empty(0), []).tolist() == []


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"),
    [
        (1.0, 2.0, 2.0),
        (1.2, 2.0, 2.4),
        (2.0, 2.0, 2.56),  # raised enough already
        (0.5, 2.0, 1.0),
        (0.5, -2.0, -1.6),  # lowered enough already
        (2.0, -2.0, -4.0),
        (9.0, -2.0, -6.0),  # dual clip
    ],
)
def test_the_ratio_is_clipped_where_the_policy_moved_far_enough(
    ratio: float, advantage: float, objective: float
) -> None:
    """PPO's clipped surrogate with upper clip 1.28, lower 0.8 and dual clip 3."""
    given = clipped_surrogate(torch.tensor(ratio), torch.tensor(advantage), GrpoConfig())
    torch.testing.assert_close(given, torch.tensor(objective))


def test_the_loss_of_fresh_samples_is_the_mean_over_their_tokens() -> None:
    """With the weights that sampled them every ratio is 1, and each token counts once, whatever its row's length."""
    policy = Policy(SMALL)
    rollouts = some_rollouts(policy)
    advantages = torch.randn(len(rollouts), generator=rng())
    lengths = torch.tensor([len(row) for row in rollouts.logprobs])
    loss, metrics = grpo_loss(policy, rollouts, advantages, GrpoConfig(entropy_bonus=0))
    torch.testing.assert_close(loss, -(advantages * lengths).sum() / lengths.sum(), atol=1e-5, rtol=0)
    assert metrics["clip_fraction"] == 0
    assert metrics["behaviour_gap"] == pytest.approx(0, abs=1e-5)


def test_the_loss_does_not_depend_on_the_order_of_rows() -> None:
    """Rows that come back from storage in another order, as views of one jagged tensor, train the same."""
    policy = Policy(SMALL)
    rollouts = some_rollouts(policy)
    advantages = torch.randn(len(rollouts), generator=rng())
    order = torch.randperm(len(rollouts), generator=rng()).tolist()

    def fetched(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.nested.nested_tensor([rows[i] for i in order], layout=torch.jagged).unbind()

    shuffled = Rollouts(fetched(rollouts.input_ids), fetched(rollouts.logprobs), fetched(rollouts.mask))
    first, _ = grpo_loss(policy, rollouts, advantages, GrpoConfig())
    second, _ = grpo_loss(policy, shuffled, advantages[order], GrpoConfig())
    torch.testing.assert_close(first, second)


def test_weights_flow_to_another_policy() -> None:
    """A loaded policy samples exactly as the one its state came from, which goes on training unseen by it."""
    trainer, worker = Policy(SMALL), Policy(replace(SMALL, seed=1))
    state = trainer.state()
    before = some_rollouts(trainer)
    config = GrpoConfig()
    train_step(trainer, make_optimizer(trainer, config), before, torch.ones(len(before)), config)
    worker.load_state(state)
    after = some_rollouts(worker)
    assert all(torch.equal(a, b) for a, b in zip(before.logprobs, after.logprobs, strict=True))
    assert not all(torch.equal(state[name], weight) for name, weight in trainer.state().items())


def test_a_state_with_other_names_is_refused() -> None:
    """A state that lacks a weight is a KeyError that names it, and nothing is loaded."""
    policy = Policy(SMALL)
    state = {name: weight + 1 for name, weight in policy.state().items() if name != "head.bias"}
    before = policy.state()
    with pytest.raises(KeyError, match=r"head\.bias"):
        policy.load_state(state)
    assert all(torch.equal(before[name], weight) for name, weight in policy.state().items())


@pytest.mark.slow
def test_sixty_steps_on_stale_and_lossy_samples_teach_the_policy() -> None:
    """From a random start, with samples two versions old and one row in eight lost, the held-out reward triples."""
    task, policy, worker = make_task(0), Policy(PolicyConfig()), Policy(PolicyConfig())
    config = GrpoConfig()
    optimizer, generator = make_optimizer(policy, config), rng()
    start = evaluate(policy, task, rng())
    versions = [policy.state()]
    for step in range(60):
        worker.load_state(versions[max(0, step - 2)])
        prompts = task.prompts(16, generator)
        rollouts = worker.sample(prompts, 8, generator)
        rewards = rewards_of(task, prompts, rollouts)
        kept = [i for i in range(128) if i % 8 != step % 8]
        left = Rollouts(*([rows[i] for i in kept] for rows in (rollouts.input_ids, rollouts.logprobs, rollouts.mask)))
        train_step(policy, optimizer, left, grpo_advantages(rewards[kept], [i // 8 for i in kept]), config)
        versions.append(policy.state())
    end = evaluate(policy, task, rng())
    assert start.sampled < 0.05
    assert end.sampled > 3 * start.sampled
    assert end.greedy > 3 * start.greedy
