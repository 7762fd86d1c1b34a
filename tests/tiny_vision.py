"""Tiny vision-language checkpoints with processors, made without a hub.

Every tensor is random, dimensions differ from one another, and the vocabulary is odd, as in tests/tiny.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bridge.families import VOCAB

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
MISTRAL_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
MISTRAL_SPECIAL += ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
INTERN_NAMES = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
INTERN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *INTERN_NAMES.values()]
GLM_SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
GLM_SPECIAL += [f"<|{place}_of_{kind}|>" for kind in ("image", "video") for place in ("begin", "end")]
GLM_SPECIAL += ["<|image|>", "<|video|>"]
VOCABULARY = VOCAB + 100  # of the tokenizer; the model's is two rows larger

# Those of the published checkpoints, without tools and without numbers of pictures.
QWEN2_VL_TEMPLATE = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
<|vision_start|><|image_pad|><|vision_end|>\
{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3_VL_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}
        {%- for item in content -%}
            {%- if item.type == 'image' or 'image' in item -%}<|vision_start|><|image_pad|><|vision_end|>
            {%- elif item.type == 'video' or 'video' in item -%}<|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in item -%}{{- item.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""
GLM_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}
{{- '\\n' if message.role == 'assistant' else '' }}<|{{ message.role }}|>{{ '\\n' }}\
{% if message.content is string %}{{ message.content }}
{%- else %}{% for item in message.content %}\
{% if item.type == 'image' or 'image' in item %}<|begin_of_image|><|image|><|end_of_image|>\
{% elif item.type == 'video' or 'video' in item %}<|begin_of_video|><|video|><|end_of_video|>\
{% elif 'text' in item %}{{ item.text }}{% endif %}{% endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\\n<|assistant|>\\n' }}{%- endif %}"""

# That of Mistral Small 3.1, without tools and without the names of wrong roles.
MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}{{- '[INST]' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{% for block in message.content %}
{%- if block.type == 'text' %}{{- block.text }}
{%- elif block.type in ['image', 'image_url'] %}{{- '[IMG]' }}
{%- else %}{{- raise_exception('Only text and image blocks are supported in message content!') }}{% endif %}
{%- endfor %}{% endif %}{{- '[/INST]' }}
{%- else %}{{- (message.content if message.content is string else message.content[0].text) + eos_token }}{% endif %}
{%- endfor %}"""

INTERN_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{% for item in message.content %}
{%- if item.type == 'image' %}{{- '<IMG_CONTEXT>\n' }}
{%- elif item.type == 'video' %}{{- '<video>\n' }}
{%- elif item.type == 'text' %}{{- item.text }}{% endif %}
{%- endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def tokenizer(special: list[str] = SPECIAL, eos: str = "<|im_end|>", **names: str):
    """Return a byte-level BPE with special tokens, by default those of Qwen's vision-language models.

    names: attributes of the tokenizer, and their tokens
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "user assistant system what colour is the shape? a red circle, a blue square, a picture of the sky."
    bpe.train_from_iterator([words] * 10, trainer)
    bos, pad = ("<s>", "<pad>") if "<s>" in special else (None, "<|endoftext|>")
    settings: Any = {"extra_special_tokens": names} if names else {}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos, pad_token=pad, **settings)


def picture(width: int, height: int, seed: int = 0):
    """Return a random picture that is smooth enough for JPEG."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def qwen2_5_vl(folder: Path, seed: int = 0, tied: bool = False) -> Path:
    """Write a tiny Qwen2.5-VL with its processor to a folder and return it."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
    from transformers import Qwen2VLImageProcessor as ImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
    video_size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 96 * 28 * 28}
    vocabulary = tokenizer()
    processor = Qwen2_5_VLProcessor(
        ImageProcessor(patch_size=14, merge_size=2, temporal_patch_size=2, size=size),
        vocabulary,
        Qwen2VLVideoProcessor(patch_size=14, merge_size=2, temporal_patch_size=2, size=video_size),
        chat_template=QWEN2_VL_TEMPLATE,
    )
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 3]}
    config = Qwen2_5_VLConfig(
        text_config=_text(rope) | {"tie_word_embeddings": tied},
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 56,
            "out_hidden_size": 48,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
        tie_word_embeddings=tied,
        **_token_ids(vocabulary),
    )
    return _save(folder, Qwen2_5_VLForConditionalGeneration, config, processor, seed)


