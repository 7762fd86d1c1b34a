"""GLM-4.5V: the text model of a vision-language checkpoint, with a layer that predicts one token more."""

from tests.bridge.families import MOE, ROPE, SHARED, Tensors, Tiny
from tests.bridge.families.deepseek_v2 import EXPERTS
from tests.bridge.families.deepseek_v3 import BIASES
from tests.bridge.families.glm4v_text import VISION, tower
from tests.bridge.families.qwen2_5_vl_text import without_tower


def config(**changes):
    from transformers import Glm4vMoeConfig

    rope = ROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
    text = SHARED | EXPERTS | {"rope_parameters": rope, "head_dim": 16} | changes
    return Glm4vMoeConfig(text_config=text, vision_config=VISION)


def _model(config):
    from transformers import Glm4vMoeForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Glm4vMoeForConditionalGeneration(config)


def carried(config, noise) -> Tensors:
    """Some of the vision tower, and of the layer behind the model's."""
    return tower(config, noise) | {"model.language_model.layers.4.enorm.weight": noise(48)}


TINY = Tiny(config, MOE, files=without_tower, fp32=BIASES, extra=carried, model=_model)
