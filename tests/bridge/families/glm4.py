"""GLM-4-0414: four norms in a layer, half of a head turns, in neighbouring dimensions; gate and up in one matrix."""

from tests.bridge.families import ROPE, SHARED, Tiny
from tests.bridge.families.faults import swapped


def config(**changes):
    from transformers import Glm4Config

    rope = ROPE | {"partial_rotary_factor": 0.5}
    return Glm4Config(**SHARED | {"rope_parameters": rope, "head_dim": 16, "attention_bias": True} | changes)


TINY = Tiny(config, faults={"norms behind the branches": swapped("post_self_attn_layernorm", "post_mlp_layernorm")})
