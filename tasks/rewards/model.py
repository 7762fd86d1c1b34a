"""Reward model: sequence classification of transformers with one label, as `--rlhf_type rm` saves it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...bridge.checkpoint.pretrained import load_model, load_tokenizer
from ...templates.chat_template.chat import check_template
from ...templates.json_types import JsonObject

TOKENS = 16384  # per batch, including padding


class ModelReward:
    """Reward of a conversation: the model's logit at its last token."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype | None = None):
        """Load the model. `dtype`: of the weights; None: as saved. Raises ValueError if it is no reward model."""
        flag = f"--reward_model {folder}"
        if not (folder / "config.json").is_file():
            raise ValueError(f"{flag}: it has no config.json. Set a checkpoint; merge an adapter first")
        model = load_model(folder, "SequenceClassification", flag="--reward_model", dtype=dtype or "auto")
        if model.config.num_labels != 1:
            raise ValueError(f"{flag}: it has {model.config.num_labels} labels, not one. Set a reward model")
        self._tokenizer = load_tokenizer(folder)
        if not self._tokenizer.chat_template:
            raise ValueError(f"{flag}: its tokenizer has no chat template. Add a chat_template.jinja to the folder")
        check_template(self._tokenizer)
        self._flag, self._device, self._model = flag, device, model.to(device).eval()
        self._text_config = model.config.get_text_config()
        self._has_padding = self._text_config.pad_token_id is not None

    def __call__(self, messages: list[list[JsonObject]]) -> list[float]:
        """Return the reward of each conversation. Raises ValueError if one exceeds the model's positions."""
        ids = [self._encode(conversation) for conversation in messages]
        rewards = [0.0] * len(ids)
        for batch in length_batches([len(tokens) for tokens in ids]):
            for i, reward in zip(batch, self._forward([ids[i] for i in batch]).tolist(), strict=True):
                rewards[i] = reward
        return rewards

    def _encode(self, conversation: list[JsonObject]) -> list[int]:
        ids = self._tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
        check_length(len(ids), getattr(self._text_config, "max_position_embeddings", None), self._flag)
        return ids

    @torch.inference_mode()
    def _forward(self, ids: Sequence[list[int]]) -> Tensor:
        """Return rewards as fp32 [conversations]."""
        if not self._has_padding:
            # transformers scores the last token that is not padding. Any id outside of the texts serves as padding.
            used_ids = {token for conversation in ids for token in conversation}
            self._text_config.pad_token_id = next(t for t in range(self._text_config.vocab_size) if t not in used_ids)
        longest = max(map(len, ids))
        tokens = torch.full((len(ids), longest), self._text_config.pad_token_id)
        mask = torch.zeros_like(tokens)
        for row, conversation in enumerate(ids):
            tokens[row, : len(conversation)] = torch.tensor(conversation)
            mask[row, : len(conversation)] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        return self._model(tokens, attention_mask=mask, use_cache=False).logits[:, 0].float()


def check_length(tokens: int, positions: int | None, flag: str) -> None:
    """Raise ValueError for a conversation that exceeds the model's positions."""
    if positions and tokens > positions:
        raise ValueError(f"{flag}: it has {positions} positions, and a conversation {tokens} tokens. Use shorter ones")


def length_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of conversations with similar lengths, up to TOKENS with padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[i] * (len(batch) + 1) > TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
