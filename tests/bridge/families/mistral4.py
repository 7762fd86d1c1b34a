"""Mistral Small 4: latent attention with growing queries, stacked experts; alone, or within a model that sees."""

from functools import partial

from tests.bridge.families import MOE, SHARED, Tiny
from tests.bridge.families.deepseek_v2 import EXPERTS, LATENT, YARN
from tests.bridge.families.faults import changed
from tests.bridge.families.gemma3_text import whole
from tests.bridge.families.mistral import nested, unseen


def config(**changes):
    from transformers import Mistral4Config

    groups = {"n_group": 4, "topk_group": 2}
    rope = {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.6}}
    return Mistral4Config(**SHARED | LATENT | EXPERTS | groups | rope | changes)


def model(config):
    from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

    return Mistral4ForCausalLM._from_config(config, dtype=config.dtype, attn_implementation="eager")


FAULTS = {"growth of queries": changed(query_growth=None)}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False, "q_lora_rank": None}
TINY = {
    "": Tiny(config, layouts=MOE, faults=FAULTS, model=model),
    "within": Tiny(
        partial(config, **ONE_GROUP),
        layouts=("TP2 SP EP2",),
        files=whole,
        raw=nested,
        extra=unseen,
        faults=FAULTS,
        model=model,
    ),
}
