"""The words of the bridge's table: a family's rows, and for each kind of row where its tensors lie, whole and split.

A row pairs names of a Hugging Face checkpoint with a name in megatron-core's model. Its kind says how the one is made
of the other, as a list of spans, which every direction reads: loading takes the spans of a rank's own window and reads
just those slices, saving puts the windows of all ranks end to end and cuts the spans out again.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Rope:
    """One rule of rotary embeddings."""

    base: float
    dim: int  # how many of a head's dimensions turn, the first ones
    scaling: dict[str, Any] | None = None  # in one spelling: {"rope_type": "llama3", "factor": 8.0, ...}
    interleaved: bool = False  # a plane is two neighbouring dimensions; else one of each half


@dataclass(frozen=True)
class Layer:
    """What one layer mixes tokens with, where layers differ."""

    mixer: str = "attention"  # or "gated_delta_net"
    rope: int | None = 0  # which of Architecture.ropes; None: no positions
    window: int | None = None  # a query meets itself and the `window - 1` keys before it
    chunk: int | None = None  # a query meets the keys of its own block of `chunk` positions only


@dataclass(frozen=True)
class Routing:
    """How tokens choose their experts, where megatron-core's own settings cannot say it; see layers/router.py."""

    group_members: int = 2  # a group of experts is as good as its best so many
    normalize: bool = True  # the weights of a token's experts are made to sum up to 1, before any scaling
    smallest_sum: float = 1e-20  # by which they are divided at least for it
    logit_bias: bool = False  # the router's matrix has a bias
    choice_bias: bool = False  # as moe_router_enable_expert_bias, which megatron-core has for sigmoid scores only
    fp32: bool = False  # its matrix is held in fp32 whatever the model's dtype


@dataclass(frozen=True)
class Architecture:
    """What a family makes of a raw config.json."""

    # Arguments of megatron-core's TransformerConfig: no parallelism, no dtype, no kernels; the activation by its name.
    transformer: dict[str, Any]
    vocab_size: int  # rows of the embedding in the checkpoint, before any padding
    tied: bool  # the output layer is the embedding
    max_positions: int
    ropes: tuple[Rope, ...]
    layers: tuple[Layer, ...]  # one for each layer of the model
    embedding_scale: float = 1.0  # hidden states after the embedding are multiplied by it, in the model's dtype
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0  # logits are divided by it
    post_norms: bool = False  # a norm of what attention and MLP add, too
    output_bias: bool = False  # of attention's output; of queries, keys and values: transformer's add_qkv_bias
    mlp_bias: bool = False  # of both matrices of dense MLPs
    sinks: bool = False  # a learnt logit for each head beside those of the keys
    # With transformer's qk_layernorm "head" (each head by itself) or "all" (all heads together); without it, in layers
    # with a rope, "l2" (each head divided by its root mean square, after the rope).
    qk_norm: str = "head"
    # (growth, step): in layers without a rope, queries at position p are multiplied by
    # 1 + growth * log(1 + floor((p + 1) / step)).
    query_growth: tuple[float, int] | None = None
    expert_bias: bool = False  # on both matrices of each expert
    routing: Routing | None = None  # None: as megatron-core's moe_router settings in `transformer` say
    predicting: int = 0  # layers of multi-token prediction that are built: see layers/mtp.py
    head: int | None = None  # labels of a head in the output layer's place: see families/sequence_classification.py
    carried: str = ""  # pattern of tensors that the model is built without: see checkpoint/passthrough.py


class Span(NamedTuple):
    """Positions start, start + step, ... below stop of one of a row's Hugging Face tensors (part None: padding).

    They are counted along the split dimension.
    """

    part: int | None
    start: int
    stop: int
    step: int = 1  # 2: every other one, as where gate and up alternate

    @property
    def length(self) -> int:
        return len(range(self.start, self.stop, self.step))


