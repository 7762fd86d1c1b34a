"""Description of a model's architecture, which a family makes from a config.json."""

from dataclasses import dataclass
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


MIXERS = {  # nouns of the token mixers but attention, by `Layer.mixer`
    "gated_delta_net": "gated delta nets",
    "kimi_delta": "Kimi delta attention",
    "lightning_attention": "lightning attention",
    "mamba": "Mamba-2",
    "attention_and_mamba": "Mamba-2",
    "short_conv": "short convolutions",
}


class ResidualFactors(NamedTuple):
    """Factors in a layer that adds its parts to their own normed input: residual * norm(x) + output * part(norm(x))."""

    mixer_residual: float
    mixer_output: float
    mlp_residual: float
    mlp_output: float


@dataclass(frozen=True)
class Layer:
    """Token mixer of one layer, and whether an MLP or experts follow it."""

    # Or "gated_delta_net", "kimi_delta", "lightning_attention", "mamba", "attention_and_mamba" (of the same input),
    # "short_conv", "none".
    mixer: str = "attention"
    has_mlp: bool = True
    rope: int | None = 0  # index into Architecture.ropes; None: no position embedding
    window: int | None = None  # a query attends to itself and the `window - 1` keys before it
    chunk: int | None = None  # a query attends within its block of `chunk` positions
    head_dim: int | None = None  # size of a query, key or value; None: kv_channels
    groups: int | None = None  # key heads; None: num_query_groups
    has_values: bool = True  # a projection of their own; else values are the keys before norm and rope
    gives_keys: bool = False  # later layers attend to its keys and values
    kv_source: int | None = None  # earlier layer whose keys and values it attends to; None: its own
    ffn_hidden_size: int | None = None  # width of its dense MLP; None: that of the other layers
    factors: ResidualFactors | None = None  # None: x + part(norm(x)), as `residual_scale` has it

    @property
    def has_attention(self) -> bool:
        return self.mixer in ("attention", "attention_and_mamba")


@dataclass(frozen=True)
class Routing:
    """Expert routing that megatron-core's settings cannot express; see layers/router.py."""

    group_members: int = 2  # a group's score is the sum of this many of its highest expert scores
    normalize: bool = True  # normalize a token's expert weights to sum to 1, before any scaling
    smallest_sum: float = 1e-20  # lower bound of the divisor in this normalization
    logit_bias: bool = False  # the router's linear layer has a bias
    choice_bias: bool = False  # moe_router_enable_expert_bias, which megatron-core supports for sigmoid scores only
    fp32: bool = False  # router weights in fp32, regardless of the model's dtype
    # An RMS norm on the router's input, whose output is divided by the root of hidden_size.
    input_norm: bool = False
    expert_factors: bool = False  # a learned factor on each expert's weight
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
    # Parts into which ranks can divide a group: each has some of its heads, and a part of its key and query. Ranks with
    # the same group gather the key and query.
    pieces: int = 1
    has_norm: bool = True  # a norm over each group's gated output
    # Factors on the projected gates, values, keys, queries and time steps.
    multipliers: tuple[float, ...] | None = None

    @property
    def units(self) -> int:
        """Return the number of pieces of all groups, which TP x CP divides."""
        return self.groups * self.pieces


class KimiDelta(NamedTuple):
    """Kimi delta attention; see layers/kimi_delta.py."""

    heads: int
    head_dim: int
    kernel: int  # tokens of the convolution


class ShortConvolution(NamedTuple):
    """Gated short convolutions; see layers/short_conv.py."""

    kernel: int  # tokens that they see
    groups: int  # equal groups of channels, which TP x CP divides


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
    post_norms: bool = False  # norms on the outputs of attention and MLP too
    head_norms: bool = False  # RMS norms of each head: of queries and keys with weights, of values without
    softmax_scale: float | None = None  # factor on attention's scores; None: that of the size of a head
    window: int | None = None  # side in pixels of the windows in which layers attend, except `full_layers`
    clips: bool = False  # linear layers, of gated layers, clip; see layers/clipped_linear.py


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


CLIP_BOUNDS = "input_min", "input_max", "output_min", "output_max"  # numbers beside a linear layer that clips
INDICATORS = 5  # kinds of tokens around and between the tiles of an image of Ovis2


