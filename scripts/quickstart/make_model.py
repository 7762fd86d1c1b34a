"""Generator of a tiny Qwen3 checkpoint with random weights, a tokenizer and a chat template.

    python scripts/quickstart/make_model.py FOLDER

It takes a second. The tokenizer is a byte-level BPE trained on the questions of train.jsonl; digits stay single tokens.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of these texts, with ChatML's special tokens and template."""
    bpe = Tokenizer(models.BPE())
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*texts, *["system user assistant"] * 100], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def main(folder: Path) -> None:
    rows = (Path(__file__).parent / "train.jsonl").read_text().splitlines()
    tokenizer = make_tokenizer([json.loads(row)["query"] for row in rows])
    token_ids = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"), "pad_token_id": 0}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
        **token_ids,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **token_ids)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder}: Qwen3, {size:,} parameters, {len(tokenizer)} tokens in its vocabulary")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
