"""Checkpoint tensors that are saved unchanged because the model is built without them, as multi-token prediction.

`Architecture.passthrough` is the pattern of their names. A megatron-core checkpoint has them in a subfolder, under
their Hugging Face names.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..mapping.architecture import Architecture, HfConfig
from .hub import has_weights
from .quantized import open_weights
from .safetensors_io import TensorSpec, finish_shards, write_shard

FOLDER = "carried"  # subfolder of a megatron-core checkpoint
TensorRecord = dict[str, str | int | list[int]]  # one tensor in conversion.json
RECORD: TensorRecord = {"carried": "as it came: the model was built without it"}  # for conversion.json


def passthrough_names(names: Iterable[str], architecture: Architecture) -> set[str]:
    """Select the passthrough tensors from the `names` that are not in the table."""
    pattern = architecture.passthrough
    return {name for name in names if pattern and re.match(pattern, name)}


class PassthroughTensors:
    """Passthrough tensors of `source`, a model folder in either format.

    Quantized tensors are dequantized to `dtype`, others keep theirs. mapped: the names in the table.
    """

    def __init__(
        self,
        source: str | Path,
        hf_config: HfConfig,
        architecture: Architecture,
        mapped: Iterable[str],
        dtype: torch.dtype,
    ):
        self.specs: dict[str, TensorSpec] = {}
        folder = Path(source) / FOLDER if (Path(source) / FOLDER).is_dir() else Path(source)
        if architecture.passthrough and has_weights(folder):
            self._weights = open_weights(folder, {} if folder.name == FOLDER else hf_config)
            for name in sorted(passthrough_names(self._weights.tensors.keys() - set(mapped), architecture)):
                stored = self._weights.tensors[name]
                is_quantized = stored.dtype.itemsize == 1
                self.specs[name] = TensorSpec(dtype if is_quantized else stored.dtype, stored.shape)

    def read(self, name: str) -> Tensor:
        shape = self.specs[name].shape
        return self._weights.read(name, 0, 0, shape[0] if shape else 0)

    def files(self, max_bytes: int) -> Iterator[dict[str, TensorSpec]]:
        """Yield the tensors of each file: at most `max_bytes`, or one tensor if it is larger."""
        specs: dict[str, TensorSpec] = {}
        for name, spec in self.specs.items():
            if specs and sum(member.bytes for member in specs.values()) + spec.bytes > max_bytes:
                yield specs
                specs = {}
            specs[name] = spec
        if specs:
            yield specs

    def save_to_subfolder(self, destination: Path, max_bytes: int) -> None:
        """Write the tensors into a subfolder of the megatron-core checkpoint `destination`. Raises OSError."""
        if not self.specs:
            return
        folder = destination / FOLDER
        folder.mkdir()
        shards = []
        for number, specs in enumerate(self.files(max_bytes)):
            file = f"part-{number:05}.safetensors"
            write_shard(folder / file, specs, ((name, self.read(name)) for name in specs))
            shards.append((file, specs))
        finish_shards(folder, shards)
