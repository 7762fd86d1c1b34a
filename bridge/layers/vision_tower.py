"""Vision tower: a transformer over patches, and mergers into features of the language model.

Every rank holds all of it and encodes media of its own; see model/vision_encoder.py. One class covers the towers that
`Vision` describes. Qwen2-VL: https://arxiv.org/abs/2409.12191, Qwen2.5-VL: https://arxiv.org/abs/2502.13923, Qwen3-VL:
https://arxiv.org/abs/2511.21631, GLM-4.1V: https://arxiv.org/abs/2507.01006, Pixtral: https://arxiv.org/abs/2410.07073,
MoonViT: https://arxiv.org/abs/2504.07491, SigLIP: https://arxiv.org/abs/2303.15343, Llama 4:
https://ai.meta.com/blog/llama-4-multimodal-intelligence, AIMv2: https://arxiv.org/abs/2411.14402, Gemma 4:
https://ai.google.dev/gemma/docs/core/model_card_4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..kernels import usable
from ..kernels.flash_attention import FORWARD_HEAD_SIZES, FlashAttention
from ..kernels.weight_gradient import has_main_grad
from ..mapping.architecture import TowerLayers, Vision
from .clipped_linear import ClippedLinear
from .mergers import (
    ACTIVATIONS,
    Downsample,
    GatedMerger,
    Linear,
    MatrixMerger,
    Merger,
    PooledProjection,
    Projection,
    ScaledMeans,
    SquareMLP,
    VisualVocabulary,
    make_norm,
)
from .norm import LayerNorm, RMSNorm
from .patch_plan import Blocks, PatchPlan
from .sinks import KernelAttention

if TYPE_CHECKING:
    from ..kernels.norm import NormKernel

# The longest length is rounded up to a multiple on a GPU. Transformer Engine searches for a kernel for each new length,
# and the search takes longer than the kernel.
LENGTH_STEP = 1024

VISION_MODULES = "pixel_norm", "patch_embed", "patch_norm", "class_token", "position_embeddings"
VISION_MODULES += "embedding_norm", "layers", "final_norm", "downsample"
MERGERS = "merger", "deep_mergers"


CLIPPED_QKV, CLIPPED_FC1 = ("q_", "k_", "v_"), ("gate_", "up_")  # parts of matrices, of which each has bounds
GELUS = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}  # torch's names of approximations


@dataclass(frozen=True)
class Attention:
    """Attention within blocks, in both directions.

    run: takes query, key and value [patches, heads, head_dim], and the blocks
    trained_head_dim: size to which heads are padded with zeros if there is a backward pass; None: they are not
    """

    run: Callable[[Tensor, Tensor, Tensor, Blocks], Tensor]
    trained_head_dim: int | None = None


# At these sizes FlashAttention-4's backward pass is right, and cuDNN's has a fast kernel for the sums over a head's
# dimensions. With 72 dimensions (Qwen3-VL-8B, 30B-A3B) those sums took 17 ms for 15,000 patches, and the backward pass
# itself 41 ms (H200).
FAST_HEAD_DIMS = 64, 128


def make_attention(vision: TowerLayers, config: TransformerConfig) -> Attention:
    """Return the attention within blocks: the language model's by FlashAttention-4 or cuDNN, else torch's."""
    kernel: str = config.attention_kernel  # type: ignore[attr-defined]
    head_dim = vision.hidden_size // vision.num_heads
    padded_dim = next((size for size in FAST_HEAD_DIMS if size >= head_dim), None)
    scale = head_dim**-0.5 if vision.softmax_scale is None else vision.softmax_scale
    if kernel == "flash" and head_dim in FORWARD_HEAD_SIZES:
        run = partial(attend_by_flash, scale=scale, is_deterministic=config.deterministic_mode)
        return Attention(run, padded_dim)
    if kernel != "transformer_engine" or vision.window:
        return Attention(partial(attend, scale=scale))
    from transformer_engine.pytorch import DotProductAttention  # pyright: ignore[reportMissingImports]

    from ..kernels.cudnn_attention import Mask, PackedAttention

    @cache
    def packed_attention(padded_dim: int) -> PackedAttention:
        module = DotProductAttention(
            vision.num_heads, padded_dim, attn_mask_type="padding", qkv_format="thd", softmax_scale=scale
        )
        return PackedAttention(module, scale, Mask(is_causal=False))

    def attend_by_engine(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
        ends, longest = blocks.cu_seqlens, -(-max(blocks.lengths) // LENGTH_STEP) * LENGTH_STEP
        attention = packed_attention(query.shape[-1])
        lengths = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        run_module = partial(attention.module, query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends, **lengths)
        return attention(query, key, value, ends, longest, run_module)

    return Attention(attend_by_engine, padded_dim)


def attend_by_flash(
    query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, *, scale: float, is_deterministic: bool
) -> Tensor:
    """Compute attention within each block by FlashAttention-4: [patches, heads, head_dim] each."""
    ends, longest = blocks.cu_seqlens, max(blocks.lengths)
    flash = FlashAttention(ends, ends, longest, longest, scale, is_causal=False, is_deterministic=is_deterministic)
    return cast(Tensor, KernelAttention.apply(query, key, value, None, flash.forward, flash.backward))


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, *, scale: float) -> Tensor:
    """Compute attention within each block, in both directions: [patches, heads, head_dim] each."""
    if query.is_cuda and query.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        longest = max(blocks.lengths)
        ends = blocks.cu_seqlens
        output = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale)
        assert isinstance(output, Tensor)
        return output
    outputs = []
    for parts in zip(*(x.split(blocks.lengths) for x in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)  # [1, heads, length, head_dim]
        outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scale).squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _with_residual(output: Tensor | tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of a norm of x, and the residual: the norm's second result if its kernel returns one."""
    return output if isinstance(output, tuple) else (output, x)


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else scale * x


