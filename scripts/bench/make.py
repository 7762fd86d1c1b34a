"""Inputs of a benchmark: real text, a tokenizer, and a checkpoint of a real shape with random weights.

    python scripts/bench/make.py 4b FOLDER      # FOLDER/4b: the checkpoint, FOLDER/text.jsonl

The text is Python's standard library, as chats that ask for a function by its documentation and answer with its source.
Rows with pictures have about as many visual tokens as others: pictures are added to a chat until they catch up.
Weights are generated on a GPU if there is one. Existing files are kept.
"""

import ast
import json
import os
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pictures
from configs import special_ids
from make_rlhf import rows_name, write_rows
from row import Row
from rows import ROWS

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
# The published Qwen3-VL's, without tools and videos.
CHATML_WITH_PICTURES = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Limits of pixels are those of 64 and of 16,384 visual tokens.
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
VIDEO_PROCESSOR = IMAGE_PROCESSOR | {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
}
CHARACTERS = 4  # of the text in a token, of 8,192
TURN_TOKENS = 5  # around the text of a turn
SHARD_BYTES = 2 * 2**30
WRITERS = max(4, (os.cpu_count() or 4) // 4)
Shape = tuple[int, ...]


def paths(name: str, work: Path) -> tuple[Path, Path]:
    """Return the folder of the checkpoint, one for all rows of a model, and the file of the data."""
    row = ROWS[name]
    first = next(other for other in ROWS if ROWS[other].config == row.config)
    data = work / f"{first}-{rows_name(row.rlhf)}.jsonl" if row.rlhf else text_file(row, work)
    return work / first, data


def text_file(row: Row, work: Path) -> Path:
    kind = ["text"] if row.pictures is None else ["pictures", *row.pictures]
    parts = [*kind, *filter(None, [row.document_tokens, row.documents])]
    return work / f"{'-'.join(map(str, parts))}.jsonl"


def make(row: Row, folder: Path, data: Path) -> None:
    """Write the row's text to `data` and its checkpoint to `folder`. The folder appears only when it is complete."""
    if not data.exists():
        write_text(data, row)
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        write_tokenizer(partial, data, row.config)
        if row.pictures:
            write_processor(partial)
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


def write_text(data: Path, row: Row) -> None:
    chats = list(conversations(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(0).shuffle(chats)
    chats = chats[: row.documents]
    if row.document_tokens:
        chats = list(joined(chats, row.document_tokens))
    data.parent.mkdir(parents=True, exist_ok=True)
    if row.pictures:
        add_pictures(chats, data.with_suffix(""), row.pictures, row.length)
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def joined(chats: list[dict[str, Any]], tokens: int) -> Iterator[dict[str, Any]]:
    """Yield chats of the turns of several, which have at most about `tokens` tokens, and almost as many."""
    turns: list[dict[str, str]] = []
    size = 0.0
    for chat in chats:
        added = sum(len(turn["content"]) / CHARACTERS + TURN_TOKENS for turn in chat["messages"])
        if turns and size + added > tokens:
            yield {"messages": turns}
            turns, size = [], 0.0
        turns = turns + chat["messages"]
        size += added


def add_pictures(chats: list[dict[str, Any]], folder: Path, tokens: tuple[int, int], length: int) -> None:
    """Add pictures to the questions, in turn, until all chats together have as many visual tokens as others.

    A chat gets no picture that would make it longer than `length` tokens.
    """
    files = pictures.write_pictures(folder, tokens, WRITERS)
    counts = [pictures.visual_tokens(size) for size in pictures.sizes(tokens)]
    number, words, visual = 0, 0.0, 0
    for chat in chats:
        chat["images"] = []
        size = sum(len(turn["content"]) for turn in chat["messages"]) / CHARACTERS
        words += size
        while visual < words and size + counts[number] < 0.9 * length:
            chat["images"].append(str(files[number]))
            size += counts[number]
            visual += counts[number]
            number = (number + 1) % len(files)
        question = chat["messages"][0]
        question["content"] = "<image>" * len(chat["images"]) + question["content"]


def write_tokenizer(folder: Path, data: Path, config: dict[str, Any]) -> None:
    """Write a byte-level BPE of at most 8,192 tokens trained on the text, with ChatML's special tokens and template.

    The ids between these tokens and special tokens that follow are tokens that never occur.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = special_ids(config)
    first = min(special.values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=min(8192, first or config["vocab_size"]),
        special_tokens=[] if first else list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    texts = (turn["content"].replace("<image>", "") for row in rows for turn in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    if first:
        content = json.loads(tokenizer.to_str())
        vocabulary = content["model"]["vocab"]
        vocabulary |= {f"<|unused_{number}|>": number for number in range(len(vocabulary), first)}
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = CHATML_WITH_PICTURES if "vision_config" in config else CHATML
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}, indent=2))


def write_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PROCESSOR, indent=2))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML_WITH_PICTURES}, indent=2))


def shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Return the tensor shapes of a model by the names in its checkpoints."""
    if config["model_type"] == "gpt_oss":
        return gpt_oss_shapes(config)
    if config["model_type"] not in ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"):
        return saved_shapes(config)
    if "vision_config" not in config:
        return text_shapes(config)
    text = text_shapes(config["text_config"] | {"tie_word_embeddings": config["tie_word_embeddings"]})
    named = {name.replace("model.", "model.language_model.", 1): shape for name, shape in text.items()}
    return named | {f"model.visual.{name}": shape for name, shape in tower_shapes(config["vision_config"]).items()}


def saved_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the tensors that transformers saves, by the names in published checkpoints."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors = revert_weight_conversion(model, model.state_dict())
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight")
    names = {name: name for name in tensors}
    if config["model_type"] == "kimi_linear":  # transformers saves the dense layer's MLP by the name of experts
        names = {name: re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name) for name in tensors}
    return {names[name]: tuple(tensor.shape) for name, tensor in tensors.items()}


def tower_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, ffn, merged = config["hidden_size"], config["intermediate_size"], 4 * config["hidden_size"]
    patch = (3, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    matrices: dict[str, Shape] = {"patch_embed.proj": (hidden, *patch)}
    norms: dict[str, int] = {}
    for number in range(config["depth"]):
        block = f"blocks.{number}"
        norms |= {f"{block}.norm1": hidden, f"{block}.norm2": hidden}
        matrices |= {f"{block}.attn.qkv": (3 * hidden, hidden), f"{block}.attn.proj": (hidden, hidden)}
        matrices |= {f"{block}.mlp.linear_fc1": (ffn, hidden), f"{block}.mlp.linear_fc2": (hidden, ffn)}
    deep = [f"deepstack_merger_list.{number}" for number in range(len(config["deepstack_visual_indexes"]))]
    for merger in ("merger", *deep):
        norms[f"{merger}.norm"] = merged if merger in deep else hidden
        matrices |= {
            f"{merger}.linear_fc1": (merged, merged),
            f"{merger}.linear_fc2": (config["out_hidden_size"], merged),
        }
    biases = {name: shape[0] for name, shape in matrices.items()} | norms
    tensors = {f"{name}.weight": shape for name, shape in matrices.items()}
    tensors |= {f"{name}.weight": (size,) for name, size in norms.items()}
    tensors |= {f"{name}.bias": (size,) for name, size in biases.items()}
    return tensors | {"pos_embed.weight": (config["num_position_embeddings"], hidden)}


def gpt_oss_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, ffn, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    matrices: dict[str, Shape] = {f"self_attn.{name}_proj": (keys, hidden) for name in ("k", "v")}
    matrices |= {"self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)}
    matrices["mlp.router"] = (experts, hidden)
    layer: dict[str, Shape] = {f"{name}.weight": shape for name, shape in matrices.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    layer["self_attn.sinks"] = (config["num_attention_heads"],)
    for name, shape in {"gate_up_proj": (hidden, 2 * ffn), "down_proj": (ffn, hidden)}.items():
        layer |= {f"mlp.experts.{name}": (experts, *shape), f"mlp.experts.{name}_bias": (experts, shape[1])}
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return tensors | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def text_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
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
        experts: int = config.get("num_experts", 0)
        ffn: int = config.get("moe_intermediate_size", config["intermediate_size"])
        if experts:
            layer["mlp.gate"] = (experts, hidden)
        mlps = [f"mlp.experts.{expert}" for expert in range(experts)] if experts else ["mlp"]
        if config["model_type"] == "qwen3_vl_moe_text":  # the experts of a layer in one tensor, transposed
            mlps, stacked = [], f"model.layers.{number}.mlp.experts"
            tensors[f"{stacked}.gate_up_proj"] = (experts, hidden, 2 * ffn)
            tensors[f"{stacked}.down_proj"] = (experts, ffn, hidden)
        for mlp in mlps:
            layer |= {f"{mlp}.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
            layer[f"{mlp}.down_proj"] = (hidden, ffn)
        tensors |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (config["vocab_size"], hidden)
    return tensors


def initial_value(name: str, model_type: str) -> float:
    """Return the value of a norm, a scale, a bias, or a decay of linear attention: A_log and its dt_bias."""
    if model_type in ("qwen3_5_moe_text", "qwen3_next"):
        if name.endswith(("A_log", "dt_bias")):
            return 1.0
        if name.endswith("norm.weight") and "linear_attn" not in name:
            return 0.0  # the model adds one
    if model_type == "gemma4_text" and name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.25  # nothing else scales scores of attention
    return float(name.endswith(("weight", "scale", "scalar")))


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json and initial weights: matrices scaled by initializer_range, vectors by `initial_value`."""
    import torch
    from safetensors.torch import save_file

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, config["dtype"])
    scale = config.get("text_config", config)["initializer_range"]
    shards: list[dict[str, Shape]] = [{}]
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

        def init_tensor(name: str, shape: Shape) -> torch.Tensor:
            if len(shape) == 1:
                return torch.full(shape, initial_value(name, config["model_type"]), dtype=dtype)
            normal = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            return (normal * scale).cpu()

        tensors = {name: init_tensor(name, shape) for name, shape in shards[number].items()}
        save_file(tensors, folder / names[number], metadata={"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write_shard, range(len(shards))))
    weight_map = {name: names[number] for number, shard in enumerate(shards) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    special = special_ids(config)
    token_ids = {"eos_token_id": special["<|im_end|>"], "pad_token_id": special["<|endoftext|>"]}
    text = {"text_config": config["text_config"] | token_ids} if "text_config" in config else {}
    (folder / "config.json").write_text(json.dumps(config | token_ids | text, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(token_ids))


def main(name: str, work: Path) -> None:
    row, (folder, data) = ROWS[name], paths(name, work)
    if row.rlhf is None:
        make(row, folder, data)
        return
    text = text_file(row, work)
    make(row, folder, text)
    if not data.exists():
        write_rows(data, text, folder, row.rlhf)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
