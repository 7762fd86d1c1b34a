"""Three steps with losses that TRL lacks: transformers' model and the papers' formulas, on what a run has logged."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tasks.preference.runs import CLIP, assert_close
from tests.tasks.rl.runs import Place
from tests.tasks.rl.test_grpo_numbers import agree, plain
from tests.tasks.rl.upstream import Reference, models

pytestmark = pytest.mark.slow
FIPO = "--loss_type fipo --beta 0 --fipo_clip_high_only false --fipo_decay_rate 3 --epsilon 0.1"


class Straightforward(Reference):
    """With a loss of the padded log-probabilities of a step's completions, in the order of their prompts."""

    def loss(self, log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, ref: Tensor) -> Tensor:
        raise NotImplementedError

    def step(
        self, optimizer: torch.optim.Optimizer, rows: list[dict], advantages: Tensor, old: Tensor, ref: Tensor
    ) -> dict[str, float]:
        scored = self.score(self.policy, rows)
        width = scored.mask.shape[1]
        loss = self.loss(scored.log_probs, old[:, :width], scored.mask, advantages, ref[:, :width])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), CLIP)
        optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm.item(), "entropy": 0.0}


class Fipo(Straightforward):
    """https://arxiv.org/abs/2603.19835."""

    def loss(self, log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, ref: Tensor) -> Tensor:
        ratios = (log_probs - old) * mask
        distances = torch.arange(mask.shape[1])[:, None] - torch.arange(mask.shape[1])
        influence = ratios.detach() @ torch.where(distances >= 0, 0.5 ** (distances / 3), 0.0)
        weights = influence.exp().clamp(0.8, 1.2)
        gains = torch.minimum(ratios.exp() * advantages[:, None], ratios.exp().clamp(0.9, 1.1) * advantages[:, None])
        return -(weights * gains * mask).sum() / mask.sum()


class Real(Straightforward):
    """https://arxiv.org/abs/2602.05630."""

    def loss(self, log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, ref: Tensor) -> Tensor:
        scores = ((log_probs - old) * mask).sum(1) / mask.sum(1) / 0.2
        losses = []
        for group, better in zip(scores.view(-1, 4), (advantages > 0).view(-1, 4), strict=True):
            both = bool(better.any() and (~better).any())
            losses.append(torch.log1p(group[~better].exp().sum()) + torch.log1p((-group[better]).exp().sum()) * both)
            losses[-1] = losses[-1] * both
        return torch.stack(losses).mean()


def reference(kind: type[Straightforward], place: Place, run: Any, **settings: Any) -> Straightforward:
    folder = place.folder / "qwen3"
    return kind(folder, run, *models(folder), **settings)


def test_fipo(place: Place) -> None:
    run = place.run(f"{FIPO} --log_rollout_offpolicy_metrics true")
    assert [abs(row["fipo/influence_weight_mean"] - 1) > 1e-3 for row in run.steps] == [False, True, True]
    assert all(abs(row["rollout_correction/kl"]) < 1e-4 for row in run.steps)  # the engine is exact
    assert run.steps[0]["rollout_correction/training_ppl"] > 1
    extremes = [abs(run.steps[2][f"rollout_correction/log_ppl_diff_{side}"]) for side in ("min", "max")]
    assert max(extremes) < 1e-4
    agree(run, reference(Fipo, place, run))


@pytest.mark.long
def test_real(place: Place) -> None:
    run = place.run("--loss_type real --beta 0 --real_tau 0.2 --scale_rewards none")
    assert not any("clip_ratio/region_mean" in row for row in run.steps)
    agree(run, reference(Real, place, run, advantages=plain))


@pytest.mark.long
def test_real_twice_through_what_was_generated(place: Place) -> None:
    """Also where a step's policy is the one that has sampled, which no pass before the step tells."""
    flags = "--loss_type real --beta 0 --real_tau 0.2 --scale_rewards none --steps_per_generation 1"
    once, twice = place.run(flags), place.run(f"{flags} --num_iterations 2")
    assert_close(once.steps[0], {name: twice.steps[0][name] for name in ("loss", "grad_norm")})
    agree(twice, reference(Real, place, twice, advantages=plain, iterations=2))
