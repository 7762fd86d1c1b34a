"""InternVL as checkpoints of InternVLChatModel have it: transformers' weights and settings under other names.

The names are those of the published checkpoints, whose code transformers has no class for.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head", "language_model.lm_head"),
    (r"^(?:model\.)?multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^(?:model\.)?multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^(?:model\.)?multi_modal_projector\.linear_2", "mlp1.3"),
    (r"^(?:model\.)?vision_tower\.", "vision_model."),
    (r"embeddings\.cls_token", "embeddings.class_embedding"),
    (r"embeddings\.position_embeddings", "embeddings.position_embedding"),
    (r"embeddings\.patch_embeddings\.projection", "embeddings.patch_embedding"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_(\d)", r"ls\1"),
    (r"attention\.projection_layer", "attn.proj"),
    (r"attention\.q_proj", "attn.qkv"),
)
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
OF_TOWER = "vision_tower|vision_model"
JOINED = re.compile(rf"(?:{OF_TOWER}).*attention\.[kv]_proj")  # they are behind q_proj in attn.qkv
# Names of the tower's settings.
SETTINGS = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization", "hidden_dropout_prob": "dropout"}
KEPT = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "norm_type",
    "layer_norm_eps", "num_channels", "attention_dropout",
)  # fmt: skip
CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
CLASSES |= {"gpt_oss": "GptOssForCausalLM"}
CODE = {
    "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
    "AutoModel": "modeling_internvl_chat.InternVLChatModel",
}


def set_statistics(folder: Path) -> None:
    """Give the processor of transformers' model the mean and standard deviation of InternVLChatModel's pixels."""
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"image_processor": settings["image_processor"] | IMAGENET}))


def rename(folder: Path, most_tiles: int = 12) -> Path:
    """Give a folder of InternVLForConditionalGeneration the names of InternVLChatModel, in place."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(chat_config(config, most_tiles), indent=2) + "\n")
    for file in folder.glob("*.safetensors"):
        save_file(chat_names(load_file(file)), file, metadata={"format": "pt"})
    (folder / "configuration_internvl_chat.py").write_text("raise RuntimeError('code of a checkpoint was run')\n")
    for name in ("processor_config.json", "video_preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    write_processor(folder)
    return folder


def write_processor(folder: Path) -> None:
    """Write the settings of images as checkpoints have them, which their code does not read."""
    settings = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 448, "do_center_crop": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def chat_config(config: dict[str, Any], most_tiles: int = 12) -> dict[str, Any]:
    """Return config.json of InternVLChatModel for that of transformers' class."""
    tower, text = config["vision_config"], config["text_config"]
    size, patch = (
        value if isinstance(value, int) else value[0] for value in (tower["image_size"], tower["patch_size"])
    )
    vision = {SETTINGS.get(name, name): tower[name] for name in (*KEPT, *SETTINGS) if name in tower}
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": CODE,
        "downsample_ratio": config.get("downsample_ratio", 0.5),
        "dynamic_image_size": True,
        "force_image_size": size,
        "llm_config": {"architectures": [CLASSES[text["model_type"]]]}
        | text
        | {"tie_word_embeddings": config.get("tie_word_embeddings", False)},
        "max_dynamic_patch": most_tiles,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": config.get("vision_feature_layer", -1),
        "template": "internvl2_5",
        "torch_dtype": config.get("dtype", "float32"),
        "use_thumbnail": True,
        "vision_config": vision
        | {"architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "image_size": size}
        | {"patch_size": patch, "drop_path_rate": 0.1, "use_flash_attn": True, "initializer_factor": 1.0},
    }


def chat_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of transformers' class under the names of InternVLChatModel."""
    renamed = {}
    for name, tensor in tensors.items():
        if JOINED.search(name):
            continue
        if re.search(rf"(?:{OF_TOWER}).*attention\.q_proj", name):
            tensor = torch.cat([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        for pattern, replacement in NAMES:
            is_of_tower = re.search(OF_TOWER, name) is not None
            if is_of_tower or pattern.startswith("^"):
                name = re.sub(pattern, replacement, name)
        renamed[name] = tensor.contiguous()
    return renamed
