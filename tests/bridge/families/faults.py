"""Faults planted on purpose: each must move the log-probabilities far beyond the bound, in every family with the part.

A fault changes one of three things: the tensors of the checkpoint (by their names in files), what the family makes of
config.json, or the model that was built.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megaswift.bridge.mapping.architecture import Architecture

if TYPE_CHECKING:  # the tests are collected without torch
    from megaswift.bridge.model.model import Model
    from torch import Tensor

Tensors = dict[str, Any]
ROUTING_BIAS = r"e_score_correction_bias|expert_bias|(?:gate|router)\.bias|moe_statics"


@dataclass(frozen=True)
class Fault:
    tensors: Callable[[Tensors], Tensors] | None = None
    architecture: Callable[[Architecture], Architecture] | None = None
    model: Callable[[Any], None] | None = None  # of a bridge.build.Model


def swapped(one: str, other: str) -> Fault:
    """Two parts of names change places."""

    def swap(name: str) -> str:
        return name.replace(one, "*").replace(other, one).replace("*", other)

    return Fault(tensors=lambda tensors: {swap(name): tensor for name, tensor in tensors.items()})


def zeroed(pattern: str) -> Fault:
    """Tensors whose names match are zeros."""
    return Fault(tensors=lambda tensors: _changed(tensors, pattern, lambda tensor: tensor * 0))


def rolled(pattern: str, dim: int = 0) -> Fault:
    """Tensors whose names match are out of place by one along `dim`: stacked experts, heads, biases."""
    return Fault(tensors=lambda tensors: _changed(tensors, pattern, lambda tensor: tensor.roll(1, dim)))


def rope_interleaved() -> Fault:
    """Planes of neighbouring dimensions where they are of the two halves, or the other way round."""
    return Fault(
        architecture=lambda about: replace(
            about, ropes=tuple(replace(rope, interleaved=not rope.interleaved) for rope in about.ropes)
        )
    )


def rope_slower() -> Fault:
    """A base three times too large."""
    return Fault(
        architecture=lambda about: replace(
            about, ropes=tuple(replace(rope, base=3 * rope.base) for rope in about.ropes)
        )
    )


def softmax_scaled() -> Fault:
    """Every softmax of attention is a quarter too sharp."""

    def plant(model: "Model") -> None:
        for module in (module for chunk in model.chunks for module in chunk.modules()):
            if any(base.__name__ == "CoreAttention" for base in type(module).__mro__):
                scale = module.softmax_scale or module.config.kv_channels**-0.5
                module.softmax_scale = 1.25 * scale

    return Fault(model=plant)


def changed(**fields: Any) -> Fault:
    """Fields of the architecture have other values."""
    return Fault(architecture=lambda about: replace(about, **fields))


def changed_sparse(**fields: Any) -> Fault:
    """Fields of the architecture's sparse attention have other values."""

    def change(about: Architecture) -> Architecture:
        assert about.sparse is not None
        return replace(about, sparse=about.sparse._replace(**fields))

    return Fault(architecture=change)


def layers_changed(**fields: Any) -> Fault:
    """Fields of the layers have other values, in the layers that have one."""

    def change(about: Architecture) -> Architecture:
        layers = []
        for layer in about.layers:
            there = {name: value for name, value in fields.items() if getattr(layer, name) is not None}
            layers.append(replace(layer, **there))
        return replace(about, layers=tuple(layers))

    return Fault(architecture=change)


def of(names: Iterable[str], about: Architecture) -> dict[str, Fault]:
    """The faults of the parts that a model has, by the names in its files."""
    text = "\n".join(names)
    found = {}
    for one, other in (("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm")):
        if one in text and other in text:
            found[f"{one} and {other} swapped"] = swapped(f"{one}.", f"{other}.")
    if any(layer.rope is not None and layer.has_attention for layer in about.layers):
        found |= {"rope interleaved": rope_interleaved(), "rope slower": rope_slower()}
    if any(layer.has_attention for layer in about.layers):
        found["softmax scale"] = softmax_scaled()
    for name in ("window", "chunk"):
        if limits := {getattr(layer, name) for layer in about.layers} - {None}:
            found[f"{name} one longer"] = layers_changed(**{name: min(limits) + 1})
    for name in ("embedding_scale", "residual_scale", "logits_scale", "gate_scale", "mlp_scale"):
        if getattr(about, name) != 1.0:
            found[f"no {name}"] = changed(**{name: 1.0})
    if re.search(r"experts\.1\.", text):
        found["expert out of place"] = swapped("experts.0.", "experts.1.")
    elif re.search(r"\bexperts\.", text):
        found["expert out of place"] = rolled(r"\bexperts\.")
    if re.search(ROUTING_BIAS, text):
        found["routing bias dropped"] = zeroed(ROUTING_BIAS)
    return found


def _changed(tensors: Tensors, pattern: str, change: "Callable[[Tensor], Tensor]") -> Tensors:
    found = {name: change(tensor) if re.search(pattern, name) else tensor for name, tensor in tensors.items()}
    assert any(re.search(pattern, name) for name in tensors), f"no tensor is called {pattern}"
    return found