def qwen3_processor():
    """Return the processor of Qwen3-VL and Qwen3.5."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}
    video_size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 96 * 32 * 32}
    half = [0.5] * 3
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, temporal_patch_size=2, size=size, image_mean=half, image_std=half
        ),
        tokenizer(),
        Qwen3VLVideoProcessor(patch_size=16, merge_size=2, temporal_patch_size=2, size=video_size),
        chat_template=QWEN3_VL_TEMPLATE,
    )


QWEN3_TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 56,
    "out_hidden_size": 48,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
}


def qwen3_vl(folder: Path, moe: bool = False, seed: int = 0, tied: bool = False, head_dim: int = 16) -> Path:
    """Write a tiny Qwen3-VL, or Qwen3-VL-MoE, with its processor to a folder and return it."""
    import transformers

    processor = qwen3_processor()
    rope = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [3 * head_dim // 16, 3 * head_dim // 16, head_dim // 8],
        "mrope_interleaved": True,
    }
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    name = "Qwen3VLMoe" if moe else "Qwen3VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(rope) | {"head_dim": head_dim, "tie_word_embeddings": tied} | (experts if moe else {}),
        vision_config=QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1, 2]},
        tie_word_embeddings=tied,
        **_token_ids(processor.tokenizer),
    )
    return _save(folder, getattr(transformers, f"{name}ForConditionalGeneration"), config, processor, seed)


def qwen3_5(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Qwen3.5 with its processor to a folder and return it."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    processor = qwen3_processor()
    rope = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [3, 2, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 24,
    }
    config = Qwen3_5Config(
        text_config=_text(rope) | delta, vision_config=QWEN3_TOWER, **_token_ids(processor.tokenizer)
    )
    return _save(folder, Qwen3_5ForConditionalGeneration, config, processor, seed)


def glm4v(folder: Path, seed: int = 0) -> Path:
    """Write a tiny GLM-4.1V with its processor to a folder and return it."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration, Glm4vImageProcessor, Glm4vProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor

    vocabulary = tokenizer(GLM_SPECIAL, eos="<|endoftext|>")
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    # Limits are of the pixels of both frames.
    size = {"shortest_edge": 8 * 28 * 28, "longest_edge": 128 * 28 * 28}
    processor = Glm4vProcessor(
        Glm4vImageProcessor(**sizes, size=size),
        vocabulary,
        Glm4vVideoProcessor(**sizes, size=size),
        chat_template=GLM_TEMPLATE,
    )
    rope = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [1, 1, 1],
        "partial_rotary_factor": 0.5,
    }
    config = Glm4vConfig(
        text_config=_text(rope) | {"eos_token_id": 0},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 56,
            "out_hidden_size": 48,
            "patch_size": 14,
            "image_size": 70,
        },
        **{f"{kind}_token_id": vocabulary.convert_tokens_to_ids(f"<|{kind}|>") for kind in ("image", "video")},
    )
    return _save(folder, Glm4vForConditionalGeneration, config, processor, seed)


def mistral3(folder: Path, seed: int = 0, tied: bool = False) -> Path:
    """Write a tiny Mistral Small 3.1 with its processor to a folder and return it."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralImageProcessor, PixtralProcessor

    vocabulary = tokenizer(MISTRAL_SPECIAL, eos="</s>")
    processor = PixtralProcessor(
        PixtralImageProcessor(patch_size={"height": 14, "width": 14}, size={"longest_edge": 224}),
        vocabulary,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=MISTRAL_TEMPLATE,
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = Mistral3Config(
        text_config=_text({"rope_type": "default", "rope_theta": 500.0})
        | {"model_type": "mistral", "head_dim": 16}
        | ids,
        vision_config={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "patch_size": 14,
            "image_size": 224,
            "hidden_act": "silu",
        },
        image_token_index=vocabulary.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=tied,
    )
    return _save(folder, Mistral3ForConditionalGeneration, config, processor, seed)


def internvl(folder: Path, seed: int = 0) -> Path:
    """Write a tiny InternVL 3.5 with its processor to a folder and return it. Its tiles have four tokens."""
    from transformers import GotOcr2ImageProcessor, InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    vocabulary = tokenizer(INTERN_SPECIAL, **INTERN_NAMES)
    size = {"height": 56, "width": 56}
    processor = InternVLProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=6),
        vocabulary,
        InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=INTERN_TEMPLATE,
    )
    config = InternVLConfig(
        text_config=_text({"rope_type": "default", "rope_theta": 500.0}) | {"model_type": "qwen3", "head_dim": 16},
        vision_config={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "patch_size": 14,
            "image_size": 56,
            "layer_scale_init_value": 1.0,
        },
        image_token_id=vocabulary.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return _save(folder, InternVLForConditionalGeneration, config, processor, seed)


FAMILIES = {
    "internvl": internvl,
    "mistral3": mistral3,
    "glm4v": glm4v,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": lambda folder, **options: qwen3_vl(folder, moe=True, **options),
    "qwen3_5": qwen3_5,
}


def _text(rope: dict) -> dict:
    return {
        "vocab_size": VOCABULARY + 2,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": 0,
        "rope_parameters": rope,
    }


def _token_ids(vocabulary) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: vocabulary.convert_tokens_to_ids(token) for name, token in names.items()}


def _save(folder: Path, kind, config, processor, seed: int) -> Path:
    """Write a model in fp32 with every parameter random: matrices of std 0.2, norms about 1, biases too."""
    model = kind._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + mean_of(model, name))
    model.save_pretrained(folder)
    _transpose_experts(Path(folder) / "model.safetensors")
    processor.save_pretrained(folder)
    return Path(folder)


def mean_of(model, name: str) -> float:
    """Return the mean of a parameter: norms scale by about 1, and delta nets forget slowly."""
    if name.endswith("A_log"):
        return -1.0
    is_norm = ("norm" in name or "ln_q" in name) and name.endswith("weight")
    adds_one = model.config.model_type.startswith("qwen3_5") and "visual" not in name and "linear_attn" not in name
    return 1.0 if is_norm and not adds_one else 0.0


def _transpose_experts(file: Path) -> None:
    """Store stacked experts as on the hub, which transformers does only for models that it has loaded."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file(
        {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()},
        file,
        metadata={"format": "pt"},
    )
