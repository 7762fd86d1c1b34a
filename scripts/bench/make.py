"""Inputs of a benchmark: real text, a tokenizer, and a checkpoint of a real shape with random weights.

    python scripts/bench/make.py 4b FOLDER      # FOLDER/4b: the checkpoint, FOLDER/text.jsonl

The text is Python's standard library, as chats that ask for a function by its documentation and answer with its source.
Weights are generated on a GPU if there is one. Existing files are kept.
"""

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rows import ROWS, Row

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
SHARD_BYTES = 2 * 2**30
WRITERS = 4


def paths(name: str, work: Path) -> tuple[Path, Path]:
    """Return the folder of the checkpoint and the file of the text."""
    documents = ROWS[name].documents
    return work / name, work / ("text.jsonl" if documents is None else f"text-{documents}.jsonl")


def make(row: Row, folder: Path, data: Path) -> None:
    """Write the row's text to `data` and its checkpoint to `folder`. The folder appears only when it is complete."""
    if not data.exists():
        write_text(data, row.documents)
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        write_tokenizer(partial, data, min(8192, row.config["vocab_size"]))
        write_weights(partial, row.config)
        partial.rename(folder)


def conversations(root: Path) -> Iterator[dict[str, Any]]:
    """Yield a chat for each documented function and class of the Python files below `root`, except tests."""
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in str(path.relative_to(root)):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            text, code = ast.get_docstring(node), ast.get_source_segment(source, node)
            if text and len(text) > 40 and code and 200 < len(code) < 12_000:
                question = f"Write Python code for `{node.name}` from the module `{path.stem}`. {text}"
                turns = (("user", question), ("assistant", f"```python\n{code}\n```"))
                yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_text(data: Path, documents: int | None) -> None:
    rows = list(conversations(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(0).shuffle(rows)
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[:documents]))


def write_tokenizer(folder: Path, data: Path, size: int) -> None:
    """Write a byte-level BPE of `size` tokens trained on the text, with ChatML's special tokens and template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    tokenizer.train_from_iterator((turn["content"] for row in rows for turn in row["messages"]), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHATML}, indent=2))


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of Qwen3 and Qwen3-MoE, by the names in their checkpoints."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
        }
        experts, ffn = config.get("num_experts"), config.get("moe_intermediate_size", config["intermediate_size"])
        if experts:
            layer["mlp.gate"] = (experts, hidden)
        for mlp in [f"mlp.experts.{expert}" for expert in range(experts)] if experts else ["mlp"]:
            layer |= {f"{mlp}.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
            layer[f"{mlp}.down_proj"] = (hidden, ffn)
        tensors |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (config["vocab_size"], hidden)
    return tensors


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json and initial weights: matrices scaled by initializer_range, norms of ones."""
    import torch
    from safetensors.torch import save_file

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, config["dtype"])
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes(config).items():
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += dtype.itemsize * torch.Size(shape).numel()
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]

    def write_shard(number: int) -> None:
        generator = torch.Generator(device).manual_seed(number)

        def init_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            if name.endswith("norm.weight"):
                return torch.ones(shape, dtype=dtype)
            normal = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            return (normal * config["initializer_range"]).cpu()

        tensors = {name: init_tensor(name, shape) for name, shape in shards[number].items()}
        save_file(tensors, folder / names[number], metadata={"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write_shard, range(len(shards))))
    weight_map = {name: names[number] for number, shard in enumerate(shards) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    token_ids = {"eos_token_id": SPECIAL.index("<|im_end|>"), "pad_token_id": SPECIAL.index("<|endoftext|>")}
    (folder / "config.json").write_text(json.dumps(config | token_ids, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(token_ids))


if __name__ == "__main__":
    make(ROWS[sys.argv[1]], *paths(sys.argv[1], Path(sys.argv[2])))
