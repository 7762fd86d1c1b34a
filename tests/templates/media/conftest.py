"""Tiny vision-language checkpoints with their tokenizers and processors."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import Prepared, prepare

from tests import tiny_audio, tiny_omni, tiny_vision


class Checkpoint(NamedTuple):
    folder: Path
    tokenizer: Any
    processor: Any  # transformers'

    def vision(self, **options) -> VisionProcessor:
        processor = VisionProcessor.open(self.folder, self.tokenizer, PrepareOptions(**options))
        assert processor
        return processor

    def prepare(self, stage="sft", **options) -> Prepared:
        return prepare(PrepareOptions(**options), self.tokenizer, stage=stage, vision=self.vision(**options))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a function from the name of a family to its tiny checkpoint."""
    made: dict[str, Checkpoint] = {}

    def make(family: str) -> Checkpoint:
        if family not in made:
            from transformers import AutoTokenizer

            families = tiny_vision.FAMILIES | tiny_audio.FAMILIES | tiny_omni.FAMILIES
            folder = families[family](tmp_path_factory.mktemp(family))
            processor = tiny_vision.processor_of(folder)
            made[family] = Checkpoint(folder, AutoTokenizer.from_pretrained(folder), processor)
        return made[family]

    return make


@pytest.fixture
def made(checkpoint):
    return checkpoint("qwen3_vl")


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    """Return the paths of pictures of 4, 6 and 15 tokens."""
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, size in enumerate([(64, 64), (96, 64), (160, 96)]):
        tiny_vision.picture(*size, seed=number).save(paths[number])
    return paths
