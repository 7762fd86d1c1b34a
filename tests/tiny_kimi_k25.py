"""A tiny Kimi-K2.5 with its processor, by the names that tensors have on the hub."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.tiny_vision_files import LATENT_EXPERTS, _save, _text
from tests.tiny_vision_text import K25_SPECIAL, K25_TEMPLATE, tokenizer


def name_on_the_hub(name: str) -> str:
    """Return the name of a tensor on the hub, given that of transformers, whose class saves some by other names."""
    names = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
    start = next((start for start in names if name.startswith(start)), "")
    return names.get(start, "") + name.removeprefix(start)


def kimi_k25(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Kimi-K2.5 with its processor to a folder and return it."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration, Kimi_K25ImageProcessor, Kimi_K25Processor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    vocabulary = tokenizer(K25_SPECIAL)
    images = Kimi_K25ImageProcessor(max_patches=120, size={"max_height": 18, "max_width": 18})
    processor = Kimi_K25Processor(images, vocabulary, Kimi_K25VideoProcessor(), chat_template=K25_TEMPLATE)
    text = _text({"rope_type": "default", "rope_theta": 500.0}) | LATENT_EXPERTS | {"model_type": "deepseek_v3"}
    text["q_lora_rank"] = 22  # transformers saves a q_proj of the language model as one of the tower
    vision = {
        "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
        "pos_emb_height": 5, "pos_emb_width": 5,
    }  # fmt: skip
    config = Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        image_token_id=vocabulary.convert_tokens_to_ids("<|media_pad|>"),
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )
    _save(folder, Kimi_K25ForConditionalGeneration, config, processor, seed)
    file = Path(folder) / "model.safetensors"
    tensors = {name_on_the_hub(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return Path(folder)
