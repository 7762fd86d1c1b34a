"""Stand-ins for the models, adapters and files that ms-swift's commands name: config files without weights."""

import json
from pathlib import Path

import numpy as np

from tests import internvl_chat, tiny_audio, tiny_omni, tiny_vision, tiny_vision_tiles
from tests.bridge.families.published import MODELS
from tests.bridge.omni.published import QWEN2_5_OMNI_7B, QWEN3_OMNI_30B_A3B
from tests.cli.checks.test_export import mcore
from tests.cli.checks.test_lora import write_adapter
from tests.cli.conftest import write_model
from tests.templates.conftest import QWEN3
from tests.tiny_vision_text import INTERN_NAMES, INTERN_SPECIAL, INTERN_TEMPLATE

FEW_EXPERTS = 16  # instead of hundreds, whose adapters would take seconds to plan
# Model of a command -> published model of the same family, and what differs.
SAME_FAMILY: dict[str, tuple[str, dict]] = {
    "Qwen2.5-7B": ("Qwen2.5-7B-Instruct", {}),
    "Qwen2.5-14B": ("Qwen2.5-7B-Instruct", {"num_attention_heads": 40, "num_key_value_heads": 8}),
    "Qwen2.5-72B-Instruct": ("Qwen2.5-7B-Instruct", {"num_attention_heads": 64, "num_key_value_heads": 8}),
    "Qwen3-4B": ("Qwen3-8B", {}),
    "Qwen3-4B-Instruct-2507": ("Qwen3-8B", {}),
    "Qwen3-8B-Base": ("Qwen3-8B", {}),
    "Qwen3-14B-FP8": ("Qwen3-8B-FP8", {"num_hidden_layers": 40}),
    "Qwen3-32B": ("Qwen3-8B", {"num_hidden_layers": 64, "num_attention_heads": 64}),
    "Qwen3-Embedding-8B": ("Qwen3-8B", {}),
    "Qwen3-Reranker-8B": ("Qwen3-8B", {}),
    "Qwen3-30B-A3B": ("Qwen3-30B-A3B-Instruct-2507", {}),
    "Qwen3-30B-A3B-Base": ("Qwen3-30B-A3B-Instruct-2507", {}),
    "Qwen3-30B-A3B-Instruct-2507-FP8": ("Qwen3-30B-A3B-Instruct-2507", {}),
    "Qwen3-235B-A22B-Instruct-2507": (
        "Qwen3-30B-A3B-Instruct-2507",
        {"num_hidden_layers": 94, "num_attention_heads": 64},
    ),
    "Qwen2.5-VL-3B-Instruct": ("Qwen2.5-VL-7B-Instruct", {}),
    "Qwen3-VL-Embedding-8B": ("Qwen3-VL-8B-Instruct", {}),
    "Qwen3-VL-Reranker-8B": ("Qwen3-VL-8B-Instruct", {}),
    "Qwen3-VL-30B-A3B-Instruct-FP8": ("Qwen3-VL-30B-A3B-Instruct", {}),
    "Qwen3-VL-235B-A22B-Instruct": (
        "Qwen3-VL-30B-A3B-Instruct",
        {"num_hidden_layers": 94, "num_attention_heads": 64},
    ),
    "Qwen3.5-2B": ("Qwen3.5-0.8B", {}),
    "Qwen3.5-4B": ("Qwen3.5-27B", {}),
    "Qwen3.5-9B": ("Qwen3.5-27B", {}),
    "GLM-4.6V-Flash": ("GLM-4.1V-9B-Thinking", {}),
    "GLM-4.6V": ("GLM-4.5V", {}),
    "Moonlight-16B-A3B-Instruct": ("Moonlight-16B-A3B", {}),
    "MiniMax-M2.7": ("MiniMax-M2", {}),
    "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}),
}
INTERNVL = "InternVL3_5-8B-HF"  # its tower is that of these models, which have another language model
CHAT_MODELS = {
    "InternVL3_5-30B-A3B": "Qwen3-30B-A3B-Instruct-2507",
    "InternVL3_5-GPT-OSS-20B-A4B-Preview": "gpt-oss-20b",
}
OMNI_MODELS = {"Qwen3-Omni-30B-A3B-Instruct": QWEN3_OMNI_30B_A3B, "Qwen2.5-Omni-7B": QWEN2_5_OMNI_7B}
OMNI_PROCESSORS = {
    "qwen3_omni_moe": ("Qwen3OmniMoe", tiny_omni.QWEN3_NAMES, 16, "id"),
    "qwen2_5_omni": ("Qwen2_5Omni", tiny_omni.QWEN2_5_NAMES, 14, "index"),
}
# Models without a family here: their classes, and whether they take images or audio.
LACKING = {
    "DeepSeek-V4": ("DeepseekV4ForCausalLM", "deepseek_v4", False),
}
MODEL_FLAGS = ("--model", "--ref_model", "--teacher_model", "--reward_model")

