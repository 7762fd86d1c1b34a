"""Reward model with a tower, as `--rlhf_type rm` saves it: transformers' model with the head `score.weight`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...bridge.checkpoint.answering_model import answering_model
from ...bridge.checkpoint.hub import read_config
from ...bridge.checkpoint.pretrained import load_model, load_tokenizer
from ...bridge.checkpoint.safetensors_io import SafetensorsFolder
from ...bridge.checkpoint.vision import has_tower
from ...bridge.model.score_head import count_labels
from ...templates.chat_template.chat import check_template
from ...templates.dataset.placed_media import PlacedMedium, expand
from ...templates.dataset.tokenize import place_media
from ...templates.dataset.transformers_inputs import to_model, transformers_inputs
from ...templates.formats.medium import Medium, from_tags, has_sentinels, to_blocks
from ...templates.formats.schemas import UnusableRow
from ...templates.json_types import JsonObject
from ...templates.media.processor import VisionProcessor
from ...templates.options import MediaOptions
from .model import check_length, length_batches
from .reward_fn import RewardSample

HEAD = "score.weight"


def has_vision(folder: Path) -> bool:
    """Return whether the reward model in `folder` sees images or hears audios."""
    return (folder / "config.json").is_file() and has_tower(folder, read_config(folder))


class VisionModelReward:
    """Reward of a conversation with images or audios: the head's product with the hidden state of its last token."""

    reads_samples = True

    def __init__(self, folder: Path, device: torch.device, options: MediaOptions, dtype: torch.dtype | None = None):
        """Load the model. `dtype`: of the weights; None: as saved. Raises ValueError if it is no reward model."""
        flag = f"--reward_model {folder}"
        labels = count_labels(read_config(folder))
        if labels != 1:
            problem = "it has no head" if labels is None else f"it has {labels} labels, not one"
            raise ValueError(f"{flag}: {problem}. Set a reward model")
        self._tokenizer = load_tokenizer(folder)
        vision = VisionProcessor.open(folder, self._tokenizer, options)
        if vision is None:
            raise ValueError(f"{flag}: it has no preprocessor_config.json. Copy its files from the original checkpoint")
        self._vision = vision
        if vision.chat_template:  # has precedence over the tokenizer's
            self._tokenizer.chat_template = vision.chat_template
        check_template(self._tokenizer)
        model = answering_model(load_model(folder, "", flag="--reward_model", dtype=dtype or "auto"))
        head = SafetensorsFolder(folder).read(HEAD, 0, 0, 1)
        self._flag, self._device, self._model = flag, device, model.to(device).eval()
        self._head = head.to(device, model.dtype)
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        """Return the reward of each conversation. Raises ValueError if one exceeds the model's positions."""
        documents = [self._encode(sample) for sample in samples]
        patches = self._patches([placed for _, media in documents for placed in media])
        rewards = [0.0] * len(documents)
        for batch in length_batches([len(ids) for ids, _ in documents]):
            for i, reward in zip(batch, self._forward([documents[i] for i in batch], patches).tolist(), strict=True):
                rewards[i] = reward
        return rewards

    def _encode(self, sample: RewardSample) -> tuple[np.ndarray, list[PlacedMedium]]:
        """Return the ids of a conversation, and its media placed there."""
        replies = sample.replies or [{"role": "assistant", "content": sample.completion}]
        # Tags in the model's answers are text.
        replies = [reply if reply["role"] == "assistant" else _with_blocks(reply) for reply in replies]
        messages = [*map(_with_blocks, sample.messages), *replies]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        try:
            placed = place_media(ids, sample.media, self._vision)
        except UnusableRow as error:
            raise ValueError(f"{self._flag}: {error} ({sample})") from None
        (ids, _), media = expand(ids, np.zeros(len(ids), np.float32), placed)
        check_length(len(ids), self._positions, self._flag)
        return ids, media

    def _patches(self, media: Sequence[PlacedMedium]) -> dict[int, np.ndarray]:
        """Return the patches or spectrogram of each medium by its id. Completions of a prompt share theirs."""
        patches: dict[int, np.ndarray] = {}
        for placed in media:
            medium: Medium | None = placed.medium
            assert medium is not None
            if id(medium) not in patches:
                patches[id(medium)] = self._vision.decode(medium, placed.plan)
        return patches

    @torch.inference_mode()
    def _forward(
        self, documents: Sequence[tuple[np.ndarray, list[PlacedMedium]]], patches: dict[int, np.ndarray]
    ) -> Tensor:
        """Return rewards as fp32 [conversations]."""
        lengths = torch.tensor([len(ids) for ids, _ in documents])
        tokens = torch.zeros(len(documents), int(lengths.max()), dtype=torch.int64)
        for row, (ids, _) in enumerate(documents):
            tokens[row, : len(ids)] = torch.from_numpy(ids)
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        media = [(placed.plan, patches[id(placed.medium)]) for _, placed_media in documents for placed in placed_media]
        inputs = {"input_ids": tokens, "attention_mask": mask, **transformers_inputs(media, tokens, self._vision)}
        output = self._model(**to_model(inputs, self._device, self._model.dtype), use_cache=False)
        hidden = output.logits if "logits" in output else output.last_hidden_state  # logits: see load_model
        last = hidden[torch.arange(len(documents)), lengths - 1]
        return (last @ self._head.T)[:, 0].float()


def _with_blocks(message: JsonObject) -> JsonObject:
    """Return a message with content blocks in place of tags."""
    content = message.get("content")
    if not isinstance(content, str) or not has_sentinels(text := from_tags(content)):
        return message
    return message | {"content": to_blocks(text)}
