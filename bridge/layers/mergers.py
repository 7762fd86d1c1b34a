"""Mergers of vision towers: from patches to features of the language model, and what they share with the tower."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..kernels.weight_gradient import has_main_grad, linear
from ..mapping.architecture import INDICATORS, Projector, TowerLayers, Vision
from .norm import LayerNorm, RMSNorm, ZeroCentredNorm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


class Linear(nn.Linear):
    """Linear layer of which every rank holds all, and whose ranks have different inputs: x [rows, in]."""

    parallel_mode = None  # lora/attach.py: it does not communicate

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.weight.requires_grad and has_main_grad(self.weight):
            return linear(x, self.weight, self.bias)
        return super().forward(x)


def make_norm(
    vision: TowerLayers, size: int, config: TransformerConfig, device: torch.device, *, has_residual: bool = False
) -> nn.Module:
    norm = RMSNorm if vision.normalization == "RMSNorm" else LayerNorm
    module = norm(size, eps=vision.eps, dtype=config.params_dtype, device=device)
    module.has_residual = has_residual
    return module


class Merger(nn.Module):
    """Merger of squares of patches into features: x [patches, hidden_size] -> [features, output_size].

    norms_square: normalize the concatenated patches of a square, instead of each patch.
    """

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device, *, norms_square: bool = False):
        super().__init__()
        self.size = vision.hidden_size * vision.merge_size**2
        self.norms_square = norms_square
        self.norm = make_norm(vision, self.size if norms_square else vision.hidden_size, config, device)
        self.linear_fc1 = Linear(self.size, self.size, dtype=config.params_dtype, device=device)
        self.linear_fc2 = Linear(self.size, vision.output_size, dtype=config.params_dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        squares = self.norm(x.view(-1, self.size)) if self.norms_square else self.norm(x).view(-1, self.size)
        return self.linear_fc2(F.gelu(self.linear_fc1(squares)))


class GatedMerger(nn.Module):
    """Projection, norm and gated MLP of the features of squares: x [features, output_size] -> the same shape."""

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        assert vision.gated_merger_size
        size = vision.output_size
        linear = partial(Linear, bias=False, dtype=config.params_dtype, device=device)
        self.activation = ACTIVATIONS[vision.activation]
        self.linear_proj = linear(size, size)
        self.norm = LayerNorm(size, eps=1e-5, dtype=config.params_dtype, device=device)
        self.linear_fc1 = linear(size, 2 * vision.gated_merger_size)
        self.linear_fc2 = linear(vision.gated_merger_size, size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(F.gelu(self.norm(self.linear_proj(x)))).chunk(2, dim=-1)
        return self.linear_fc2(self.activation(gate) * up)


class Projection(nn.Module):
    """Merger of the form `projector`: x [patches, hidden_size] -> [features, output_size].

    As in transformers, a square's values are in order of channels, and then of its patches, where it is reduced.
    """

    def __init__(self, vision: Vision, projector: Projector, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.square, size, output = vision.merge_size**2, vision.hidden_size, vision.output_size
        kinds = {"dtype": config.params_dtype, "device": device}
        self.activation = ACTIVATIONS[projector.activation]
        self.linear_merge = self.norm = None
        if projector.reduces_squares:
            self.norm = RMSNorm(size, eps=projector.eps, **kinds)
            self.linear_merge = Linear(size * self.square, size, bias=False, **kinds)
        else:
            size *= self.square
            if projector.eps is not None:
                self.norm = LayerNorm(size, eps=projector.eps, **kinds)
        self.linear_fc1 = Linear(size, output, bias=projector.bias, **kinds)
        self.linear_fc2 = Linear(output, output, bias=projector.bias, **kinds)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear_merge is None:
            squares = x.reshape(len(x) // self.square, -1)
            squares = squares if self.norm is None else self.norm(squares)
        else:
            x = x if self.norm is None else self.norm(x)
            squares = self.linear_merge(x.unflatten(0, (-1, self.square)).transpose(1, 2).flatten(1))
        return self.linear_fc2(self.activation(self.linear_fc1(squares)))


class PooledProjection(nn.Module):
    """Projection of the normalized mean of a square: x [patches, hidden_size] -> [features, output_size].

    The matrix is as Gemma 3's checkpoints have it, [hidden_size, output_size].
    """

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.square, size = vision.merge_size**2, vision.hidden_size
        self.norm = ZeroCentredNorm(size, eps=vision.eps, dtype=config.params_dtype, device=device)
        weight = torch.empty(size, vision.output_size, dtype=config.params_dtype, device=device)
        self.projection = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(0, (-1, self.square)).mean(1)) @ self.projection


class VisualVocabulary(nn.Module):
    """Sum of visual words by their probabilities: x [patches, hidden_size] -> [features, output_size].

    words: [visual words, output_size], whose last rows are features by themselves
    """

    def __init__(self, vision: Vision, words: int, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.size = vision.hidden_size * vision.merge_size**2
        self.likely = words - INDICATORS  # words that have probabilities
        kinds = {"dtype": config.params_dtype, "device": device}
        self.linear_fc1 = Linear(self.size, self.likely, bias=False, **kinds)
        self.norm = nn.LayerNorm(self.likely, eps=1e-5, **kinds)  # too wide for fused kernels
        self.words = nn.Parameter(torch.empty(words, vision.output_size, **kinds))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.norm(self.linear_fc1(x.view(-1, self.size))).softmax(-1)
        return probabilities @ self.words[: self.likely]


class MatrixMerger(nn.Module):
    """Projection of features of squares: x [features, size] -> [features, output_size].

    eps: of an RMS norm without weights before it; None: there is no norm
    """

    def __init__(
        self, size: int, output_size: int, config: TransformerConfig, device: torch.device, *, eps: float | None = None
    ):
        super().__init__()
        self.eps = eps
        self.linear_proj = Linear(size, output_size, bias=False, dtype=config.params_dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_proj(x if self.eps is None else F.rms_norm(x, x.shape[-1:], eps=self.eps))


class Downsample(nn.Module):
    """Convolution over squares of patches, computed as a matrix product: [patches, hidden] -> [features, output]."""

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        shape = vision.output_size, vision.hidden_size, vision.merge_size, vision.merge_size
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(vision.output_size, dtype=config.params_dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        return F.linear(x.view(-1, weight.shape[1]), weight, self.bias)


class SquareMLP(nn.Module):
    """MLP over squares, with an activation behind both layers: [patches, hidden] -> [features, size]."""

    def __init__(self, vision: Vision, size: int, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.square_size = vision.hidden_size * vision.merge_size**2
        linear = partial(Linear, bias=False, dtype=config.params_dtype, device=device)
        self.linear_fc1, self.linear_fc2 = linear(self.square_size, size), linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear_fc2(F.gelu(self.linear_fc1(x.view(-1, self.square_size)))))


class ScaledMeans(nn.Module):
    """Means of squares times the root of their size, perhaps standardized: [patches, size] -> [features, size].

    The factor takes values out of the range of fp16, and the bias takes them back: both are applied in fp32.
    """

    std_bias: Tensor
    std_scale: Tensor

    def __init__(self, vision: Vision, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.square, self.factor, self.standardizes = vision.merge_size**2, vision.hidden_size**0.5, vision.standardizes
        if vision.standardizes:
            for name in ("std_bias", "std_scale"):
                empty = torch.empty(vision.hidden_size, dtype=config.params_dtype, device=device)
                self.register_buffer(name, empty)

    def forward(self, x: Tensor) -> Tensor:
        means = x.unflatten(0, (-1, self.square)).float().mean(1).to(x.dtype).float() * self.factor
        if self.standardizes:
            means = (means - self.std_bias.float()) * self.std_scale.float()
        return means.to(x.dtype)
