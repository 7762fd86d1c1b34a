"""FLOPs of training and peak FLOP/s of chips, the two parts of MFU.

Counts the matrix products of the model itself: linear layers (with a token's routed experts, the router, and the output
layer for trained tokens), and attention over the causal pairs within each document. Does not count embedding look-ups,
norms, activations, adapters and recomputation. A backward pass costs twice a forward pass: once for the gradients of
inputs, once for the gradients of weights, scaled by the share of trained weights.

This is PaLM's appendix B, exact for documents: https://arxiv.org/abs/2204.02311
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...bridge.mapping.architecture import INDICATORS, Layer
from .audio_flops import AudioFlops

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from ...bridge.mapping.architecture import Vision
    from ...bridge.model.model import Model
    from ...templates.batching.media_batch import MediaBatch

# Dense bf16 peaks of the data sheets in FLOP/s; the first pattern that matches the device's name applies.
PEAK_BF16 = [
    (r"\bGB200\b", 2500e12),
    (r"\bB200\b", 2250e12),
    (r"\bH[12]00 NVL\b", 835e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\b(H100|H200|H800|GH200)\b", 989e12),
    (r"\b(A100|A800)\b", 312e12),
    (r"\bH20\b", 148e12),
    (r"\bL40S\b", 362e12),
    (r"\bRTX 4090\b", 165e12),
]


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device by its name (`torch.cuda.get_device_name()`); None if not listed."""
    return next((peak for pattern, peak in PEAK_BF16 if re.search(pattern, device_name)), None)


