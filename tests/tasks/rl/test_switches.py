"""Steps with the switches of losses and advantages: transformers' model and the formulas, on what a run has logged."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.tasks.preference.runs import BETAS, CLIP, EPSILON, assert_close, assert_same_weights
from tests.tasks.rl.runs import END, LENGTH, Place, Trained, assert_same_steps, prompts
from tests.tasks.rl.test_grpo_numbers import agree
from tests.tasks.rl.upstream import Reference, models, rewards_of

pytestmark = pytest.mark.slow
LOW, HIGH = -0.2, 0.9  # mean rewards of a prompt that is neither too hard nor too easy
LOSS = (
    "--loss_agg_mode seq-mean-token-sum --kl_estimator k2 --dual_clip 1.02 --entropy_coef 0.05 --epsilon 0.01 "
    f"--epsilon_high 0.1 --beta 0.2 --ref_model other --difficulty_range {LOW} {HIGH}"
)
REINFORCE = (
    "--advantage_estimator reinforce --num_generations 1 --kl_in_reward true --beta 0.3 --ref_model other "
    "--target_kl 0.05 --kl_horizon 50 --whiten_advantages true --advantage_clip 1.2 --normalize_rewards true "
    "--reward_clip 1 --loss_type dapo --train_iters 3 --steps_per_generation 1 --global_batch_size 6"
)


class WithSwitches(Reference):
    """LOSS in a page."""

    trains_entropy = True

    def step(
        self, optimizer: torch.optim.Optimizer, rows: list[dict], advantages: Tensor, old: Tensor, ref: Tensor
    ) -> dict[str, float]:
        scored = self.score(self.policy, rows)
        means = rewards_of(rows).view(-1, 4).mean(1, keepdim=True)
        is_within = ((means > LOW) & (means < HIGH)).expand(-1, 4).flatten()
        mask = scored.mask * is_within[:, None]
        width, advantages = mask.shape[1], advantages[:, None]
        ratios = (scored.log_probs - old[:, :width]).exp()
        losses = -torch.minimum(ratios * advantages, ratios.clamp(0.99, 1.1) * advantages)
        losses = torch.where(advantages < 0, torch.minimum(losses, -1.02 * advantages), losses)
        kl = 0.5 * (scored.log_probs - ref[:, :width]).square()
        entropy = (scored.entropies * mask).sum() / mask.sum()
        loss = ((losses + 0.2 * kl) * mask).sum() / len(rows) - 0.05 * entropy
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), CLIP)
        optimizer.step()
        means_of_tokens = {"kl": kl, "entropy": scored.entropies}
        metrics = {name: ((values * mask).sum() / mask.sum()).item() for name, values in means_of_tokens.items()}
        return {"loss": loss.item(), "grad_norm": norm.item(), **metrics}


class Reinforce(Reference):
    """REINFORCE in a page: the log of each generation, of one step, and the policy that is trained by them."""

    def steps(self) -> list[dict[str, float]]:
        torch.set_num_threads(1)
        parameters = self.policy.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=self.rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)
        log, coefficient, rewards = [], 0.3, torch.zeros(0, dtype=torch.float64)
        for generation in (1, 2, 3):
            rows = [row for row in self.run.completions if row["generation"] == generation]
            with torch.no_grad():
                old, ref = self.score(self.policy, rows), self.score(self.ref, rows)
            mask, kl = old.mask.double(), (old.log_probs - ref.log_probs).double()
            rewards = torch.cat([rewards, rewards_of(rows).double()])
            scores = ((rewards_of(rows).double() - rewards.mean()) / (rewards.std() + 1e-6)).clamp(-1, 1)
            returns = scores[:, None] - coefficient * (kl * mask).flip(1).cumsum(1).flip(1)
            trained = returns[mask > 0]
            advantages = ((returns - trained.mean()) / (trained.var() + 1e-8).sqrt()).clamp(-1.2, 1.2)
            means = ((kl * mask).sum(1) / mask.sum(1)).mean().item()
            current = self.score(self.policy, rows).log_probs
            ratios = (current - old.log_probs).exp()
            loss = -(ratios * advantages * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), CLIP)
            optimizer.step()
            log.append({"loss": loss.item(), "grad_norm": norm.item(), "reward_kl": means, "kl_coef": coefficient})
            for row, values, of_row in zip(rows, advantages, mask, strict=True):
                mean = (values * of_row).sum() / of_row.sum()
                assert row["advantage"] == pytest.approx(mean.item(), abs=1e-4)
            coefficient *= 1 + min(max(means / 0.05 - 1, -0.2), 0.2) * len(rows) / 50
        return log


def greedy_reward(place: Place) -> float:
    """Return the mean reward of the initial model's likeliest answers to val.jsonl."""
    folder, rewards = place.folder / "qwen3", []
    tokenizer, model = AutoTokenizer.from_pretrained(folder), models(folder)[0].eval()
    for row in prompts(5, first=6):
        ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        answer: list[int] = []
        while len(answer) < LENGTH and END not in answer:
            with torch.no_grad():
                answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
        rewards.append(math.sin(sum(answer) + row["goal"]) + 0.5 * (1 - len(answer) / LENGTH))
    return sum(rewards) / len(rewards)


