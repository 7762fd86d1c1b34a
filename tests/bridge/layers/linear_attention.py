"""Mixers with linear attention or convolutions, without their model, and random inputs of them."""

from types import SimpleNamespace
from typing import Any

import torch
from megaswift.bridge.layers.gated_delta import GatedDeltaNet
from megaswift.bridge.layers.grouped_mixer import GroupedMixer
from megaswift.bridge.layers.kimi_delta import KimiDeltaAttention
from megaswift.bridge.layers.lightning import LightningAttention
from megaswift.bridge.layers.mamba import Mamba2
from megaswift.bridge.layers.short_conv import ShortConv
from megaswift.bridge.mapping.architecture import Mamba

KERNEL = 4


def mixer(kind: type[GroupedMixer], **sizes: Any) -> Any:
    """A layer without parameters, for its methods that take all they need."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, size in sizes.items():
        setattr(layer, name, size)
    return layer


def cases(groups: int, heads: int, dim: int, state: int) -> dict[str, SimpleNamespace]:
    """Each mixer: its layer, and `inputs(tokens, dtype)`: the arguments of `_run_torch` but for the layout.

    groups: of keys; heads: of values in a group, where a mixer has several; dim: of values, and of keys where they have
    no `state`. Some inputs are in fp32 in any model; all require gradients but those that no model trains.
    """

    def gated_delta(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        decay = -torch.rand(tokens, groups, heads) * torch.linspace(0, 3, heads)
        channels = groups * (2 * state + heads * dim)
        qkv, beta = normal(tokens, channels), torch.rand(tokens, groups, heads)
        return [trained(qkv, dtype), trained(decay), trained(beta, dtype), trained(weight(channels), dtype)]

    def kimi_delta(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        qkv, decay, beta = normal(tokens, 3 * groups * dim), normal(tokens, groups, dim), torch.rand(tokens, groups)
        rates, bias = torch.linspace(-3, 1, groups).unsqueeze(-1), normal(groups, dim)
        rounded = (qkv, decay, beta, weight(3 * groups * dim))
        return [*(trained(x, dtype) for x in rounded), trained(rates), trained(bias)]

    def lightning(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [trained(normal(tokens, groups, 3 * dim), dtype), -torch.linspace(0.003, 0.8, groups).unsqueeze(-1)]

    def mamba(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        channels = groups * (heads * dim + 2 * state)
        rates = -torch.rand(groups, heads) * torch.linspace(0.1, 3, heads)
        convolution = [trained(x, dtype) for x in (weight(channels), normal(channels))]
        x, dt = trained(normal(tokens, channels), dtype), trained(torch.rand(tokens, groups, heads))
        return [x, dt, *convolution, trained(rates), trained(normal(groups, heads))]

    def short_conv(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [trained(normal(tokens, groups * dim), dtype), trained(weight(groups * dim), dtype)]

    sizes = Mamba(groups * heads, dim, groups, state, KERNEL, True, (0.0, float("inf")), 1)
    sections = (heads * dim + 2 * state, heads * dim, heads)
    delta = {"key_dim": state, "value_dim": dim, "heads": heads, "conv_dim": 2 * state + heads * dim}
    layers = {
        "gated delta net": (mixer(GatedDeltaNet, **delta), gated_delta),
        "Kimi delta attention": (mixer(KimiDeltaAttention, dim=dim), kimi_delta),
        "lightning attention": (mixer(LightningAttention, dim=dim), lightning),
        "Mamba-2": (mixer(Mamba2, mamba=sizes, heads=heads, key_dim=state, sections=sections), mamba),
        "short convolution": (mixer(ShortConv), short_conv),
    }
    return {name: SimpleNamespace(layer=layer, inputs=inputs) for name, (layer, inputs) in layers.items()}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def weight(channels: int) -> torch.Tensor:
    return torch.randn(channels, 1, KERNEL) * 0.5


def trained(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return x.to(dtype).requires_grad_()
