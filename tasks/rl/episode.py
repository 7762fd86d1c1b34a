"""Prompts with what was generated for them: tokens, rewards, advantages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...templates.batching.episode_batches import Sequences
from ...templates.batching.prompt_dataloader import Prompt
from ..rollout.engine import Completion


@dataclass
class Episode:
    """A prompt and one completion of it, or several answers with what others say in between (tasks/turns)."""

    place: str  # of the prompt's row, to name it in a message
    group: int  # completions of the same group are compared
    tokens: np.ndarray  # int32 [length], the prompt's and the completion's
    trained: np.ndarray  # float32 [length]: 1 on tokens that the model drew
    sampled: np.ndarray  # float32 [length]: their log-probabilities by the engine, else 0
    finish: str  # "length": it was cut off
    columns: dict[str, Any]  # of the prompt's row
    text: str = ""  # of the completion, as Texts has it; of several answers the last one's
    turns: list[dict[str, Any]] = field(default_factory=list)  # of several: the messages behind the prompt's
    info: dict[str, Any] = field(default_factory=dict)  # what the scheduler of turns says of it
    rewards: dict[str, float | None] = field(default_factory=dict)  # by function
    reward: float = 0.0  # the functions' weighted sum; NaN where none says anything of it
    penalty: float = 0.0  # that --kl_in_reward takes off it before completions are compared
    advantage: float = 0.0
    old: np.ndarray | None = None  # float32 [length]: log-probabilities by the model that drew them
    experts: np.ndarray | None = None  # int16 [length, layers, topk]: where its tokens go; -1: the model chooses

    @classmethod
    def of(cls, prompt: Prompt, group: int, completion: Completion, text: str) -> "Episode":
        before, after = len(prompt.tokens), len(completion.tokens)
        return cls(
            prompt.source_row,
            group,
            tokens=np.array([*prompt.tokens, *completion.tokens], np.int32),
            trained=np.repeat(np.array([0, 1], np.float32), [before, after]),
            sampled=np.concatenate([np.zeros(before, np.float32), np.array(completion.log_probs, np.float32)]),
            finish=completion.finish,
            columns=prompt.columns,
            text=text,
            experts=completion.experts_of(before + after),
        )

    def go_on(self, messages: list[dict[str, Any]], between: list[int], completion: Completion, text: str) -> None:
        """Put messages, whose tokens are `between`, behind the last answer, and the next one behind these."""
        log_probs = np.concatenate([np.zeros(len(between), np.float32), np.array(completion.log_probs, np.float32)])
        trained = np.repeat(np.array([0, 1], np.float32), [len(between), len(completion.tokens)])
        self.turns = [*self.messages, *messages, {"role": "assistant", "content": text}]
        self.tokens = np.concatenate([self.tokens, np.array([*between, *completion.tokens], np.int32)])
        self.trained = np.concatenate([self.trained, trained])
        self.sampled = np.concatenate([self.sampled, log_probs])
        self.finish, self.text = completion.finish, text
        experts = completion.experts_of(len(self.tokens))
        if experts is not None and self.experts is not None:  # those by which a token was drawn stay
            known = experts[: len(self.experts)]
            known[:] = np.where(self.experts < 0, known, self.experts)
        self.experts = experts

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Behind the prompt's."""
        return self.turns or [{"role": "assistant", "content": self.text}]

    @property
    def last(self) -> np.ndarray:
        """The tokens of the last answer."""
        return self.tokens[int(np.flatnonzero(self.trained == 0)[-1]) + 1 :]

    @property
    def length(self) -> int:
        """Tokens that the model drew."""
        return int(self.trained.sum())


def sequences_of(episodes: Sequence[Episode], *, drop_cut_off: bool) -> Sequences:
    """What a step trains on. `drop_cut_off`: completions that were cut off have no loss."""
    known = {"sampled": [episode.sampled for episode in episodes]}
    if all(episode.old is not None for episode in episodes):
        known["old"] = [episode.old for episode in episodes if episode.old is not None]
    experts = [episode.experts for episode in episodes if episode.experts is not None]
    return Sequences(
        [episode.tokens for episode in episodes],
        [episode.trained * float(not (drop_cut_off and episode.finish == "length")) for episode in episodes],
        [episode.advantage for episode in episodes],
        known,
        experts if len(experts) == len(episodes) else [],
    )


ARRAYS = "tokens", "trained", "sampled", "old", "experts"


def to_tensors(episodes: Sequence[Episode]) -> dict[str, Tensor]:
    """For a checkpoint."""
    rows = [{name: value for name, value in vars(episode).items() if name not in ARRAYS} for episode in episodes]
    found = {"rows": as_bytes(rows)}
    if episodes:
        found["lengths"] = torch.tensor([len(episode.tokens) for episode in episodes])
    for name in ARRAYS:
        values = [getattr(episode, name) for episode in episodes if getattr(episode, name) is not None]
        if values:
            found[name] = torch.from_numpy(np.concatenate(values))
    return found


def from_tensors(tensors: dict[str, Tensor]) -> list[Episode]:
    """What `to_tensors` was given."""
    rows: list[dict[str, Any]] = from_bytes(tensors["rows"])
    if not rows:
        return []
    ends = np.cumsum(tensors["lengths"].numpy())[:-1]
    arrays: dict[str, Any] = {name: np.split(tensors[name].numpy(), ends) for name in ARRAYS if name in tensors}
    return [Episode(**row, **{name: of_each[i] for name, of_each in arrays.items()}) for i, row in enumerate(rows)]


def as_bytes(value: Any) -> Tensor:
    """JSON, as uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
