"""GLM-4.5: half of each head turns, norms on query and key heads or (Air) none."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.deepseek_v2 import EXPERTS
from tests.bridge.families.deepseek_v3 import BIASES, predicting


def config(**changes):
    from transformers import Glm4MoeConfig

    own = {
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_mtp_layers": 1,
    }
    return Glm4MoeConfig(**SHARED | EXPERTS | own | changes)


TINY = {
    "": Tiny(config, layouts=MOE, fp32=BIASES, extra=predicting),
    "Air": Tiny(partial(config, use_qk_norm=False, n_group=4, topk_group=2), layouts=(), fp32=BIASES),
}
