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
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36},
    "32b": {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024, "dtype": "float32"},
}
TIED = {"tie_word_embeddings": True}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.9,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    | {"truncate": False, "original_max_position_embeddings": 4096},
    "max_position_embeddings": 131_072,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "initializer_range": 0.02,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOWERS = {
    "4b": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    "30b": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
    "tiny": {"depth": 3, "hidden_size": 48, "intermediate_size": 80, "deepstack_visual_indexes": [0, 1]}
    | {"num_heads": 4, "num_position_embeddings": 64},
}


# Special tokens of Qwen3-VL in the order of their ids, which end 279 rows before the end of the embedding.
VISION_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
VISION_SPECIAL += ["<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"]
VISION_SPECIAL += ["<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
UNUSED = 279


def special_ids(config: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the special tokens: the published ones in a Qwen3-VL, since ms-swift has them in its code."""
    if "vision_config" not in config:
        return {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    first = config["text_config"]["vocab_size"] - UNUSED - len(VISION_SPECIAL)
    return {token: first + number for number, token in enumerate(VISION_SPECIAL)}


def qwen3_vl(text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a Qwen3-VL with the decoder of a Qwen3 or Qwen3-MoE."""
    is_moe = text["model_type"] == "qwen3_moe"
    kind = "qwen3_vl_moe" if is_moe else "qwen3_vl"
    minor = text["head_dim"] * 5 // 32  # planes of the rope that are turned by height, and by width
    sections = [text["head_dim"] // 2 - 2 * minor, minor, minor]
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": sections}
    config = {
        "model_type": kind,
        "architectures": ["Qwen3VLMoeForConditionalGeneration" if is_moe else "Qwen3VLForConditionalGeneration"],
        "dtype": text["dtype"],
        "transformers_version": "4.57.0",  # without one, transformers warns of a wrong tokenizer
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | {"model_type": f"{kind}_text", "rope_scaling": rope, "rope_theta": 5e6},
        "vision_config": VISION | tower | {"model_type": kind, "out_hidden_size": text["hidden_size"]},
    }
    del config["text_config"]["architectures"]
    ids = special_ids(config)
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return config | {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in names.items()}


OVERLAP = "--overlap_grad_reduce true --overlap_param_gather true"
RECOMPUTE = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
BF16_MOMENTS = "--use_precision_aware_optimizer true --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16"
LORA = "--tuner_type lora --merge_lora false"


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
    document_tokens: int | None = None  # tokens of a document, about: chats are joined; None: single chats
    pictures: tuple[int, int] | None = None  # least and most visual tokens of a picture; None: text alone
    layout: str = ""  # flags of every system
    peer: str = ""  # extra flags of the peer that its documentation recommends for speed
    min_speedup: dict[str, float] = field(default_factory=dict)  # system -> lowest speed relative to its baseline
    mfu: float | None = None  # lowest MFU
    first_step: float | None = None  # most seconds from the command to the end of step 1

    def batch_on(self, gpus: int) -> int:
        """Return the packs of a global batch."""
        return self.global_batch * (1 if self.gpus else gpus)


QWEN3_SMALL = QWEN3 | SIZES["0.6b"] | TIED
QWEN3_30B = QWEN3_MOE | {"num_hidden_layers": 48}
QWEN3_MEDIUM = QWEN3 | SIZES["1.7b"] | TIED
QWEN3_VL_4B = qwen3_vl(QWEN3 | SIZES["4b"] | TIED, TOWERS["4b"])
QWEN3_VL_MOE = qwen3_vl(QWEN3_MOE | {"num_hidden_layers": 8}, TOWERS["30b"])
FROZEN = "--freeze_vit true --freeze_aligner true"
TRAINED = "--freeze_vit false --freeze_aligner false"
PICTURES = (256, 1024)

ROWS = {
    "0.6b": Row("Qwen3-0.6B", QWEN3_SMALL, 4, 16, min_speedup={"ours": 1.4}),
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
    "8b-offload": Row(
        "Qwen3-8B, optimizer on the host",
        QWEN3 | SIZES["8b"],
        1,
        16,
        steps=6,
        layout="--optimizer_cpu_offload true",
        # megatron-core's optimizer on the host has no other form.
        peer="--optimizer_offload_fraction 1 --use_precision_aware_optimizer true",
        min_speedup={"ours": 2.0},
    ),
    "30b": Row(
        "Qwen3-30B-A3B",
        QWEN3_30B,
        1,
        32,
        gpus=8,
        steps=8,
        layout=f"--expert_model_parallel_size 8 {OVERLAP}",
        peer="--moe_permute_fusion true",
        min_speedup={"ours": 3.0},
    ),
    # Rows of one node.
    "30b-pp4": Row(
        "Qwen3-30B-A3B, PP4",
        QWEN3_30B,
        1,
        64,
        gpus=4,
        steps=7,
        layout="--pipeline_model_parallel_size 4 --decoder_first_pipeline_num_layers 12 "
        f"--decoder_last_pipeline_num_layers 10 {BF16_MOMENTS}",
        peer="--moe_permute_fusion true",
        min_speedup={"ours": 3.0},
    ),
    "30b-ep4": Row(
        "Qwen3-30B-A3B, EP4",
        QWEN3_30B,
        1,
        32,
        gpus=4,
        steps=7,
        layout=f"--expert_model_parallel_size 4 {OVERLAP} {BF16_MOMENTS}",
        peer="--moe_permute_fusion true",
        min_speedup={"ours": 3.0},
    ),
    "30b-lora": Row(
        "Qwen3-30B-A3B, LoRA",
        QWEN3_30B,
        2,
        8,
        gpus=None,
        steps=7,
        layout=LORA,
        peer="--target_modules all-linear --moe_permute_fusion true",
        min_speedup={"ours": 3.0},
    ),
    "30b-32k-lora": Row(
        "Qwen3-30B-A3B, LoRA, documents of 32,768, CP4",
        QWEN3_30B,
        1,
        8,
        gpus=4,
        steps=6,
        length=32_768,
        document_tokens=32_768,
        layout=f"{LORA} --context_parallel_size 4",
        peer="--target_modules all-linear --moe_permute_fusion true",
    ),
    "30b-128k-lora": Row(
        "Qwen3-30B-A3B, LoRA, documents of 131,072, CP4, recomputed",
        QWEN3_30B,
        1,
        2,
        gpus=4,
        steps=6,
        length=131_072,
        document_tokens=131_072,
        layout=f"{LORA} --context_parallel_size 4 {RECOMPUTE}",
        peer="--target_modules all-linear --moe_permute_fusion true",
    ),
    "32b-tp4": Row(
        "Qwen3-32B, TP4",
        QWEN3 | SIZES["32b"],
        1,
        16,
        gpus=4,
        steps=6,
        layout=f"--tensor_model_parallel_size 4 --sequence_parallel true {BF16_MOMENTS}",
        min_speedup={"ours": 1.1},
    ),
    "32b-pp4": Row(
        "Qwen3-32B, PP4, 12 of 16 layers recomputed",
        QWEN3 | SIZES["32b"],
        1,
        32,
        gpus=4,
        steps=6,
        layout=f"--pipeline_model_parallel_size 4 {BF16_MOMENTS} "
        "--recompute_granularity full --recompute_method block --recompute_num_layers 12",
        min_speedup={"ours": 1.1},
    ),
    "4b-32k": Row(
        "Qwen3-4B, documents of 32,768, MLPs recomputed",
        QWEN3 | SIZES["4b"] | TIED,
        1,
        2,
        steps=7,
        length=32_768,
        document_tokens=32_768,
        layout="--recompute_modules mlp",
        mfu=0.48,
    ),
    "4b-128k": Row(
        "Qwen3-4B, documents of 131,072, recomputed",
        QWEN3 | SIZES["4b"] | TIED,
        1,
        1,
        steps=4,
        length=131_072,
        document_tokens=131_072,
        layout=RECOMPUTE,
        mfu=0.45,
    ),
    "4b-128k-cp2": Row(
        "Qwen3-4B, documents of 131,072, recomputed, CP2",
        QWEN3 | SIZES["4b"] | TIED,
        1,
        1,
        gpus=2,
        steps=4,
        length=131_072,
        document_tokens=131_072,
        layout=f"{RECOMPUTE} --context_parallel_size 2",
        mfu=0.45,
    ),
    "gpt-oss-20b": Row(
        "gpt-oss-20b, PP4",
        GPT_OSS_20B,
        1,
        64,
        gpus=4,
        steps=7,
        layout="--pipeline_model_parallel_size 4 --decoder_last_pipeline_num_layers 3",
    ),
    "gpt-oss-20b-lora": Row("gpt-oss-20b, LoRA", GPT_OSS_20B, 2, 8, gpus=None, steps=8, layout=LORA),
    "vl-4b": Row(
        "Qwen3-VL-4B, frozen tower",
        QWEN3_VL_4B,
        2,
        16,
        steps=8,
        documents=900,
        pictures=PICTURES,
        layout=FROZEN,
        min_speedup={"ours": 1.4},
        mfu=0.5,
    ),
    "vl-4b-trained": Row(
        "Qwen3-VL-4B, trained tower",
        QWEN3_VL_4B,
        2,
        16,
        steps=8,
        documents=900,
        pictures=PICTURES,
        layout=TRAINED,
        peer="--vit_gradient_checkpointing false",
        min_speedup={"ours": 1.8},
    ),
    "vl-4b-trained-mb1": Row(
        "Qwen3-VL-4B, trained tower, micro batch of one pack",
        QWEN3_VL_4B,
        1,
        16,
        steps=8,
        documents=900,
        pictures=PICTURES,
        layout=TRAINED,
        peer="--vit_gradient_checkpointing false",
        min_speedup={"ours": 1.8},
    ),
    "vl-4b-tp2": Row(
        "Qwen3-VL-4B, trained tower, TP2",
        QWEN3_VL_4B,
        1,
        16,
        gpus=2,
        steps=8,
        documents=900,
        pictures=PICTURES,
        layout=f"{TRAINED} --tensor_model_parallel_size 2 --sequence_parallel true",
    ),
    "vl-4b-pp2": Row(
        "Qwen3-VL-4B, trained tower, PP2, VPP2",
        QWEN3_VL_4B,
        1,
        32,
        gpus=2,
        steps=8,
        documents=900,
        pictures=PICTURES,
        layout=f"{TRAINED} --pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2",
    ),
    "vl-moe": Row(
        "Qwen3-VL-30B-A3B, 8 layers, frozen tower",
        QWEN3_VL_MOE,
        2,
        16,
        documents=900,
        pictures=PICTURES,
        layout=FROZEN,
        peer="--moe_permute_fusion true",
        min_speedup={"ours": 4.0},
    ),
    "vl-moe-trained": Row(
        "Qwen3-VL-30B-A3B, 8 layers, trained tower",
        QWEN3_VL_MOE,
        1,
        16,
        documents=900,
        pictures=PICTURES,
        layout=TRAINED,
        peer="--moe_permute_fusion true --vit_gradient_checkpointing false",
        min_speedup={"ours": 3.0},
    ),
    # Rows that vary what `megatron plan` estimates. An H100 holds them, some with LoRA only.
    "0.6b-mb8": Row("Qwen3-0.6B, micro batch of eight packs", QWEN3_SMALL, 8, 32),
    "0.6b-32k": Row("Qwen3-0.6B, packs of 32,768", QWEN3_SMALL, 1, 4, length=32_768),
    "1.7b": Row("Qwen3-1.7B", QWEN3_MEDIUM, 2, 16),
    "1.7b-32k-recompute": Row(
        "Qwen3-1.7B, packs of 32,768, recomputed", QWEN3_MEDIUM, 1, 2, length=32_768, layout=RECOMPUTE
    ),
    "1.7b-offload": Row(
        "Qwen3-1.7B, optimizer on the host", QWEN3_MEDIUM, 4, 16, layout="--optimizer_cpu_offload true"
    ),
    "1.7b-32k-cp2": Row(
        "Qwen3-1.7B, packs of 32,768, CP2",
        QWEN3_MEDIUM,
        1,
        4,
        gpus=2,
        length=32_768,
        layout="--context_parallel_size 2",
    ),
    "4b-8k": Row("Qwen3-4B, packs of 8,192", QWEN3 | SIZES["4b"] | TIED, 1, 8, length=8192),
    "4b-tp2": Row(
        "Qwen3-4B, TP2",
        QWEN3 | SIZES["4b"] | TIED,
        2,
        16,
        gpus=2,
        layout="--tensor_model_parallel_size 2 --sequence_parallel true",
    ),
    "4b-pp2": Row(
        "Qwen3-4B, PP2", QWEN3 | SIZES["4b"] | TIED, 1, 16, gpus=2, layout="--pipeline_model_parallel_size 2"
    ),
    "8b-32k-recompute": Row(
        "Qwen3-8B, packs of 32,768, recomputed",
        QWEN3 | SIZES["8b"],
        1,
        1,
        steps=7,
        length=32_768,
        layout=RECOMPUTE,
    ),
    "moe-8k": Row("Qwen3-30B-A3B, 8 layers, packs of 8,192", QWEN3_MOE | {"num_hidden_layers": 8}, 1, 8, length=8192),
    "moe4-8k-recompute": Row(
        "Qwen3-30B-A3B, 4 layers, packs of 8,192, recomputed",
        QWEN3_MOE | {"num_hidden_layers": 4},
        1,
        8,
        length=8192,
        layout=RECOMPUTE,
    ),
    "tiny": Row("tiny, to try the script", QWEN3 | SIZES["tiny"], 1, 4, steps=4, length=512, documents=120),
    "vl-tiny": Row(
        "tiny, with pictures",
        qwen3_vl(QWEN3 | SIZES["tiny"], TOWERS["tiny"]),
        1,
        4,
        steps=4,
        length=512,
        documents=120,
        pictures=(80, 160),
        layout=TRAINED,
    ),
}

# Variants of megaswift: extra flags. BASELINES: a variant is compared with ours, ours and peer-flash with the peer.
VARIANTS = {
    "ours": "",
    "local": "--transformer_impl local",
    "fp8-tensorwise": "--fp8_format hybrid --fp8_recipe tensorwise",
    "fp8-blockwise": "--fp8_format e4m3 --fp8_recipe blockwise",
    "lora": LORA,
    # Random experts for each token, as in published figures.
    "forced": '--megatron_extra_kwargs {"moe_router_force_load_balancing":true}',
}
MIN_SPEEDUPS = {"local": 0.95}  # lowest relative speed, on every row
# ms-swift, by its attention. Its vision tower uses FlashAttention only with `flash`, and else loops over the pictures
# in each layer.
PEERS = {"peer": "--attention_backend fused", "peer-flash": "--attention_backend flash"}
BASELINES = {"ours": "peer", "peer-flash": "peer"} | dict.fromkeys(
    [name for name in VARIANTS if name != "ours"], "ours"
)
SYSTEMS = (*VARIANTS, *PEERS)
