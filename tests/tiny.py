"""Tiny checkpoints of real architectures, made to be unforgiving.

Every tensor is random (norms are not 1, biases not 0), dimensions differ from one another, the vocabulary is odd, and
rope's original length is shorter than the documents.
"""

import importlib
from pathlib import Path

import torch

from tests.bridge.families import VOCAB

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")


def config(family: str, **changes):
    """transformers' config of a family's tiny model."""
    return importlib.import_module(f"tests.bridge.families.{family}").config(**changes)


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


def save_random_adapter(network: torch.nn.Module, folder: Path, seed: int = 1, **settings) -> Path:
    """Add noise to the tensors of a PEFT adapter of a model, save it, and return its folder.

    settings: of LoraConfig
    """
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(network, LoraConfig(r=4, **settings))  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder
