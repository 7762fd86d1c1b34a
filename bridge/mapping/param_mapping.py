"""The mapping table between a Hugging Face checkpoint and a megatron-core model.

A `ParamMapping` pairs tensor names of both sides. Its `ShardingKind` builds one from the other as a list of spans,
which every direction reads: loading reads just the spans of a rank's own window, saving concatenates the windows of
all ranks and cuts the spans out again.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

HfConfig = dict[str, Any]  # a config.json
TransformerArgs = dict[str, Any]  # keyword arguments of megatron-core's TransformerConfig


@dataclass(frozen=True)
class Rope:
    """One rule of rotary embeddings."""

    base: float
    dim: int  # rotated dimensions of a head, the first ones
    scaling: HfConfig | None = None  # in one spelling: {"rope_type": "llama3", "factor": 8.0, ...}
    interleaved: bool = False  # rotate pairs of neighbouring dimensions; else pairs of one dimension of each half


@dataclass(frozen=True)
class Layer:
    """The token mixer of one layer, where layers differ."""

    mixer: str = "attention"  # or "gated_delta_net"
    rope: int | None = 0  # index into Architecture.ropes; None: no positions
    window: int | None = None  # a query attends to itself and the `window - 1` keys before it
    chunk: int | None = None  # a query attends within its own block of `chunk` positions


@dataclass(frozen=True)
class Routing:
    """Expert routing that megatron-core's own settings cannot express; see layers/router.py."""

    group_members: int = 2  # the score of a group of experts is the sum of its best so many
    normalize: bool = True  # normalize a token's expert weights to sum to 1, before any scaling
    smallest_sum: float = 1e-20  # lower bound of the divisor of this normalization
    logit_bias: bool = False  # the router's matrix has a bias
    choice_bias: bool = False  # moe_router_enable_expert_bias, which megatron-core has for sigmoid scores only
    fp32: bool = False  # keep the router's matrix in fp32, whatever the model's dtype


@dataclass(frozen=True)
class Architecture:
    """A model's architecture, as a family reads it from config.json."""

    transformer: TransformerArgs  # without parallelism, dtype and kernels; the activation by its name
    vocab_size: int  # rows of the embedding in the checkpoint, without padding
    tied: bool  # the output layer is the embedding
    max_positions: int
    ropes: tuple[Rope, ...]
    layers: tuple[Layer, ...]  # one per layer
    embedding_scale: float = 1.0  # factor on the embedding's output, in the model's dtype
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP
    logits_scale: float = 1.0  # divisor of the logits
    post_norms: bool = False  # norms on the outputs of attention and MLP, too
    output_bias: bool = False  # bias of attention's output; that of queries, keys and values: add_qkv_bias
    mlp_bias: bool = False  # biases of both matrices of dense MLPs
    sinks: bool = False  # a learned logit per head beside those of the keys
    # With transformer's qk_layernorm "head" (each head by itself) or "all" (all heads together); without it, in layers
    # with a rope, "l2" (each head divided by its root mean square, after the rope).
    qk_norm: str = "head"
    # (growth, step): in layers without a rope, queries at position p are multiplied by
    # 1 + growth * log(1 + floor((p + 1) / step)).
    query_growth: tuple[float, int] | None = None
    expert_bias: bool = False  # biases of both matrices of each expert
    routing: Routing | None = None  # None: the moe_router settings of `transformer`
    mtp_depths: int = 0  # layers of multi-token prediction to build; see layers/mtp.py
    num_labels: int | None = None  # of a score head in the output layer's place; see sequence_classification.py
    passthrough: str = ""  # pattern of tensors that the model is built without; see checkpoint/passthrough.py


class Span(NamedTuple):
    """Positions start, start + step, ... below stop of one of a mapping's Hugging Face tensors (part None: padding).

    They are counted along the split dimension.
    """

    part: int | None
    start: int
    stop: int
    step: int = 1  # 2: every other one, where gate and up alternate

    @property
    def length(self) -> int:
        return len(range(self.start, self.stop, self.step))


