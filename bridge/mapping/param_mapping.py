"""Mapping table between a Hugging Face checkpoint and a megatron-core model.

A `ParamMapping` pairs the tensor names of both sides. Its `ShardingKind` describes the megatron-core tensor as a list
of spans of the Hugging Face tensors. Loading reads only the spans of a rank's shard. Saving concatenates the shards of
all ranks and cuts out the spans.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

HfConfig = dict[str, Any]  # a config.json
TransformerArgs = dict[str, Any]  # keyword arguments of megatron-core's TransformerConfig


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    base: float
    dim: int  # number of rotated dimensions, the first ones of a head
    scaling: HfConfig | None = None  # normalized: {"rope_type": "llama3", "factor": 8.0, ...}
    interleaved: bool = False  # rotate adjacent dimensions; else pair dimension i of the first and the second half
    # Index of the position (0: time, 1: height, 2: width) that rotates each plane; (): the same position on all axes.
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layer:
    """Token mixer of one layer, and whether an MLP or experts follow it."""

    mixer: str = "attention"  # or "gated_delta_net", "mamba", "none"
    has_mlp: bool = True
    rope: int | None = 0  # index into Architecture.ropes; None: no position embedding
    window: int | None = None  # a query attends to itself and the `window - 1` keys before it
    chunk: int | None = None  # a query attends within its block of `chunk` positions
    head_dim: int | None = None  # size of a query, key or value; None: kv_channels
    groups: int | None = None  # key heads; None: num_query_groups
    has_values: bool = True  # a projection of their own; else values are the keys before norm and rope


@dataclass(frozen=True)
class Routing:
    """Expert routing that megatron-core's settings cannot express; see layers/router.py."""

    group_members: int = 2  # a group's score is the sum of this many of its highest expert scores
    normalize: bool = True  # normalize a token's expert weights to sum to 1, before any scaling
    smallest_sum: float = 1e-20  # lower bound of the divisor in this normalization
    logit_bias: bool = False  # the router's linear layer has a bias
    choice_bias: bool = False  # moe_router_enable_expert_bias, which megatron-core supports for sigmoid scores only
    fp32: bool = False  # router weights in fp32, regardless of the model's dtype
    sparse_mixer: float | None = None  # SparseMixer's margin, relative to the logits; replaces the other rules


class QueryGrowth(NamedTuple):
    """Factor on queries at position p: 1 + rate * log(1 + floor((p + first) / step))."""

    rate: float
    step: int
    first: int = 0
    has_rope: bool = True  # in the layers with a rope, or in those without


class SparseAttention(NamedTuple):
    """Lightning indexers that select the keys of each query (DeepSeek-V3.2); see layers/sparse_attention.py."""

    topk: int  # number of keys that a query attends to
    heads: int
    head_dim: int
    interleaved: bool  # order of its rope, which has attention's frequencies and rotates the first dimensions of a head
    sources: tuple[int, ...]  # for each layer, the one whose indexer selects its keys: itself or an earlier one


class Mamba(NamedTuple):
    """Mamba-2 layers; see layers/mamba.py."""

    heads: int
    head_dim: int
    groups: int  # the heads of a group have the same keys and queries
    state_dim: int  # size of a key or query
    kernel: int  # tokens of the convolution
    conv_bias: bool
    dt_limits: tuple[float, float]  # bounds of a time step


class Projector(NamedTuple):
    """Merger whose MLP has the width of the language model."""

    eps: float | None  # epsilon of the norm before it; None: there is no norm
    bias: bool  # the MLP's linear layers have biases
    activation: str
    # An RMS norm on each patch and a linear layer that reduces a square to `hidden_size` are before the MLP; else a
    # LayerNorm on each square.
    reduces_squares: bool


