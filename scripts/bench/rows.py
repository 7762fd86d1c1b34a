"""Rows of the benchmark table: a model, its parallel layout, and the flags of each system."""

from configs import GPT_OSS_20B, QWEN3, QWEN3_30B, QWEN3_235B, QWEN3_MOE, SIZES, TIED, TOWERS, qwen3_vl
from grpo_rows import GRPO_ROWS
from hybrids import HYBRIDS
from row import BF16_MOMENTS, LORA, RECOMPUTE, Rlhf, Row

OVERLAP = "--overlap_grad_reduce true --overlap_param_gather true"

QWEN3_SMALL = QWEN3 | SIZES["0.6b"] | TIED
QWEN3_MEDIUM = QWEN3 | SIZES["1.7b"] | TIED
QWEN3_VL_4B = qwen3_vl(QWEN3 | SIZES["4b"] | TIED, TOWERS["4b"])
QWEN3_VL_MOE = qwen3_vl(QWEN3_MOE | {"num_hidden_layers": 8}, TOWERS["30b"])
DPO = Rlhf("dpo", 1000, 1024, "--beta 0.1 --packing false")
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
        layout="--optimizer_cpu_offload true --optimizer_offload_fraction 0.88",  # within 80 GiB
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
    # A checkpoint with optimizer of 81 GB, for disks that cannot hold the 305 GB of the whole model.
    "30b-12-pp4": Row(
        "Qwen3-30B-A3B, 12 layers, PP4",
        QWEN3_MOE | {"num_hidden_layers": 12},
        1,
        64,
        gpus=4,
        steps=7,
        layout="--pipeline_model_parallel_size 4 --decoder_first_pipeline_num_layers 4 "
        f"--decoder_last_pipeline_num_layers 2 {BF16_MOMENTS}",
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
    "4b-32k-cp2": Row(
        "Qwen3-4B, documents of 32,768, CP2",
        QWEN3 | SIZES["4b"] | TIED,
        1,
        2,
        gpus=2,
        steps=7,
        length=32_768,
        document_tokens=32_768,
        layout="--context_parallel_size 2",
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
    # Pairs of prompts of 1,000 tokens with two answers of 1,024: both sequences count, also where the prompt is shared.
    "8b-dpo": Row(
        "Qwen3-8B, DPO", QWEN3 | SIZES["8b"], 2, 8, gpus=None, steps=8, length=4096, layout=OVERLAP, rlhf=DPO
    ),
    "8b-dpo-mb1": Row(
        "Qwen3-8B, DPO, micro batch of one pair",
        QWEN3 | SIZES["8b"],
        1,
        8,
        gpus=None,
        steps=8,
        length=4096,
        layout=OVERLAP,
        rlhf=DPO,
    ),
    # Prompts of 256 tokens with answers of 768, all of whose distributions are compared with the teacher's.
    "1.7b-gkd": Row(
        "Qwen3-1.7B, GKD of answers, teacher Qwen3-4B",
        QWEN3_MEDIUM,
        1,
        64,
        steps=8,
        length=1040,
        rlhf=Rlhf("gkd", 256, 768, "--beta 0.5 --lmbda 0", "--packing true --packing_length 8448", teacher="4b"),
        peer="--micro_batch_size 4 --teacher_model_type qwen3",
    ),
    # For conversion.py, since no machine of four GPUs trains it: 22 GB.
    "235b-4": Row(
        "Qwen3-235B-A22B, 4 layers",
        QWEN3_235B | {"num_hidden_layers": 4},
        1,
        8,
        gpus=4,
        layout="--expert_model_parallel_size 4",
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
    "tiny-dpo": Row(
        "tiny, DPO",
        QWEN3 | SIZES["tiny"],
        1,
        4,
        steps=4,
        length=400,
        documents=120,
        rlhf=Rlhf("dpo", 100, 100, DPO.flags),
    ),
    "tiny-gkd": Row(
        "tiny, GKD of answers, teacher of the same shape",
        QWEN3 | SIZES["tiny"],
        1,
        4,
        steps=4,
        length=400,
        documents=120,
        rlhf=Rlhf("gkd", 100, 100, "--beta 0.5 --lmbda 0", "--packing true --packing_length 800", teacher="tiny"),
    ),
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
    **HYBRIDS,
    **GRPO_ROWS,
}

# Variants of megaswift: extra flags. BASELINES: systems to compare with, the first that has run: a variant with
# ours, ours and peer-flash with the peer.
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
BASELINES = {"ours": ("peer", "peer-flash"), "peer-flash": ("peer",)} | dict.fromkeys(
    [name for name in VARIANTS if name != "ours"], ("ours",)
)
SYSTEMS = (*VARIANTS, *PEERS)
