"""PPO in one process and a page: transformers' models and torch's AdamW, on the completions that a run has logged.

The arithmetic is that of TRL 0.29.1's PPOTrainer with one minibatch a step (later versions have none), for completions
of any length and two optimizers. Each completion passes through the models by itself, without padding.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.tasks.preference.runs import BETAS, CLIP, EPSILON
from tests.tasks.rl.runs import RATE, Trained
from tests.tasks.rl.upstream import Reference, rewards_of


class Settings(NamedTuple):
    beta: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    critic_rate: float = 1e-3
    warmup: int = 0
    whitens: bool = True
    kl_in_reward: bool = True
    descent_rate: float | None = None  # gradient descent of the policy without clipping, instead of AdamW


class Targets(NamedTuple):
    """Of a generation's completions, padded on the right: [completions, width]."""

    old: Tensor
    ref: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


class Ppo(Reference):
    """What `run` should have done to the policy and the critic."""

    def __init__(self, folder: Any, run: Trained, policy: Any, ref: Any, critic: Any, settings: Settings):
        super().__init__(folder, run, policy, ref)
        self.critic, self.ppo = critic.eval(), settings
        for model in (policy, critic):
            model.get_input_embeddings().padding_idx = None  # token 0 has a gradient where it is drawn

    def steps(self) -> list[dict[str, float]]:
        torch.set_num_threads(1)
        policy = self.optimizer(self.policy, self.ppo.descent_rate or RATE)
        critic = self.optimizer(self.critic, self.ppo.critic_rate)
        log = []
        for generation in sorted({row["generation"] for row in self.run.completions}):
            rows = [row for row in self.run.completions if row["generation"] == generation]
            targets, mask = self.targets(rows)
            for first in range(0, len(rows), self.batch):
                if len(log) < len(self.run.steps):
                    chosen = slice(first, first + self.batch)
                    of_step = Targets(*(values[chosen] for values in targets))
                    log.append(self.update_critic(critic, rows[chosen], of_step, mask[chosen]))
                    log[-1] |= self.update_policy(
                        policy, rows[chosen], of_step, mask[chosen], frozen=len(log) <= self.ppo.warmup
                    )
                    if not first:
                        log[-1] |= self.batch_means(targets, mask)
        return log

    def optimizer(self, model: Any, rate: float) -> torch.optim.Optimizer:
        if self.ppo.descent_rate:
            return torch.optim.SGD(model.parameters(), lr=rate)
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)

    @torch.no_grad()
    def targets(self, rows: list[dict]) -> tuple[Targets, Tensor]:
        """From the last token to the first, all completions at once."""
        old, ref = self.score(self.policy, rows), self.score(self.ref, rows).log_probs
        mask, values = old.mask, self.values(rows)
        rewards = -self.ppo.beta * (old.log_probs - ref) * mask * self.ppo.kl_in_reward
        rewards[torch.arange(len(rows)), mask.sum(1).long() - 1] += rewards_of(rows)
        advantages, later_value, later = torch.zeros_like(values), torch.zeros(len(rows)), torch.zeros(len(rows))
        for token in reversed(range(mask.shape[1])):
            delta = rewards[:, token] + self.ppo.gamma * later_value - values[:, token]
            later = (delta + self.ppo.gamma * self.ppo.lam * later) * mask[:, token]
            later_value = values[:, token] * mask[:, token]
            advantages[:, token] = later
        returns = (advantages + values) * mask
        if self.ppo.whitens:
            drawn = advantages[mask > 0]
            advantages = (advantages - drawn.mean()) * torch.rsqrt(drawn.var() + 1e-8) * mask
        return Targets(old.log_probs, ref, values, advantages, returns), mask

    def update_critic(
        self, optimizer: torch.optim.Optimizer, rows: list[dict], targets: Targets, mask: Tensor
    ) -> dict[str, float]:
        values = self.values(rows)
        width = values.shape[1]
        old, returns, mask = targets.values[:, :width], targets.returns[:, :width], mask[:, :width]
        limited = torch.clamp(values, old - self.ppo.cliprange_value, old + self.ppo.cliprange_value)
        plain, clipped = (values - returns).square(), (limited - returns).square()
        loss = 0.5 * (torch.max(plain, clipped) * mask).sum() / mask.sum()
        share = ((clipped > plain) * mask).sum() / mask.sum()
        norm = self.descend(optimizer, loss)
        return {"critic/loss": loss.item(), "critic/clip_ratio": share.item(), "critic/grad_norm": norm}

    def update_policy(
        self, optimizer: torch.optim.Optimizer, rows: list[dict], targets: Targets, mask: Tensor, *, frozen: bool
    ) -> dict[str, float]:
        log_probs = self.score(self.policy, rows).log_probs
        width = log_probs.shape[1]
        old, ref, advantages = targets.old[:, :width], targets.ref[:, :width], targets.advantages[:, :width]
        mask, clip = mask[:, :width], self.ppo.cliprange
        ratios = (log_probs - old).exp()
        losses = torch.max(-advantages * ratios, -advantages * ratios.clamp(1 - clip, 1 + clip))
        if not self.ppo.kl_in_reward:
            losses = losses + self.ppo.beta * ((ref - log_probs).exp() - (ref - log_probs) - 1)
        loss = (losses * mask).sum() / mask.sum()
        return {"loss": loss.item(), "grad_norm": 0.0 if frozen else self.descend(optimizer, loss)}

    def descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, torch.inf if self.ppo.descent_rate else CLIP)
        optimizer.step()
        return norm.item()

    @staticmethod
    def batch_means(targets: Targets, mask: Tensor) -> dict[str, float]:
        values, returns = targets.values[mask > 0], targets.returns[mask > 0]
        explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
        return {
            "values/mean": values.mean().item(),
            "returns/mean": returns.mean().item(),
            "critic/explained_variance": explained.item(),
        }

    def values(self, rows: list[dict]) -> Tensor:
        """Before each drawn token: the head's output at the one before it."""
        found = []
        for row in rows:
            prompt = self.tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            hidden = self.critic.model(torch.tensor([prompt + row["completion_ids"]])).last_hidden_state
            found.append(self.critic.score(hidden)[0, len(prompt) - 1 : -1, 0])
        return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
