"""Rewards of what was generated, on the first rank, for all."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...bridge import runtime
from ...bridge.checkpoint import hub
from ..distributed.collectives import first_of_each_node, kept_by_first_rank, on_first_rank, patient_group
from ..options.rewards import RewardOptions
from ..rewards.load import load_rewards, reward_names, reward_weights
from ..rewards.model import ModelReward
from ..rewards.reward_fn import Sample
from ..rewards.scoring import Scores, score
from ..rewards.unscored import Unjudged, check_columns
from ..rollout.health import say
from ..run.context import Run
from .episode import Episode


class RewardScorer:
    """Sets the rewards of episodes. Every rank calls it alike.

    A function is called once with all completions that were generated at a time, in one process: it may compare them,
    or ask a service. Raises ValueError, on every rank, for one that wants what no row has.
    """

    def __init__(self, run: Run, options: RewardOptions):
        self.tokenizer, self.timeout = run.tokenizer, options.reward_timeout
        self.weights = reward_weights(options)
        folder = None
        if options.reward_model:
            reward_options = replace(run.options, model=options.reward_model, mcore_model=None)
            folder = first_of_each_node(lambda: hub.source_folder(reward_options, None))
        self.columns = kept_by_first_rank(lambda: run.data.columns) or []
        self.rewards = kept_by_first_rank(lambda: load_rewards(options, _model(folder)))
        evaluates = run.options.eval_iters != 0
        # what is to be known before the first step
        self.notes = kept_by_first_rank(lambda: check_columns(self.rewards or [], run.data, evaluates=evaluates)) or []
        self.unjudged = Unjudged(reward_names(options))

    def __call__(self, episodes: Sequence[Episode]) -> None:
        """Raises RewardError, on every rank, for a reward that fails."""
        scores = on_first_rank(lambda: self._scored(episodes), patient_group())
        for number, episode in enumerate(episodes):
            episode.reward = float(scores.rewards[number])
            rewards = {name: float(values[number]) for name, values in scores.by_function.items()}
            episode.rewards = {name: None if math.isnan(value) else value for name, value in rewards.items()}

    def _scored(self, episodes: Sequence[Episode]) -> Scores:
        samples = []
        for episode in episodes:
            drawn = episode.loss_mask > 0
            first = int(drawn.argmax()) if drawn.any() else len(drawn)
            samples.append(
                Sample(
                    place=episode.source_row,
                    prompt=self.tokenizer.decode(episode.tokens[:first].tolist()),
                    messages=episode.columns["messages"],
                    completion=episode.text,
                    completion_ids=episode.tokens[drawn].tolist(),
                    columns={name: episode.columns.get(name) for name in self.columns},
                    said=episode.messages,
                    info=episode.info,
                )
            )
        scores = score(self.rewards or [], self.weights, samples, self.timeout)
        if note := self.unjudged.look(samples, scores.rewards):
            say(f"note: {note}")
        return scores


def _model(folder: Path | None) -> ModelReward | None:
    return ModelReward(folder, runtime.device()) if folder else None
