"""Tokenizers and chat templates of tiny vision-language checkpoints."""

from typing import Any

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
KIMI_SPECIAL = ["[BOS]", "[EOS]", "[PAD]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"]
KIMI_SPECIAL += ["<|im_middle|>", "<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
K25_SPECIAL = [token.replace("<|media_start|>", "<|media_begin|>") for token in KIMI_SPECIAL]
LLAVA_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
ONEVISION_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
OVIS_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<IMG_ATOM>"]
OVIS_SPECIAL += [f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END")]
LLAMA_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot|>", "<|finetune_right_pad|>"]
LLAMA_SPECIAL += ["<|header_start|>", "<|header_end|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"]
LLAMA_SPECIAL += ["<|tile_x_separator|>", "<|tile_y_separator|>"]
GEMMA_NAMES = {
    "boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"
}  # fmt: skip
GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", *GEMMA_NAMES.values()]
GEMMA4_NAMES = {
    "boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>",
    "boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>",
}  # fmt: skip
GEMMA4_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|video|>", *GEMMA4_NAMES.values()]
VOCABULARY = VOCAB + 100  # size of the tokenizer; the model's is two rows larger

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

# That of LLaVA-OneVision.
ONEVISION_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}\
{% if message['role'] != 'assistant' %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + content['text'] }}{% endfor %}\
{% else %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}\
{% generation %}{{ '\n' + content['text'] }}{% endgeneration %}{% endfor %}\
{% endif %}{{ '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

OVIS_TEMPLATE = """\
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}\
{% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' %}{{ '<image>\n' }}\
{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}\
{{'<|im_end|>\n'}}{% endfor %}\
{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"""

KIMI_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' -}}{%- endif -%}
{{- '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for content in message['content'] -%}
{%- if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}
{{- '<|media_start|>image<|media_content|><|media_pad|><|media_end|>' -}}
{%- else -%}{{- content['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}"""

K25_TEMPLATE = KIMI_TEMPLATE.replace("<|media_start|>", "<|media_begin|>")

GEMMA_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' }}
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- else %}{% for item in message['content'] %}
{%- if item['type'] == 'image' %}{{ '<start_of_image>' }}
{%- elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}
{%- endfor %}{% endif %}{{ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# That of Gemma 4, without tools and thoughts.
GEMMA4_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<|turn>' + role + '\n' }}
{%- if message['content'] is string %}{{- message['content'] | trim }}
{%- else %}{%- for item in message['content'] %}
{%- if item['type'] == 'text' %}{{- item['text'] | trim }}
{%- else %}{{- '<|' + item['type'] + '|>' }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\n' }}{%- endif %}"""

# That of LLaVA 1.5, whose images precede the texts of a message.
LLAVA_TEMPLATE = """\
{% for message in messages %}\
{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}\
{% if message['role'] != 'assistant' %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}\
{% else %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}\
{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

# That of Llama 4, without tools.
LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for content in message['content'] %}
{%- if content['type'] == 'image' %}{{- '<|image|>' }}
{%- elif content['type'] == 'text' %}{{- content['text'] }}{%- endif %}
{%- endfor %}{%- endif %}
{{- "<|eot|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{%- endif %}"""


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
    lines = [f"a{breaks}" for breaks in ("\n\n", "\n\n\n")] if "<bos>" in special else []  # Gemma merges line breaks
    bpe.train_from_iterator([words, *lines] * 10, trainer)
    bos = next((token for token in ("<s>", "<bos>", "<|begin_of_text|>") if token in special), None)
    pad = next((token for token in ("<pad>", "<|finetune_right_pad|>") if token in special), "<|endoftext|>")
    settings: Any = {"extra_special_tokens": names} if names else {}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos, pad_token=pad, **settings)