@dataclass(frozen=True, kw_only=True)
class Vision(TowerLayers):
    """Vision tower: a transformer over patches of images and videos, and mergers to features of the language model.

    A merger concatenates the patches of a square of `merge_size` x `merge_size`, and is an MLP with one hidden layer.
    With `gated_merger_size`, a convolution over each square ends the tower, and the merger is a projection, a norm and
    a gated MLP. `projector` is another form of it; with `pools_squares` it is the mean of a square, a norm that adds 1
    to its weights, and a matrix. With `square_mlp_size`, an MLP over each square ends the tower, whose two layers each
    end with an activation, and the merger is a matrix. With `scales_means`, the mean of each square times the root of
    its size ends the tower. With `merger_eps`, the merger is an RMS norm without weights and a matrix.
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
    has_code_names: bool = False  # tensors have the names of the checkpoint's own code, and not transformers'
    is_patch_matrix: bool = False  # the projection of patches is a matrix in checkpoints, and not a convolution
    is_channels_last: bool = False  # a column of that matrix is of a row, column and channel; else the channel is first
    pixel_norm: bool = False  # a norm on the pixels of a patch
    patch_norm: bool = False  # a norm on embedded patches, before position embeddings are added
    grid_side: int | None = None  # side of a grid of learned position embeddings, which is resampled
    grid_axes: int = 1  # axes of that table in checkpoints: one of rows, or height and width
    # Rows of each of two tables of learned position embeddings: of columns of an image and of rows, which are added.
    axis_positions: int | None = None
    alternates_axes: bool = (
        False  # in checkpoints the rows of both tables alternate; else one table is before the other
    )
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
    merger_eps: float | None = None
    scales_means: bool = False
    standardizes: bool = False  # (x - bias) * scale by tensors of the checkpoint, not trained; needs `scales_means`
    square_mlp_size: int | None = None  # width of both layers of an MLP over each square
    # The features of an image's tiles are put together, without padding, with a learned one behind each row; they are
    # reduced to those of so many tiles. See layers/tile_features.py.
    most_tiles: int | None = None
    # Rows of a table of visual words. A square's features are its rows, weighed by probabilities; the last INDICATORS
    # rows are of the tokens around and between the tiles of an image, which are visual tokens too.
    visual_words: int | None = None
    # The token of images, and that whose per-layer embeddings it has instead of its own; see layers/layer_inputs.py.
    layer_input_tokens: tuple[int, int] | None = None


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
    # Size of the vector that each token gives to each layer; see layers/layer_inputs.py. With `layer_scalar` only.
    layer_input_size: int | None = None
    embedding_scale: float = 1.0  # factor on the embedding's output, in the model's dtype
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP
    mixer_scales: tuple[float, float] = (1.0, 1.0)  # factors on attention's and Mamba-2's outputs, in layers with both
    gate_scale: float = 1.0  # factor on the gates of dense MLPs
    mlp_scale: float = 1.0  # factor on the outputs of MLPs
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
    short_conv: ShortConvolution | None = None  # likewise
    kimi_delta: KimiDelta | None = None
    sparse: SparseAttention | None = None  # requires multi_latent_attention
    expert_bias: bool = False  # biases of both linear layers of each expert
    expert_latent: int | None = None  # width of the experts' inputs and outputs; None: that of the layer
    expert_norms: bool = False  # norms on inputs and outputs of the experts; see layers/normed_experts.py
    routing: Routing | None = None  # None: the moe_router settings in `transformer` suffice
    mtp_depths: int = 0  # layers of multi-token prediction to build; see layers/mtp.py
    num_labels: int | None = None  # outputs of the score head in place of the output layer; see model/score_head.py
    vision: Vision | None = None  # vision tower to build
    audio: Audio | None = None  # audio tower to build
    # Blocks of visual tokens that attend in both directions do so in layers with a window alone.
    blocks_in_windows: bool = False
    passthrough: str = ""  # regex of tensors that the model is built without; see checkpoint/passthrough.py
    # (regex, replacement) from names of tensors in files to transformers' modules, where they differ: PEFT uses these.
    module_names: tuple[tuple[str, str], ...] = ()

    @property
    def is_one_stage(self) -> bool:
        """Return whether one pipeline stage has all layers: they read the embeddings, or keys of other layers."""
        return self.layer_input_size is not None or any(layer.kv_source is not None for layer in self.layers)

    @property
    def convolution(self) -> int | None:
        """Number of tokens that the convolutions of layers with a state see: 1 for none; None without such layers."""
        mixers = {layer.mixer for layer in self.layers}
        if sized := self.mamba or self.short_conv or self.kimi_delta:
            return sized.kernel
        if "gated_delta_net" in mixers:
            return self.transformer["linear_conv_kernel_dim"]
        return 1 if "lightning_attention" in mixers else None
