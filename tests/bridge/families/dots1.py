"""dots.llm1: norms on query and key heads, the last layer attends to a window."""

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.deepseek_v2 import EXPERTS
from tests.bridge.families.deepseek_v3 import BIASES


def config(**changes):
    from transformers import Dots1Config

    own = {
        "rope_parameters": ROPE,
        "head_dim": 12,
        "norm_topk_prob": True,
        "attention_bias": True,
        "sliding_window": 9,
        "max_window_layers": 3,
    }
    return Dots1Config(**SHARED | EXPERTS | own | changes)


TINY = Tiny(config, layouts=MOE, fp32=BIASES)
