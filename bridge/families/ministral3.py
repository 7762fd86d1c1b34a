"""Ministral 3: Mistral's layers with YaRN, and queries that grow with their position.

Checkpoints on the hub are Mistral3ForConditionalGeneration, beside the tower of pixtral.py.
"""

from functools import partial

from ..mapping.architecture import Architecture, HfConfig, QueryGrowth
from ..mapping.param_mapping import Family
from . import pixtral
from .decoder import DEFAULTS, fill_rope
from .mistral import ARCHITECTURES, LIMITS, VLM_NAMES, describe_mistral, mappings
from .vlm_text import nested_text_config

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
TEXT_DEFAULTS = DEFAULTS | {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}


def architecture(config: HfConfig) -> Architecture:
    config = fill_rope(config, ROPE)
    return describe_mistral(config, config.get("sliding_window"), query_growth=query_growth(config))


def query_growth(config: HfConfig) -> QueryGrowth:
    """Read how queries grow. Raises ValueError if the rope's settings do not say it."""
    settings = config.get("rope_scaling") or config["rope_parameters"]
    rate, step = (settings.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if rate is None or not step:
        raise ValueError(
            "config.json has rope_parameters without llama_4_scaling_beta or original_max_position_embeddings: these "
            "say how queries grow. Set both; llama_4_scaling_beta 0.0 is no growth"
        )
    return QueryGrowth(rate, step)


FAMILY = Family(
    name="ministral3",
    architectures=("Ministral3ForCausalLM", *ARCHITECTURES),
    models="Ministral 3 3B, 8B and 14B",
    architecture=architecture,
    mappings=mappings,
    text_config=nested_text_config,
    vision=partial(pixtral.vision, text_defaults=TEXT_DEFAULTS),
    vision_mappings=pixtral.vision_mappings,
    vlm_names=VLM_NAMES,
    limits=LIMITS,
    defaults=TEXT_DEFAULTS,
)
