"""Tiny checkpoints of real architectures, made to be unforgiving.

Every tensor is random (norms are not 1, biases not 0), dimensions differ from one another, the vocabulary is odd, and
rope's original length is shorter than the documents.
"""

from pathlib import Path

import torch

VOCAB = 261
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")


def config(family: str, **changes):
    """transformers' config of a family's tiny model."""
    import transformers as tf

    if family == "qwen2":
        return tf.Qwen2Config(**_SHARED | {"rope_parameters": _ROPE, "tie_word_embeddings": True} | changes)
    if family == "qwen3":
        return tf.Qwen3Config(
            **_SHARED | {"rope_parameters": _ROPE, "head_dim": 16, "tie_word_embeddings": False} | changes
        )
    if family == "qwen3_moe":
        moe = {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
        }
        return tf.Qwen3MoeConfig(**_SHARED | {"rope_parameters": _ROPE} | moe | changes)
    if family == "llama":
        return tf.LlamaConfig(**_SHARED | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True} | changes)
    raise ValueError(family)


def model(family: str, seed: int = 0, **changes):
    """A transformers model in fp32 with every parameter random: matrices of std 0.2, norms about 1, biases too."""
    from transformers import AutoModelForCausalLM

    result = AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1.0 if "norm" in name else noise)
    return result


def save(folder: Path, family: str, seed: int = 0, **changes) -> Path:
    """Write a tiny checkpoint's folder and return it."""
    model(family, seed, **changes).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Give a tiny checkpoint a byte-level BPE of its vocabulary's size, with ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(["user assistant system"] * 10, trainer)
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    ).save_pretrained(folder)
