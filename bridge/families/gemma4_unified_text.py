"""Gemma 4 12B text: Gemma 4's dense text model in a checkpoint whose images and audio have no towers."""

from ..mapping.param_mapping import Family
from . import gemma4_text

DENSE = gemma4_text.FAMILY

FAMILY = Family(
    name="gemma4_unified_text",
    architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    models="Gemma 4 12B, text",
    architecture=gemma4_text.architecture,
    mappings=gemma4_text.mappings,
    text_config=DENSE.text_config,
    vlm_names=DENSE.vlm_names,
    limits=(
        "num_kv_shared_layers",
        "attention_bias",
        "images and audio: their embedders pass through unchanged",
    ),
    defaults=DENSE.defaults
    | {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144},
)
