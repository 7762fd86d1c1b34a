"""Episodes: prompts with their completions, rewards and advantages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...templates.batching.episode_batches import Sequences
from ...templates.batching.prompt_dataloader import Prompt
from ...templates.dataset.placed_media import PlacedMedium, media_from_json, media_to_json
from ..multi_turn.registry import EditedAnswer
from ..rollout.engine import Completion


@dataclass
class Episode:
    """A prompt with its completion, or with the turns of a multi-turn episode (tasks/multi_turn)."""

    source_row: str  # description of the prompt's row, for messages
    group: int  # advantages compare the completions of a group
    tokens: np.ndarray  # int32 [length]: prompt and completion
    loss_mask: np.ndarray  # float32 [length]: 1 on tokens that the model generated
    rollout_log_probs: np.ndarray  # float32 [length]: by the engine, on generated tokens, else 0
    finish_reason: str  # "length": the completion was truncated
    columns: dict[str, Any]  # of the prompt's row
    text: str = ""  # of the completion; with several turns, of the last one
    turns: list[dict[str, Any]] = field(default_factory=list)  # messages after the prompt's, if several
    info: dict[str, Any] = field(default_factory=dict)  # from the multi-turn scheduler
    rewards: dict[str, float | None] = field(default_factory=dict)  # by function
    reward: float = 0.0  # weighted sum of the rewards; NaN if no function scores the episode
    kl_penalty: float = 0.0  # subtracted from the reward with --kl_in_reward
    is_excluded: bool = False  # has no loss: its prompt is outside --difficulty_range
    advantage: float = 0.0
    old_log_probs: np.ndarray | None = None  # float32 [length]: by the policy before the steps on this rollout
    answer_start: int = 0  # position in `tokens` of the last generation
    answer_offset: int = 0  # position in `text` of the last generation: above 0 if it continues a message
    prompt_id: str = ""  # the same for all completions of a prompt
    request_id: str = ""
    ref_log_probs: np.ndarray | None = None  # float32 [length]: by the reference
    teacher_log_probs: np.ndarray | None = None  # float32 [length]: by the teacher
    values: np.ndarray | None = None  # float32 [length]: by the critic, before each token is drawn
    returns: np.ndarray | None = None  # float32 [length]: what the critic learns
    advantages: np.ndarray | None = None  # float32 [length]: where tokens differ, in place of `advantage`
    experts: np.ndarray | None = None  # int16 [length, layers, topk]: for router replay; -1: the model's own choice
    media: Sequence[PlacedMedium] = ()  # images and videos, placed in `tokens`
    turn_images: int = 0  # images after the prompt's

    @classmethod
    def from_completion(cls, prompt: Prompt, group: int, completion: Completion, text: str) -> "Episode":
        prompt_length, completion_length = len(prompt.tokens), len(completion.tokens)
        return cls(
            prompt.source_row,
            group,
            tokens=np.array([*prompt.tokens, *completion.tokens], np.int32),
            loss_mask=np.repeat(np.array([0, 1], np.float32), [prompt_length, completion_length]),
            rollout_log_probs=np.concatenate(
                [np.zeros(prompt_length, np.float32), np.array(completion.log_probs, np.float32)]
            ),
            finish_reason=completion.finish,
            columns=prompt.columns,
            text=text,
            answer_start=prompt_length,
            experts=completion.padded_experts(prompt_length + completion_length),
            media=prompt.media,
        )

    def append_turn(
        self,
        messages: list[dict[str, Any]],
        tokens: list[int],
        completion: Completion,
        text: str,
        images: Sequence[PlacedMedium] = (),
    ) -> None:
        """Append messages with their tokens, and the model's answer to them; without messages its last one goes on.

        images: of the messages, placed in the episode
        """
        self.media, self.turn_images = [*self.media, *images], self.turn_images + len(images)
        log_probs = np.concatenate([np.zeros(len(tokens), np.float32), np.array(completion.log_probs, np.float32)])
        mask = np.repeat(np.array([0, 1], np.float32), [len(tokens), len(completion.tokens)])
        self.answer_start, self.answer_offset = len(self.tokens) + len(tokens), 0 if messages else len(self.text)
        if messages:
            self.turns = [*self.messages, *messages, {"role": "assistant", "content": text}]
        else:
            text = self.text + text
            self.turns = [*self.messages[:-1], {"role": "assistant", "content": text}]
        self.tokens = np.concatenate([self.tokens, np.array([*tokens, *completion.tokens], np.int32)])
        self.loss_mask = np.concatenate([self.loss_mask, mask])
        self.rollout_log_probs = np.concatenate([self.rollout_log_probs, log_probs])
        self.finish_reason, self.text = completion.finish, text
        experts = completion.padded_experts(len(self.tokens))
        if experts is not None and self.experts is not None:  # keep the experts that generated a token
            earlier = experts[: len(self.experts)]
            earlier[:] = np.where(self.experts < 0, earlier, self.experts)
        self.experts = experts

    def edit_answer(self, answer: EditedAnswer) -> None:
        """Replace the last generation by what a scheduler has made of it. Kept tokens keep their log-probabilities."""
        start, generated = self.answer_start, self.last_answer.tolist()
        tokens, mask = np.array(answer.token_ids, np.int32), np.array(answer.loss_mask, np.float32)
        kept = common_prefix(generated, answer.token_ids)
        added = len(tokens) - kept
        log_probs = np.concatenate(
            [self.rollout_log_probs[start : start + kept] * mask[:kept], np.zeros(added, np.float32)]
        )
        self.tokens = np.concatenate([self.tokens[:start], tokens])
        self.loss_mask = np.concatenate([self.loss_mask[:start], mask])
        self.rollout_log_probs = np.concatenate([self.rollout_log_probs[:start], log_probs])
        if self.experts is not None:
            unknown = np.full((added, *self.experts.shape[1:]), -1, self.experts.dtype)
            self.experts = np.concatenate([self.experts[: start + kept], unknown])
        self.text = answer.text
        self.turns = [*self.messages[:-1], {"role": "assistant", "content": answer.text}]

    def following(self, images: Sequence[PlacedMedium]) -> list[PlacedMedium]:
        """Return images of messages after the episode's tokens, placed in and numbered among the episode's."""
        first, start = len(self.media), len(self.tokens)
        return [image._replace(place=start + image.place, number=first + i) for i, image in enumerate(images)]

    @property
    def media_owner(self) -> str:
        """Name that episodes with the same media share: the prompt's, or the episode's own."""
        return self.request_id if self.turn_images else self.prompt_id

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Messages after the prompt's."""
        return self.turns or [{"role": "assistant", "content": self.text}]

    @property
    def last_answer(self) -> np.ndarray:
        """Tokens of the last generation."""
        return self.tokens[self.answer_start :]

    def trained_tokens(self, *, drop_truncated: bool) -> np.ndarray:
        """Return the loss weight of each token: float32 [length]. drop_truncated: 0 for a truncated completion."""
        is_dropped = self.is_excluded or (drop_truncated and self.finish_reason == "length")
        return self.loss_mask * float(not is_dropped)

    @property
    def length(self) -> int:
        """Number of tokens that the model generated."""
        return int(self.loss_mask.sum())


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens at the start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def sequences_of(episodes: Sequence[Episode], *, drop_truncated: bool) -> Sequences:
    """Return the sequences of a training step. Excluded ones have no loss; drop_truncated: nor truncated ones."""
    return Sequences(
        [episode.tokens for episode in episodes],
        [episode.trained_tokens(drop_truncated=drop_truncated) for episode in episodes],
        [episode.advantage for episode in episodes],
        rollout_log_probs=[episode.rollout_log_probs for episode in episodes],
        **{name: arrays_of(episodes, name) for name in OF_SEQUENCES},
        **media_of(episodes),
    )


