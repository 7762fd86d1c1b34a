"""A reward model as a reward: transformers' sequence classification with one label, as `--rlhf_type rm` saves it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...bridge.checkpoint.pretrained import load_model, load_tokenizer
from ...templates.chat_template.chat import check_template

TOKENS = 16384  # of a batch, padding included


class ModelReward:
    """The reward of a conversation is the logit of its last token."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype | None = None):
        """`dtype`: of its weights; none: as they are saved. Raises ValueError where the folder has no reward model."""
        flag = f"--reward_model {folder}"
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{flag}: there is no config.json in it. Give a checkpoint; an adapter is to be merged first"
            )
        model = load_model(folder, "SequenceClassification", flag="--reward_model", dtype=dtype or "auto")
        if model.config.num_labels != 1:
            raise ValueError(f"{flag} has {model.config.num_labels} labels, and a reward model has one")
        self._tokenizer: Any = load_tokenizer(folder)
        if not self._tokenizer.chat_template:
            raise ValueError(f"{flag}: its tokenizer has no chat template. Add a chat_template.jinja to the folder")
        check_template(self._tokenizer)
        self._flag, self._device, self._model = flag, device, model.to(device).eval()
        self._text = model.config.get_text_config()
        self._pads = self._text.pad_token_id is not None

    def __call__(self, messages: list[list[dict[str, Any]]]) -> list[float]:
        """The reward of each conversation. Raises ValueError for one that is longer than the model's positions."""
        ids = [self._encode(conversation) for conversation in messages]
        rewards = [0.0] * len(ids)
        for batch in _batches([len(each) for each in ids]):
            for place, reward in zip(batch, self._forward([ids[place] for place in batch]).tolist(), strict=True):
                rewards[place] = reward
        return rewards

    def _encode(self, conversation: list[dict[str, Any]]) -> list[int]:
        ids = self._tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
        most = getattr(self._text, "max_position_embeddings", None)
        if most and len(ids) > most:
            raise ValueError(f"{self._flag} reads up to {most} tokens, and a conversation has {len(ids)}")
        return ids

    @torch.inference_mode()
    def _forward(self, ids: Sequence[list[int]]) -> Tensor:
        """fp32 [conversations]"""
        if not self._pads:
            # transformers scores the last token that is not padding: any serves that is in none of the texts.
            there = {token for each in ids for token in each}
            self._text.pad_token_id = next(t for t in range(self._text.vocab_size) if t not in there)
        longest = max(map(len, ids))
        tokens = torch.full((len(ids), longest), self._text.pad_token_id)
        mask = torch.zeros_like(tokens)
        for row, each in enumerate(ids):
            tokens[row, : len(each)] = torch.tensor(each)
            mask[row, : len(each)] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        return self._model(tokens, attention_mask=mask, use_cache=False).logits[:, 0].float()


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places in `lengths`, those of like lengths together, up to TOKENS with padding."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if batch and lengths[place] * (len(batch) + 1) > TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
