"""Building blocks of the vision towers of vision-language families: mappings, and axes of multimodal ropes."""

from dataclasses import replace
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, TowerLayers, Vision
from ..mapping.param_mapping import REPLICATED, VISION_TOWER, ParamMapping, ShardingKind, Span

ACTIVATIONS = "silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"
TOWER_NAMES = ((r"^visual\.", "model.visual."),)  # Architecture.module_names


def _gate_then_up(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return [Span(part, 0, length // 2) for part in (0, 1)]


def _heads_together(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out the query, key and value of each head together, from one matrix with all queries before all keys."""
    assert architecture.vision is not None
    heads = architecture.vision.num_heads
    size = length // (3 * heads)
    starts = [(part * heads + head) * size for head in range(heads) for part in range(3)]
    return [Span(0, start, start + size) for start in starts]


def separate_heads_together(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out the query, key and value of each head together, from three matrices."""
    assert architecture.vision is not None
    size = length // (3 * architecture.vision.num_heads)
    heads = range(architecture.vision.num_heads)
    return [Span(part, head * size, (head + 1) * size) for head in heads for part in range(3)]


def _paired_heads_together(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out the heads as `_heads_together`, of a rope that turns pairs of neighbours, of width and height in turns.

    A pair of the tower's rope are elements of the two halves of a head, the planes of height before those of width.
    """
    spans = []
    for number, span in enumerate(_heads_together(length, ranks, architecture)):
        is_rotated = number % 3 < 2
        spans += [Span(0, span.start + first, span.stop, 4) for first in (2, 0, 3, 1)] if is_rotated else [span]
    return spans


def _half_pairs_together(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out the heads as `separate_heads_together`, of a rope that turns pairs within each half of a head.

    The first half is turned by the column and the second by the row: `_quarters`.
    """
    spans = []
    for span in separate_heads_together(length, ranks, architecture):
        spans += [span] if span.part == 2 else _quarters(span)
    return spans


def _quarters(head: Span) -> list[Span]:
    """Return the quarters of a head in the order of the tower's rope: first elements of pairs before second ones.

    Of either, the planes of height are before those of width.
    """
    quarter = head.length // 4
    starts = (head.start + number * quarter for number in (2, 0, 3, 1))
    return [Span(head.part, start, start + quarter) for start in starts]


def _half_pairs(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return _quarters(Span(0, 0, length))


def _channels_first(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out the pixels of a patch channel by channel, from those with all channels of a pixel together."""
    assert architecture.vision is not None
    channels = architecture.vision.channels
    return [Span(0, channel, length, channels) for channel in range(channels)]


def common_settings(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of `Vision` that every tower's config has by the same names."""
    return {
        "num_layers": config["depth"],
        "num_heads": config["num_heads"],
        "patch_size": config["patch_size"],
        "temporal_patch_size": config["temporal_patch_size"],
        "merge_size": config["spatial_merge_size"],
        "channels": config["in_channels"],
        "activation": config["hidden_act"],
        "rope_base": config["rope_base"],
    }


REPLICATED_GATE_UP = ShardingKind(None, _gate_then_up, ("gate", "up"))
REPLICATED_QKV = ShardingKind(None, _heads_together)
REPLICATED_PAIRED_QKV = ShardingKind(None, _paired_heads_together)
REPLICATED_Q_K_V = ShardingKind(None, separate_heads_together, ("q", "k", "v"))
REPLICATED_HALVED_Q_K_V = ShardingKind(None, _half_pairs_together, ("q", "k", "v"))
REPLICATED_CHANNELS_FIRST = ShardingKind(None, _channels_first)
REPLICATED_HALVED_HEAD = ShardingKind(None, _half_pairs)


class TowerTable:
    """Table of a tower's mappings, to which modules are added by their names on both sides.

    layers: the values of {layer} in the names; None: there is none. The kind is that of a linear layer's tensors.
    """

    def __init__(self, settings: TowerLayers, tower: str = VISION_TOWER):
        """tower: VISION_TOWER or AUDIO_TOWER"""
        self.settings, self._tower = settings, tower
        self.layers = tuple(range(settings.num_layers))
        self._mappings: list[ParamMapping] = []

    def add(self, hf: str, mcore: str, kind: ShardingKind = REPLICATED, layers: tuple[int, ...] | None = None) -> None:
        self._mappings.append(ParamMapping(hf, self._tower + mcore, kind, layers))

    def linear(
        self,
        hf: str,
        mcore: str,
        kind: ShardingKind = REPLICATED,
        layers: tuple[int, ...] | None = None,
        *,
        bias: bool,
    ) -> None:
        for leaf in ("weight", "bias") if bias else ("weight",):
            self.add(f"{hf}.{leaf}", f"{mcore}.{leaf}", kind, layers)

    def norm(self, hf: str, mcore: str, layers: tuple[int, ...] | None = None, *, kind: str = "") -> None:
        """kind: "LayerNorm" or "RMSNorm"; by default the tower's"""
        self.linear(hf, mcore, layers=layers, bias=(kind or self.settings.normalization) == "LayerNorm")

    def under(self, *prefixes: str) -> list[ParamMapping]:
        """Return the mappings, whose names in checkpoints begin with any of these."""
        return [replace(mapping, hf=prefix + mapping.hf) for prefix in prefixes for mapping in self._mappings]


def tower_mappings(
    vision: Vision,
    *,
    attention: str,
    fc1: str,
    fc2: str,
    merger: dict[str, str],
    deep_merger: str = "",
    position_embeddings: str = "pos_embed",
    has_fused_qkv: bool = True,
    prefixes: tuple[str, ...] = ("visual.", "model.visual."),
) -> list[ParamMapping]:
    """Map a tower of Qwen's or GLM's form by its names in the checkpoint.

    attention: names of the query-key-value matrix and of the output projection, with {}. has_fused_qkv: that is one
    matrix `qkv`; else there are `q`, `k` and `v`. fc1, fc2: of the MLP's.
    merger: names of the merger's `norm`, `fc1` and `fc2`, and of the gated merger's `proj`. deep_merger: name of the
    mergers of `deep_layers`, {layer} is their index. prefixes: beginnings of all names.
    """
    gated = REPLICATED_GATE_UP if vision.gated else REPLICATED
    merger_gated = REPLICATED_GATE_UP if vision.gated_merger_size else REPLICATED
    merger_bias = not vision.gated_merger_size
    table = TowerTable(vision)
    layers, bias = table.layers, vision.layer_bias
    table.linear("patch_embed.proj", "patch_embed", bias=vision.patch_bias)
    if vision.grid_side:
        table.add(position_embeddings + ".weight", "position_embeddings.weight")
    table.norm("blocks.{layer}.norm1", "layers.{layer}.norm1", layers)
    table.norm("blocks.{layer}.norm2", "layers.{layer}.norm2", layers)
    qkv, kind = ("qkv", REPLICATED_QKV) if has_fused_qkv else ("{part}", REPLICATED_Q_K_V)
    qkv = "blocks.{layer}." + attention.format(qkv)
    table.linear(qkv, "layers.{layer}.linear_qkv", kind, layers, bias=vision.qkv_bias)
    projection = "blocks.{layer}." + attention.format("proj")
    table.linear(projection, "layers.{layer}.linear_proj", layers=layers, bias=bias)
    table.linear("blocks.{layer}." + fc1, "layers.{layer}.linear_fc1", gated, layers, bias=bias)
    table.linear("blocks.{layer}." + fc2, "layers.{layer}.linear_fc2", layers=layers, bias=bias)
    if vision.patch_norm:
        table.norm("post_conv_layernorm", "patch_norm")
    if vision.final_norm:
        table.norm("post_layernorm", "final_norm")
    if vision.gated_merger_size:
        table.linear("downsample", "downsample", bias=True)
        table.linear(f"merger.{merger['proj']}", "merger.linear_proj", bias=False)
    places: list[tuple[str, str, tuple[int, ...] | None]] = [("merger", "merger", None)]
    if vision.deep_layers:
        places.append((deep_merger + ".{layer}", "deep_mergers.{layer}", tuple(range(len(vision.deep_layers)))))
    for hf, mcore, indices in places:
        kind = "LayerNorm" if vision.gated_merger_size else vision.normalization
        table.norm(f"{hf}.{merger['norm']}", f"{mcore}.norm", indices, kind=kind)
        table.linear(f"{hf}.{merger['fc1']}", f"{mcore}.linear_fc1", merger_gated, indices, bias=merger_bias)
        table.linear(f"{hf}.{merger['fc2']}", f"{mcore}.linear_fc2", layers=indices, bias=merger_bias)
    return table.under(*prefixes)


def with_rope_axes(
    architecture: Architecture, config: HfConfig, *, interleaved: bool, sections: list[int] | None = None
) -> Architecture:
    """Return the architecture with a multimodal rope: each plane is rotated by the position of one axis.

    `mrope_section` has the planes of time, height and width. interleaved: the axes alternate from plane to plane, else
    they have blocks of planes. sections: default of mrope_section; None: the rope stays plain without one.
    Raises ValueError if the sections do not fit.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sections = settings.get("mrope_section") or sections
    if sections is None:
        return architecture
    (rope,) = architecture.ropes
    planes = rope.dim // 2
    if len(sections) != 3 or (sum(sections) != planes and not interleaved):
        raise ValueError(
            f"config.json has mrope_section {sections}: expected are the planes of time, height and width, {planes} in "
            "total"
        )
    if interleaved:
        axes = [p % 3 if p < 3 * sections[p % 3] else 0 for p in range(planes)]
    else:
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    return replace(architecture, ropes=(replace(rope, axes=tuple(axes)),))
