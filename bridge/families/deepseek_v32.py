"""DeepSeek-V3.2: V3's layers, in which a lightning indexer selects the keys that each query attends to."""

from functools import partial

from ..mapping.architecture import HfConfig
from ..mapping.param_mapping import Family
from .deepseek_moe import LIMITS, mtp_mappings
from .deepseek_v3 import FAMILY as DEEPSEEK_V3
from .sparse_latent import SPARSE_LIMITS, describe_sparse, sparse_mappings


def _own_indexers(config: HfConfig) -> tuple[int, ...]:
    return tuple(range(config["num_hidden_layers"]))


architecture = partial(describe_sparse, sources=_own_indexers, interleaved_indexer=False)
mappings = partial(sparse_mappings, sources=_own_indexers)
FAMILY = Family(
    name="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    models="DeepSeek-V3.2 and V3.2-Exp",
    architecture=architecture,
    mappings=mappings,
    mtp_mappings=partial(mtp_mappings, mappings),
    limits=(*SPARSE_LIMITS, *LIMITS),
    defaults={key: value for key, value in DEEPSEEK_V3.defaults.items() if key != "rope_interleave"}
    | {
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
)