def _accumulates(x: Tensor, norm: nn.Module, *linears: nn.Module) -> bool:
    """Return whether a norm and linear layers run as one function, which adds gradients to the weights' `main_grad`."""
    return (
        torch.is_grad_enabled()
        and isinstance(norm, (RMSNorm, LayerNorm))
        and usable(x)
        and all(type(layer) is Linear and layer.weight.requires_grad for layer in linears)
        and all(has_main_grad(cast(Tensor, layer.weight)) for layer in linears)
    )


def _norm_kernel(norm: nn.Module) -> "NormKernel":
    from ..kernels.norm import NormKernel

    assert isinstance(norm, (RMSNorm, LayerNorm))
    return NormKernel(norm.eps or 0.0, is_centred=isinstance(norm, LayerNorm), is_zero_centred=norm.zero_centred)


def _parameters(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a norm or linear layer. Their dicts are faster to read than attributes."""
    parameters = module._parameters
    return cast(Tensor, parameters["weight"]), parameters.get("bias")


class RopePlan(Protocol):
    """Rope of a tower's rows."""

    @property
    def cos(self) -> Tensor:
        """[rows, 1, head_dim / 2] fp32"""
        ...

    @property
    def sin(self) -> Tensor: ...


class TowerLayer(nn.Module):
    def __init__(self, vision: TowerLayers, config: TransformerConfig, device: torch.device, attention: Attention):
        super().__init__()
        self.attention = attention
        size, ffn_size = vision.hidden_size, vision.ffn_hidden_size
        self.num_heads, self.head_dim, self.gated = vision.num_heads, size // vision.num_heads, vision.gated
        self.activation = ACTIVATIONS[vision.activation]
        self.gelu = None if vision.gated else GELUS.get(vision.activation)
        self.has_fused_gelu = vision.activation == "gelu_pytorch_tanh" and vision.layer_bias
        self.norm1, self.norm2 = (make_norm(vision, size, config, device, has_residual=True) for _ in range(2))
        self.post_norm1 = self.post_norm2 = self.q_norm = self.k_norm = None
        if vision.post_norms:
            self.post_norm1, self.post_norm2 = (make_norm(vision, size, config, device) for _ in range(2))
        if vision.head_norms:
            self.q_norm, self.k_norm = (
                RMSNorm(self.head_dim, eps=vision.eps, dtype=config.params_dtype, device=device) for _ in range(2)
            )
        self.query_value_bias = None
        if vision.qkv_bias and not vision.key_bias:
            self.query_value_bias = nn.Parameter(torch.empty(2 * size, dtype=config.params_dtype, device=device))
        if vision.clips:
            linear = partial(ClippedLinear, dtype=config.params_dtype, device=device)
            self.linear_qkv = linear(size, 3 * size, parts=CLIPPED_QKV, blocks=vision.num_heads)
            self.linear_fc1 = linear(size, 2 * ffn_size, parts=CLIPPED_FC1)
        else:
            linear = partial(Linear, bias=vision.layer_bias, dtype=config.params_dtype, device=device)
            self.linear_qkv = linear(size, 3 * size, bias=vision.qkv_bias and vision.key_bias)
            self.linear_fc1 = linear(size, 2 * ffn_size if vision.gated else ffn_size)
        self.linear_proj = linear(size, size)
        self.linear_fc2 = linear(ffn_size, size)
        self.scale1 = self.scale2 = None
        if vision.layer_scale:
            self.scale1, self.scale2 = (
                nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device)) for _ in range(2)
            )

    def forward(self, x: Tensor, plan: RopePlan, blocks: Blocks) -> Tensor:
        """x [patches, hidden_size] -> the same shape."""
        qkv, x = self._normed_qkv(x)
        if self.query_value_bias is not None:
            query_bias, value_bias = self.query_value_bias.view(self.num_heads, 2, -1).unbind(1)
            qkv = qkv + torch.stack((query_bias, torch.zeros_like(query_bias), value_bias), dim=1).flatten()
        query, key, value = self._heads(qkv, plan)
        heads = self.attention.run(query, key, value, blocks)[..., : self.head_dim]
        return self._with_mlp(x + _scaled(_normed(self.linear_proj(heads.flatten(1)), self.post_norm1), self.scale1))

    def _normed_qkv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values of x [patches, hidden_size], and x for the residual."""
        if _accumulates(x, self.norm1, self.linear_qkv):
            from ..kernels.normed_linear import normed_linear

            return normed_linear(x, _parameters(self.norm1), *_parameters(self.linear_qkv), _norm_kernel(self.norm1))
        normed, x = _with_residual(self.norm1(x), x)
        return self.linear_qkv(normed), x

    def _with_mlp(self, x: Tensor) -> Tensor:
        """Return x [patches, hidden_size] with what the MLP adds."""
        linears = self.linear_fc1, self.linear_fc2
        has_plain_output = self.post_norm2 is None and self.scale2 is None
        if self.gelu is not None and has_plain_output and _accumulates(x, self.norm2, *linears):
            from ..kernels.normed_linear import normed_mlp

            norm, first, second = map(_parameters, (self.norm2, *linears))
            return normed_mlp(x, norm, first, second, self.gelu, _norm_kernel(self.norm2))
        normed, x = _with_residual(self.norm2(x), x)
        return x + _scaled(_normed(self.linear_fc2(self._hidden(normed)), self.post_norm2), self.scale2)

    def _hidden(self, x: Tensor) -> Tensor:
        """Return what the MLP's second layer takes: x [patches, hidden_size] -> [patches, ffn_hidden_size]."""
        if self.gated:
            gate, up = self.linear_fc1(x).chunk(2, dim=-1)
            return self.activation(gate) * up
        layer = self.linear_fc1
        if self.has_fused_gelu and x.is_cuda and not torch.is_grad_enabled() and type(layer) is Linear:
            # cuBLAS applies the GELU to its sums. A backward pass would need them without it.
            return torch.ops.aten._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
        return self.activation(layer(x))

    def _heads(self, qkv: Tensor, plan: RopePlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values: [patches, heads, head_dim, perhaps padded] each.

        qkv [patches, heads * 3 * head_dim]
        """
        if usable(qkv):
            from ..kernels.qkv import HeadLayout, split_heads

            padded_dim = self.attention.trained_head_dim if qkv.requires_grad else None
            norms, eps = None, 0.0
            if self.q_norm is not None and self.k_norm is not None:
                norms, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps or 0.0
            layout = HeadLayout(self.num_heads, queries=1, dim=self.head_dim, eps=eps, padded_dim=padded_dim)
            query, key, value, _ = split_heads(qkv, norms, (plan.cos, plan.sin), layout)
            return query, key, self._normed_value(value)
        query, key, value = qkv.view(len(qkv), self.num_heads, 3, -1).unbind(2)
        query, key = _normed(query, self.q_norm), _normed(key, self.k_norm)
        return _rotate(query, plan), _rotate(key, plan), self._normed_value(value)

    def _normed_value(self, value: Tensor) -> Tensor:
        """Return values [patches, heads, head_dim, perhaps padded] divided by their root mean square, if they are."""
        if self.q_norm is None:
            return value
        # Zeros behind a head make the mean smaller by `share`.
        share, eps = self.head_dim / value.shape[-1], self.q_norm.eps or 0.0
        normed = F.rms_norm(value, value.shape[-1:], eps=eps * share)
        return normed if share == 1.0 else normed * share**0.5


def _rotate(x: Tensor, plan: RopePlan) -> Tensor:
    """Rotate x [patches, heads, head_dim] in fp32, as transformers does."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * plan.cos - second * plan.sin, second * plan.cos + first * plan.sin), dim=-1).to(x.dtype)


class Weight(nn.Module):
    """Parameter of a shape that a checkpoint has."""

    def __init__(self, *shape: int, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


class PatchEmbedding(nn.Module):
    """Projection of patches: a convolution whose stride is its kernel, computed as a matrix product."""

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        side = vision.patch_size
        time = (vision.temporal_patch_size,) if vision.temporal_patch_size > 1 else ()
        shape = vision.hidden_size, vision.channels, *time, side, side
        if vision.is_patch_matrix:
            shape = vision.hidden_size, math.prod(shape[1:])
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        bias = torch.empty(vision.hidden_size, dtype=config.params_dtype, device=device)
        self.bias = nn.Parameter(bias) if vision.patch_bias else None

        self.channels = vision.channels if vision.is_channels_last else None

    def forward(self, patches: Tensor) -> Tensor:
        """patches [patches, channels * frames * side * side], normalized -> [patches, hidden_size]."""
        weight = self.weight.flatten(1)
        if self.channels:
            weight = weight.unflatten(1, (-1, self.channels)).transpose(1, 2).flatten(1)
        return F.linear(patches.to(weight.dtype), weight, self.bias)


class VisionTower(nn.Module):
    """Vision tower of `config.architecture.vision`, with uninitialized weights."""

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.vision_settings = vision
        self.patch_embed = PatchEmbedding(vision, config, device)
        self.patch_norm = make_norm(vision, vision.hidden_size, config, device) if vision.patch_norm else None
        pixels = vision.channels * vision.temporal_patch_size * vision.patch_size**2
        self.pixel_norm = make_norm(vision, pixels, config, device) if vision.pixel_norm else None
        self.position_embeddings = self.class_token = None
        make_weight = partial(Weight, config=config, device=device)
        if vision.grid_side and vision.class_token:
            batch = (1,) if vision.is_batched else ()
            self.class_token = make_weight(*2 * batch, vision.hidden_size)
            self.position_embeddings = make_weight(*batch, 1 + vision.grid_side**2, vision.hidden_size)
        elif vision.grid_side and vision.grid_axes == 2:
            self.position_embeddings = make_weight(vision.grid_side, vision.grid_side, vision.hidden_size)
        elif vision.axis_positions:
            tables = (vision.axis_positions, 2) if vision.alternates_axes else (2, vision.axis_positions)
            self.position_embeddings = make_weight(*tables, vision.hidden_size)
        elif vision.grid_side:
            rows = vision.grid_side**2
            self.position_embeddings = nn.Embedding(
                rows,
                vision.hidden_size,
                _weight=torch.empty(rows, vision.hidden_size, dtype=config.params_dtype, device=device),
            )
        self.embedding_norm = make_norm(vision, vision.hidden_size, config, device) if vision.embedding_norm else None
        attention = make_attention(vision, config)
        self.layers = nn.ModuleList(TowerLayer(vision, config, device, attention) for _ in range(vision.num_layers))
        self.final_norm = make_norm(vision, vision.hidden_size, config, device) if vision.final_norm else None
        self.downsample = None
        if vision.gated_merger_size:
            self.downsample = Downsample(vision, config, device)
            self.merger = GatedMerger(vision, config, device)
        elif vision.square_mlp_size:
            size = vision.square_mlp_size
            self.downsample = SquareMLP(vision, size, config, device)
            self.merger = MatrixMerger(size, vision.output_size, config, device)
        elif vision.merger_eps is not None:
            self.downsample = ScaledMeans(vision, config, device) if vision.scales_means else None
            self.merger = MatrixMerger(vision.hidden_size, vision.output_size, config, device, eps=vision.merger_eps)
        elif vision.pools_squares:
            self.merger = PooledProjection(vision, config, device)
        elif vision.projector is not None:
            self.merger = Projection(vision, vision.projector, config, device)
        elif vision.visual_words:
            self.merger = VisualVocabulary(vision, vision.visual_words, config, device)
        else:
            self.merger = Merger(vision, config, device)
        if vision.most_tiles:
            newline = torch.empty(vision.output_size, dtype=config.params_dtype, device=device)
            self.merger.newline = nn.Parameter(newline)  # behind each row of an image's features
        self.deep_mergers = nn.ModuleList(Merger(vision, config, device, norms_square=True) for _ in vision.deep_layers)

    def encode(self, patches: Tensor, plan: PatchPlan) -> list[Tensor]:
        """Return what the mergers take: the output of the tower's last module, then those of `deep_layers`.

        patches [patches, channels * frames * side * side], normalized -> [patches + padding, hidden_size] each, or
        [features + padding, size] of `downsample`
        """
        x = F.pad(patches, (0, 0, 0, plan.padding)) if plan.padding else patches
        x = self.patch_embed(_normed(x, self.pixel_norm))
        if self.patch_norm is not None:
            x = self.patch_norm(x)
        if self.position_embeddings is not None:
            assert plan.taps is not None
            assert plan.tap_weights is not None
            table = self.position_embeddings.weight.flatten(0, -2)
            x = x + F.embedding_bag(plan.taps, table, mode="sum", per_sample_weights=plan.tap_weights.to(table.dtype))
            if self.class_token is not None:
                assert plan.row_order is not None
                token = self.class_token.weight.view(1, -1) + table[:1]
                x = torch.cat((token.expand(len(plan.row_order) - len(x), -1), x))[plan.row_order]
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if plan.patch_order is not None:
            x = x[plan.patch_order]
        states = {}
        for number, layer in enumerate(self.layers):
            is_full = plan.windows is None or number in self.vision_settings.full_layers
            x = layer(x, plan, plan.full if is_full else plan.windows)
            if number in self.vision_settings.deep_layers:
                states[number] = x
        if plan.patch_rows is not None:
            x = x[plan.patch_rows]
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.downsample is not None:
            x = self.downsample(x)
        return [x, *(states[number] for number in self.vision_settings.deep_layers)]

    def merge(self, states: list[Tensor], plan: PatchPlan) -> Tensor:
        """Return the features of `encode`'s states in the processor's order.

        [1 + deep layers, features, output_size]
        """
        features = torch.stack([merger(x) for merger, x in zip([self.merger, *self.deep_mergers], states, strict=True)])
        if plan.feature_order is not None:
            features = features[:, plan.feature_order]
        features = features[:, : features.shape[1] - plan.padding // self.vision_settings.merge_size**2]
        if plan.tile_features is None:
            return features
        return plan.tile_features.apply(features[0], self._learned_features()).unsqueeze(0)

    def _learned_features(self) -> Tensor:
        """Return the features beside those of patches: [1 or 5, output_size]."""
        if isinstance(self.merger, VisualVocabulary):
            return self.merger.words[self.merger.likely :]
        newline = self.merger.newline
        assert isinstance(newline, Tensor)
        return newline.unsqueeze(0)
