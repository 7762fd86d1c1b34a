"""Flags that repeat what the model's folder says: `--model_type`, `--template`, `--agent_template`, a second `--model`.

They are compared with config.json and the chat template, which decide.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...bridge.checkpoint.hub import mcore_folder, read_config
from ...bridge.option_groups import flag_value
from ...bridge.options import ModelOptions
from ..flags import UsageError
from .lora import SIZE_KEYS
from .model import HfConfig

# model_type of config.json -> other names of ms-swift for its models
MODEL_TYPES = {
    "qwen2": "qwen2_5 qwen2_5_math qwen2_5_coder qwq qwq_preview marco_o1 deepseek_r1_distill skywork_o1 qwen2_gte",
    "qwen2_moe": "qwen qwen1half_moe",
    "qwen3": "qwen3_thinking qwen3_nothinking qwen3_guard qwen3_emb qwen3_reranker",
    "qwen3_moe": "qwen3_moe_thinking qwen3_moe_nothinking qwen3_coder",
    "qwen3_next": "qwen3_next_thinking",
    "qwen3_5_text": "qwen3_5 qwen3_8",
    "qwen3_5_moe_text": "qwen3_5_moe qwen3_8_moe",
    "qwen3_omni_moe": "qwen3_omni",
    "llama": "llama2 llama3 llama3_1 llama3_2 yi yi_coder deepseek_r1_distill longwriter_llama3_1 openbuddy_llama "
    "codefuse_codellama llama3_2_reward",
    "deepseek_v2": "deepseek_v2_5 deepseek_v2_lite",
    "deepseek_v3": "deepseek_r1 deepseek_v3_1 moonlight kimi_k2",
    "glm4": "glm4_0414 glm4_z1_rumination",
    "glm4_moe": "glm4_5 glm4_7",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3_vision",
    "mistral": "mistral_nemo mistral_2501 zephyr devstral wizardlm2 openbuddy_mistral",
    "mixtral": "wizardlm2_moe openbuddy_mixtral",
    "minimax_m2": "minimax_m2_1 minimax_m2_5 minimax_m2_7",
    "phi3": "phi4",
    "ernie4_5_moe": "ernie_thinking",
}
CHATML = "<|im_start|>"
# name of a template in ms-swift -> text that such a chat template has
TEMPLATES = {
    **dict.fromkeys(("chatml", "qwen", "qwen2_5", "qwen2_5_math", "qwq", "qwq_preview", "marco_o1"), CHATML),
    **dict.fromkeys(("qwen3", "qwen3_thinking", "qwen3_nothinking", "qwen3_guard", "qwen3_coder"), CHATML),
    **dict.fromkeys(("qwen3_5", "qwen3_8", "qwen3_vl", "qwen2_vl", "qwen2_5_vl"), CHATML),
    **dict.fromkeys(("qwen3_omni", "qwen2_5_omni"), CHATML),
    "llama": "[INST]",
    **dict.fromkeys(("llama3", "llama3_2"), "<|start_header_id|>"),
    "llama4": "<|header_start|>",
    "deepseek": "User:",
    **dict.fromkeys(("deepseek_v2_5", "deepseek_r1", "deepseek_v3_1"), "<\uff5cUser\uff5c>"),
    **dict.fromkeys(("moonlight", "kimi_k2", "kimi_vl"), "<|im_user|>"),
    **dict.fromkeys(("glm4", "glm4_5", "glm4_7", "glm4_z1_rumination"), "<|user|>"),
    **dict.fromkeys(("mistral_nemo", "mistral_2501"), "[INST]"),
    **dict.fromkeys(("gemma", "gemma3_text", "gemma3_vision"), "<start_of_turn>"),
    **dict.fromkeys(("minimax_m2", "minimax_m2_1", "minimax_m2_5", "minimax_m2_7"), "]~b]"),
    "phi3": "<|user|>",
    "phi4": "<|im_sep|>",
    "gpt_oss": "<|channel|>",
}
# name of an agent template in ms-swift -> text that a chat template with this format of tool calls has
AGENT_TEMPLATES = {
    "hermes": "<tool_call>",
    **dict.fromkeys(("qwen3_coder", "qwen3_5"), "<function="),
    **dict.fromkeys(("react_en", "react_zh", "react_grpo"), "Action Input:"),
    **dict.fromkeys(("qwen_en", "qwen_zh", "qwen_en_parallel", "qwen_zh_parallel"), "✿FUNCTION✿"),
    **dict.fromkeys(("glm4_5", "glm4_7", "glm5_1"), "<arg_key>"),
    "llama3": "ipython",
    "llama4": "ipython",
    "deepseek_v3_1": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "minimax_m2": "<minimax:tool_call>",
    "mistral": "[TOOL_CALLS]",
    "seed_oss": "<seed:tool_call>",
    "kimi_k25": "<|tool_calls_section_begin|>",
}
FORMATS = {"template": ("turns", TEMPLATES), "agent_template": ("tool calls", AGENT_TEMPLATES)}
# Formats that contain another one's text.
OTHER_FORMATS = {"hermes": ("<function=", "<arg_key>")}


def check_agreement(options: ModelOptions, claims: Mapping[str, str]) -> Iterator[str]:
    """Raise UsageError if the model's folder says otherwise than `claims`, flags with their values. Yield notes."""
    folder = _local_folder(options)
    for name, value in claims.items():
        if folder is None:
            yield f"--{name} {value} has no effect: the model's own is used, which is not on this machine yet."
        elif name == "model_type":
            yield _compare_type(value, folder)
        else:
            yield _compare_template(name, value, folder)