PLUGIN = """
from swift.rewards import ORM, orms


class Constant(ORM):
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)


orms["external_r1v_acc"] = Constant
"""
ENVIRONMENT = """
from swift.rollout.gym_env import Env, envs


class Lake(Env):
    async def reset(self, config):
        return "", {}, ""

    async def step(self, action):
        return "", 0.0, True, {}

    async def close(self):
        pass


envs["frozen_lake"] = Lake
"""
MESSAGES = {"messages": [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]}
ALPACA = ["AI-ModelScope/alpaca-gpt4-data-zh"]  # of the config file
CONFIG_FILE = """
model: Qwen/Qwen2.5-7B-Instruct
dataset: [AI-ModelScope/alpaca-gpt4-data-zh#500]
num_train_epochs: 1
tuner_type: lora
micro_batch_size: 1
global_batch_size: 8
"""
FILES = {
    "examples/train/grpo/prompt.txt": "Answer briefly.",
    "examples/train/grpo/plugin/plugin.py": PLUGIN,
    "examples/train/new_special_tokens/tokens.txt": "<a>\n<b>\n",
    "examples/megatron/grpo/multi_turn/frozen_lake_plugin.py": ENVIRONMENT,
    "examples/megatron/grpo/multi_turn/frozen_lake.jsonl": '{"messages": [{"role": "user", "content": "Go."}]}\n',
    "examples/yaml/megatron/sft.yaml": CONFIG_FILE,
    "qwen3_cached_dataset/train/rows.jsonl": f"{json.dumps(MESSAGES)}\n" * 64,
    "qwen3_cached_dataset/val/rows.jsonl": f"{json.dumps(MESSAGES)}\n",
    **dict.fromkeys(
        (
            "examples/ray/grpo/ray_grpo_colocate.yaml",
            "examples/ray/gkd/rollout_colocate_teacher_colocate.yaml",
            "frozen_lake_colocate.yaml",
        ),
        "rlhf_type: grpo\ncolocate_groups: [[train, rollout]]\n",
    ),
}


def config(name: str) -> dict:
    """Return config.json of a model by the last part of its name."""
    for prefix, (architecture, model_type, has_media) in LACKING.items():
        if name.startswith(prefix):
            return {"architectures": [architecture], "model_type": model_type} | (
                {"vision_config": {}} if has_media else {}
            )
    if name in OMNI_MODELS:
        return OMNI_MODELS[name]
    if name in CHAT_MODELS:
        return internvl_chat.chat_config(MODELS[INTERNVL].config | {"text_config": config(CHAT_MODELS[name])})
    published, changes = SAME_FAMILY.get(name, (name, {}))
    result = dict(MODELS[published].config)
    text = dict(result["text_config"]) if "text_config" in result else result
    text |= changes
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if text.get(key, 0) > FEW_EXPERTS:
            text[key] = FEW_EXPERTS
    return result | {"text_config": text} if "text_config" in result else text


def write_files(root: Path) -> None:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def write_model_of(root: Path, name: str) -> Path:
    """Write the stand-in of a hub id or of the folder of a model."""
    parts = Path(name).parts
    folder = root / "models" / (parts[1] if "checkpoint" in parts[-1] else parts[-1])
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        write_model(folder, config(folder.name))
        write_chat_template(folder)
    return folder


def write_chat_template(folder: Path) -> None:
    """Write a small version of Qwen3's chat template, with tools and thoughts."""
    (folder / "chat_template.jinja").write_text(QWEN3)


