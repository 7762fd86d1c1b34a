"""Files of a checkpoint's processor of images and videos, and what is made of them."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..tokenizer import Tokenizer
from .families import VisionFamily
from .image_rules import (
    BudgetImages,
    CroppedImages,
    ImageRules,
    Kimi25Images,
    KimiSettings,
    NoImages,
    PaddedImages,
    PixtralImages,
    QwenImages,
    SquareImages,
    WholeSquareImages,
)
from .limits import MediaLimits
from .tile_rules import (
    InternChatImages,
    InternImages,
    LlamaImages,
    LlamaTokens,
    OneVisionImages,
    OvisImages,
    OvisTokens,
)
from .timestamps import Form as TimestampForm
from .videos import VideoInfo, sample_even, sample_floor, sample_glm4v, sample_glm46v

PROCESSOR_FILES = "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"
# Names of Pixtral's tokens in processor_config.json, and their default: of a patch, of the ends of a row and an image.
ROW_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
# Names of InternVL's tokens as attributes of the tokenizer, and their default.
TILE_TOKENS = {
    "start_image_token": "<img>",
    "context_image_token": "<IMG_CONTEXT>",
    "end_image_token": "</img>",
}
# Gemma 4's, before an image's visual tokens, of one, and behind them: attributes of the tokenizer, and their default.
SOFT_TOKEN_NAMES = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
# Llama 4's, which its processor has no names for: as in LlamaTokens.
LLAMA_TOKENS = "<|image_start|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"
LLAMA_TOKENS += "<|image|>", "<|image_end|>"
# Ovis2's, in the order of its visual_indicator_token_ids, and then a visual token: as in OvisTokens.
OVIS_TOKENS = "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<IMG_ATOM>"
# What goes before a chat template of texts alone: the blocks of a message become one text, with IMAGE for an image.
FLAT_CONTENT = """\
{%- set flat = namespace(messages=[], text='') %}
{%- for message in messages %}
{%- if message.content is string or not message.content %}{% set flat.messages = flat.messages + [message] %}
{%- else %}{% set flat.text = '' %}
{%- for item in message.content %}
{%- set flat.text = flat.text + ('IMAGE\\n' if item.type == 'image' else item.text) %}
{%- endfor %}{% set flat.messages = flat.messages + [dict(message, content=flat.text)] %}{% endif %}
{%- endfor %}
{%- set messages = flat.messages %}
"""
ONEVISION_FRAMES = 32  # most frames of a video: those that LLaVA-OneVision was trained with
ONEVISION_RATIO = "anyres_max_9"  # LLaVA-OneVision's default of vision_aspect_ratio


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error}). Copy it again from the original checkpoint.") from error
    return content if isinstance(content, dict) else {}


def read_model(folder: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint; of an Omni model with the settings of its thinker outside."""
    config = read_json(folder / "config.json")
    thinker = config.get("thinker_config") or {}
    return config | {name: value for name, value in thinker.items() if name not in ("model_type", "architectures")}


def token_id(tokenizer: Tokenizer, token: str) -> int:
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"the tokenizer has no {token}, which stands for media. Copy its files from the original.")
    return ids[0]


def load_processors(folder: Path, family: VisionFamily) -> tuple[Any, Any]:
    """Return transformers' image and video processor of a checkpoint, of which the settings are read; None: none.

    Kimi-VL's are remote code: its settings are returned. Those of InternVLChatModel are in config.json.
    """
    if family.image is None:
        return None, None
    if family.processor == "kimi_vl":
        return _kimi_settings(folder / PROCESSOR_FILES[0]), None
    if family.processor == "internvl_chat":
        return _intern_chat_processor(read_model(folder)), None
    has_videos = family.has_video_processor
    from transformers import AutoImageProcessor, AutoVideoProcessor

    loaded = []
    for kind in (AutoImageProcessor, AutoVideoProcessor) if has_videos else (AutoImageProcessor,):
        try:
            loaded.append(kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # transformers raises many types
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{folder}: its processor of images cannot be read ({reason}). Copy preprocessor_config.json, "
                "processor_config.json and video_preprocessor_config.json, as far as the original checkpoint has them."
            ) from error
    return loaded[0], loaded[1] if has_videos else None


