"""GRPO with a teacher: each token's advantage has the teacher's log-probability over the policy's."""

import pytest
import torch
from torch import Tensor

from tests.tasks.preference.runs import assert_close
from tests.tasks.rl.runs import Place, Trained
from tests.tasks.rl.test_grpo_numbers import agree
from tests.tasks.rl.test_loss_variants import Straightforward
from tests.tasks.rl.upstream import models

pytestmark = pytest.mark.slow
TEACHER = "--teacher_model other --teacher_kl_coef 0.3 --beta 0"


class Taught(Straightforward):
    """GRPO's loss; the reference is the teacher."""

    def loss(self, log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, ref: Tensor) -> Tensor:
        by_token = advantages[:, None] + 0.3 * (ref - old)
        ratios = (log_probs - old).exp()
        losses = -torch.minimum(ratios * by_token, ratios.clamp(0.8, 1.2) * by_token)
        return ((losses * mask).sum(1) / mask.sum(1)).mean()


def test_advantages_of_tokens(place: Place) -> None:
    run = place.run(TEACHER)
    assert "teacher: other" in run.printed
    folder = place.folder / "qwen3"
    reference = Taught(folder, run, *models(folder, place.folder / "other"))
    rows = run.completions[:8]
    with torch.no_grad():
        policy, teacher = reference.score(reference.policy, rows), reference.score(reference.ref, rows)
    difference = (teacher.log_probs - policy.log_probs) * policy.mask
    k3 = ((difference.exp() - difference - 1) * policy.mask).sum() / policy.mask.sum()
    assert_close(run.steps[0], {"teacher_kl": k3.item()})
    agree(run, reference)


def without_rewards(place: Place, flags: str) -> Trained:
    line = place.line(f"{TEACHER} --reward_funcs constant {flags}", "alone").replace("--reward_funcs constant", "")
    return Trained(place.folder / "alone", place.megatron(line))


@pytest.mark.long
def test_without_rewards_the_teacher_is_all(place: Place) -> None:
    """Also with one completion of a prompt; as if all had the same reward."""
    flags = "--num_generations 1 --steps_per_generation 1"
    found, wanted = without_rewards(place, flags), place.run(f"{TEACHER} --reward_funcs constant {flags}")
    for one, other in zip(found.steps, wanted.steps, strict=True):
        assert_close(one, {name: other[name] for name in ("loss", "grad_norm", "teacher_kl")})
    assert all(row["advantage"] == 0 for row in found.completions)
    assert found.steps[0]["grad_norm"] > 0.01


@pytest.mark.long
def test_the_weight_of_the_teacher(place: Place) -> None:
    found, wanted = place.run(f"{TEACHER} --teacher_kl_coef 0"), place.run("--beta 0")
    for one, other in zip(found.steps, wanted.steps, strict=True):
        assert_close(one, {name: other[name] for name in ("loss", "grad_norm", "clip_ratio/region_mean")})
        assert one["teacher_kl"] > 0.1