def media_of(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the media of episodes as fields of `Sequences`: completions of a prompt share theirs."""
    if not any(episode.media for episode in episodes):
        return {}
    owners = {owner: i for i, owner in enumerate(dict.fromkeys(episode.media_owner for episode in episodes))}
    return {
        "media": [episode.media for episode in episodes],
        "media_owners": [owners[episode.media_owner] for episode in episodes],
    }


def arrays_of(episodes: Sequence[Episode], name: str) -> list[np.ndarray]:
    """Return an array of each episode, or none unless all have it."""
    arrays = [array for episode in episodes if (array := getattr(episode, name)) is not None]
    return arrays if len(arrays) == len(episodes) else []


OF_SEQUENCES = "old_log_probs", "ref_log_probs", "teacher_log_probs", "advantages", "experts"
ARRAYS = "tokens", "loss_mask", "rollout_log_probs", *OF_SEQUENCES, "values", "returns"
# Names in checkpoints of versions before 0.2.
EARLIER_NAMES = {
    "trained": "loss_mask",
    "sampled": "rollout_log_probs",
    "old": "old_log_probs",
    "place": "source_row",
    "finish": "finish_reason",
    "penalty": "kl_penalty",
}


def to_tensors(episodes: Sequence[Episode]) -> dict[str, Tensor]:
    """Convert episodes to tensors, for a checkpoint."""
    excluded = *ARRAYS, "media"
    rows = [{name: value for name, value in vars(episode).items() if name not in excluded} for episode in episodes]
    tensors = {"rows": as_bytes(rows)}
    if media := {episode.media_owner: media_to_json(episode.media) for episode in episodes if episode.media}:
        tensors["media"] = as_bytes(media)
    if episodes:
        tensors["lengths"] = torch.tensor([len(episode.tokens) for episode in episodes])
    for name in ARRAYS:
        values = [array for episode in episodes if (array := getattr(episode, name)) is not None]
        if values:
            tensors[name] = torch.from_numpy(np.concatenate(values))
    return tensors


def from_tensors(tensors: dict[str, Tensor]) -> list[Episode]:
    """Restore the episodes from the tensors of `to_tensors`."""
    tensors = {EARLIER_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
    rows: list[dict[str, Any]] = from_bytes(tensors["rows"])
    if not rows:
        return []
    ends = np.cumsum(tensors["lengths"].numpy())[:-1]
    arrays: dict[str, Any] = {name: np.split(tensors[name].numpy(), ends) for name in ARRAYS if name in tensors}
    fields = [{EARLIER_NAMES.get(name, name): value for name, value in row.items()} for row in rows]
    stored_media = from_bytes(tensors["media"]) if "media" in tensors else {}
    media = {owner: media_from_json(rows) for owner, rows in stored_media.items()}
    episodes = [Episode(**row, **{name: values[i] for name, values in arrays.items()}) for i, row in enumerate(fields)]
    for episode in episodes:
        episode.media = media.get(episode.media_owner, ())
    return episodes


def as_bytes(value: Any) -> Tensor:
    """Encode a value as JSON, in a uint8 tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