def _kimi_settings(file: Path) -> KimiSettings:
    """Return the settings of Kimi-VL's processor. Defaults are those of its code."""
    config = {
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "patch_size": 14,
        "merge_kernel_size": (2, 2),
        "in_token_limit": 4096,
    } | read_json(file)
    height, width = config["merge_kernel_size"]
    if not config.get("pad_input") or height != width:
        raise ValueError(
            f"{file}: pad_input {config.get('pad_input')} and merge_kernel_size {config['merge_kernel_size']} are not "
            "supported: images are padded, and merged in squares. Copy the file from the original checkpoint."
        )
    mean, std = (tuple(config[name]) for name in ("image_mean", "image_std"))
    return KimiSettings(mean, std, config["patch_size"], height, config["in_token_limit"])


def _intern_chat_processor(config: Mapping[str, Any]) -> Any:
    """Return transformers' processor with the settings of InternVLChatModel, or the defaults of its class.

    Its pixels have ImageNet's statistics.
    """
    from transformers import GotOcr2ImageProcessor
    from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    side, is_tiled = config["vision_config"].get("image_size", 448), config.get("dynamic_image_size", False)
    least, most = (config.get("min_dynamic_patch", 1), config.get("max_dynamic_patch", 6)) if is_tiled else (1, 1)
    return GotOcr2ImageProcessor(
        size={"height": side, "width": side},
        crop_to_patches=is_tiled,
        min_patches=least,
        max_patches=most,
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
    )


def _kimi_k25_rules(folder: Path, processor: Any) -> Kimi25Images:
    """Return the rules of transformers' processor, which does not read the settings of the checkpoint's own code."""
    file = folder / PROCESSOR_FILES[0]
    settings = (read_json(file) if file.is_file() else {}).get("media_proc_cfg") or {}
    values = {
        "in_patch_limit": processor.max_patches,
        "patch_limit_on_one_side": processor.size["max_height"],
        "patch_size": processor.patch_size,
        "merge_kernel_size": processor.merge_size,
        "image_mean": [*processor.image_mean],
        "image_std": [*processor.image_std],
        "fixed_output_tokens": None,
    }
    if differing := [name for name, value in values.items() if settings.get(name, value) != value]:
        raise ValueError(
            f"{file}: media_proc_cfg has {differing[0]} {settings[differing[0]]}, and only "
            f"{values[differing[0]]} is supported. Copy the file from the original checkpoint."
        )
    return Kimi25Images(processor)


def video_config(processor: Any, family: VisionFamily) -> dict[str, Any] | None:
    """Return what limits need of a video processor. processor: transformers'; None: there is none"""
    if processor is None:
        return None
    if family.processor == "onevision":
        pixels = processor.size["height"] * processor.size["width"]
        return {"size": {"shortest_edge": pixels, "longest_edge": pixels}, "max_frames": ONEVISION_FRAMES}
    names = "fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens"
    edges = "shortest_edge", "longest_edge"
    sizes = family.video_pixels or [processor.size[edge] for edge in edges]
    size = dict(zip(edges, sizes, strict=True))
    return {"size": size} | {name: getattr(processor, name, None) for name in names}


# Which frames of a video are taken. Arguments: its facts, limits, and frames of a patch of time
Sample = Callable[[VideoInfo, MediaLimits, int], list[int]]


def video_form(
    processor: Any, family: VisionFamily, requested: Mapping[str, Any]
) -> tuple[TimestampForm | None, Sample]:
    """Return the form of a video's times, None without them, and how its frames are sampled.

    processor: transformers' video processor. requested: values of variables
    Raises ValueError for variables that videos of a GLM do not have.
    """
    sizes = [name for name in sorted(requested) if name.startswith("VIDEO_")]
    if family.processor == "onevision" and sizes:
        value = requested[sizes[0]]
        raise ValueError(f"{sizes[0]} {value}: the frames of this model's videos have one size. Remove it.")
    if not family.has_image_tokens:
        return ("qwen3", sample_even) if family.has_timestamps else (None, sample_floor)
    if names := sorted(requested.keys() & {"FPS_MIN_FRAMES", "FPS_MAX_FRAMES", "FRAME_FACTOR"}):
        raise ValueError(f"{names[0]} {requested[names[0]]}: the number of frames of a GLM's video has no such limit.")
    if type(processor).__name__ == "Glm46VVideoProcessor":
        return "glm46v", sample_glm46v
    return "glm4v", partial(sample_glm4v, longest=processor.max_duration)


