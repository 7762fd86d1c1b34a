"""Hunyuan with experts: a shared and routed experts of one width, as lists by layer and with a router in fp32."""

from tests.bridge.families import MOE, SHARED, Tiny
from tests.bridge.families.hunyuan_v1_dense import FAULTS, GROWN, MEANS


def config(**changes):
    from transformers import HunYuanMoEV1Config

    moe = {"head_dim": 16, "intermediate_size": 40, "num_experts": 8, "moe_topk": 3, "tie_word_embeddings": False}
    return HunYuanMoEV1Config(**SHARED | {"rope_parameters": GROWN} | moe | changes)


LISTS = {"moe_topk": [3] * 4, "num_shared_expert": [1] * 4, "moe_intermediate_size": [40] * 4}
TINY = Tiny(config, MOE, means=MEANS, fp32=(r"mlp\.gate\.wg",), raw=LISTS, faults=FAULTS)