@dataclass(frozen=True)
class Kind:
    """How one megatron-core tensor is made of Hugging Face tensors, and how tensor parallelism splits it.

    `spans(length, ranks, architecture)` covers, in order and without a gap, the `length` positions along `dim` of the
    shards of all `ranks` put end to end; rank r holds the r-th equal window of them. `parts` are the words that stand
    for {part} in the row's Hugging Face pattern.
    """

    dim: int | None  # None: every rank holds all of it
    spans: Callable[[int, int, Architecture], list[Span]]
    parts: tuple[str, ...] = ("",)


def _whole(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return [Span(0, 0, length)]


def _padded_vocabulary(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    size = architecture.vocab_size
    return [Span(0, 0, size), Span(None, 0, length - size)] if length > size else [Span(0, 0, size)]


def _query_groups(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """For each query group its query heads, its key head, its value head.

    The order knows nothing of ranks. With fewer groups than ranks megatron-core still cuts it into equal windows, and a
    rank gathers the activations of its group (megatron.core.transformer.attention, `num_query_groups < world_size`).
    """
    heads, groups = architecture.transformer["num_attention_heads"], architecture.transformer["num_query_groups"]
    one = length // (heads + 2 * groups)
    sizes = (heads // groups * one, one, one)
    return [Span(part, g * size, (g + 1) * size) for g in range(groups) for part, size in enumerate(sizes)]


def _gate_and_up(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """For each rank its gate, then its up: the shards of a gated MLP's two matrices alternate."""
    size = length // (2 * ranks)
    return [Span(part, r * size, (r + 1) * size) for r in range(ranks) for part in (0, 1)]


def _fused_gate_and_up(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """The same where one matrix holds the whole gate, then the whole up."""
    half, size = length // 2, length // (2 * ranks)
    return [Span(0, first + r * size, first + (r + 1) * size) for r in range(ranks) for first in (0, half)]


REPLICATED = Kind(None, _whole)
COLUMN = Kind(0, _whole)  # split by output features
ROW = Kind(1, _whole)  # split by input features
VOCAB = Kind(0, _padded_vocabulary)
QKV = Kind(0, _query_groups, ("q", "k", "v"))
GATE_UP = Kind(0, _gate_and_up, ("gate", "up"))
FUSED_GATE_UP = Kind(0, _fused_gate_and_up)


@dataclass(frozen=True)
class Row:
    """One line of a family's table. {layer} and {expert} run over the model's layers and experts.

    A row of experts (its megatron-core name says so: EXPERTS) is split by expert tensor parallelism and spread by
    expert parallelism, another by tensor parallelism.
    """

    hf: str  # with {part} where the kind has several
    mcore: str  # in the spelling of megatron-core's local layers; an expert's own name has no {expert}
    kind: Kind
    layers: tuple[int, ...] | None = None  # where it is found; None: in every layer
    stacked: bool = False  # the Hugging Face tensor holds all experts, the expert's number first
    transposed: bool = False  # the last two dimensions are the other way round in the Hugging Face tensor
    fp32: bool = False  # held and saved in fp32 whatever the model's dtype


@dataclass(frozen=True)
class Family:
    """One architecture of transformers: how its config.json is read, and its table."""

    name: str  # model_type in config.json
    architectures: tuple[str, ...]
    models: str  # whose checkpoints these are, for docs/models.md
    describe: Callable[[dict[str, Any]], Architecture]  # raises ValueError for what cannot be expressed
    rows: Callable[[dict[str, Any]], list[Row]]
    limits: tuple[str, ...] = ()  # what `describe` refuses, for docs/models.md
    # The rows of the first so many layers of multi-token prediction. Raises ValueError where config.json has fewer.
    predicting_rows: Callable[[dict[str, Any], int], list[Row]] | None = None


class Key(NamedTuple):
    """One tensor of the whole model on megatron-core's side; layer and expert count over the whole model."""

    name: str  # the pattern Row.mcore
    layer: int | None = None
    expert: int | None = None

    def __str__(self) -> str:
        expert = "" if self.expert is None else f" of expert {self.expert}"
        return self.name.format(layer=self.layer) + expert


class Entry(NamedTuple):
    """A row at one layer and expert."""

    kind: Kind
    hf: tuple[str, ...]  # a name for each part of the kind
    transposed: bool = False  # as in Row
    fp32: bool = False
    stack: int = 0  # how many experts the Hugging Face tensors hold, where these are stacked
    place: int | None = None  # which of them this is

    @property
    def dim(self) -> int:
        """The split dimension of megatron-core's tensor."""
        return self.kind.dim or 0

    @property
    def hf_dim(self) -> int:
        """The same of the Hugging Face tensors (one expert's, where these are stacked)."""
        return 1 - self.dim if self.transposed else self.dim

    def among(self, names: Container[str]) -> bool:
        return all(name in names for name in self.hf)

    def spans(self, shard: Sequence[int], ranks: int, architecture: Architecture) -> list[Span]:
        """The spans of the whole tensor, of which a rank's shard has shape `shard`."""
        return self.kind.spans(shard[self.dim] * ranks, ranks, architecture)

    def shapes(self, shard: Sequence[int], spans: Iterable[Span]) -> dict[str, tuple[int, ...]]:
        """The shapes of the Hugging Face tensors (one expert's part, where these are stacked) of `spans`, by name."""
        lengths = [0] * len(self.hf)
        for span in spans:
            if span.part is not None and span.length:
                last = span.start + (span.length - 1) * span.step
                lengths[span.part] = max(lengths[span.part], last + 1)
        before, after = tuple(shard[: self.dim]), tuple(shard[self.dim + 1 :])
        shapes = [(*before, length, *after) for length in lengths]
        return dict(zip(self.hf, (shape[::-1] if self.transposed else shape for shape in shapes), strict=True))

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint of a tensor that has `shape` by `shapes`."""
        return shape if self.place is None else (self.stack, *shape)


EMBEDDING = Key("embedding.word_embeddings.weight")
OUTPUT = Key("output_layer.weight")
EXPERTS = "mlp.experts.linear_fc"  # in the names of the experts' own tensors, one for each expert


def table(
    family: Family, config: dict[str, Any], architecture: Architecture, names: Container[str] = ()
) -> dict[Key, Entry]:
    """The rows written out for every layer and expert of the model that `config` (a raw config.json) describes.

    Where a family has several rows for one tensor, ways in which its checkpoints have it, the first counts of which a
    checkpoint with tensors of these `names` has all. With tied embeddings the output layer's entry names the
    embedding's tensor: a copy, where a stage holds one.
    """
    entries: dict[Key, Entry] = {}
    experts = range(architecture.transformer.get("num_moe_experts") or 0)
    rows = family.rows(config)
    if architecture.predicting and family.predicting_rows:
        rows = rows + family.predicting_rows(config, architecture.predicting)
    for row in rows:
        layered, expert_row = "{layer}" in row.mcore, EXPERTS in row.mcore
        layers = range(architecture.transformer["num_layers"]) if row.layers is None else row.layers
        for layer in layers if layered else (None,):
            for expert in experts if expert_row else (None,):
                hf = tuple(row.hf.format(layer=layer, expert=expert, part=part) for part in row.kind.parts)
                key, entry = Key(row.mcore, layer, expert), Entry(row.kind, hf, row.transposed, row.fp32)
                if row.stacked:
                    entry = entry._replace(stack=len(experts), place=expert)
                if key not in entries or (entry.among(names) and not entries[key].among(names)):
                    entries[key] = entry
    if architecture.tied:
        entries[OUTPUT] = entries[EMBEDDING]
    return entries


def window(spans: Iterable[Span], start: int, stop: int) -> Iterator[tuple[int, Span]]:
    """What of `spans` lies in positions start..stop: each piece with its place counted from `start`."""
    at = 0
    for span in spans:
        low, high = max(at, start), min(at + span.length, stop)
        if low < high:
            first, last = (span.start + (position - at) * span.step for position in (low, high - 1))
            yield low - start, Span(span.part, first, last + 1, span.step)
        at += span.length