def write_processor(folder: Path) -> None:
    """Write tokenizer, chat template and processors of a vision-language model, and their tokens in config.json."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

    settings = json.loads((folder / "config.json").read_text())
    if settings["model_type"] == "llama4":
        side = settings["vision_config"]["image_size"]
        tiny_vision_tiles.llama4_processor(side).save_pretrained(folder)
        return
    if settings["model_type"] in OMNI_PROCESSORS:
        kind, names, patch, suffix = OMNI_PROCESSORS[settings["model_type"]]
        processor = tiny_omni.processor_of(kind, names, patch)
        processor.save_pretrained(folder)
        thinker = settings["thinker_config"] | tiny_omni.token_ids(processor, names, suffix)
        (folder / "config.json").write_text(json.dumps(settings | {"thinker_config": thinker}))
        return
    if settings["model_type"] == "internvl_chat":
        tokenizer = tiny_vision.tokenizer(INTERN_SPECIAL, **INTERN_NAMES)
        tokenizer.chat_template = INTERN_TEMPLATE
        tokenizer.save_pretrained(folder)
        internvl_chat.write_processor(folder)
        return
    if settings["model_type"].startswith("gemma4"):
        kind = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}[settings["model_type"]]
        processor = tiny_vision.gemma4_processor(kind, settings["vision_config"]["patch_size"], 280)
        processor.save_pretrained(folder)
        ids = tiny_vision.gemma4_ids(processor.tokenizer)
        (folder / "config.json").write_text(json.dumps(settings | ids))
        return
    tokenizer = tiny_vision.tokenizer()
    tokenizer.chat_template = tiny_vision.QWEN3_VL_TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>") for kind in ("image", "video")}
    (folder / "config.json").write_text(json.dumps(settings | ids))
    patch = settings["vision_config"].get("patch_size", 14 if "2" in settings["model_type"] else 16)
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    sizes["size"] = {"shortest_edge": 56 * 56, "longest_edge": 1003520}
    Qwen2VLImageProcessor(**sizes).save_pretrained(folder)
    Qwen3VLVideoProcessor(**sizes).save_pretrained(folder)


def write_checkpoint(root: Path, flag: str, name: str) -> None:
    """Write the stand-in of a checkpoint that an export reads."""
    folder = root / name
    base = name.removesuffix("-mcore") if flag == "--mcore_model" else name.split("/")[1]
    model = write_model_of(root, base)
    if flag == "--mcore_model" and not folder.is_dir():
        mcore(folder, config(model.name))
    elif flag == "--adapters":
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter(folder, model)
        if "3.5" in model.name:  # attention in every fourth layer only
            name = "base_model.model.model.language_model.layers.3.self_attn.q_proj.lora_A.weight"
            header = json.dumps({name: {"dtype": "F32", "shape": [], "data_offsets": [0, 0]}}).encode()
            (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    elif flag == "--mcore_adapter":
        (folder / "adapter_model.safetensors").unlink(missing_ok=True)
        if not (folder / "latest_checkpointed_iteration.txt").is_file():
            mcore(folder, None)
        settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": ["v_proj", "q_proj"]}
        settings["base_model_name_or_path"] = str(model)
        (folder / "adapter_config.json").write_text(json.dumps(settings))


# Columns of the datasets that tests/templates/formats/test_presets.py has not.
ROWS = {
    "swift/self-cognition": {"query": "Who are you?", "response": "I am {{NAME}} of {{AUTHOR}}.", "tag": "en"},
    "liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT": {
        "instruction": "What is 1 + 1?", "input": "", "output": "<think>\n1, 2\n</think>\n\nIt is 2.",
        "repo_name": "r", "prompt_source": "p", "core": 9,
    },
    "swift/Chinese-Qwen3-235B-2507-Distill-data-110k-SFT": MESSAGES,
    "swift/Chinese-Qwen3-235B-Thinking-2507-Distill-data-110k-SFT": MESSAGES,
    "swift/Qwen3-SFT-Mixin": MESSAGES,
    "swift/new_special_tokens": MESSAGES,
    "ZhipuAI/LongWriter-6k": MESSAGES | {"length": 9},
    "AI-ModelScope/LaTeX_OCR": {"image": "formula.png", "text": "x ^ { 2 }"},
    "speech_asr/speech_asr_aishell1_trainsets": {"Audio:FILE": "speech.wav", "Text:LABEL": "今天 天气"},
    "swift/RLAIF-V-Dataset": {
        "question": "What is it?", "chosen": "A formula.", "rejected": "A cat.", "image": "formula.png", "idx": 9,
    },
    "llm-wizard/alpaca-gpt4-data-zh": {"instruction": "算", "input": "输入\uff1a一", "output": "二"},
    "examples/megatron/grpo/multi_turn/frozen_lake.jsonl": {
        "messages": MESSAGES["messages"][:1], "env_config": {"name": "frozen_lake"},
    },
}  # fmt: skip

SUBSETS = ("AI-ModelScope/LaTeX_OCR",)  # datasets with a folder for each subset


def write_datasets(root: Path, words: list[str], count: int = 64) -> None:
    """Write `count` rows for each dataset that a command names, in the dataset's own columns, under its name."""
    from tests.templates.formats.test_presets import ROWS as PRESET_ROWS

    tiny_vision.picture(160, 40).save(root / "formula.png")
    (root / "speech.wav").write_bytes(tiny_audio.wav(np.zeros(tiny_audio.RATE, np.float32)))
    for word in [*words, *ALPACA]:
        name, _, _ = word.partition("#")
        dataset_id, _, subset = name.partition(":")
        row = ROWS.get(dataset_id) or (PRESET_ROWS.get(name) or PRESET_ROWS.get(dataset_id) or (None, None))[1]
        if row is None:
            continue
        file = root / dataset_id
        if file.suffix != ".jsonl":
            file = file / (subset if dataset_id in SUBSETS else "") / "train.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((json.dumps(row, ensure_ascii=False) + "\n") * count)
