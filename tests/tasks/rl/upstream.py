"""GRPO in one process and a page: transformers' model, TRL's loss and torch's AdamW, on the completions that a run has
logged. Each completion passes through the model by itself, without padding. TRL takes ten seconds to import."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.tasks.losses import upstream
from tests.tasks.preference.runs import BETAS, CLIP, EPSILON
from tests.tasks.rl.runs import LENGTH, RATE, Trained

SETTINGS = {
    "loss_type": "grpo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "importance_sampling_level": "token",
    "beta": 0.04,
    "max_completion_length": LENGTH,
}
ARGUMENTS = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
CLIPPED = "low_mean", "low_min", "high_mean", "high_max", "region_mean"
METRICS = "kl", "entropy", *(f"clip_ratio/{name}" for name in CLIPPED), "cispo_clip_ratio"


class Scored(NamedTuple):
    """Of completions, padded on the right: [completions, width]."""

    log_probs: Tensor
    entropies: Tensor
    mask: Tensor


class Reference:
    """What `run` should have done. `settings`: TRL's names beside SETTINGS; `args` those of its config."""

    trains_entropy = False

    def __init__(
        self,
        folder: Path,
        run: Trained,
        policy: Any,
        ref: Any,
        *,
        rate: float = RATE,
        temperature: float = 0.9,
        batch: int = 8,
        iterations: int = 1,
        without_cut_off: bool = False,
        kl_in_reward: bool = False,
        follows: tuple[int, float] | None = None,
        advantages: Callable[[Tensor], Tensor] | None = None,
        **settings: Any,
    ):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.run, self.policy, self.ref, self.temperature = run, policy.eval(), ref.eval(), temperature
        self.rate, self.batch, self.iterations, self.without_cut_off = rate, batch, iterations, without_cut_off
        self.kl_in_reward, self.advantages_of = kl_in_reward, advantages or advantages_of
        self.follows = follows  # steps between two times that the reference does, and the policy's share
        self.settings = SETTINGS | settings | {"args": ARGUMENTS | settings.get("args", {})}

    def steps(self) -> list[dict[str, float]]:
        """The log of the run's steps; the policy is trained by them."""
        torch.set_num_threads(1)
        parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)
        log = []
        for generation in sorted({row["generation"] for row in self.run.completions}):
            rows = [row for row in self.run.completions if row["generation"] == generation]
            with torch.no_grad():
                old, ref = self.score(self.policy, rows).log_probs, self.score(self.ref, rows).log_probs
            beta = self.settings["beta"]
            less = beta * (old - ref).sum(1) if self.kl_in_reward else torch.zeros(len(rows))
            advantages = self.advantages_of(rewards_of(rows) - less)
            logged = torch.tensor([row["advantage"] for row in rows])
            torch.testing.assert_close(logged, advantages, rtol=1e-5, atol=1e-5)
            places = torch.arange(len(rows)).split(self.batch)
            for of_step in [*places] * self.iterations:
                if len(log) == len(self.run.steps):
                    return log
                chosen = [rows[place] for place in of_step.tolist()]
                log.append(self.step(optimizer, chosen, advantages[of_step], old[of_step], ref[of_step]))
                if self.follows and len(log) % self.follows[0] == 0:
                    upstream.follow(self.policy, self.ref, self.follows[1])
        return log

    def step(
        self, optimizer: torch.optim.Optimizer, rows: list[dict], advantages: Tensor, old: Tensor, ref: Tensor
    ) -> dict[str, float]:
        found = self.score(self.policy, rows)
        mask = found.mask
        if self.without_cut_off:
            mask = mask * torch.tensor([float(row["finish_reason"] != "length") for row in rows])[:, None]
        width = mask.shape[1]
        inputs = {
            "advantages": advantages,
            "completion_mask": mask,
            "old_per_token_logps": old[:, :width],
            "ref_per_token_logps": ref[:, :width],
        }
        settings = self.settings | ({"beta": 0.0} if self.kl_in_reward else {})
        loss, metrics = upstream.grpo(found.log_probs, found.entropies, inputs, **settings)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), CLIP)
        optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm.item()} | {n: metrics[n] for n in METRICS if n in metrics}

    def score(self, model: Any, rows: list[dict]) -> Scored:
        """Of what the rows' completions consist of, with the temperature that they were drawn with."""
        scored = [self._completion(model, row) for row in rows]
        width = max(len(log_probs) for log_probs, _ in scored)
        mask = torch.stack([(torch.arange(width) < len(each)).float() for each, _ in scored])
        found = [
            torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True) for values in zip(*scored, strict=True)
        ]
        return Scored(found[0], found[1], mask)

    def _completion(self, model: Any, row: dict) -> tuple[Tensor, Tensor]:
        prompt = self.tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        drawn = row["completion_ids"]
        logits = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1].float() / self.temperature
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(1, torch.tensor(drawn, dtype=torch.int64)[:, None])[:, 0]
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        return chosen, entropies if self.trains_entropy else entropies.detach()


def rewards_of(rows: list[dict]) -> Tensor:
    """As COMMON weighs them."""
    return torch.tensor([row["rewards"]["waves"] + 0.5 * (row["rewards"]["short"] or 0) for row in rows])


def advantages_of(rewards: Tensor, group: int = 4) -> Tensor:
    """https://arxiv.org/abs/2402.03300: of each group's rewards, which come one after the other."""
    groups = rewards.double().view(-1, group)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten().float()


def models(folder: Path, ref: Path | None = None) -> tuple[Any, Any]:
    """Policy and reference."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if ref is None:
        return policy, copy.deepcopy(policy)
    return policy, AutoModelForCausalLM.from_pretrained(ref, dtype=torch.float32, attn_implementation="eager")


def rollout_means(run: Trained, group: int = 4) -> dict[str, float]:
    """What a log line says of the completions of the generation before it, from these: the first generation's."""
    rows = [row for row in run.completions if row["generation"] == 1]
    rewards = rewards_of(rows).double().view(-1, group)
    lengths = torch.tensor([float(len(row["completion_ids"])) for row in rows])
    cut_off = torch.tensor([row["finish_reason"] == "length" for row in rows])
    means = {
        "reward": rewards.mean(),
        "reward_std": rewards.std(),
        "frac_reward_zero_std": (rewards.std(1) == 0).double().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": cut_off.double().mean(),
        "completions/mean_terminated_length": lengths[~cut_off].mean(),
    }
    for name in rows[0]["rewards"]:
        given = torch.tensor([row["rewards"][name] for row in rows if row["rewards"][name] is not None])
        means |= {f"rewards/{name}/mean": given.mean(), f"rewards/{name}/std": given.std()}
    return {name: value.item() for name, value in means.items()}


def as_filed(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names, and in the parts, that files have."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.clone() for name, tensor in revert_weight_conversion(model, dict(state)).items()}
