"""`megatron rlhf --rlhf_type ppo`: RL with a critic, whose values give each token an advantage.

`Ppo.train` is the whole loop (https://arxiv.org/abs/1707.06347). Its parts are those of GRPO (grpo.py) and the critic
(critic.py). Policy, critic and reference may have different parallel layouts (tasks/run/roles.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron.core.process_groups_config import ProcessGroupCollection

from ...bridge.model.model import Model
from ...templates.batching.collator import Batch
from ...templates.batching.prompt_dataloader import Prompts
from ..observability.flops import Flops
from ..options import PpoOptions
from ..reference.reference_model import RolloutReference
from ..run.context import Run
from ..train.objective import Objective, StepRunner, forward_flops
from ..train.restore import last_step
from ..train.router_replay import check_replay
from ..train.setup import train
from .critic import TRAINING_PASSES, Critic
from .grpo import Grpo, make_reference
from .reward_scorer import check_data
from .token_advantages import CriticAdvantageEstimator


def run(options: PpoOptions, sources: dict[str, str]) -> int:
    """Run the task and return its exit code. sources: where each option's value came from, for args.json."""
    return train(options, sources, make_ppo, check_data)


def make_ppo(run: Run, model: Model, train: Prompts, val: Prompts | None) -> tuple[Objective, list[str]]:
    options = run.options
    assert isinstance(options, PpoOptions)
    check_replay(model, options.router_replay_mode)
    reference = make_reference(run, model, options)
    critic = Critic(run, options, last_step(run, train))  # pyright: ignore[reportArgumentType]
    ppo = Ppo(run, model, train, reference, critic)
    notes = [*([reference.note] if reference else []), critic.note]
    return ppo.objective(), [*notes, *ppo.worker.scorer.notes, ppo.rollout.note]


class Ppo(Grpo):
    """The PPO loop and its state between steps."""

    def __init__(self, run: Run, model: Model, prompts: Prompts, reference: RolloutReference | None, critic: Critic):
        super().__init__(run, model, prompts, reference)
        assert isinstance(run.options, PpoOptions)
        self.ppo_options, self.critic = run.options, critic
        self.advantages = CriticAdvantageEstimator(run.options)

    def objective(self) -> Objective:
        objective = super().objective()
        value_passes = 1 / self.options.sampling.num_iterations  # once per rollout batch
        flops = partial(_add_critic, self.critic.flops, value_passes, objective.extra_flops, self.groups)
        return replace(objective, role=self.critic.trained, extra_flops=flops)

    def train(self, trainer: StepRunner) -> None:
        """Run the training loop."""
        for step in trainer.steps():
            if not self.pending:
                episodes = self.collect(trainer, step)
                self.record_old_log_probs(trainer, episodes)
                if self.reference:
                    self.record_ref_log_probs(trainer, episodes, self.reference)
                with self._phase(trainer, "values"):
                    self.critic.record_values(episodes)
                self.metrics.add_means(self.advantages(episodes))
                self.log_episodes(episodes)
                self.pending = self.split_into_steps(episodes)
            with self._phase(trainer, "update_critic"):
                self.critic.update(self.pending[0], step)
            trainer.step(self.next_batches(trainer), updates=step > self.ppo_options.critic.critic_warmup)
            self.add_step_metrics()
            if self.async_rollout:
                self.async_rollout.raise_if_failed()

    def add_step_metrics(self) -> None:
        super().add_step_metrics()
        self.metrics.add_means(self.critic.pop_metrics())


def _add_critic(
    critic: Flops,
    value_passes: float,
    extra_flops: Callable[[list[Batch]], float],
    groups: ProcessGroupCollection,
    batches: list[Batch],
) -> float:
    """Return the FLOPs of the critic on a step's tokens and images, and of other models.

    value_passes: forward passes beside those of training
    """
    flops = (TRAINING_PASSES + value_passes) * forward_flops(replace(critic, vision=None, audio=None), groups, batches)
    for media in (batch.media for batch in batches):
        flops += sum(critic.of_media(media)) + value_passes * sum(critic.of_media(media, trains=False))
    return extra_flops(batches) + flops
