import json
import math
import os
from pathlib import Path

import pytest

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's launcher variables and GPUs from these tests."""
    for name in list(os.environ):
        if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "NNODES", "NODE_RANK",
                    "MAX_RESTARTS",
                    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS",
                    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # fmt: skip
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write_model(folder: Path, config: dict) -> Path:
    """Write config.json and a sparse file of zero weights, which takes no disk space."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes(config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def shapes(config: dict) -> dict[str, list[int]]:
    """Return the tensor shapes of a Qwen3 model, dense or MoE; {} for other families."""
    if config.get("model_type") not in ("qwen3", "qwen3_moe"):
        return {}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = head * heads, head * config["num_key_value_heads"]
    layer = {
        "input_layernorm.weight": [hidden],
        "self_attn.q_proj.weight": [queries, hidden],
        "self_attn.k_proj.weight": [keys, hidden],
        "self_attn.v_proj.weight": [keys, hidden],
        "self_attn.o_proj.weight": [hidden, queries],
        "self_attn.q_norm.weight": [head],
        "self_attn.k_norm.weight": [head],
        "post_attention_layernorm.weight": [hidden],
    }
    experts = config.get("num_experts", 0)
    width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    for mlp in [f"mlp.experts.{n}" for n in range(experts)] or ["mlp"]:
        layer |= {f"{mlp}.gate_proj.weight": [width, hidden], f"{mlp}.up_proj.weight": [width, hidden]}
        layer[f"{mlp}.down_proj.weight"] = [hidden, width]
    if experts:
        layer["mlp.gate.weight"] = [experts, hidden]
    ends = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    if not config.get("tie_word_embeddings"):
        ends["lm_head.weight"] = ends["model.embed_tokens.weight"]
    layers = range(config["num_hidden_layers"])
    return ends | {f"model.layers.{n}.{name}": shape for n in layers for name, shape in layer.items()}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_model(tmp_path / "dense", DENSE)


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return write_model(tmp_path / "mixture", MIXTURE)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"query": f"What is {n}?", "response": f"{n} is {n}."}) + "\n" for n in range(40))
    )
    return file


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes and ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    ).save_pretrained(folder)