def reference[T: Reference](kind: type[T], place: Place, run: Trained, **settings: Any) -> T:
    folder = place.folder / "qwen3"
    return kind(folder, run, *models(folder, place.folder / "other"), **settings)


def test_switches_of_the_loss(place: Place) -> None:
    run = place.run(LOSS)
    assert 0 < run.steps[0]["completions/excluded_ratio"] < 1
    assert max(row["clip_ratio/dual_mean"] for row in run.steps) > 0.01
    agree(run, reference(WithSwitches, place, run))


def test_switches_of_advantages(place: Place) -> None:
    """Three generations, so that the coefficient and the moments of rewards move."""
    run = place.run(REINFORCE)
    expected = reference(Reinforce, place, run)
    start = {name: tensor.clone() for name, tensor in expected.policy.state_dict().items()}
    log = expected.steps()
    assert [row["kl_coef"] for row in log] != [0.3] * 3
    for step, row in zip(run.steps, log, strict=True):
        assert 0 < step["advantages/clip_ratio"] < 1
        assert 0 < step["rewards/clip_ratio"] < 1
        assert_close(step, row)
    assert_same_weights(run.weights, expected.policy.state_dict(), start)


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        (LOSS, "--tensor_model_parallel_size 2 --sequence_parallel true"),
        (REINFORCE, "--context_parallel_size 2"),
        pytest.param(LOSS, "--context_parallel_size 2 --packing true --packing_length 160", marks=pytest.mark.long),
        pytest.param(LOSS, "--pipeline_model_parallel_size 2", marks=pytest.mark.long),
        pytest.param(LOSS, "--use_distributed_optimizer true", marks=pytest.mark.long),
        pytest.param(REINFORCE, "--pipeline_model_parallel_size 2", marks=pytest.mark.long),
        pytest.param(REINFORCE, "--micro_batch_size 1", marks=pytest.mark.long),
    ],
)
def test_two_processes(flags: str, layout: str, place: Place) -> None:
    run, single = place.run(f"{flags} {layout}", 2), place.run(flags)
    assert_same_steps(run, single)
    assert_same_weights(run.weights, single.weights, place.start())


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.long)])
def test_evaluation_before_the_first_step(processes: int | None, place: Place) -> None:
    """By the initial weights, greedily; the training is what it is without."""
    flags = "--val_dataset val.jsonl --eval_on_start true --eval_temperature 0 --num_generations_eval 2 --eval_steps 3"
    run = place.run(flags, processes)
    assert [row["step"] for row in run.evaluations] == [0, 3]
    assert run.evaluations[0]["eval_reward"] == pytest.approx(greedy_reward(place), abs=1e-6)
    assert run.evaluations[0]["eval_reward"] != run.evaluations[1]["eval_reward"]
    base = place.run("", processes)
    for one, other in zip(run.steps, base.steps, strict=True):
        assert_close(one, {name: other[name] for name in ("loss", "grad_norm")})