@dataclass(frozen=True)
class Flops:
    """Cost of a model: `flops.training([document lengths])` returns the FLOPs of a forward and backward pass."""

    matrix_parameters: int  # weights that a token is multiplied by, including the output layer's
    pair: int  # forward FLOPs of a (query, key) pair, over all heads of all layers with full attention
    # Layers with sliding-window or chunked attention: (window, chunk, FLOPs of a pair over these layers).
    limited: tuple[tuple[int | None, int | None, int], ...] = ()
    output: int = 0  # part of the output layer in the matrix parameters
    trained: float = 1.0  # share of the parameters with gradients
    vision: "VisionFlops | None" = None
    audio: AudioFlops | None = None

    @classmethod
    def of_model(cls, model: "Model", *, scores_tokens: bool = True) -> "Flops":
        """Return the cost of a model. Without `scores_tokens` its output layer is excluded; a head's products are not
        counted."""
        vocabulary = model.architecture.vocab_size if scores_tokens else 0
        flops = cls.of(model.config, vocabulary, trained=model.trained_share)
        if model.vision is None:
            return flops
        vision, audio = model.architecture.vision, model.architecture.audio
        trained = {"trains_layers": model.vision.trains_tower, "trains_mergers": model.vision.trains_mergers}
        return replace(
            flops, vision=vision and VisionFlops.of(vision, **trained), audio=audio and AudioFlops.of(audio, **trained)
        )

    def of_media(self, media: "MediaBatch | None", *, trains: bool = True) -> list[int]:
        """Return the FLOPs of the towers for each medium of a micro batch, with their backward pass if `trains`."""
        if media is None:
            return []
        visual = self.vision and (self.vision.training if trains else self.vision.forward)
        audio = self.audio and (self.audio.training if trains else self.audio.forward)
        costs = [visual([grid]) for grid in media.grids.tolist() if visual]
        return costs + [audio(frames) for frames in media.frames.tolist() if audio]

    @classmethod
    def of(cls, sizes: "TransformerConfig", vocab_size: int, *, trained: float = 1.0) -> "Flops":
        """Return the cost by the model's sizes; `vocab_size` excludes the padding of tensor parallelism."""
        hidden, heads = sizes.hidden_size, sizes.num_attention_heads
        head_dim = sizes.kv_channels or hidden // heads
        groups = sizes.num_query_groups or heads
        queries = 2 * heads if sizes.attention_output_gate else heads  # each with its gate

        def attention_of(layer: Layer) -> tuple[int, int]:
            """Return a layer's parameters, and its FLOPs for a pair of query and key."""
            if sizes.multi_latent_attention:
                return _latent_attention(sizes)
            dim, projections = layer.head_dim or head_dim, 2 if layer.has_values else 1
            projections = projections if layer.kv_source is None else 0
            width = queries + projections * (layer.groups or groups) + heads
            return hidden * width * dim, 4 * heads * dim

        layers: tuple[Layer, ...] = sizes.architecture.layers  # type: ignore[attr-defined]
        attention_layers = [layer for layer in layers if layer.has_attention]
        attention, _ = attention_of(Layer())
        matrices = 3 if sizes.gated_linear_unit else 2
        dense_ffn = sizes.ffn_hidden_size or 4 * hidden
        pattern, sparse = [False] * len(layers), 0
        if sizes.num_moe_experts:
            frequency = sizes.moe_layer_freq
            pattern = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(len(layers))]
            latent = sizes.architecture.expert_latent  # type: ignore[attr-defined]
            routed = matrices * (latent or hidden) * sizes.moe_router_topk * (sizes.moe_ffn_hidden_size or dense_ffn)
            shared = matrices * hidden * (sizes.moe_shared_expert_intermediate_size or 0)
            sparse = hidden * sizes.num_moe_experts + routed + shared + 2 * hidden * (latent or 0)
        mixers = {"attention": lambda layer: attention_of(layer)[0], "none": lambda layer: 0}
        mixers |= {"gated_delta_net": lambda layer: _delta_net(sizes), "mamba": lambda layer: _mamba(sizes)}
        mixers |= {"lightning_attention": lambda layer: _lightning(sizes)}
        mixers |= {"kimi_delta": lambda layer: _kimi_delta(sizes)}
        mixers |= {"short_conv": lambda layer: 4 * hidden * hidden}
        mixers |= {"attention_and_mamba": lambda layer: attention_of(layer)[0] + _mamba(sizes)}
        parameters = sum(mixers[layer.mixer](layer) for layer in layers)
        parameters += sum(
            sparse if has_experts else matrices * hidden * (layer.ffn_hidden_size or dense_ffn)
            for layer, has_experts in zip(layers, pattern, strict=True)
            if layer.has_mlp
        )
        depths = sizes.architecture.mtp_depths  # type: ignore[attr-defined]
        parameters += depths * (2 * hidden * hidden + attention + (sparse or matrices * hidden * dense_ffn))
        # The projections of embeddings for each layer, and each layer's two matrices.
        parameters += 3 * len(layers) * hidden * (sizes.architecture.layer_input_size or 0)  # type: ignore[attr-defined]
        pairs: Counter[tuple[int | None, int | None]] = Counter()
        indexer = sizes.architecture.sparse  # type: ignore[attr-defined]
        topk = indexer.topk if indexer else None  # a query sees as many keys as in a window of this length
        for layer in (*attention_layers, *[Layer()] * depths):
            pairs[layer.window or topk, layer.chunk] += attention_of(layer)[1]
        full_attention = pairs.pop((None, None), 0)
        limited = tuple((window, chunk, flops) for (window, chunk), flops in pairs.items())
        output = hidden * vocab_size
        return cls(parameters + (1 + depths) * output, full_attention, limited, 0 if depths else output, trained)

    def training(self, lengths: Iterable[int], scored: int | None = None, reused: Iterable[int] = ()) -> int:
        """Return the FLOPs of training on documents of these lengths (tokens), each attending causally to itself.

        scored: number of tokens whose label's probability is computed; None: all.
        reused: lengths of beginnings of documents that are computed with another document
        """
        products, attention = self._forward(list(lengths), scored, list(reused))
        return round((2 + self.trained) * products) + 3 * attention

    def forward(self, lengths: Iterable[int], scored: int | None = None, reused: Iterable[int] = ()) -> int:
        """Return the FLOPs of a forward pass."""
        return sum(self._forward(list(lengths), scored, list(reused)))

    def _forward(self, lengths: list[int], scored: int | None, reused: list[int]) -> tuple[int, int]:
        """Return the FLOPs of matrix products and of attention."""
        tokens = sum(lengths) - sum(reused)
        skipped = 0 if scored is None else tokens - scored
        attention = sum(
            sign * cost * pairs(length, window, chunk)
            for window, chunk, cost in ((None, None, self.pair), *self.limited)
            for sign, counted in ((1, lengths), (-1, reused))
            for length in counted
        )
        return 2 * self.matrix_parameters * tokens - 2 * self.output * skipped, attention

    def six_n_d(self, tokens: float) -> float:
        """Return the usual estimate 6 x parameters x tokens: the matrix products without attention."""
        return 6 * self.matrix_parameters * tokens