@dataclass(frozen=True, kw_only=True)
class TowerLayers:
    """Layers of a tower: transformer layers that attend in both directions."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    output_size: int  # the language model's hidden size
    normalization: str = "LayerNorm"  # or "RMSNorm"
    eps: float = 1e-6
    gated: bool = False
    activation: str = "gelu_pytorch_tanh"
    qkv_bias: bool = True
    key_bias: bool = True  # keys have a bias too, with `qkv_bias`
    layer_bias: bool = True  # biases of the other linear layers in the tower's layers
    layer_scale: bool = False  # learned factors on the outputs of attention and MLP
    window: int | None = None  # side in pixels of the windows in which layers attend, except `full_layers`


@dataclass(frozen=True, kw_only=True)
class Audio(TowerLayers):
    """Audio tower: convolutions over chunks of a log-mel spectrogram, a transformer, and a projector.

    Positions are sinusoidal, and begin anew in each chunk.
    """

    mel_bins: int
    chunk: int  # frames of the spectrogram that the convolutions see together
    block_chunks: int  # chunks that attend to each other
    channels: int | None = None  # outputs of three convolutions over time and frequency; None: two over time alone
    # Frames behind the end of an audio are zeros to each convolution: "never" (only to the first one), "short" (where
    # the audio has a single chunk), or "always".
    masks: str = "never"
    pools: bool = False  # the mean of each pair of positions is a feature
    projector_hidden: bool = True  # the projector has a hidden layer

    @property
    def halvings(self) -> int:
        """Number of convolutions that halve the time."""
        return 3 if self.channels else 1

    def positions(self, frames: int) -> int:
        """Return the positions of some frames of one chunk, behind the convolutions."""
        for _ in range(self.halvings):
            frames = (frames + 1) // 2
        return frames


INDICATORS = 5  # kinds of tokens around and between the tiles of an image of Ovis2


@dataclass(frozen=True, kw_only=True)
class Vision(TowerLayers):
    """Vision tower: a transformer over patches of images and videos, and mergers to features of the language model.

    A merger concatenates the patches of a square of `merge_size` x `merge_size`, and is an MLP with one hidden layer.
    With `gated_merger_size`, a convolution over each square ends the tower, and the merger is a projection, a norm and
    a gated MLP. `projector` is another form of it; with `pools_squares` it is the mean of a square, a norm that adds 1
    to its weights, and a matrix. With `square_mlp_size`, an MLP over each square ends the tower, whose two layers each
    end with an activation, and the merger is a matrix.
    """

    patch_size: int  # pixels
    temporal_patch_size: int  # frames; 1: the convolution over patches has no dimension of time
    merge_size: int
    rope_base: float | None = 10000.0  # None: no rope
    # Frequencies of a head's rope: each axis has the same ones, those of half a head; or height has every other one of
    # a head, and width those between.
    rope_alternates: bool = False
    channels: int = 3
    patch_bias: bool = True
    is_patch_matrix: bool = False  # the projection of patches is a matrix in checkpoints, and not a convolution
    patch_norm: bool = False  # a norm on embedded patches, before position embeddings are added
    grid_side: int | None = None  # side of a grid of learned position embeddings, which is resampled
    grid_axes: int = 1  # axes of that table in checkpoints: one of rows, or height and width
    class_token: bool = False  # a learned token in front of each image or frame; it has the grid's first embedding
    is_batched: bool = False  # class token and position embeddings have an axis of one image in checkpoints
    embedding_norm: bool = False  # a norm on class tokens and patches with their position embeddings
    final_norm: bool = False  # a norm behind the last layer
    # "bilinear": the ends of the grid are the first and the last patch; or "bicubic": the ends of their areas
    interpolation: str = "bilinear"
    full_layers: tuple[int, ...] = ()
    # Layers whose outputs, through mergers of their own, are added to the outputs of the language model's first layers
    # (DeepStack, https://arxiv.org/abs/2406.04334).
    deep_layers: tuple[int, ...] = ()
    gated_merger_size: int | None = None  # hidden size of the merger's gated MLP
    projector: Projector | None = None
    pools_squares: bool = False
    square_mlp_size: int | None = None  # width of both layers of an MLP over each square
    # The features of an image's tiles are put together, without padding, with a learned one behind each row; they are
    # reduced to those of so many tiles. See layers/tile_features.py.
    most_tiles: int | None = None
    # Rows of a table of visual words. A square's features are its rows, weighed by probabilities; the last INDICATORS
    # rows are of the tokens around and between the tiles of an image, which are visual tokens too.
    visual_words: int | None = None


@dataclass(frozen=True)
class Architecture:
    """Architecture of a model, which a family reads from config.json."""

    transformer: TransformerArgs  # without parallelism, dtype and kernels; activation_func is a name
    vocab_size: int  # rows of the embedding in the checkpoint, without padding
    tied: bool  # the output layer is the embedding
    max_positions: int
    ropes: tuple[Rope, ...]
    layers: tuple[Layer, ...]  # one per layer
    layer_scalar: bool = False  # each layer's output is multiplied by a number of the checkpoint
    embedding_scale: float = 1.0  # factor on the embedding's output, in the model's dtype
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP
    logits_scale: float = 1.0  # divisor of the logits
    logits_bias: bool = False  # the output layer has a bias
    logits_cap: float | None = None  # logits x become cap * tanh(x / cap), before any division
    score_cap: float | None = None  # attention scores too, before the softmax
    pre_norms: bool = True  # norms on the inputs of attention and MLP
    post_norms: bool = False  # norms on their outputs
    parallel_block: bool = False  # attention and MLP have the same input, the output of one norm
    norm_bias: bool = True  # biases of LayerNorms
    output_bias: bool = False  # bias of attention's output projection; for queries, keys and values: add_qkv_bias
    mlp_bias: bool = False  # biases of both linear layers of dense MLPs
    sinks: bool = False  # a learned logit per head in addition to those of the keys
    # With qk_layernorm in `transformer`: "head" (a norm per head), "rotated" (one after the rope) or "all" (one for all
    # heads). Without it: "l2" divides each head by its root mean square after the rope, in layers with a rope.
    qk_norm: str = "head"
    value_norm: bool = False  # values of each head are divided by their root mean square
    query_growth: QueryGrowth | None = None
    mamba: Mamba | None = None  # sizes of the layers with this mixer
    sparse: SparseAttention | None = None  # requires multi_latent_attention
    expert_bias: bool = False  # biases of both linear layers of each expert
    expert_latent: int | None = None  # width of the experts' inputs and outputs; None: that of the layer
    routing: Routing | None = None  # None: the moe_router settings in `transformer` suffice
    mtp_depths: int = 0  # layers of multi-token prediction to build; see layers/mtp.py
    num_labels: int | None = None  # of a score head that replaces the output layer; see sequence_classification.py
    vision: Vision | None = None  # vision tower to build
    audio: Audio | None = None  # audio tower to build
    passthrough: str = ""  # regex of tensors that the model is built without; see checkpoint/passthrough.py
    # (regex, replacement) from names of tensors in files to transformers' modules, where they differ: PEFT uses these.
    module_names: tuple[tuple[str, str], ...] = ()


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
    vlm_names: tuple[Callable[[str], str], ...] = ()  # renaming functions for tensors of vision-language checkpoints

    def describe(self, hf_config: HfConfig, *, vision: bool = False) -> Architecture:
        """Read the architecture from a raw config.json, of the language model alone or with its towers.

        Raises ValueError for unsupported settings, and if the model has no tower.
        """
        architecture = self.architecture(self.read(hf_config))
        if not vision:
            return architecture
        if not self.has_tower(hf_config):
            raise ValueError(f"{self.name}: this model has no vision tower, or its tower is not supported")
        return replace(
            architecture,
            vision=self.vision(hf_config) if self.vision and "vision_config" in hf_config else None,
            audio=self.audio(hf_config) if self.audio and "audio_config" in hf_config else None,
        )

    def has_tower(self, hf_config: HfConfig) -> bool:
        """Return whether a raw config.json has a vision or audio tower that can be built."""
        towers = ("vision_config", self.vision), ("audio_config", self.audio)
        return any(key in hf_config and reader is not None for key, reader in towers)

    def read(self, hf_config: HfConfig) -> HfConfig:
        """Return the text model's part of a raw config.json, with defaults for missing and null keys.

        With a tower, it also has the raw `text_config` and `vision_config`.
        """
        config = self.text_config(hf_config)
        missing = {key: default for key, default in self.defaults.items() if config.get(key) is None}
        return config | missing | {key: hf_config[key] for key in ("text_config", "vision_config") if key in hf_config}

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
