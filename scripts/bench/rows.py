"""Rows of the benchmark table: a model, its parallel layout, and the flags of each system."""

from dataclasses import dataclass, field
from typing import Any

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151_936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SIZES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024, "dtype": "float32"},
}
TIED = {"tie_word_embeddings": True}
OVERLAP = "--overlap_grad_reduce true --overlap_param_gather true"


@dataclass(frozen=True)
class Row:
    """Model of a real shape with random weights, its layout, and its targets."""

    title: str
    config: dict[str, Any]
    micro_batch: int
    global_batch: int  # packs of a step; per GPU if `gpus` is None
    gpus: int | None = 1  # None: all visible GPUs
    steps: int = 12
    length: int = 4096  # tokens of a pack
    documents: int | None = None  # of the text; None: all
    layout: str = ""  # flags of every system
    peer: str = ""  # extra flags of the peer that its documentation recommends for speed
    min_speedup: dict[str, float] = field(default_factory=dict)  # system -> lowest speed relative to its baseline
    mfu: float | None = None  # lowest MFU
    first_step: float | None = None  # most seconds from the command to the end of step 1

    def batch_on(self, gpus: int) -> int:
        """Return the packs of a global batch."""
        return self.global_batch * (1 if self.gpus else gpus)


ROWS = {
    "0.6b": Row("Qwen3-0.6B", QWEN3 | SIZES["0.6b"] | TIED, 4, 16, min_speedup={"ours": 1.4}),
    "4b": Row(
        "Qwen3-4B", QWEN3 | SIZES["4b"] | TIED, 2, 16, steps=8, min_speedup={"ours": 1.2}, mfu=0.52, first_step=30
    ),
    "moe": Row(
        "Qwen3-30B-A3B, 8 layers",
        QWEN3_MOE | {"num_hidden_layers": 8},
        2,
        16,
        peer="--moe_permute_fusion true",
        min_speedup={"ours": 3.0},
    ),
    "moe-ep2": Row(
        "Qwen3-30B-A3B, 8 layers, EP2",
        QWEN3_MOE | {"num_hidden_layers": 8},
        2,
        32,
        gpus=2,
        layout=f"--expert_model_parallel_size 2 {OVERLAP}",
        peer="--moe_permute_fusion true",
        min_speedup={"ours": 3.0},
    ),
    "8b": Row(
        "Qwen3-8B",
        QWEN3 | SIZES["8b"],
        2,
        8,
        gpus=None,
        steps=8,
        layout=OVERLAP,
        min_speedup={"ours": 1.1, "fp8-tensorwise": 1.25},
        mfu=0.57,
    ),
    "8b-mb1": Row(
        "Qwen3-8B, micro batch of one pack",
        QWEN3 | SIZES["8b"],
        1,
        8,
        gpus=None,
        steps=8,
        layout=OVERLAP,
        min_speedup={"ours": 1.1},
    ),
    "30b": Row(
        "Qwen3-30B-A3B",
        QWEN3_MOE | {"num_hidden_layers": 48},
        1,
        32,
        gpus=8,
        steps=8,
        layout=f"--expert_model_parallel_size 8 {OVERLAP}",
        peer="--moe_permute_fusion true",
        min_speedup={"ours": 3.0},
    ),
    "tiny": Row("tiny, to try the script", QWEN3 | SIZES["tiny"], 1, 4, steps=4, length=512, documents=120),
}

# Variants of megaswift: extra flags. BASELINES: a variant is compared with ours, and ours with the peer.
VARIANTS = {
    "ours": "",
    "local": "--transformer_impl local",
    "fp8-tensorwise": "--fp8_format hybrid --fp8_recipe tensorwise",
    "fp8-blockwise": "--fp8_format e4m3 --fp8_recipe blockwise",
    "lora": "--tuner_type lora --merge_lora false",
}
MIN_SPEEDUPS = {"local": 0.95}  # lowest relative speed, on every row
BASELINES = {"ours": "peer"} | dict.fromkeys([name for name in VARIANTS if name != "ours"], "ours")
SYSTEMS = (*VARIANTS, "peer")