def image_rules(
    folder: Path, family: VisionFamily, processor: Any, video_processor: Any, tokenizer: Tokenizer
) -> ImageRules:
    """Return the rules of a checkpoint's processors. processor, video_processor: transformers'; None: it has none"""
    if processor is None:
        return NoImages()
    match family.processor:
        case "pixtral":
            return _pixtral_rules(folder, processor, tokenizer)
        case "internvl" | "internvl_chat":
            return _internvl_rules(folder, processor, tokenizer)
        case "gemma3":
            return _gemma3_rules(folder, processor)
        case "gemma4":
            return _gemma4_rules(folder, processor, tokenizer, BudgetImages)
        case "gemma4_unified":
            return _gemma4_rules(folder, processor, tokenizer, WholeSquareImages)
        case "llama4":
            return _llama4_rules(folder, processor, tokenizer)
        case "ovis2":
            return _ovis2_rules(folder, processor, tokenizer)
        case "onevision":
            return _onevision_rules(folder, processor, video_processor)
        case "llava":
            return _llava_rules(folder, processor)
        case "kimi_vl":
            return PaddedImages(processor)
        case "kimi_k25":
            return _kimi_k25_rules(folder, processor)
        case "qwen2_vl":
            return QwenImages(processor, counts_frames=family.counts_frames)


def _pixtral_rules(folder: Path, processor: Any, tokenizer: Tokenizer) -> PixtralImages:
    # Sizes of patches and tokens are of the processor of images and text, and not of its image processor.
    config, model = read_json(folder / "processor_config.json"), read_json(folder / "config.json")
    patch, merge = config.get("patch_size", 16), config.get("spatial_merge_size", 1)
    expected = model["vision_config"].get("patch_size", 16), model.get("spatial_merge_size", 2)
    if (patch, merge) != expected:
        raise ValueError(
            f"{folder}: processor_config.json has patch_size {patch} and spatial_merge_size {merge}, and config.json "
            f"{expected[0]} and {expected[1]}. Copy both files from the original checkpoint."
        )
    image, row_end, end = (token_id(tokenizer, config.get(name) or default) for name, default in ROW_TOKENS.items())
    return PixtralImages(processor, patch, merge, (image, row_end, end))