@dataclass(frozen=True)
class ShardingKind:
    """Construction of a megatron-core tensor from Hugging Face tensors, and its split by tensor parallelism.

    `spans(length, ranks, architecture)` covers, in order and without a gap, the `length` positions along `dim` of the
    concatenated shards of all `ranks`; rank r holds the r-th equal window of them. `parts` are the words that replace
    {part} in the Hugging Face name.
    """

    dim: int | None  # None: every rank holds all of it
    spans: Callable[[int, int, Architecture], list[Span]]
    parts: tuple[str, ...] = ("",)


def _full(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return [Span(0, 0, length)]


def _padded_vocabulary(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    size = architecture.vocab_size
    return [Span(0, 0, size), Span(None, 0, length - size)] if length > size else [Span(0, 0, size)]


def _query_groups(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each query group as its query heads, its key head, its value head.

    The order does not depend on ranks. With fewer groups than ranks megatron-core still cuts it into equal windows, and
    a rank gathers the activations of its group (megatron.core.transformer.attention, `num_query_groups < world_size`).
    """
    heads, groups = architecture.transformer["num_attention_heads"], architecture.transformer["num_query_groups"]
    head_dim = length // (heads + 2 * groups)
    sizes = (heads // groups * head_dim, head_dim, head_dim)
    return [Span(part, g * size, (g + 1) * size) for g in range(groups) for part, size in enumerate(sizes)]


def _gate_and_up(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each rank's gate, then its up: the shards of a gated MLP's two matrices alternate."""
    size = length // (2 * ranks)
    return [Span(part, r * size, (r + 1) * size) for r in range(ranks) for part in (0, 1)]


def _fused_gate_and_up(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out gate and up by ranks where one matrix holds all of the gate, then all of the up."""
    half, size = length // 2, length // (2 * ranks)
    return [Span(0, first + r * size, first + (r + 1) * size) for r in range(ranks) for first in (0, half)]


REPLICATED = ShardingKind(None, _full)
COLUMN = ShardingKind(0, _full)  # split by output features
ROW = ShardingKind(1, _full)  # split by input features
VOCAB = ShardingKind(0, _padded_vocabulary)
QKV = ShardingKind(0, _query_groups, ("q", "k", "v"))
GATE_UP = ShardingKind(0, _gate_and_up, ("gate", "up"))
FUSED_GATE_UP = ShardingKind(0, _fused_gate_and_up)


@dataclass(frozen=True)
class ParamMapping:
    """One line of a family's table. {layer} and {expert} run over the model's layers and experts.

    Expert tensor parallelism splits the mappings of experts (EXPERTS is in their megatron-core name) and expert
    parallelism distributes them; tensor parallelism splits the others.
    """

    hf: str  # with {part} where the kind has several
    mcore: str  # in the spelling of megatron-core's local layers; an expert's own name has no {expert}
    kind: ShardingKind
    layers: tuple[int, ...] | None = None  # None: every layer
    stacked: bool = False  # the Hugging Face tensor holds all experts, along its first dimension
    transposed: bool = False  # the last two dimensions are swapped in the Hugging Face tensor
    fp32: bool = False  # held and saved in fp32 whatever the model's dtype


@dataclass(frozen=True)
class Family:
    """One architecture of transformers: how to read its config.json, and its table.

    The functions get config.json's text model with `defaults` filled in. They raise ValueError for a setting that
    cannot be expressed.
    """

    name: str  # model_type in config.json
    architectures: tuple[str, ...]
    models: str  # the checkpoints, for docs/models.md
    defaults: HfConfig  # of transformers' config class
    architecture: Callable[[HfConfig], Architecture]
    mappings: Callable[[HfConfig], list[ParamMapping]]
    limits: tuple[str, ...] = ()  # refused settings, for docs/models.md
    # Mappings of the first so many layers of multi-token prediction. Raises ValueError if config.json has fewer.
    mtp_mappings: Callable[[HfConfig, int], list[ParamMapping]] | None = None
    text_config: Callable[[HfConfig], HfConfig] = lambda config: config  # the text model's part of a config.json
    vlm_names: tuple[Callable[[str], str], ...] = ()  # spellings of a tensor's name in vision-language checkpoints

    def describe(self, hf_config: HfConfig) -> Architecture:
        """Read the architecture of a raw config.json. Raises ValueError for what cannot be expressed."""
        return self.architecture(self.read(hf_config))

    def read(self, hf_config: HfConfig) -> HfConfig:
        """Return the text model's part of a raw config.json with defaults filled in (null counts as missing)."""
        config = self.text_config(hf_config)
        missing = {key: default for key, default in self.defaults.items() if config.get(key) is None}
        return config | missing | {key: hf_config[key] for key in ("text_config",) if key in hf_config}

    def list_mappings(self, hf_config: HfConfig, mtp_depths: int = 0) -> list[ParamMapping]:
        """List the table by all spellings of its names, the likelier ones for this raw config.json first."""
        config = self.read(hf_config)
        mappings = self.mappings(config)
        vlm = [replace(mapping, hf=spell(mapping.hf)) for spell in self.vlm_names for mapping in mappings]
        mappings = vlm + mappings if "text_config" in hf_config else mappings + vlm
        return mappings + self.mtp_mappings(config, mtp_depths) if self.mtp_mappings and mtp_depths else mappings


class ParamKey(NamedTuple):
    """One tensor of the model on megatron-core's side, by global layer and expert numbers."""

    name: str  # ParamMapping.mcore
    layer: int | None = None
    expert: int | None = None

    def __str__(self) -> str:
        expert = "" if self.expert is None else f" of expert {self.expert}"
        return self.name.format(layer=self.layer) + expert


class MappingEntry(NamedTuple):
    """A mapping at one layer and expert."""

    kind: ShardingKind
    hf: tuple[str, ...]  # one name per part of the kind
    transposed: bool = False  # as in ParamMapping
    fp32: bool = False
    num_experts: int = 0  # number of experts in the Hugging Face tensors, where these are stacked
    expert_index: int | None = None  # index of this one among them

    @property
    def dim(self) -> int:
        """The split dimension of megatron-core's tensor."""
        return self.kind.dim or 0

    @property
    def hf_dim(self) -> int:
        """The split dimension of the Hugging Face tensors (one expert's, where these are stacked)."""
        return 1 - self.dim if self.transposed else self.dim

    def is_in(self, names: Container[str]) -> bool:
        return all(name in names for name in self.hf)

    def spans(self, shard: Sequence[int], ranks: int, architecture: Architecture) -> list[Span]:
        """Return the spans of the full tensor, given the shape of a rank's shard."""
        return self.kind.spans(shard[self.dim] * ranks, ranks, architecture)

    def hf_shapes(self, shard: Sequence[int], spans: Iterable[Span]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the Hugging Face tensors of `spans` by name (one expert's, where these are stacked)."""
        lengths = [0] * len(self.hf)
        for span in spans:
            if span.part is not None and span.length:
                last = span.start + (span.length - 1) * span.step
                lengths[span.part] = max(lengths[span.part], last + 1)
        before, after = tuple(shard[: self.dim]), tuple(shard[self.dim + 1 :])
        shapes = [(*before, length, *after) for length in lengths]
        return dict(zip(self.hf, (shape[::-1] if self.transposed else shape for shape in shapes), strict=True))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the checkpoint of a tensor of `hf_shapes`."""
        return shape if self.expert_index is None else (self.num_experts, *shape)


ParamTable = dict[ParamKey, MappingEntry]
EMBEDDING = ParamKey("embedding.word_embeddings.weight")
OUTPUT = ParamKey("output_layer.weight")
EXPERTS = "mlp.experts.linear_fc"  # in the names of the experts' own tensors, one for each expert


def expand_mappings(
    family: Family, hf_config: HfConfig, architecture: Architecture, names: Container[str] = ()
) -> ParamTable:
    """Expand the table over every layer and expert of the model that a raw config.json describes.

    Where a family has several mappings for one tensor (spellings of its checkpoints), the first whose tensors are all
    among the checkpoint's `names` counts. With tied embeddings the output layer's entry names the embedding's tensor:
    a copy, where a stage holds one.
    """
    entries: ParamTable = {}
    experts = range(architecture.transformer.get("num_moe_experts") or 0)
    for mapping in family.list_mappings(hf_config, architecture.mtp_depths):
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
    """Yield the pieces of `spans` within positions start..stop, each with its offset from `start`."""
    begin = 0
    for span in spans:
        low, high = max(begin, start), min(begin + span.length, stop)
        if low < high:
            first, last = (span.start + (position - begin) * span.step for position in (low, high - 1))
            yield low - start, Span(span.part, first, last + 1, span.step)
        begin += span.length
