"""Command R: one LayerNorm without bias for attention and MLP, adjacent planes, scaled logits; or biases."""

from dataclasses import replace
from functools import partial

from tests.bridge.families import DENSE, RECOMPUTE, ROPE, SHARED_WITHOUT_EPS, Tiny
from tests.bridge.families.faults import Fault


def config(**changes):
    from transformers import CohereConfig

    return CohereConfig(
        **SHARED_WITHOUT_EPS | {"rope_parameters": ROPE, "layer_norm_eps": 1e-3, "logit_scale": 0.3} | changes
    )


def one_after_another() -> Fault:
    """The MLP reads the norm of attention's output too."""

    def plant(model):
        for layer in (module for chunk in model.chunks for module in chunk.decoder.layers):
            layer._forward_pre_mlp_layernorm = lambda hidden, norm=layer.input_layernorm: norm(hidden)

    return Fault(model=plant)


def uncentred() -> Fault:
    """RMSNorms in place of LayerNorms."""
    return Fault(
        architecture=lambda about: replace(about, transformer=about.transformer | {"normalization": "RMSNorm"})
    )


FAULTS = {"one after another": one_after_another(), "norms without means": uncentred()}
BIASES = {"attention_bias": True, "tie_word_embeddings": False}
TINY = {
    "": Tiny(config, (*DENSE, *RECOMPUTE), faults=FAULTS),
    "biases": Tiny(partial(config, **BIASES), layouts=(), faults=FAULTS),
}
