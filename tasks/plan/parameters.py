"""Parameters of a model by where they lie: layers, and what tensor and expert parallelism divide.

They are counted from the tables that load and save the model (bridge/mapping) and the shapes of transformers' model on
the meta device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from ...bridge.checkpoint.pretrained import empty_model
from ...bridge.families import family_of
from ...bridge.layers.vision_tower import MERGERS
from ...bridge.mapping.architecture import Architecture, HfConfig
from ...bridge.mapping.param_mapping import (
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    TOWERS,
    MappingEntry,
    ParamKey,
    ParamTable,
    expand_mappings,
)

LAYER, PREDICTION = "decoder.layers.{layer}.", "mtp.layers.{layer}."  # begin the names of their tensors
LAYER_INPUTS = "embedding.layer_inputs."
INNER = PREDICTION + "mtp_model_layer."


@dataclass
class Parameters:
    """Numbers of parameters."""

    split: int = 0  # divided by tensor parallelism
    replicated: int = 0
    expert: int = 0  # split by expert parallelism

    @property
    def total(self) -> int:
        return self.split + self.replicated + self.expert

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.split + other.split, self.replicated + other.replicated, self.expert + other.expert)

    def __sub__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.split - other.split, self.replicated - other.replicated, self.expert - other.expert)


@dataclass
class ModelParameters:
    """Parameters of a model's parts."""

    layers: list[Parameters]
    embedding: Parameters = field(default_factory=Parameters)
    layer_inputs: Parameters = field(default_factory=Parameters)  # further embeddings, of each layer
    output: Parameters = field(default_factory=Parameters)  # with the last norm; with the embedding's copy if tied
    tower: Parameters = field(default_factory=Parameters)  # on every rank, without its mergers
    mergers: Parameters = field(default_factory=Parameters)
    prediction: Parameters = field(default_factory=Parameters)  # layers of multi-token prediction
    tied: bool = False

    @property
    def total(self) -> int:
        """Number in the checkpoint: a tied output layer counts once."""
        return self.language + self.tower.total + self.mergers.total

    @property
    def language(self) -> int:
        """Number in the language model."""
        parts = self._sums[-1] + self.embedding + self.layer_inputs + self.output + self.prediction
        return parts.total - (self.embedding.total if self.tied else 0)

    @cached_property
    def _sums(self) -> list[Parameters]:
        """Parameters of the first layers, by their number. A search reads those of ranges some ten thousand times."""
        return list(accumulate(self.layers, initial=Parameters()))

    def of_layers(self, layers: range) -> Parameters:
        return self._sums[layers.stop] - self._sums[layers.start]

    def of_stage(self, layers: range, *, is_first: bool, is_last: bool) -> Parameters:
        """Return the parameters of a pipeline stage, without the tower's.

        With one stage a tied output layer is the embedding itself. With several, the last one has a copy of the
        embedding if it is tied or has layers of multi-token prediction.
        """
        stage = self.of_layers(layers)
        if is_first:
            stage += self.embedding + self.layer_inputs
        if is_last:
            stage += self.output + self.prediction
        if is_first and is_last and self.tied:
            stage.split -= self.embedding.split
        if is_last and not is_first and self.prediction.total and not self.tied:
            stage += self.embedding
        return stage


def count_parameters(hf_config: HfConfig, transformers_config: Any, depths: int = 0) -> ModelParameters:
    """Count the parameters of the model of a config.json.

    transformers_config: the same as transformers' config; depths: layers of multi-token prediction, which it lacks
    Raises ValueError for a model with tensors whose shapes are not known.
    """
    from transformers.core_model_loading import revert_weight_conversion

    family = family_of(hf_config)
    architecture = family.describe(hf_config, vision=family.has_tower(hf_config))
    if depths:
        architecture = family.add_prediction(architecture, hf_config, depths)
    with torch.device("meta"):
        empty = empty_model(transformers_config)
        tensors = empty.state_dict()
        tensors |= revert_weight_conversion(empty, tensors)  # some have other names in checkpoints
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model = ModelParameters(
        [Parameters() for _ in range(architecture.transformer["num_layers"])], tied=architecture.tied
    )
    entries = expand_mappings(family, hf_config, architecture, shapes)
    like = _layer_of_prediction(entries)
    for key, entry in entries.items():
        part = _part(model, key)
        if key.name.startswith(PREDICTION):
            count = _count_of_prediction(key, like, entries, shapes, architecture)
        else:
            count = _count(key, entry, shapes, architecture)
        if EXPERTS in key.name:
            part.expert += count
        elif entry.kind.dim is None or key.name.startswith(TOWERS):
            part.replicated += count
        else:
            part.split += count
    return model


def _part(model: ModelParameters, key: ParamKey) -> Parameters:
    if key.name.startswith(TOWERS):
        return model.mergers if key.name.split(".")[1] in MERGERS else model.tower
    if key.name.startswith(PREDICTION):
        return model.prediction
    if key.layer is not None:
        return model.layers[key.layer]
    if key == EMBEDDING:
        return model.embedding
    return model.layer_inputs if key.name.startswith(LAYER_INPUTS) else model.output


def _layer_of_prediction(entries: ParamTable) -> int | None:
    """Return the last layer of the model with the tensors of those of multi-token prediction; None without any."""
    names: dict[int, set[str]] = {}
    inner = {key.name.removeprefix(INNER) for key in entries if key.name.startswith(INNER)}
    for key in entries:
        if key.layer is not None and key.name.startswith(LAYER):
            names.setdefault(key.layer, set()).add(key.name.removeprefix(LAYER))
    return max((layer for layer, tensors in names.items() if tensors == inner), default=None)


def _count_of_prediction(
    key: ParamKey,
    like: int | None,
    entries: ParamTable,
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
) -> int:
    """Count a tensor of a layer of multi-token prediction, within which is one as the model's layer `like`."""
    if key.name.startswith(INNER):
        key = ParamKey(LAYER + key.name.removeprefix(INNER), like, key.expert)
        return _count(key, entries[key], shapes, architecture)
    hidden: int = architecture.transformer["hidden_size"]
    return 2 * hidden**2 if ".eh_proj." in key.name else hidden


def _count(
    key: ParamKey, entry: MappingEntry, shapes: Mapping[str, tuple[int, ...]], architecture: Architecture
) -> int:
    if entry.is_in(shapes):
        sizes = [shapes[name] for name in entry.hf]
        return sum(torch.Size(size[1:] if entry.num_experts else size).numel() for size in sizes)
    if key == OUTPUT and architecture.num_labels is not None:  # a head: TaskWork adds its parameters
        return 0
    if EXPERTS not in key.name or not key.name.endswith("weight"):
        name = OUTPUT.name if key == OUTPUT else key.name
        raise ValueError(f"the shape of {name} ({', '.join(entry.hf)}) is not known without the weights")
    # transformers stacks the experts of a layer, which checkpoints have one by one.
    arguments = architecture.transformer
    size = (architecture.expert_latent or arguments["hidden_size"]) * arguments["moe_ffn_hidden_size"]
    return size * (2 if arguments.get("gated_linear_unit") and "linear_fc1" in key.name else 1)
