"""Rollout worker: generates completions of the next prompts, plays further turns, and scores them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isnan

from ...templates.batching.prompt_dataloader import Prompt, Prompts
from ..options import GrpoOptions
from .completion_text import CompletionTexts
from .episode import Episode
from .multi_turn import MultiTurn, Phase
from .reward_scorer import RewardScorer
from .rollout_metrics import RolloutMetrics
from .sampler import Sampler


@dataclass
class RolloutWorker:
    """Generation and scoring of episodes. Every rank makes the same calls, and gets all episodes."""

    options: GrpoOptions
    prompts: Prompts
    sampler: Sampler
    texts: CompletionTexts
    multi_turn: MultiTurn | None
    scorer: RewardScorer
    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)

    def detached(self) -> "RolloutWorker":
        """Return an independent copy for another thread. It raises WeightsLost if a server loses its weights."""
        return replace(self, prompts=copy.copy(self.prompts), sampler=self.sampler.detach(), metrics=RolloutMetrics())

    def collect(self, phase: Phase) -> list[Episode]:
        """Return the scored episodes of a rollout batch, --num_generations of each prompt.

        --dynamic_sample: prompts whose completions all have the same reward give no gradient. Other prompts replace
        them, up to --max_resample_times times.
        """
        options, group_size = self.options, self.options.sampling.num_generations
        groups_needed = (options.sampling.generation_batch_size or 0) // group_size
        kept: list[list[Episode]] = []
        spare: list[list[Episode]] = []
        for _ in range(1 + options.max_resample_times * options.dynamic_sample):
            groups = self.rollout(self.prompts.next_batch(groups_needed - len(kept)), group_size, phase)
            self.metrics.add([episode for group in groups for episode in group], group_size)
            for group in groups:
                (kept if not options.dynamic_sample or _rewards_differ(group) else spare).append(group)
            if len(kept) == groups_needed:
                break
        return [episode for group in (kept + spare)[:groups_needed] for episode in group]

    def rollout(self, prompts: Sequence[Prompt], group_size: int, phase: Phase) -> list[list[Episode]]:
        """Return `group_size` scored episodes of each prompt."""
        first = self.prompts.consumed - len(prompts)
        prompt_ids = [f"prompt-{first + number}" for number in range(len(prompts)) for _ in range(group_size)]
        request_ids = [f"{prompt_id}-{number % group_size}" for number, prompt_id in enumerate(prompt_ids)]
        repeated = [prompt for prompt in prompts for _ in range(group_size)]
        if self.multi_turn:
            with phase("multi_turn"):
                repeated = self.multi_turn.start(repeated, request_ids)
        with phase("gen"):
            completions = self.sampler(repeated)
        texts = self.texts([prompt.columns for prompt in repeated], [prompt.tokens for prompt in repeated], completions)
        rows = zip(repeated, completions, texts, strict=True)
        episodes = [
            Episode.from_completion(prompt, number // group_size, completion, text)
            for number, (prompt, completion, text) in enumerate(rows)
        ]
        for episode, prompt_id, request_id in zip(episodes, prompt_ids, request_ids, strict=True):
            episode.prompt_id, episode.request_id = prompt_id, request_id
        if self.multi_turn:
            self.multi_turn(self.sampler, repeated, episodes, self.metrics, phase)
        with phase("reward"):
            self.scorer(episodes)
        return [episodes[start : start + group_size] for start in range(0, len(episodes), group_size)]


def _rewards_differ(group: list[Episode]) -> bool:
    return len({episode.reward for episode in group if not isnan(episode.reward)}) > 1
