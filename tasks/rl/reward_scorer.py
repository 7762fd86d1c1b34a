"""Rewards of episodes, computed on rank 0 for all ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...bridge import runtime
from ...bridge.checkpoint import hub
from ...templates.formats.medium import media_columns
from ...templates.json_types import JsonObject
from ...templates.options import MediaOptions
from ..distributed.collectives import broadcast_from_rank0, gloo_group, local_rank0_first, rank0_only
from ..options import GrpoOptions
from ..options.rewards import RewardOptions
from ..rewards.load import load_rewards, reward_names, reward_weights, signatures
from ..rewards.model import ModelReward
from ..rewards.reward_fn import Reward, RewardSample, TrainerState
from ..rewards.scoring import Scores, score
from ..rewards.unscored import UnscoredMonitor, check_columns
from ..rewards.vision_model import VisionModelReward, has_vision
from ..rollout.factory import check_media
from ..rollout.health import notify
from ..run.context import Run, turn_images
from ..system.plugins import load_plugins
from .episode import Episode


class RewardScorer:
    """Scorer that sets the rewards of episodes. Every rank makes the same calls.

    Each reward function gets all completions of a generation in one call, in one process. So it may compare them, or
    call a service. Raises ValueError on every rank if a function requires a column that no row has.
    """

    def __init__(self, run: Run, options: RewardOptions):
        self.tokenizer, self.timeout = run.tokenizer, options.reward_timeout
        self.weights = reward_weights(options)
        folder = _model_folder(run, options)
        added = _added_columns(run)
        self.columns = [*(rank0_only(lambda: run.data.columns) or []), *added]
        self.rewards = rank0_only(lambda: self._load(run, folder))
        evaluates = run.options.training.eval_iters != 0
        self.notes: list[str] = []
        if self.weights:
            notes = rank0_only(lambda: check_columns(self.rewards or [], run.data, evaluates=evaluates, added=added))
            self.notes = notes or []
        self.monitor = UnscoredMonitor(reward_names(options))
        self.trainer_state = TrainerState(0, run.options.training.train_iters or 0)  # advanced by the loop

    @staticmethod
    def _load(run: Run, model_folder: Path | None) -> list[Reward]:
        options = run.options
        assert isinstance(options, GrpoOptions)
        load_plugins(options.plugins.external_plugins)
        return load_rewards(options.rewards, options, _model(model_folder, options.data))

    def __call__(self, episodes: Sequence[Episode]) -> None:
        """Set the rewards of the episodes; without reward functions (but a teacher) they stay 0.

        Raises RewardError on every rank if a reward function fails.
        """
        if not self.weights:
            return
        scores = broadcast_from_rank0(lambda: self._score(episodes), gloo_group())
        for i, episode in enumerate(episodes):
            episode.reward = float(scores.rewards[i])
            rewards = {name: float(values[i]) for name, values in scores.by_function.items()}
            episode.rewards = {name: None if math.isnan(value) else value for name, value in rewards.items()}

    def _score(self, episodes: Sequence[Episode]) -> Scores:
        samples = []
        for episode in episodes:
            is_generated = episode.loss_mask > 0
            first = int(is_generated.argmax()) if is_generated.any() else len(is_generated)
            samples.append(
                RewardSample(
                    row=episode.source_row,
                    prompt=self.tokenizer.decode(episode.tokens[:first].tolist()),
                    messages=episode.columns["messages"],
                    completion=episode.text,
                    completion_ids=episode.tokens[is_generated].tolist(),
                    columns={name: episode.columns.get(name) for name in self.columns} | sources_of(episode),
                    replies=episode.messages,
                    info=episode.info,
                    finish_reason=episode.finish_reason,
                    prompt_id=episode.prompt_id,
                    request_id=episode.request_id,
                    media=[image.medium for image in episode.media if image.medium],
                )
            )
        for reward in self.rewards or []:
            reward.trainer_state = self.trainer_state
        scores = score(self.rewards or [], self.weights, samples, self.timeout)
        if note := self.monitor.check(samples, scores.rewards):
            notify(f"note: {note}")
        return scores


def sources_of(episode: Episode) -> JsonObject:
    """Return the columns `images` and `videos` of an episode, as its row has them: also those that are data."""
    return media_columns((image.medium for image in episode.media if image.medium), lambda source: source)


def _added_columns(run: Run) -> list[str]:
    """Return the columns of episodes that rows may lack: those of what tools and schedulers send."""
    return ["images"] if turn_images(run.options) else []


def check_data(run: Run) -> None:
    """Raise ValueError on every rank for data that rewards or engines cannot use, before any model is loaded.

    A reward function may require columns that no row has, a reward model may have no tower for images, and an engine
    may take no videos.
    """
    options = run.options
    assert isinstance(options, GrpoOptions)

    def check() -> None:
        load_plugins(options.plugins.external_plugins)
        evaluates = options.training.eval_iters != 0
        check_columns(signatures(options.rewards), run.data, evaluates=evaluates, added=_added_columns(run))

    if reward_weights(options.rewards):
        rank0_only(check)
    check_media(run, options.engine)
    folder = _model_folder(run, options.rewards)
    if folder and run.sees_media and not has_vision(folder):
        raise ValueError(
            f"--reward_model {options.rewards.reward_model}: has no vision tower, and the run has images. Set a "
            "reward model of a vision-language model"
        )


def _model_folder(run: Run, options: RewardOptions) -> Path | None:
    if not options.reward_model:
        return None
    reward_options = replace(run.options, model=options.reward_model, mcore_model=None)
    return local_rank0_first(lambda: hub.source_folder(reward_options, None))


def _model(folder: Path | None, options: MediaOptions) -> ModelReward | VisionModelReward | None:
    if folder is None:
        return None
    if has_vision(folder):
        return VisionModelReward(folder, runtime.device(), options)
    return ModelReward(folder, runtime.device())
