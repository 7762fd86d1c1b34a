"""MiniMax-Text-01: lightning attention and softmax attention by turns; normed residuals; stored decays."""

from dataclasses import replace
from functools import partial
from typing import Any

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import Fault, rolled
from tests.bridge.families.qwen3_next import leaking, planted, ungated

FACTORS = {f"{part}_{greek}_factor": 0.7 + 0.1 * number for number, (part, greek) in enumerate(
    (part, greek) for part in ("full_attn", "linear_attn", "mlp") for greek in ("alpha", "beta")
)}  # fmt: skip
DECAYS = "slope_rate", "query_decay", "key_decay", "diagonal_decay"


def config(**changes):
    from transformers import MiniMaxConfig

    settings: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "block_size": 32}
    types = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    return MiniMaxConfig(**SHARED | FACTORS | settings | {"rope_parameters": ROPE, "layer_types": types} | changes)


def model(config):
    """transformers' model, whose decays are not to be random."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for module in made.modules():
        module._non_persistent_buffers_set |= {name for name in DECAYS if hasattr(module, name)}
    return made


def decays(config, noise) -> dict[str, Any]:
    """What files have beside the weights, and nothing reads."""
    return {f"model.layers.0.self_attn.{name}": noise(config.num_attention_heads, 1, 1) for name in DECAYS}


def _slower(module) -> None:
    module.layer_number += 1


def _normed_apart(module) -> None:
    import torch

    def norm(x, gate):
        return gate.sigmoid() * module.norm().view(module.groups, 1, -1) * torch.nn.functional.rms_norm(x, x.shape[-1:])

    module._gated_norm = norm


def _without_factors(about):
    return replace(about, layers=tuple(replace(layer, factors=None) for layer in about.layers))


def _one_factor_off(name: str) -> Fault:
    def change(about):
        layers = tuple(replace(layer, factors=layer.factors._replace(**{name: 0.5})) for layer in about.layers)
        return replace(about, layers=layers)

    return Fault(architecture=change)


FAULTS = {
    "decays of the next layer": planted("LightningAttention", _slower),
    "gate of lightning attention dropped": planted("LightningAttention", ungated),
    "norm of each head": planted("LightningAttention", _normed_apart),
    "norms of other heads": rolled(r"self_attn\.norm"),
    "queries, keys and values of other heads": rolled("qkv_proj"),
    "residual before the norms": Fault(architecture=_without_factors),
    **{
        f"{name} of another size": _one_factor_off(name)
        for name in ("mixer_residual", "mixer_output", "mlp_residual", "mlp_output")
    },
    "states leak": leaking("LightningAttention", "slots", "steps"),
}
TINY = {
    "": Tiny(config, (*MOE, "TP2 SP recompute"), model=model, extra=decays, faults=FAULTS),
    # Windows in softmax attention, and each layer's kind by its number.
    "window": Tiny(
        partial(config, sliding_window=7, layer_types=None), ("PP2 recompute parts",), model=model,
        raw={"layer_types": None},
    ),
}  # fmt: skip