@dataclass(frozen=True)
class VisionFlops:
    """Cost of a vision tower. Counts its matrix products, and attention within images, frames or windows."""

    layers: int  # weights that a patch is multiplied by
    mergers: int  # weights that a feature is made of
    pair: int  # forward FLOPs of a pair of patches in a layer
    full_layers: int
    window_layers: int
    window: int  # patches of a window
    square: int  # patches of a feature
    trains_layers: bool
    trains_mergers: bool

    @classmethod
    def of(cls, vision: "Vision", *, trains_layers: bool, trains_mergers: bool) -> "VisionFlops":
        hidden, square = vision.hidden_size, vision.merge_size**2
        matrices = 3 if vision.gated else 2
        patch = vision.channels * vision.temporal_patch_size * vision.patch_size**2 * hidden
        merged, output = hidden * square, vision.output_size
        mergers = (1 + len(vision.deep_layers)) * merged * (merged + output)
        if vision.gated_merger_size:  # behind a convolution over the patches of a square
            patch += hidden * output
            mergers = output * (output + 3 * vision.gated_merger_size)
        if vision.projector:
            inputs, reduction = (hidden, merged * hidden) if vision.projector.reduces_squares else (merged, 0)
            mergers = reduction + inputs * output + output**2
        if vision.pools_squares or vision.merger_eps is not None:
            mergers = hidden * output
        if size := vision.square_mlp_size:
            patch += hidden * size + size**2 // square
            mergers = size * output
        if words := vision.visual_words:
            mergers = (words - INDICATORS) * (merged + output)
        full = len(vision.full_layers) if vision.window else vision.num_layers
        return cls(
            layers=patch + vision.num_layers * (4 * hidden**2 + matrices * hidden * vision.ffn_hidden_size),
            mergers=mergers,
            pair=4 * hidden,
            full_layers=full,
            window_layers=vision.num_layers - full,
            window=(vision.window // vision.patch_size) ** 2 if vision.window else 0,
            square=square,
            trains_layers=trains_layers,
            trains_mergers=trains_mergers,
        )

    def forward(self, grids: Iterable[Sequence[int]]) -> int:
        """Return the FLOPs of a forward pass over media of these grids (time, height, width in patches)."""
        return replace(self, trains_layers=False, trains_mergers=False).training(grids)

    def training(self, grids: Iterable[Sequence[int]]) -> int:
        """Return the FLOPs of training on media of these grids (time, height, width in patches), without recomputation.

        Frozen layers have no backward pass.
        """
        grids = list(grids)
        patches = sum(time * height * width for time, height, width in grids)
        squares = sum(time * (height * width) ** 2 for time, height, width in grids)
        attention = self.pair * (self.full_layers * squares + self.window_layers * patches * self.window)
        layers = (2 * self.layers * patches + attention) * (3 if self.trains_layers else 1)
        return layers + 2 * self.mergers * patches // self.square * (1 + self.trains_mergers + self.trains_layers)


def pairs(length: int, window: int | None = None, chunk: int | None = None) -> int:
    """Return the number of visible (query, key) pairs in a document of `length` tokens."""
    if chunk is not None and chunk < length:
        return length // chunk * pairs(chunk, window) + pairs(length % chunk, window)
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def _latent_attention(sizes: "TransformerConfig") -> tuple[int, int]:
    """Return the number of weights of multi-latent attention, and the forward FLOPs of a (query, key) pair."""
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    names = "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"
    rank, latent, nope, rope, value = (getattr(sizes, name) for name in names)
    query = heads * (nope + rope)
    queries = hidden * query if rank is None else (hidden + query) * rank
    keys = hidden * (latent + rope) + latent * heads * (nope + value)
    return queries + keys + heads * value * hidden, 2 * (query + heads * value)


def _delta_net(sizes: "TransformerConfig") -> int:
    """Return the number of weights of a gated delta net, including its state.

    The state also multiplies each token: its key reads and writes, its query reads.
    """
    names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    keys, values, key_dim, value_dim = (getattr(sizes, name) for name in names)
    weights = sizes.hidden_size * (2 * keys * key_dim + 3 * values * value_dim + 2 * values)
    return weights + 3 * values * key_dim * value_dim


def _kimi_delta(sizes: "TransformerConfig") -> int:
    """Return the number of weights of Kimi delta attention, including its state, as for gated delta nets."""
    heads, dim, _ = sizes.architecture.kimi_delta  # type: ignore[attr-defined]
    latents = 2 * (sizes.hidden_size + heads * dim) * dim
    return sizes.hidden_size * heads * (4 * dim + 1) + latents + 3 * heads * dim * dim


def _mamba(sizes: "TransformerConfig") -> int:
    """Return the number of weights of a Mamba-2 layer, including its state, which each token writes and reads."""
    mamba = sizes.architecture.mamba  # type: ignore[attr-defined]
    values = mamba.heads * mamba.head_dim
    projected = 3 * values + 2 * mamba.groups * mamba.state_dim + mamba.heads
    return sizes.hidden_size * projected + 2 * values * mamba.state_dim


def _lightning(sizes: "TransformerConfig") -> int:
    """Return the number of weights of lightning attention, including its state, which each token writes and reads."""
    width, dim = sizes.num_attention_heads * (sizes.kv_channels or 0), sizes.kv_channels or 0
    return 5 * sizes.hidden_size * width + 2 * width * dim
