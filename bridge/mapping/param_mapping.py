"""Mapping table between a Hugging Face checkpoint and a megatron-core model.

A `ParamMapping` pairs the tensor names of both sides. Its `ShardingKind` describes the megatron-core tensor as a list
of spans of the Hugging Face tensors. Loading reads only the spans of a rank's shard. Saving concatenates the shards of
all ranks and cuts out the spans.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from .architecture import Architecture, Audio, HfConfig, Vision


class Span(NamedTuple):
    """Positions start, start + step, ... below stop of a Hugging Face tensor, along the split dimension.

    part: index of the tensor in its mapping; None: padding.
    """

    part: int | None
    start: int
    stop: int
    step: int = 1  # 2 where gate and up alternate

    @property
    def length(self) -> int:
        return len(range(self.start, self.stop, self.step))


@dataclass(frozen=True)
class ShardingKind:
    """Layout of a megatron-core tensor in terms of Hugging Face tensors, and its split by tensor parallelism.

    dim: the split dimension; None: replicated. spans(length, ranks, architecture): cover, in order and without a gap,
    the `length` positions along `dim` of the concatenated equal shards of all `ranks`. parts: replacements of {part} in
    the Hugging Face name. is_scalar: the Hugging Face tensor has no dimension, and megatron-core's one element.
    """

    dim: int | None
    spans: Callable[[int, int, Architecture], list[Span]]
    parts: tuple[str, ...] = ("",)
    is_scalar: bool = False


def _full_span(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return [Span(0, 0, length)]


def _padded_vocabulary(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    size = architecture.vocab_size
    return [Span(0, 0, size), Span(None, 0, length - size)] if length > size else [Span(0, 0, size)]


def _query_groups(
    length: int, ranks: int, architecture: Architecture, groups: int | None = None, has_values: bool = True
) -> list[Span]:
    """Lay out each query group as its query heads, its key head, its value head (if `has_values`).

    groups: their number, by default that of the architecture. The order does not depend on `ranks`: with fewer groups,
    megatron-core splits the tensor equally, and a rank gathers its group's activations (its Attention).
    """
    heads, parts = architecture.transformer["num_attention_heads"], 2 if has_values else 1
    count: int = groups or architecture.transformer["num_query_groups"]
    head_dim = length // (heads + parts * count)
    sizes = (heads // count * head_dim, *[head_dim] * parts)
    return [Span(part, g * size, (g + 1) * size) for g in range(count) for part, size in enumerate(sizes)]


def _gate_and_up(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each rank's shard of gate, then its shard of up."""
    size = length // (2 * ranks)
    return [Span(part, r * size, (r + 1) * size) for r in range(ranks) for part in (0, 1)]


