"""Families of vision- and audio-language models by the model_type of their config.json. Imports no torch.

Most processors of these families have one form, that of Qwen2-VL. To add such a family, add a row; image_rules.py has
the other forms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..formats.medium import MediaKind

Processor = Literal[
    "qwen2_vl",
    "pixtral",
    "internvl",
    "internvl_chat",
    "kimi_vl",
    "kimi_k25",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "llava",
    "llama4",
    "onevision",
    "ovis2",
]


class Placeholder(NamedTuple):
    """Tokens that stand for an image or a video: one that is repeated, between two that enclose it."""

    start: str
    repeated: str
    end: str


QWEN_IMAGE = Placeholder("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
QWEN_VIDEO = Placeholder("<|vision_start|>", "<|video_pad|>", "<|vision_end|>")
PIXTRAL_IMAGE = Placeholder("", "[IMG]", "")
INTERN_IMAGE = Placeholder("", "<IMG_CONTEXT>", "")
KIMI_IMAGE = Placeholder("<|media_start|>image<|media_content|>", "<|media_pad|>", "<|media_end|>")
K25_IMAGE = Placeholder("<|media_begin|>image<|media_content|>", "<|media_pad|>", "<|media_end|>")
GEMMA_IMAGE = Placeholder("\n\n<start_of_image>", "<image_soft_token>", "<end_of_image>\n\n")
GEMMA4_IMAGE = Placeholder("", "<|image|>", "")
LLAVA_IMAGE = Placeholder("", "<image>", "")
ONEVISION_IMAGE, ONEVISION_VIDEO = Placeholder("", "<image>", ""), Placeholder("", "<video>", "")
OVIS_IMAGE = Placeholder("", "<IMG_ATOM>", "")
LLAMA_IMAGE = Placeholder("", "<|patch|>", "")
GLM_IMAGE = Placeholder("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
GLM_VIDEO = Placeholder("<|begin_of_video|>", "<|video|>", "<|end_of_video|>")


@dataclass(frozen=True)
class AudioFamily:
    """What differs between the processors of audios.

    window: default of n_window in audio_config, half a chunk of a spectrogram in frames
    is_padded: as of Qwen2.5-Omni, audios are continued by silence to the longest that the extractor takes, and pairs of
        the tower's positions are tokens
    mask: name of the mask of spectrograms among the inputs of transformers' model
    """

    placeholder: Placeholder
    window: int = 50
    is_padded: bool = False
    mask: str = "input_features_mask"


@dataclass(frozen=True)
class VisionFamily:
    """What differs between the processors of the families.

    norm_bbox: form of boxes that the model learned
    has_timestamps: each patch of time of a video has its own block of tokens, beside its time as text; the limits of a
        video are those of all its frames together
    has_image_tokens: the visual tokens of a video are those of images, between tokens of a video
    has_retrieval_prompts: embeddings and rerankers have the prompts of Qwen3-VL-Embedding and Qwen3-VL-Reranker
    video: None: videos are not supported
    counts_frames: the checkpoint's limits of an image count each of its pixels once for each frame of a patch of time,
    and an image with a side below a visual token's grows first
    tower_mlp: key of vision_config that has the width of the tower's MLPs
    has_axes: visual tokens have positions in time, height and width; else each token has one
    audio: None: audios are not supported
    image: None: images are not supported
    has_blocks: the visual tokens of an image attend to each other in both directions
    processor: form of the processor: Qwen2-VL's; Pixtral's, which has tokens between the rows of an image; InternVL's,
        which cuts images into tiles, by settings of its own or, of internvl_chat, in config.json; Llama 4's, which has
        tokens between tiles, or Ovis2's, where these are visual tokens too, or LLaVA-OneVision's, which puts the
        features of tiles together; Kimi-VL's and Kimi-K2.5's, which pad images; Gemma 3's and LLaVA's, whose images
        have one size, to which LLaVA's crops them; Gemma 4's, whose images all have about as many tokens
    template_image: text of an image in chat templates, which processors replace by the placeholder; "": it is there
    block_types: name of the types of tokens among the inputs of transformers' model, by which it finds these blocks
    has_bf16_pixels: pixels are normalized in bfloat16
    video_pixels: fewest and most pixels of a frame, which the processor's class has; None: those of its files
    follows_time: patches of time of a video are as many positions apart as the model has for that time, and the text
        behind the video comes after the last of them
    """

    norm_bbox: Literal["norm1000", "none"]
    has_timestamps: bool = False
    has_image_tokens: bool = False
    has_retrieval_prompts: bool = False
    image: Placeholder | None = QWEN_IMAGE
    video: Placeholder | None = QWEN_VIDEO
    counts_frames: bool = False
    tower_mlp: str = "intermediate_size"
    has_axes: bool = True
    has_blocks: bool = False
    block_types: str = "token_type_ids"
    audio: AudioFamily | None = None
    processor: Processor = "qwen2_vl"
    template_image: str = ""
    has_bf16_pixels: bool = False
    video_pixels: tuple[int, int] | None = None
    follows_time: bool = False

    @property
    def has_video_processor(self) -> bool:
        """Return whether the settings of a processor of videos are read."""
        return self.processor in ("qwen2_vl", "onevision") and self.image is not None

    def placeholder(self, kind: MediaKind) -> Placeholder | None:
        """Return the tokens of a medium; None if its kind is not supported."""
        if kind == "audio":
            return self.audio and self.audio.placeholder
        return self.image if kind == "image" else self.video


QWEN_AUDIO = Placeholder("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
ASR = VisionFamily("none", image=None, video=None, has_axes=False, audio=AudioFamily(QWEN_AUDIO))
GLM = VisionFamily(
    "norm1000",
    image=GLM_IMAGE,
    video=GLM_VIDEO,
    has_timestamps=True,
    has_image_tokens=True,
    counts_frames=True,
    tower_mlp="out_hidden_size",
)
MISTRAL = VisionFamily("norm1000", image=PIXTRAL_IMAGE, video=None, has_axes=False, processor="pixtral")
INTERN = VisionFamily("norm1000", image=INTERN_IMAGE, video=None, has_axes=False, processor="internvl")
INTERN_CHAT = replace(INTERN, processor="internvl_chat", template_image="<image>")
KIMI = VisionFamily("norm1000", image=KIMI_IMAGE, video=None, has_axes=False, processor="kimi_vl")
ONEVISION = VisionFamily(
    "norm1000", image=ONEVISION_IMAGE, video=ONEVISION_VIDEO, has_axes=False, processor="onevision"
)
OVIS2 = VisionFamily(
    "norm1000", image=OVIS_IMAGE, video=None, has_axes=False, processor="ovis2", template_image="<image>"
)
KIMI_K25 = VisionFamily("norm1000", image=K25_IMAGE, video=None, has_axes=False, processor="kimi_k25")
GEMMA = VisionFamily(
    "norm1000",
    image=GEMMA_IMAGE,
    video=None,
    has_axes=False,
    has_blocks=True,
    processor="gemma3",
    template_image="<start_of_image>",
)
GEMMA4 = VisionFamily(
    "norm1000",
    image=GEMMA4_IMAGE,
    video=None,
    has_axes=False,
    has_blocks=True,
    block_types="mm_token_type_ids",
    processor="gemma4",
)
LLAVA = VisionFamily("norm1000", image=LLAVA_IMAGE, video=None, has_axes=False, processor="llava")
LLAMA = VisionFamily(
    "norm1000",
    image=LLAMA_IMAGE,
    video=None,
    has_axes=False,
    processor="llama4",
    template_image="<|image|>",
    has_bf16_pixels=True,
)
OMNI_MASK = "feature_attention_mask"
QWEN2_5_OMNI = VisionFamily(
    "none",
    image=Placeholder("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
    video=Placeholder("<|vision_bos|>", "<|VIDEO|>", "<|vision_eos|>"),
    audio=AudioFamily(
        Placeholder("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"), window=100, is_padded=True, mask=OMNI_MASK
    ),
    video_pixels=(128 * 28 * 28, 768 * 28 * 28),
    follows_time=True,
)
QWEN3_OMNI = VisionFamily(
    "norm1000",
    audio=AudioFamily(QWEN_AUDIO, mask=OMNI_MASK),
    video_pixels=(128 * 32 * 32, 768 * 32 * 32),
    follows_time=True,
)
FAMILIES = {
    "qwen2_vl": VisionFamily("norm1000"),
    "qwen2_5_vl": VisionFamily("none"),
    "qwen3_vl": VisionFamily("norm1000", has_timestamps=True, has_retrieval_prompts=True),
    "qwen3_vl_moe": VisionFamily("norm1000", has_timestamps=True, has_retrieval_prompts=True),
    "qwen3_5": VisionFamily("norm1000", has_timestamps=True),
    "qwen3_5_moe": VisionFamily("norm1000", has_timestamps=True),
    "glm4v": GLM,
    "glm4v_moe": GLM,
    "glm46v": GLM,
    "mistral3": MISTRAL,
    "internvl": INTERN,
    "internvl_chat": INTERN_CHAT,
    "qwen3_asr": ASR,
    "kimi_vl": KIMI,
    "kimi_k25": KIMI_K25,
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "gemma4_unified": replace(GEMMA4, processor="gemma4_unified"),
    "llava": LLAVA,
    "llama4": LLAMA,
    "llava_onevision": ONEVISION,
    "ovis2": OVIS2,
    "qwen2_5_omni": QWEN2_5_OMNI,
    "qwen2_5_omni_thinker": QWEN2_5_OMNI,
    "qwen3_omni_moe": QWEN3_OMNI,
    "qwen3_omni_moe_thinker": QWEN3_OMNI,
}


def vision_family(config: Mapping[str, Any]) -> VisionFamily:
    """Return the family of a model with a tower. config: its config.json. Raises KeyError for an unknown model_type."""
    family = FAMILIES[config["model_type"]]
    if not family.processor.startswith("gemma4"):
        return family
    default = "vision" if family.processor == "gemma4_unified" else None
    text = config.get("text_config") or {}
    return replace(family, has_blocks=text.get("use_bidirectional_attention", default) == "vision")


TOWER_SETTINGS = "patch_size", "spatial_merge_size", "merge_kernel_size", "temporal_patch_size", "tokens_per_second"
TOWER_SETTINGS += ("pixel_shuffle_ratio", "hidden_stride", "pooling_kernel_size")
AUDIO_SETTINGS = "n_window", "num_mel_bins"
TOKEN_SETTINGS = (
    *("audio_token_id", "image_token_id", "image_token_index", "media_placeholder_token_id", "video_token_id"),
    *("spatial_merge_size", "downsample_ratio", "mm_tokens_per_image", "position_id_per_seconds"),
    *("image_grid_pinpoints", "vision_aspect_ratio", "visual_indicator_token_ids"),
)


def differing_setting(config: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return a setting that makes patches, tokens or positions of two models differ; None if they are the same.

    config, other: config.json of models with a vision or audio tower
    """
    if FAMILIES[config["model_type"]] != FAMILIES[other["model_type"]]:
        return "model_type"
    if vision_family(config).has_blocks != vision_family(other).has_blocks:
        return "use_bidirectional_attention"
    pairs = {name: (config.get(name), other.get(name)) for name in TOKEN_SETTINGS}
    for tower, names in (("vision_config", TOWER_SETTINGS), ("audio_config", AUDIO_SETTINGS)):
        settings, other_settings = config.get(tower) or {}, other.get(tower) or {}
        pairs |= {name: (settings.get(name), other_settings.get(name)) for name in names}
    return next((name for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]), None)
