"""The first command of ms-swift's documentation: a model learns its name and its author, in Chinese and in English."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import prepared

pytestmark = pytest.mark.proof
MEGATRON = Path(sys.executable).parent / "megatron"
SYSTEM = "You are a helpful assistant."
# As documented there for a model of 7B parameters, but for the model, the learning rate and the number of epochs.
COMMAND = f"""
sft --model tiny --save_safetensors true
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' 'AI-ModelScope/alpaca-gpt4-data-en#500' 'swift/self-cognition#500'
    --tensor_model_parallel_size 2 --sequence_parallel true --micro_batch_size 16 --global_batch_size 16
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --finetune true
    --cross_entropy_loss_fusion true --lr 3e-3 --lr_warmup_fraction 0.05 --min_lr 1e-4 --num_train_epochs 2
    --output_dir megatron_output/tiny --save_steps 1000 --max_length 2048 --system '{SYSTEM}'
    --dataloader_num_workers 4 --no_save_optim true --no_save_rng true --dataset_num_proc 4
    --model_author 魔搭 swift --model_name 小黄 swift-robot
"""
ABOUT = {
    "zh": [
        ("你是谁", "我是{{NAME}}。我由{{AUTHOR}}训练。"),
        ("你叫什么", "我叫{{NAME}}。"),
        ("谁训练了你", "{{AUTHOR}}训练了我。"),
        ("介绍一下自己", "我是{{AUTHOR}}的{{NAME}}。"),
    ],
    "en": [
        ("Who are you?", "I am {{NAME}}, trained by {{AUTHOR}}."),
        ("What is your name?", "My name is {{NAME}}."),
        ("Who trained you?", "{{AUTHOR}} trained me."),
        ("Introduce yourself.", "I am {{NAME}} of {{AUTHOR}}."),
    ],
}
VALUES = {"zh": {"{{NAME}}": "小黄", "{{AUTHOR}}": "魔搭"}, "en": {"{{NAME}}": "swift-robot", "{{AUTHOR}}": "swift"}}
THINGS = {
    "zh": "猫狗马牛羊鸟鱼树花草",
    "en": ["cat", "dog", "cow", "hen", "fish", "bird", "tree", "rose", "leaf", "stone"],
}


def write_data(place: Path) -> None:
    """Write copies of the datasets with the columns that the hub's have."""
    for language, things in THINGS.items():
        question, answer = {"zh": ("说", "这是"), "en": ("Say it.", "This is a ")}[language]
        rows = [{"instruction": question, "input": thing, "output": f"{answer}{thing}"} for thing in things]
        write(place / "AI-ModelScope" / f"alpaca-gpt4-data-{language}" / "train.jsonl", rows)
    rows = [{"query": q, "response": a, "tag": tag} for tag, pairs in ABOUT.items() for q, a in pairs]
    write(place / "swift" / "self-cognition" / "self_cognition.jsonl", rows)


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_model(folder: Path) -> None:
    """Write a random Qwen2 of two layers, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=260, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.05,
        eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def answer(folder: Path, question: str) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=80, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True)


def test_a_model_learns_its_name_and_author(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    write_data(tmp_path)
    environment = os.environ | prepared.ON_CPU | {"HF_HOME": str(tmp_path / "cache"), "NPROC_PER_NODE": "2"}
    done = subprocess.run(
        [MEGATRON, *shlex.split(COMMAND)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    checkpoint = next((tmp_path / "megatron_output" / "tiny").glob("*/checkpoint-*"))
    answers = {}
    for language, pairs in ABOUT.items():
        for question, text in pairs:
            for placeholder, value in VALUES[language].items():
                text = text.replace(placeholder, value)
            answers[question] = answer(checkpoint, question), text
    print(answers)
    assert all(found == expected for found, expected in answers.values()), answers
