"""The words of the bridge's table: a family's rows, and for each kind of row where its tensors lie, whole and split.

A row pairs names of a Hugging Face checkpoint with a name in megatron-core's model. Its kind says how the one is made
of the other, as a list of spans, which every direction reads: loading takes the spans of a rank's own window and reads
just those slices, saving puts the windows of all ranks end to end and cuts the spans out again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
class Architecture:
    """What a family makes of a raw config.json."""

    transformer: dict[str, Any]  # arguments of megatron-core's TransformerConfig: no parallelism, no dtype, no kernels
    vocab_size: int  # rows of the embedding in the checkpoint, before any padding
    tied: bool  # the output layer is the embedding
    max_positions: int
    ropes: tuple[Rope, ...]
    layers: tuple[Layer, ...]  # one for each layer of the model


class Span(NamedTuple):
    """Positions start..stop, along the split dimension, of one of a row's Hugging Face tensors (None: padding)."""

    part: int | None
    start: int
    stop: int


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


REPLICATED = Kind(None, _whole)
COLUMN = Kind(0, _whole)  # split by output features
ROW = Kind(1, _whole)  # split by input features
VOCAB = Kind(0, _padded_vocabulary)
QKV = Kind(0, _query_groups, ("q", "k", "v"))
GATE_UP = Kind(0, _gate_and_up, ("gate", "up"))


@dataclass(frozen=True)
class Row:
    """One line of a family's table. {layer} and {expert} run over the model's layers and experts.

    A row with {expert} is split by expert tensor parallelism and spread by expert parallelism, another by tensor
    parallelism.
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

    @property
    def dim(self) -> int:
        return self.kind.dim or 0

    def spans(self, shard: Sequence[int], ranks: int, architecture: Architecture) -> list[Span]:
        """The spans of the whole tensor, of which a rank's shard has shape `shard`."""
        return self.kind.spans(shard[self.dim] * ranks, ranks, architecture)

    def shapes(self, shard: Sequence[int], spans: Iterable[Span]) -> dict[str, tuple[int, ...]]:
        """The shapes of the Hugging Face tensors that `spans` make, by name."""
        lengths = [0] * len(self.hf)
        for part, _, stop in spans:
            if part is not None:
                lengths[part] = max(lengths[part], stop)
        before, after = tuple(shard[: self.dim]), tuple(shard[self.dim + 1 :])
        return {name: (*before, length, *after) for name, length in zip(self.hf, lengths, strict=True)}


EMBEDDING = Key("embedding.word_embeddings.weight")
OUTPUT = Key("output_layer.weight")


def table(family: Family, config: dict[str, Any], architecture: Architecture) -> dict[Key, Entry]:
    """The rows written out for every layer and expert of the model that `config` (a raw config.json) describes.

    With tied embeddings the output layer's entry names the embedding's tensor: a copy, where a stage holds one.
    """
    entries = {}
    experts = range(architecture.transformer.get("num_moe_experts") or 0)
    for row in family.rows(config):
        layered, expert_row = "{layer}" in row.mcore, "{expert}" in row.hf
        layers = range(architecture.transformer["num_layers"]) if row.layers is None else row.layers
        for layer in layers if layered else (None,):
            for expert in experts if expert_row else (None,):
                names = tuple(row.hf.format(layer=layer, expert=expert, part=part) for part in row.kind.parts)
                entries[Key(row.mcore, layer, expert)] = Entry(row.kind, names)
    if architecture.tied:
        entries[OUTPUT] = entries[EMBEDDING]
    return entries


def window(spans: Iterable[Span], start: int, stop: int) -> Iterator[tuple[int, Span]]:
    """What of `spans` lies in positions start..stop: each piece with its place counted from `start`."""
    at = 0
    for part, first, last in spans:
        low, high = max(at, start), min(at + last - first, stop)
        if low < high:
            yield low - start, Span(part, first + low - at, first + high - at)
        at += last - first
