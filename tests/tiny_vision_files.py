"""Files of tiny vision-language checkpoints: text models of one size, and random parameters."""

from pathlib import Path

import torch

from tests.tiny_vision_text import SPECIAL, VOCABULARY

LEARNED_BUFFERS = "layer_scalar", "std_bias", "std_scale", "_min", "_max"  # Gemma 4's, in its checkpoints
# Settings of a decoder of DeepSeek-V3's shape, beside `_text`.
LATENT_EXPERTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 18, "q_lora_rank": None, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
}  # fmt: skip


def _text(rope: dict) -> dict:
    return {
        "vocab_size": VOCABULARY + 2,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": 0,
        "rope_parameters": rope,
    }


def _save(folder: Path, kind, config, processor, seed: int) -> Path:
    """Write a model in fp32 with every parameter random: matrices of std 0.2, norms about 1, biases too."""
    model = kind._from_config(config, dtype=torch.float32) if hasattr(kind, "_from_config") else kind(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith(LEARNED_BUFFERS)]
        for name, parameter in [*model.named_parameters(), *buffers]:
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + mean_of(model, name))
    model.save_pretrained(folder)
    if config.model_type != "llama4":  # its class has the experts as the hub
        _transpose_experts(Path(folder) / "model.safetensors")
    processor.save_pretrained(folder)
    return Path(folder)


def mean_of(model, name: str) -> float:
    """Return the mean of a parameter: norms scale by about 1, and delta nets forget slowly."""
    if model.config.model_type.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.4  # nothing else scales its scores
    if name.endswith("A_log"):
        return -1.0
    if name.endswith(("layer_scalar", "std_scale")):
        return 1.0
    if name.endswith(("_min", "_max")):  # of a linear layer that clips
        return -0.8 if name.endswith("_min") else 0.8
    is_norm = ("norm" in name or "ln_q" in name) and name.endswith("weight")
    adds_one = model.config.model_type.startswith("qwen3_5") and "visual" not in name and "linear_attn" not in name
    return 1.0 if is_norm and not adds_one else 0.0


def _transpose_experts(file: Path) -> None:
    """Store stacked experts as on the hub, which transformers does only for models that it has loaded."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file(
        {
            name: t.transpose(1, 2).contiguous() if ".experts." in name and t.dim() == 3 else t
            for name, t in tensors.items()
        },
        file,
        metadata={"format": "pt"},
    )
