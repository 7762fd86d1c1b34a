"""GLM-5: DeepSeek-V3.2's layers, some of which may attend to the keys that an earlier layer has selected."""

from functools import partial

from ..mapping.architecture import HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .deepseek_moe import LIMITS, mtp_mappings
from .deepseek_v32 import FAMILY as DEEPSEEK_V32
from .sparse_latent import SPARSE_LIMITS, describe_sparse, sparse_mappings

LETTERS = {"F": "full", "S": "shared"}


def _indexer_types(config: HfConfig) -> list[str]:
    """Return whether each layer selects its keys ("full"), or has those of the last one that does ("shared")."""
    if types := config.get("indexer_types"):
        return types
    if pattern := config.get("index_topk_pattern"):
        return [str(LETTERS.get(letter, letter)) for letter in pattern]
    frequency, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    layers = range(config["num_hidden_layers"])
    return ["shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in layers]


def _sources(config: HfConfig) -> tuple[int, ...]:
    types, layers = _indexer_types(config), config["num_hidden_layers"]
    if len(types) != layers or set(types) - {"full", "shared"} or types[0] != "full":
        raise ValueError(
            f"config.json has indexer_types {types}: set full or shared for each of the {layers} layers, full first"
        )
    sources: list[int] = []
    for layer, kind in enumerate(types):
        sources.append(layer if kind == "full" else sources[-1])
    return tuple(sources)


def _mtp_mappings(config: HfConfig, depths: int) -> list[ParamMapping]:
    if _indexer_types(config)[-1] == "shared":
        raise ValueError(
            f"--mtp_num_layers {depths}: this model's last layer has no indexer, and whether its layers of "
            "multi-token prediction have one is not known. Remove it"
        )
    return mtp_mappings(mappings, config, depths)


architecture = partial(describe_sparse, sources=_sources, interleaved_indexer=True)
mappings = partial(sparse_mappings, sources=_sources)
FAMILY = Family(
    name="glm_moe_dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    models="GLM-5",
    architecture=architecture,
    mappings=mappings,
    mtp_mappings=_mtp_mappings,
    limits=(*SPARSE_LIMITS, *LIMITS),
    defaults=DEEPSEEK_V32.defaults
    | {
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
)
