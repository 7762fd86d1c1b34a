"""Rows of GRPO: prompts of equal lengths, and answers that end by their length.

Rewards do not depend on the text, and one in 150,000 tokens of random weights ends an answer. vLLM is in the processes,
or servers are on the last GPUs. A row of PPO has a critic beside.
"""

# pyright: reportMissingImports=false

from dataclasses import replace

from configs import QWEN3, QWEN3_30B, SIZES, TIED
from row import BF16_MOMENTS, LORA, RECOMPUTE, RECOMPUTE_HALF, Rlhf, Row

PACKS = "--packing true --packing_length 4096"
REWARD = "--reward_funcs coin --beta 0"
ANSWERS = "--num_generations 8 --max_completion_length 512 --temperature 1"
GRPO = Rlhf("grpo", 256, 512, f"{REWARD} {ANSWERS} --vllm_max_model_len 1536", PACKS)
GRPO_SHORT = Rlhf("grpo", 32, 512, f"--reward_funcs coin --beta 0.04 {ANSWERS} --vllm_max_model_len 1536", PACKS)
COLOCATED = "--use_vllm true --vllm_mode colocate"
# Memory for vLLM and for training at once, on GPUs of 140 GB: nothing has to move between them.
PEER_COLOCATED = "--micro_batch_size 4 --vllm_gpu_memory_utilization 0.35 --sleep_level 0"

GRPO_ROWS = {
    # 8 prompts with 8 answers each, and the log-probabilities of a reference.
    "4b-grpo": Row(
        "Qwen3-4B, GRPO, vLLM in the processes",
        QWEN3 | SIZES["4b"] | TIED,
        1,
        64,
        gpus=2,
        steps=6,
        warmup=2,
        length=544,
        layout=COLOCATED,
        rlhf=GRPO_SHORT,
        peer=PEER_COLOCATED,
        min_speedup={"ours": 1.5},
    ),
    "4b-grpo-1": Row(
        "Qwen3-4B, GRPO, vLLM in the process",
        QWEN3 | SIZES["4b"] | TIED,
        1,
        64,
        steps=6,
        warmup=2,
        length=544,
        layout=COLOCATED,
        rlhf=GRPO_SHORT,
        peer=PEER_COLOCATED,
    ),
    "4b-grpo-server": Row(
        "Qwen3-4B, GRPO, a server on one GPU, generating ahead",
        QWEN3 | SIZES["4b"] | TIED,
        1,
        64,
        gpus=2,
        steps=6,
        warmup=2,
        length=544,
        layout="--use_vllm true --async_generate true",
        rlhf=replace(GRPO_SHORT, servers=1),
    ),
    # As many completions, one of a prompt; log-probabilities of a reference, and a critic that is trained in full.
    "1.7b-ppo-server": Row(
        "Qwen3-1.7B, PPO, a server on one GPU",
        QWEN3 | SIZES["1.7b"] | TIED,
        1,
        64,
        gpus=2,
        steps=6,
        warmup=2,
        length=544,
        layout="--use_vllm true",
        rlhf=Rlhf(
            "ppo",
            32,
            512,
            "--reward_funcs coin --beta 0.05 --max_completion_length 512 --temperature 1 --vllm_max_model_len 1536",
            PACKS,
            servers=1,
        ),
    ),
    # 64 prompts of 256 tokens with 8 answers of 512 each. All weights, with the optimizer's state on the GPUs, or
    # adapters, sent merged.
    "30b-grpo": Row(
        "Qwen3-30B-A3B, GRPO, PP4, vLLM TP2 in the processes",
        QWEN3_30B,
        1,
        512,
        gpus=4,
        steps=4,
        warmup=2,
        length=768,
        layout="--pipeline_model_parallel_size 4 --decoder_first_pipeline_num_layers 12 "
        f"--decoder_last_pipeline_num_layers 10 {BF16_MOMENTS} {RECOMPUTE_HALF} "
        f"{COLOCATED} --vllm_tensor_parallel_size 2",
        rlhf=GRPO,
    ),
    "30b-grpo-server": Row(
        "Qwen3-30B-A3B, GRPO, PP3, a server on one GPU",
        QWEN3_30B,
        1,
        512,
        gpus=4,
        steps=4,
        warmup=2,
        length=768,
        layout=f"--pipeline_model_parallel_size 3 {BF16_MOMENTS} --main_params_dtype fp16 {RECOMPUTE} --use_vllm true",
        rlhf=replace(GRPO, servers=1),
    ),
    "30b-grpo-lora": Row(
        "Qwen3-30B-A3B, GRPO, LoRA, EP4, vLLM TP2 in the processes",
        QWEN3_30B,
        1,
        512,
        gpus=4,
        steps=4,
        warmup=2,
        length=768,
        layout=f"{LORA} --expert_model_parallel_size 4 {COLOCATED} --vllm_tensor_parallel_size 2",
        rlhf=GRPO,
    ),
    "30b-grpo-server-lora": Row(
        "Qwen3-30B-A3B, GRPO, LoRA, EP2, a server on two GPUs",
        QWEN3_30B,
        1,
        512,
        gpus=4,
        steps=4,
        warmup=2,
        length=768,
        layout=f"{LORA} --expert_model_parallel_size 2 --use_vllm true --vllm_tensor_parallel_size 2",
        rlhf=replace(GRPO, servers=2),
    ),
    "tiny-grpo": Row(
        "tiny, GRPO",
        QWEN3 | SIZES["tiny"] | {"head_dim": 32},  # the least of vLLM on a CPU
        1,
        16,
        steps=3,
        warmup=1,
        length=48,
        documents=120,
        rlhf=Rlhf(
            "grpo",
            32,
            16,
            f"{REWARD} --num_generations 4 --max_completion_length 16",
            "--packing true --packing_length 256",
        ),
    ),
}
