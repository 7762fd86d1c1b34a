"""GLM-4.7-Flash: latent attention, a dense layer first, and experts in one group; or plain queries and more groups."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.deepseek_v2 import EXPERTS, LATENT
from tests.bridge.families.deepseek_v3 import BIASES, predicting


def config(**changes):
    from transformers import Glm4MoeLiteConfig

    settings = {"rope_parameters": ROPE, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
    moe = {key: value for key, value in EXPERTS.items() if key != "first_k_dense_replace"}
    return Glm4MoeLiteConfig(**SHARED | LATENT | moe | settings | changes)


ODD = {
    "mlp_layer_types": ["dense", "dense", "dense", "sparse"],
    "n_group": 4,
    "topk_group": 2,
    "rope_interleave": False,
}
TINY = {
    "": Tiny(config, layouts=MOE, fp32=BIASES, extra=predicting),
    "odd layers": Tiny(partial(config, **ODD), layouts=("PP2",), fp32=BIASES, extra=predicting),
}
