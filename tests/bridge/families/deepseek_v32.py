"""DeepSeek-V3.2: an indexer in each layer selects 24 keys of documents with up to 70 tokens, or of one with 64."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny, faults
from tests.bridge.families.deepseek_v2 import EXPERTS, LATENT, YARN
from tests.bridge.families.deepseek_v3 import BIASES, predicting

INDEXER = {"index_topk": 24, "index_n_heads": 6, "index_head_dim": 12}


def config(**changes):
    from transformers import DeepseekV32Config

    settings = {"rope_parameters": YARN, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1}
    return DeepseekV32Config(**SHARED | LATENT | EXPERTS | INDEXER | settings | changes)


FAULTS = {
    "an indexer's heads swapped": faults.rolled(r"indexer\.weights_proj"),
    "an indexer's key norm without bias": faults.zeroed(r"indexer\.k_norm\.bias"),
    "an indexer's rope interleaved": faults.changed_sparse(interleaved=True),
    "one key more": faults.changed_sparse(topk=INDEXER["index_topk"] + 1),
}
# Only the longest document has more keys than are selected; all layers have experts, in one group.
LONG = {"rope_parameters": ROPE, "index_topk": 64, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
TINY = {
    "": Tiny(config, layouts=(*MOE, "TP2 SP PP2", "TP2 SP recompute"), fp32=BIASES, extra=predicting, faults=FAULTS),
    "long": Tiny(partial(config, **LONG), layouts=("CP2",), fp32=BIASES, extra=predicting),
}
