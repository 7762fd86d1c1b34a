"""Numbers of documents with audios by transformers and its processor, which takes at most one in a document."""

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tests import tiny_audio
from tests.tasks.vision_oracle import Oracle

SOUNDS = 9


def write_sounds(folder: Path) -> None:
    """Write 0.wav ... of a quarter of a second to almost three."""
    for number in range(SOUNDS):
        (folder / f"{number}.wav").write_bytes(tiny_audio.wav(tiny_audio.sound(4000 + 5000 * number, number)))


class AudioOracle(Oracle):
    auto_class = "AutoModelForMultimodalLM"

    def __init__(self, folder: Path, pictures: Path, *, has_head: bool = False):
        super().__init__(folder, pictures, has_head=has_head)
        # Otherwise transformers trains no embedding of the padding token, which a completion may have.
        self.model.get_input_embeddings().padding_idx = None

    def inputs(self, text: str, images: Sequence[str], videos: Sequence[Sequence[str]] = ()) -> dict[str, Tensor]:
        """images: files of sounds"""
        if not images:
            return self.processor.tokenizer([text], return_tensors="pt")
        (name,) = images
        with wave.open(str(self.pictures / name)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
        return self.processor(text=[text], audio=[samples])