def _internvl_rules(folder: Path, processor: Any, tokenizer: Tokenizer) -> InternImages:
    model, file = read_json(folder / "config.json"), folder / "processor_config.json"
    vision = model["vision_config"]
    (tile, other), (patch, _) = (
        value if isinstance(value, list) else (value, value)
        for value in (vision.get("image_size", 448), vision.get("patch_size", 14))
    )
    merge = round(1 / model.get("downsample_ratio", 0.5))
    config = read_json(file) if file.is_file() else {}
    tokens, expected = config.get("image_seq_length", 256), (tile // patch // merge) ** 2
    size, is_chat = (processor.size["height"], processor.size["width"]), model["model_type"] == "internvl_chat"
    if not is_chat and (tokens != expected or size != (tile, other)):
        raise ValueError(
            f"{folder}: its processor has tiles of {size[0]} x {size[1]} pixels and {tokens} tokens, and config.json "
            f"has some of {tile} x {other} and {expected}. Copy these files from the original checkpoint."
        )
    start, image, end = (
        token_id(tokenizer, getattr(tokenizer, name, None) or default) for name, default in TILE_TOKENS.items()
    )
    kind = InternChatImages if is_chat else InternImages
    return kind(processor, tile, patch, merge, (start, image, end))


def _llama4_rules(folder: Path, processor: Any, tokenizer: Tokenizer) -> LlamaImages:
    vision, file = read_json(folder / "config.json")["vision_config"], folder / "processor_config.json"
    config = read_json(file) if file.is_file() else {}
    tile, patch = vision.get("image_size", 448), vision.get("patch_size", 14)
    ratio = vision.get("pixel_shuffle_ratio", 0.5)
    size = processor.size["height"], processor.size["width"]
    actual = *size, config.get("patch_size", 14), config.get("pixel_shuffle_ratio", 0.5)
    if actual != (tile, tile, patch, ratio) or processor.resize_to_max_canvas:
        raise ValueError(
            f"{folder}: its processor has tiles of {size[0]} x {size[1]} pixels, patch_size {actual[2]}, "
            f"pixel_shuffle_ratio {actual[3]} and resize_to_max_canvas {processor.resize_to_max_canvas}; expected are "
            f"those of config.json, {tile} x {tile}, {patch} and {ratio}, and False. Copy both files from the original "
            "checkpoint."
        )
    tokens = LlamaTokens(*(token_id(tokenizer, token) for token in LLAMA_TOKENS))
    return LlamaImages(processor, tile, patch, round(1 / ratio), tokens)


def _ovis2_rules(folder: Path, processor: Any, tokenizer: Tokenizer) -> OvisImages:
    model, file = read_json(folder / "config.json"), folder / "processor_config.json"
    config = read_json(file) if file.is_file() else {}
    vision, tokens = model["vision_config"], OvisTokens(*(token_id(tokenizer, token) for token in OVIS_TOKENS))
    tile, patch, merge = (
        vision.get(name, default) for name, default in (("image_size", 224), ("patch_size", 14), ("hidden_stride", 1))
    )
    expected = {
        "size": (tile, tile),
        "image_seq_length": (tile // patch // merge) ** 2,
        "crop_to_patches": True,
        "use_covering_area_grid": True,
        "tokens": [*model["visual_indicator_token_ids"], model["image_token_id"]],
    }
    actual = {
        "size": (processor.size["height"], processor.size["width"]),
        "image_seq_length": config.get("image_seq_length", 256),
        "crop_to_patches": processor.crop_to_patches,
        "use_covering_area_grid": processor.use_covering_area_grid,
        "tokens": [*tokens],
    }
    _check_same(folder, actual, expected)
    return OvisImages(processor, tile, patch, merge, tokens)


def _check_same(folder: Path, actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise ValueError if a processor has another setting than config.json, or than is supported."""
    if differing := [name for name, value in expected.items() if actual[name] != value]:
        name = differing[0]
        raise ValueError(
            f"{folder}: its processor has {name} {actual[name]}, and expected is {expected[name]}, that of config.json "
            "or the only one that is supported. Copy these files from the original checkpoint."
        )


def _onevision_rules(folder: Path, processor: Any, video_processor: Any) -> OneVisionImages:
    model, file = read_json(folder / "config.json"), folder / "processor_config.json"
    config = read_json(file) if file.is_file() else {}
    vision, pinpoints = model["vision_config"], [tuple(size) for size in processor.image_grid_pinpoints]
    tile, patch = vision.get("image_size", 224), vision.get("patch_size", 16)
    tokens, ratio = (tile // patch) ** 2, model.get("vision_aspect_ratio") or ONEVISION_RATIO
    expected = {
        "size": (tile, tile),
        "num_image_tokens": tokens,
        "vision_aspect_ratio": ratio,
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": [tuple(size) for size in model.get("image_grid_pinpoints") or pinpoints],
    }
    actual = {
        "size": (processor.size["height"], processor.size["width"]),
        "num_image_tokens": config.get("num_image_tokens", tokens),
        "vision_aspect_ratio": config.get("vision_aspect_ratio") or ONEVISION_RATIO,
        "vision_feature_select_strategy": config.get("vision_feature_select_strategy") or "full",
        "image_grid_pinpoints": pinpoints,
    }
    _check_same(folder, actual, expected)
    names = "resample", "image_mean", "image_std"
    of_images, of_videos = ({name: getattr(one, name) for name in names} for one in (processor, video_processor))
    of_images |= {"size": (tile, tile)}
    of_videos |= {"size": (video_processor.size["height"], video_processor.size["width"])}
    differing = next((name for name in of_images if of_images[name] != of_videos[name]), None)
    problem = differing and (
        f"its frames would have {differing} {of_videos[differing]} by the checkpoint's processor, and images have "
        f"{of_images[differing]}"
    )
    if any(side % tile for size in pinpoints for side in size):
        raise ValueError(f"{folder}: image_grid_pinpoints has sizes that are not multiples of {tile}: not supported.")
    return OneVisionImages(pinpoints, tile, patch, int(ratio.rpartition("_")[2]), video_problem=problem)


def _gemma3_rules(folder: Path, processor: Any) -> SquareImages:
    model, file = read_json(folder / "config.json"), folder / "processor_config.json"
    vision, tokens = model["vision_config"], model.get("mm_tokens_per_image", 256)
    side, patch = vision.get("image_size", 224), vision.get("patch_size", 16)
    size = processor.size["height"], processor.size["width"]
    expanded = (read_json(file) if file.is_file() else {}).get("image_seq_length", 256)
    if size != (side, side) or expanded != tokens:
        raise ValueError(
            f"{folder}: its processor has images of {size[0]} x {size[1]} pixels and {expanded} tokens, and "
            f"config.json some of {side} x {side} and {tokens}. Copy these files from the original checkpoint."
        )
    return SquareImages(side, patch, side // patch // math.isqrt(tokens))


def _gemma4_rules(folder: Path, processor: Any, tokenizer: Tokenizer, kind: type[BudgetImages]) -> BudgetImages:
    model = read_json(folder / "config.json")
    vision = model["vision_config"]
    start, image, end = (
        token_id(tokenizer, getattr(tokenizer, name, None) or default) for name, default in SOFT_TOKEN_NAMES.items()
    )
    expected = {
        "patch_size": vision.get("patch_size", 16),
        "pooling_kernel_size": vision.get("pooling_kernel_size", 3),
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": False,
        "rescale_factor": 1 / 255,
    }
    actual = {name: getattr(processor, name) for name in expected}
    tokens = {"image_token_id": image, "boi_token_id": start, "eoi_token_id": end}
    expected |= {name: model.get(name, token) for name, token in tokens.items()}
    _check_same(folder, actual | tokens, expected)
    other_ids = (model.get(f"{medium}_token_id") for medium in ("video", "audio"))
    return kind(processor, (start, image, end), tuple(token for token in other_ids if token is not None))


def _llava_rules(folder: Path, processor: Any) -> CroppedImages:
    vision, file = read_json(folder / "config.json")["vision_config"], folder / "processor_config.json"
    side, patch = vision.get("image_size", 224), vision.get("patch_size", 32)
    sizes = processor.size["shortest_edge"], processor.crop_size["height"], processor.crop_size["width"]
    if sizes != (side,) * 3 or not processor.do_center_crop:
        raise ValueError(
            f"{folder}: its processor resizes the shorter side of an image to {sizes[0]} and crops {sizes[1]} x "
            f"{sizes[2]}, and config.json has images of {side} x {side}. Copy these files from the original checkpoint."
        )
    config = read_json(file) if file.is_file() else {}
    tokens = config.get("num_additional_image_tokens", 1) - 1  # beside those of patches: the class token is left out
    if tokens or config.get("patch_size", patch) != patch:
        raise ValueError(
            f"{file}: patch_size {config.get('patch_size')} and num_additional_image_tokens "
            f"{config.get('num_additional_image_tokens')} make other tokens than the model's. Set {patch} and 1."
        )
    return CroppedImages(side, patch, 1)


def chat_template(folder: Path, family: VisionFamily, tokenizer: Tokenizer, *, has_sound: bool = False) -> str | None:
    """Return the chat template that goes before the tokenizer's: a processor's in its earlier form, or a changed one.

    It has the placeholder of an image where processors write it into the text of the template.
    has_sound: it has a placeholder of an audio behind each video's
    """
    template = _earlier_template(folder)
    if has_sound and family.video and family.audio:
        template, video = template or tokenizer.chat_template, family.video.repeated
        if not isinstance(template, str) or video not in template:
            raise ValueError(f"USE_AUDIO_IN_VIDEO true: the chat template has no {video} for a video. Remove it.")
        return template.replace(video, video + family.audio.placeholder.repeated)
    if not family.template_image or family.image is None:
        return template
    template = template or tokenizer.chat_template
    if not isinstance(template, str) or family.image.repeated in template:
        return None
    if family.processor == "internvl_chat" and family.template_image not in template:
        return FLAT_CONTENT.replace("IMAGE", "".join(family.image)) + template
    return template.replace(family.template_image, "".join(family.image))


def _earlier_template(folder: Path) -> str | None:
    file = folder / "chat_template.json"
    if (folder / "chat_template.jinja").is_file() or not file.is_file():
        return None
    template = read_json(file).get("chat_template")
    return template if isinstance(template, str) else None
