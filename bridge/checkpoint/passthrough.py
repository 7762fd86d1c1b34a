"""Tensors of a checkpoint that the model is built without (multi-token prediction): they go along as they are.

`Architecture.carried` is a pattern of their names. In a folder of megatron-core's format they lie in a folder of their
own, by the names of the Hugging Face checkpoint.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..mapping.param_mapping import Architecture, HfConfig
from .hub import has_weights
from .quantized import open_weights
from .safetensors_io import TensorSpec, finish_shards, write_shard

FOLDER = "carried"  # in a folder of megatron-core's format
WHAT = {"carried": "as it came: the model was built without it"}  # for conversion.json


def passthrough_names(names: Iterable[str], architecture: Architecture) -> set[str]:
    """Those of a checkpoint's names, without the table's, that go along."""
    pattern = architecture.passthrough
    return {name for name in names if pattern and re.match(pattern, name)}


class PassthroughTensors:
    """What goes along from `source`, a model folder in either format: `forms` by name, and `read`.

    Tensors that are quantised go out in `dtype`, others as they are. `rows`: the names that the table has.
    """

    def __init__(
        self,
        source: str | Path,
        hf_config: HfConfig,
        architecture: Architecture,
        rows: Iterable[str],
        dtype: torch.dtype,
    ):
        self.forms: dict[str, TensorSpec] = {}
        folder = Path(source) / FOLDER if (Path(source) / FOLDER).is_dir() else Path(source)
        if architecture.passthrough and has_weights(folder):
            self._weights = open_weights(folder, {} if folder.name == FOLDER else hf_config)
            for name in sorted(passthrough_names(self._weights.tensors.keys() - set(rows), architecture)):
                stored = self._weights.tensors[name]
                quantised = stored.dtype.itemsize == 1
                self.forms[name] = TensorSpec(dtype if quantised else stored.dtype, stored.shape)

    def read(self, name: str) -> Tensor:
        """As a view of the file where it is not quantised."""
        shape = self.forms[name].shape
        return self._weights.read(name, 0, 0, shape[0] if shape else 0)

    def files(self, max_bytes: int) -> Iterator[dict[str, TensorSpec]]:
        """The tensors in runs of at most `max_bytes`, or one tensor where that is larger."""
        run: dict[str, TensorSpec] = {}
        for name, form in self.forms.items():
            if run and sum(other.bytes for other in run.values()) + form.bytes > max_bytes:
                yield run
                run = {}
            run[name] = form
        if run:
            yield run

    def save_beside(self, destination: Path, max_bytes: int) -> None:
        """Into the folder of its own of `destination`, a folder in megatron-core's format. Raises OSError."""
        if not self.forms:
            return
        folder = destination / FOLDER
        folder.mkdir()
        shards = []
        for number, forms in enumerate(self.files(max_bytes)):
            file = f"part-{number:05}.safetensors"
            write_shard(folder / file, forms, ((name, self.read(name)) for name in forms))
            shards.append((file, forms))
        finish_shards(folder, shards)