def _local_folder(options: ModelOptions) -> Path | None:
    folder = Path(flag_value(options, "mcore_model", None) or options.model or "").expanduser()
    return folder if (folder / "config.json").is_file() else None


def _compare_type(value: str, folder: Path) -> str:
    config = _read(folder)
    types = [kind for part in (config, config.get("text_config") or {}) if (kind := part.get("model_type"))]
    if not any(value == kind or value in MODEL_TYPES.get(kind, "").split() for kind in types):
        raise UsageError(
            f"--model_type {value}: config.json of {folder} says {' and '.join(types) or 'none'}. Remove it."
        )
    return f"--model_type {value} has no effect: config.json says it."


def _compare_template(name: str, value: str, folder: Path) -> str:
    what, formats = FORMATS[name]
    text, marker = _chat_template(folder), formats.get(value)
    if marker is None or marker not in text or any(other in text for other in OTHER_FORMATS.get(value, ())):
        problem = f"has no {marker}" if marker and text and marker not in text else f"has another format of {what}"
        raise UsageError(
            f"--{name} {value}: the chat template of {folder} {problem if text else 'is missing'}, and it is the one "
            "that is used. Remove the flag, or write that format to the folder's chat_template.jinja."
        )
    return f"--{name} {value} has no effect: the model's chat template is used, which has its {what}."


def _chat_template(folder: Path) -> str:
    """Return the text of a model's chat templates; "" without one."""
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    for name in ("tokenizer_config.json", "chat_template.json"):
        try:
            table = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        texts.append(json.dumps(table.get("chat_template") or "", ensure_ascii=False))
    return "\n".join(texts)


def drop_second_model(options: ModelOptions) -> Iterator[str]:
    """Unset --model beside a --mcore_model of the same model, and yield a note. Raises UsageError for another one."""
    mcore = flag_value(options, "mcore_model", None)
    if not mcore or not options.model:
        return
    if not Path(mcore).expanduser().is_dir():
        raise UsageError(f"--mcore_model {mcore}: no such folder. Set that of a megatron-core checkpoint.")
    if problem := _difference(options.model, Path(mcore).expanduser()):
        raise UsageError(
            f"--model {options.model}: {problem}, and config.json and tokenizer come from the folder of --mcore_model. "
            "Remove one of them."
        )
    yield f"--model {options.model} has no effect: --mcore_model {mcore} is the same model."
    options.model = ""


def _difference(model: str, mcore: Path) -> str:
    """Return how a model differs from a megatron-core checkpoint; "" if it is the same model."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        return "" if model.rpartition("/")[2] in str(mcore) else f"its name is not part of {mcore}"
    expected, actual = (
        config | (config.get("text_config") or {}) for config in (_read(mcore, mcore=True), _read(folder))
    )
    for name in ("model_type", *SIZE_KEYS):
        if expected.get(name) != actual.get(name):
            return f"its {name} is {actual.get(name)}, that of {mcore} {expected.get(name)}"
    return ""


def _read(folder: Path, *, mcore: bool = False) -> HfConfig:
    try:
        if mcore:
            mcore_folder(folder)
        return read_config(folder, mcore=mcore)
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        raise UsageError(text if text.startswith("--") else f"{folder}: {text}") from None
