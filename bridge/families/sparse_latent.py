"""DeepSeek's sparse attention: DeepSeek-V3's layers with a lightning indexer in each layer, or in some of them."""

from collections.abc import Callable
from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, SparseAttention
from ..mapping.param_mapping import REPLICATED, ParamMapping
from . import deepseek_v3
from .decoder import check_layer_types, check_supported, layer_mapping
from .deepseek_moe import count_dense_layers

Sources = Callable[[HfConfig], tuple[int, ...]]  # config -> SparseAttention.sources
SPARSE_LIMITS = (
    "the lightning indexer takes no adapters, and is frozen without `--dsa_indexer_loss_coeff`",
    "attention_bias",
    "q_lora_rank null",
)


def describe_sparse(config: HfConfig, *, sources: Sources, interleaved_indexer: bool) -> Architecture:
    """Return the architecture. interleaved_indexer: the indexer's rope is interleaved, as that of attention always is.

    Raises ValueError for unsupported settings.
    """
    layers = config["num_hidden_layers"]
    check_layer_types(config, config.get("layer_types") or ["deepseek_sparse_attention"] * layers, _LAYER_TYPES)
    check_supported(config, {"rope_interleave": (True,), "indexer_rope_interleave": (interleaved_indexer,)})
    if "q_lora_rank" in config and config["q_lora_rank"] is None:
        raise ValueError("config.json has q_lora_rank null: the indexer's queries need the latent queries")
    architecture = deepseek_v3.architecture(_count_dense_layers(config) | {"rope_interleave": True})
    sparse = SparseAttention(
        topk=config["index_topk"],
        heads=config["index_n_heads"],
        head_dim=config["index_head_dim"],
        interleaved=interleaved_indexer,
        sources=sources(config),
    )
    return replace(architecture, sparse=sparse)


_LAYER_TYPES = {"deepseek_sparse_attention", "indexed_attention"}  # the second in transformers 5.20


def _count_dense_layers(config: HfConfig) -> HfConfig:
    """Return `config` with the number of dense first layers, for which mlp_layer_types goes before the number."""
    return count_dense_layers(config | {"first_k_dense_replace": None}) if config.get("mlp_layer_types") else config


def sparse_mappings(config: HfConfig, *, sources: Sources) -> list[ParamMapping]:
    layers = tuple(sorted(set(sources(config))))
    hf, mcore = "self_attn.indexer.", "self_attention.indexer."
    tensors = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    return [
        *deepseek_v3.mappings(_count_dense_layers(config)),
        *(layer_mapping(hf + tensor, mcore + tensor, REPLICATED, layers) for tensor in tensors),
    ]
