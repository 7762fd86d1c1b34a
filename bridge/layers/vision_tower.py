"""Vision tower: a transformer over patches, and mergers into features of the language model.

Every rank holds all of it and encodes media of its own; see model/vision_features.py. One class covers the towers that
`Vision` describes. Qwen2-VL: https://arxiv.org/abs/2409.12191, Qwen2.5-VL: https://arxiv.org/abs/2502.13923, Qwen3-VL:
https://arxiv.org/abs/2511.21631.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..kernels import usable
from ..mapping.param_mapping import Vision
from .norm import RMSNorm
from .packed_seqs import to_device

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


TOWER_MODULES = "patch_embed", "position_embeddings", "layers"
MERGERS = "merger", "deep_mergers"


@dataclass(frozen=True)
class Blocks:
    """Blocks of consecutive patches that attend to each other: an image, a frame of a video, or a window."""

    lengths: list[int]
    cu_seqlens: Tensor  # [blocks + 1] int32, on the device


@dataclass(frozen=True)
class PatchPlan:
    """Description of the patches of some media, made on the CPU once for all layers.

    Patches are in the order of the processor: merged squares after each other. Within the tower, with windows, they are
    in the order of the windows.
    """

    cos: Tensor  # [patches, 1, head_dim / 2] fp32
    sin: Tensor
    full: Blocks
    windows: Blocks | None
    patch_order: Tensor | None  # [patches] int64: from the processor's order to the tower's
    feature_order: Tensor | None  # [features] int64: from the tower's order back to the processor's
    # Bilinear interpolation of the learned position embeddings: four rows for each patch, and their weights.
    taps: Tensor | None  # [patches, 4] int64
    tap_weights: Tensor | None  # [patches, 4] fp32


def plan_patches(grids: Tensor, vision: Vision, device: torch.device) -> PatchPlan:
    """Return the plan of media. grids [media, 3] int64, CPU: time, height and width in patches."""
    from transformers.vision_utils import (
        get_vision_cu_seqlens,
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
        get_vision_window_index,
    )

    positions = get_vision_position_ids(grids, vision.merge_size)  # [patches, 2]
    axis_dim = vision.hidden_size // vision.num_heads // 2
    frequencies = 1.0 / vision.rope_base ** (torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim)
    planes = (positions.unsqueeze(-1).float() * frequencies).flatten(1)  # those of height, then those of width
    windows = patch_order = feature_order = taps = tap_weights = None
    if vision.window:
        index, bounds = get_vision_window_index(grids, vision.merge_size, vision.window, vision.patch_size)
        square = vision.merge_size**2
        patch_order = (index.unsqueeze(1) * square + torch.arange(square)).flatten()
        windows = _blocks(bounds, device)
        planes, feature_order = planes[patch_order], index.argsort()
    if vision.grid_side:
        taps, tap_weights = get_vision_interpolation_indices_and_weights(
            grids, vision.grid_side, "bilinear", align_corners=True, spatial_merge_size=vision.merge_size
        )
    angles = planes.unsqueeze(1)
    on_device = [
        None if tensor is None else to_device(tensor, device)
        for tensor in (angles.cos(), angles.sin(), patch_order, feature_order, taps, tap_weights)
    ]
    cos, sin, patch_order, feature_order, taps, tap_weights = on_device
    assert cos is not None
    assert sin is not None
    full = _blocks(get_vision_cu_seqlens(grids), device)
    return PatchPlan(cos, sin, full, windows, patch_order, feature_order, taps, tap_weights)


def _blocks(bounds: Tensor, device: torch.device) -> Blocks:
    return Blocks([end - start for start, end in pairwise(bounds.tolist())], to_device(bounds.to(torch.int32), device))


class Linear(nn.Linear):
    """Linear layer of which every rank holds all, and whose ranks have different inputs."""

    parallel_mode = None  # lora/attach.py: it does not communicate


def _norm(vision: Vision, size: int, config: TransformerConfig, device: torch.device) -> nn.Module:
    norm = RMSNorm if vision.normalization == "RMSNorm" else nn.LayerNorm
    return norm(size, eps=vision.eps, dtype=config.params_dtype, device=device)


Attention = Callable[[Tensor, Tensor, Tensor, Blocks], Tensor]


def make_attention(vision: Vision, config: TransformerConfig) -> Attention:
    """Return the attention within blocks: Transformer Engine's if the language model has it, else torch's."""
    if config.attention_kernel != "transformer_engine" or vision.window:  # type: ignore[attr-defined]
        return attend
    from transformer_engine.pytorch import DotProductAttention  # pyright: ignore[reportMissingImports]

    head_dim = vision.hidden_size // vision.num_heads
    module = DotProductAttention(vision.num_heads, head_dim, attn_mask_type="padding", qkv_format="thd")

    def attend_by_engine(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
        ends, longest = blocks.cu_seqlens, max(blocks.lengths)
        output = module(
            query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        return output.view(query.shape)

    return attend_by_engine


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
    """Compute attention within each block, in both directions: [patches, heads, head_dim] each."""
    if query.is_cuda and query.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        longest = max(blocks.lengths)
        output = varlen_attn(query, key, value, blocks.cu_seqlens, blocks.cu_seqlens, longest, longest)
        assert isinstance(output, Tensor)
        return output
    outputs = []
    for parts in zip(*(x.split(blocks.lengths) for x in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)  # [1, heads, length, head_dim]
        outputs.append(F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


class TowerLayer(nn.Module):
    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device, attention: Attention):
        super().__init__()
        self.attention = attention
        size, ffn_size = vision.hidden_size, vision.ffn_hidden_size
        linear = partial(Linear, dtype=config.params_dtype, device=device)
        self.num_heads, self.gated = vision.num_heads, vision.gated
        self.activation = ACTIVATIONS[vision.activation]
        self.norm1, self.norm2 = (_norm(vision, size, config, device) for _ in range(2))
        self.linear_qkv = linear(size, 3 * size)
        self.linear_proj = linear(size, size)
        self.linear_fc1 = linear(size, 2 * ffn_size if vision.gated else ffn_size)
        self.linear_fc2 = linear(ffn_size, size)

    def forward(self, x: Tensor, plan: PatchPlan, blocks: Blocks) -> Tensor:
        """x [patches, hidden_size] -> the same shape."""
        query, key, value = self._heads(self.linear_qkv(self.norm1(x)), plan)
        x = x + self.linear_proj(self.attention(query, key, value, blocks).flatten(1))
        hidden = self.linear_fc1(self.norm2(x))
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * up
        else:
            hidden = self.activation(hidden)
        return x + self.linear_fc2(hidden)

    def _heads(self, qkv: Tensor, plan: PatchPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values: [patches, heads, head_dim] each.

        qkv [patches, heads * 3 * head_dim]
        """
        if usable(qkv):
            from ..kernels.qkv import HeadLayout, split_heads

            layout = HeadLayout(self.num_heads, queries=1, dim=qkv.shape[1] // (3 * self.num_heads))
            query, key, value, _ = split_heads(qkv.unsqueeze(1), None, (plan.cos, plan.sin), layout)
            return query.squeeze(1), key.squeeze(1), value.squeeze(1)
        query, key, value = qkv.view(len(qkv), self.num_heads, 3, -1).unbind(2)
        return _rotate(query, plan), _rotate(key, plan), value


def _rotate(x: Tensor, plan: PatchPlan) -> Tensor:
    """Rotate x [patches, heads, head_dim] in fp32, as transformers does."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * plan.cos - second * plan.sin, second * plan.cos + first * plan.sin), dim=-1).to(x.dtype)


class Merger(nn.Module):
    """Merger of squares of patches into features: x [patches, hidden_size] -> [features, output_size].

    norms_square: normalize the concatenated patches of a square, instead of each patch.
    """

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device, *, norms_square: bool = False):
        super().__init__()
        self.size = vision.hidden_size * vision.merge_size**2
        self.norms_square = norms_square
        self.norm = _norm(vision, self.size if norms_square else vision.hidden_size, config, device)
        self.linear_fc1 = Linear(self.size, self.size, dtype=config.params_dtype, device=device)
        self.linear_fc2 = Linear(self.size, vision.output_size, dtype=config.params_dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        squares = self.norm(x.view(-1, self.size)) if self.norms_square else self.norm(x).view(-1, self.size)
        return self.linear_fc2(F.gelu(self.linear_fc1(squares)))


class PatchEmbedding(nn.Module):
    """Projection of patches: a convolution whose stride is its kernel, computed as a matrix product."""

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        side = vision.patch_size
        shape = vision.hidden_size, vision.channels, vision.temporal_patch_size, side, side
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        bias = torch.empty(vision.hidden_size, dtype=config.params_dtype, device=device)
        self.bias = nn.Parameter(bias) if vision.patch_bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """patches [patches, channels * frames * side * side], normalized -> [patches, hidden_size]."""
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class VisionTower(nn.Module):
    """Vision tower of `config.architecture.vision`, with uninitialized weights."""

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.vision_settings = vision
        self.patch_embed = PatchEmbedding(vision, config, device)
        self.position_embeddings = None
        if vision.grid_side:
            rows = vision.grid_side**2
            self.position_embeddings = nn.Embedding(
                rows,
                vision.hidden_size,
                _weight=torch.empty(rows, vision.hidden_size, dtype=config.params_dtype, device=device),
            )
        attention = make_attention(vision, config)
        self.layers = nn.ModuleList(TowerLayer(vision, config, device, attention) for _ in range(vision.num_layers))
        self.merger = Merger(vision, config, device)
        self.deep_mergers = nn.ModuleList(Merger(vision, config, device, norms_square=True) for _ in vision.deep_layers)

    def encode(self, patches: Tensor, plan: PatchPlan) -> list[Tensor]:
        """Return what the mergers take: the output of the last layer, then those of `deep_layers`.

        patches [patches, channels * frames * side * side], normalized -> [patches, hidden_size] each
        """
        x = self.patch_embed(patches)
        if self.position_embeddings is not None:
            assert plan.taps is not None
            assert plan.tap_weights is not None
            weight = self.position_embeddings.weight
            x = x + F.embedding_bag(plan.taps, weight, mode="sum", per_sample_weights=plan.tap_weights.to(weight.dtype))
        if plan.patch_order is not None:
            x = x[plan.patch_order]
        states = {}
        for number, layer in enumerate(self.layers):
            is_full = plan.windows is None or number in self.vision_settings.full_layers
            x = layer(x, plan, plan.full if is_full else plan.windows)
            if number in self.vision_settings.deep_layers:
                states[number] = x
        return [x, *(states[number] for number in self.vision_settings.deep_layers)]

    def merge(self, states: list[Tensor], plan: PatchPlan) -> Tensor:
        """Return the features of `encode`'s states in the processor's order.

        [1 + deep layers, features, output_size]
        """
        features = torch.stack([merger(x) for merger, x in zip([self.merger, *self.deep_mergers], states, strict=True)])
        return features if plan.feature_order is None else features[:, plan.feature_order]


class VisionPart(nn.Module):
    """Module that holds the vision tower, as the chunks of a model hold the layers.

    The functions that load, save and freeze parameters take it beside the chunks.
    """

    pre_process = post_process = False
    decoder = SimpleNamespace(layers=())
    mtp = None

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.config = config
        self.vision = VisionTower(vision, config, device)
