"""Tiny models of every family, and what the tests of all families ask of them.

To add a family, write tests/bridge/families/<model_type>.py, where `<model_type>` is its name in bridge/families.
Nothing else has to be registered: test_families.py finds the file. It holds

    def config(**changes):
        from transformers import FooConfig  # here, not at the top: collecting tests must stay fast
        return FooConfig(**SHARED | {"rope_parameters": ROPE, "head_dim": 16} | changes)

    TINY = Tiny(config)

or several variants by name, where a setting changes what is built (tied or not, biases, an uneven number of dense
layers, a routing rule). Give a variant only what it is for: each costs seconds in every layout.

    TINY = {"": Tiny(config), "tied": Tiny(partial(config, tie_word_embeddings=True))}

Tested for every variant (`pytest tests/bridge/families -k foo` runs one family, about a minute):
- the log-probabilities of many tokens, of packed documents and of padded rows, and every parameter's gradient, against
  transformers in fp32 with eager attention and each document by itself: in one process, and in each of `layouts`;
- that what is loaded and saved again is the same, name for name and byte for byte, in fp32 and bf16, in each layout;
- that faults show: those that can be planted in any family (faults.py finds which parts it has), and `faults`.

Be unforgiving. Let dimensions differ from one another, vocabularies be odd (VOCAB is), windows, chunks and rope's
original lengths be shorter than the documents (2 to 70 tokens: reference.py), and give more than one routing group and
more than one kind of layer in each pipeline stage. 4 layers, hidden size about 48, 8 experts: the tests of all
families share a few minutes. Heads, groups, experts and widths must divide by 2 for TP2 and EP2, layers by 2 for PP2.

transformers' model is the truth, and its `save_pretrained` for names: where that writes other names than the hub's
checkpoints have, `files` renames (or stacks, or splits) them, and `raw` makes config.json what the hub's looks like.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB = 261
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# For families without RMSNorms: vLLM gives Cohere RMSNorms where config.json names their epsilon.
SHARED_WITHOUT_EPS = {key: value for key, value in SHARED.items() if key != "rms_norm_eps"}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP, LAYOUT = "sequence_parallel", "pipeline_model_parallel_layout"
ACCOUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
RECOMPUTE_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Every layout that a Tiny may name, by the number of processes. "" is one process: every Tiny is tested in it.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"": {}},
    2: {
        "TP2": {TP: 2, SP: False},
        "TP2 SP": {TP: 2, SP: True},
        "PP2": {PP: 2},
        "PP2 uneven": {PP: 2, "decoder_first_pipeline_num_layers": 3},
        "PP2 VPP2": {PP: 2, VPP: 2},
        "PP2 VPP3 accounted": {PP: 2, VPP: 3} | ACCOUNTED,  # the embedding and the loss are chunks of their own
        "PP2 VPP2 by letters": {PP: 2, LAYOUT: "E|tt|t|tL"},
        "CP2": {CP: 2},
        "EP2": {EP: 2},
        "TP2 SP ETP2": {TP: 2, SP: True, ETP: 2},
        "TP2 SP EP2": {TP: 2, SP: True, EP: 2},
        "TP2 SP recompute": {TP: 2, SP: True} | RECOMPUTE_LAYERS,
        "PP2 recompute parts": {PP: 2, "recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
        "PP2 recompute MLPs": {PP: 2, "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    },
    4: {
        "TP4 SP": {TP: 4, SP: True},
        "TP4 SP ETP4": {TP: 4, SP: True, ETP: 4},
        "TP2 SP PP2": {TP: 2, SP: True, PP: 2},
        "TP2 SP PP2 VPP2": {TP: 2, SP: True, PP: 2, VPP: 2},
        "PP4": {PP: 4},
        "EP4": {EP: 4},
        "EP2 PP2": {EP: 2, PP: 2},
        "TP2 SP EP2 ETP2": {TP: 2, SP: True, EP: 2, ETP: 2},
    },
}
# What a family names as a rule; a few name more of the others.
DENSE = ("TP2", "TP2 SP", "PP2", "CP2")
RECOMPUTE = ("TP2 SP recompute", "PP2 recompute parts", "PP2 recompute MLPs")  # families with new layers take them too
MOE = ("TP2 SP ETP2", "PP2", "EP2", "TP2 SP EP2", "CP2")  # megatron-core trains experts under TP with SP only

Tensors = dict[str, Any]  # by name: torch tensors


@dataclass(frozen=True)
class Tiny:
    """One tiny model, and what is special about it. The patterns are regular expressions, searched in names."""

    config: Callable[..., Any]  # makes transformers' config (of the text model)
    layouts: tuple[str, ...] = DENSE  # or MOE, or less: say in a comment why
    # Every tensor of transformers' state dict (persistent buffers too) is normal noise around a mean. The first pattern
    # that is found decides, and these come before the defaults: mean 0, for norms' weights 1, and std 0.2.
    means: Mapping[str, float] = field(default_factory=dict)  # e.g. {"norm": 0.0} for zero-centred norms
    stds: Mapping[str, float] = field(default_factory=dict)  # no smaller than 0.2, but for a reason
    files: Callable[[Tensors], Tensors] | None = None  # names of save_pretrained -> of the hub; linear: gradients too
    # Changes to config.json as saved (None takes a key out), or a function that makes another one of it.
    raw: Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] = field(default_factory=dict)
    fp32: tuple[str, ...] = ()  # patterns of names that checkpoints hold in fp32 beside bf16 weights
    # What the files have and transformers' model does not (MTP): called with the config, and a function
    # noise(*shape, mean=0.0) -> Tensor. It must come back byte for byte; its mathematics need tests of their own.
    extra: Callable[..., Tensors] | None = None
    # Beyond what faults.py finds by itself; None takes one of those out, with a comment that says why.
    faults: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[Any], Any] | None = None  # config -> transformers' model, where AutoModelForCausalLM is not it


_TOOLS = ("faults", "reference", "worker", "test_")


def tinies() -> dict[str, Tiny]:
    """Every variant of every family: {"qwen3": ..., "llama biases": ...}."""
    found = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith(_TOOLS)):
        given = getattr(importlib.import_module(f"{__name__}.{module}"), "TINY", {})
        variants = {"": given} if isinstance(given, Tiny) else given
        found |= {f"{module} {name}".strip(): tiny for name, tiny in variants.items()}
    return found