def _fused_gate_and_up(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each rank's gate, then its up, from one matrix with all of gate before all of up."""
    half, size = length // 2, length // (2 * ranks)
    return [Span(0, first + r * size, first + (r + 1) * size) for r in range(ranks) for first in (0, half)]


REPLICATED = ShardingKind(None, _full_span)
SCALAR = ShardingKind(None, _full_span, is_scalar=True)
COLUMN = ShardingKind(0, _full_span)  # split by output features
ROW = ShardingKind(1, _full_span)  # split by input features
VOCAB = ShardingKind(0, _padded_vocabulary)
QKV = ShardingKind(0, _query_groups, ("q", "k", "v"))
GATE_UP = ShardingKind(0, _gate_and_up, ("gate", "up"))
FUSED_GATE_UP = ShardingKind(0, _fused_gate_and_up)


def qkv_of_groups(groups: int, *, has_values: bool) -> ShardingKind:
    """Return the kind of a QKV matrix with another number of key heads than the architecture's, or without values."""
    parts = ("q", "k", "v") if has_values else ("q", "k")
    return ShardingKind(0, partial(_query_groups, groups=groups, has_values=has_values), parts)


@dataclass(frozen=True)
class ParamMapping:
    """One line of a family's table, for all {layer} and {expert} of the model.

    Expert tensor parallelism splits the mappings of experts (EXPERTS is in their megatron-core name) and expert
    parallelism distributes them; tensor parallelism splits the others.
    """

    hf: str  # with {part} where the kind has several
    mcore: str  # named as in megatron-core's local layers; names of experts have no {expert}
    kind: ShardingKind
    layers: tuple[int, ...] | None = None  # None: every layer
    stacked: bool = False  # the Hugging Face tensor stacks all experts along its first dimension
    transposed: bool = False  # the last two dimensions are swapped in the Hugging Face tensor
    fp32: bool = False  # kept and saved in fp32, regardless of the model's dtype


@dataclass(frozen=True)
class Family:
    """Model family of transformers: its reader of config.json, and its mapping table.

    The functions take the text model's config with `defaults` filled in. Unsupported settings raise ValueError.
    """

    name: str  # model_type in config.json
    architectures: tuple[str, ...]
    models: str  # the checkpoints, for docs/models.md
    defaults: HfConfig  # of transformers' config class
    architecture: Callable[[HfConfig], Architecture]
    mappings: Callable[[HfConfig], list[ParamMapping]]
    limits: tuple[str, ...] = ()  # unsupported settings, for docs/models.md
    # Mappings of the first layers of multi-token prediction, as many as given; ValueError if config.json has fewer.
    mtp_mappings: Callable[[HfConfig, int], list[ParamMapping]] | None = None
    text_config: Callable[[HfConfig], HfConfig] = lambda config: config  # text model's part of a config.json
    vision: Callable[[HfConfig], Vision] | None = None  # reads the vision tower from a raw config.json
    vision_mappings: Callable[[Vision], list[ParamMapping]] | None = None
    audio: Callable[[HfConfig], Audio] | None = None  # reads the audio tower from a raw config.json
    audio_mappings: Callable[[Audio], list[ParamMapping]] | None = None
    builds_towers: Callable[[HfConfig], bool] = lambda hf_config: True  # those of a raw config.json can be built
    vlm_names: tuple[Callable[[str], str], ...] = ()  # renaming functions for tensors of vision-language checkpoints

    def describe(self, hf_config: HfConfig, *, vision: bool = False) -> Architecture:
        """Read the architecture from a raw config.json, of the language model alone or with its towers.

        Raises ValueError for unsupported settings, and if the model has no tower.
        """
        architecture = self.architecture(self.read(hf_config))
        if not vision:
            return architecture
        if not self._has_tower_settings(hf_config):
            raise ValueError(f"{self.name}: this model has no vision tower, or its tower is not supported")
        return replace(
            architecture,
            vision=self.vision(hf_config) if self.vision and "vision_config" in hf_config else None,
            audio=self.audio(hf_config) if self.audio and "audio_config" in hf_config else None,
        )

    def has_tower(self, hf_config: HfConfig) -> bool:
        """Return whether a raw config.json has a vision or audio tower that can be built."""
        return self._has_tower_settings(hf_config) and self.builds_towers(hf_config)

    def _has_tower_settings(self, hf_config: HfConfig) -> bool:
        towers = ("vision_config", self.vision), ("audio_config", self.audio)
        return any(key in hf_config and reader is not None for key, reader in towers)

    def read(self, hf_config: HfConfig) -> HfConfig:
        """Return the text model's part of a raw config.json, with defaults for missing and null keys.

        With a tower, it also has the raw `text_config` and `vision_config`.
        """
        config = self.text_config(hf_config)
        missing = {key: default for key, default in self.defaults.items() if config.get(key) is None}
        return config | missing | {key: hf_config[key] for key in ("text_config", "vision_config") if key in hf_config}

    def add_prediction(self, architecture: Architecture, hf_config: HfConfig, depths: int) -> Architecture:
        """Return the architecture with layers of multi-token prediction.

        Raises ValueError if the model of a raw config.json has fewer, or none that are known.
        """
        if self.mtp_mappings is None:
            raise ValueError(
                f"--mtp_num_layers {depths}: layers of multi-token prediction are not known of {self.name}"
            )
        self.mtp_mappings(self.read(hf_config), depths)
        return replace(architecture, mtp_depths=depths)

    def list_mappings(self, hf_config: HfConfig, mtp_depths: int = 0) -> list[ParamMapping]:
        """List the mappings under all their checkpoint names, the likelier names for this raw config.json first."""
        config = self.read(hf_config)
        mappings = self.mappings(config)
        vlm = [replace(mapping, hf=spell(mapping.hf)) for spell in self.vlm_names for mapping in mappings]
        mappings = vlm + mappings if "text_config" in hf_config else mappings + vlm
        return mappings + self.mtp_mappings(config, mtp_depths) if self.mtp_mappings and mtp_depths else mappings


class ParamKey(NamedTuple):
    """Key of a megatron-core tensor, with global layer and expert indices."""

    name: str  # ParamMapping.mcore
    layer: int | None = None
    expert: int | None = None

    def __str__(self) -> str:
        expert = "" if self.expert is None else f" of expert {self.expert}"
        return self.name.format(layer=self.layer) + expert


class MappingEntry(NamedTuple):
    """Mapping of one layer and expert."""

    kind: ShardingKind
    hf: tuple[str, ...]  # one name per part of the kind
    transposed: bool = False  # as in ParamMapping
    fp32: bool = False
    num_experts: int = 0  # number of experts stacked in the Hugging Face tensors
    expert_index: int | None = None  # index of this expert among them

    @property
    def dim(self) -> int:
        """Split dimension of the megatron-core tensor."""
        return self.kind.dim or 0

    @property
    def hf_dim(self) -> int:
        """Split dimension of the Hugging Face tensors (of one expert, if stacked)."""
        return 1 - self.dim if self.transposed else self.dim

    def is_in(self, names: Container[str]) -> bool:
        return all(name in names for name in self.hf)

    def spans(self, shard: Sequence[int], ranks: int, architecture: Architecture) -> list[Span]:
        """Return the spans of the full tensor, given the shape of one rank's shard."""
        return self.kind.spans(shard[self.dim] * ranks, ranks, architecture)

    def hf_shapes(self, shard: Sequence[int], spans: Iterable[Span]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the Hugging Face tensors in `spans` by name (of one expert, if stacked)."""
        if self.kind.is_scalar:
            return dict.fromkeys(self.hf, ())
        lengths = [0] * len(self.hf)
        for span in spans:
            if span.part is not None and span.length:
                last = span.start + (span.length - 1) * span.step
                lengths[span.part] = max(lengths[span.part], last + 1)
        leading, trailing = tuple(shard[: self.dim]), tuple(shard[self.dim + 1 :])
        shapes = [(*leading, length, *trailing) for length in lengths]
        return dict(zip(self.hf, (shape[::-1] if self.transposed else shape for shape in shapes), strict=True))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the checkpoint, given a shape of `hf_shapes`."""
        return shape if self.expert_index is None else (self.num_experts, *shape)


ParamTable = dict[ParamKey, MappingEntry]
EMBEDDING = ParamKey("embedding.word_embeddings.weight")
OUTPUT, OUTPUT_BIAS = ParamKey("output_layer.weight"), ParamKey("output_layer.bias")
VISION_TOWER, AUDIO_TOWER = "vision.", "audio."  # begin the names of a tower's tensors
TOWERS = VISION_TOWER, AUDIO_TOWER
EXPERTS = "mlp.experts.linear_fc"  # in the names of tensors of single experts


def expand_mappings(
    family: Family, hf_config: HfConfig, architecture: Architecture, names: Container[str] = ()
) -> ParamTable:
    """Expand the table over every layer and expert of the model in a raw config.json.

    If a family has several mappings of one tensor, the first with all its tensors in the checkpoint's `names` is used.
    With tied embeddings the output layer's entry names the embedding's tensor, and the last stage has a copy.
    """
    entries: ParamTable = {}
    experts = range(architecture.transformer.get("num_moe_experts") or 0)
    mappings = family.list_mappings(hf_config, architecture.mtp_depths)
    if architecture.vision and family.vision_mappings:
        mappings = mappings + family.vision_mappings(architecture.vision)
    if architecture.audio and family.audio_mappings:
        mappings = mappings + family.audio_mappings(architecture.audio)
    for mapping in mappings:
        layers = range(architecture.transformer["num_layers"]) if mapping.layers is None else mapping.layers
        for layer in layers if "{layer}" in mapping.mcore else (None,):
            for expert in experts if EXPERTS in mapping.mcore else (None,):
                hf = tuple(mapping.hf.format(layer=layer, expert=expert, part=part) for part in mapping.kind.parts)
                key = ParamKey(mapping.mcore, layer, expert)
                entry = MappingEntry(mapping.kind, hf, mapping.transposed, mapping.fp32)
                if mapping.stacked:
                    entry = entry._replace(num_experts=len(experts), expert_index=expert)
                if key not in entries or (entry.is_in(names) and not entries[key].is_in(names)):
                    entries[key] = entry
    if architecture.tied:
        entries[OUTPUT] = entries[EMBEDDING]
    return entries


def clip_spans(spans: Iterable[Span], start: int, stop: int) -> Iterator[tuple[int, Span]]:
    """Yield the parts of `spans` within positions start..stop, each with its offset from `start`."""
    begin = 0
    for span in spans:
        low, high = max(begin, start), min(begin + span.length, stop)
        if low < high:
            first, last = (span.start + (position - begin) * span.step for position in (low, high - 1))
            yield low - start, Span(span.part, first, last + 1, span.step)
        begin += span.length
