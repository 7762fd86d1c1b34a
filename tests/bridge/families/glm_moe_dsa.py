"""GLM-5: an indexer in each layer, or layers that take the keys that the layer before them selects."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny, faults
from tests.bridge.families.deepseek_v2 import EXPERTS, LATENT
from tests.bridge.families.deepseek_v3 import BIASES, predicting
from tests.bridge.families.deepseek_v32 import INDEXER


def config(**changes):
    from transformers import GlmMoeDsaConfig

    settings = {"rope_parameters": ROPE, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
    return GlmMoeDsaConfig(**SHARED | LATENT | EXPERTS | INDEXER | settings | changes)


SHARING = {"indexer_types": ["full", "shared", "full", "shared"], "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}
OWN = {"another layer's keys": faults.changed_sparse(sources=(0, 0, 2, 0))}
TINY = {
    "": Tiny(config, layouts=MOE, fp32=BIASES, extra=predicting),
    "sharing": Tiny(
        partial(config, **SHARING),
        layouts=("PP2", "CP2", "TP2 SP recompute"),
        fp32=BIASES,
        extra=predicting,
        faults=OWN,
    ),
}
