"""What is known of a published model, and what several of them have in common."""

from dataclasses import dataclass
from typing import Any

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@dataclass(frozen=True)
class Published:
    """One model of the hub."""

    family: str
    size: str  # parameters of the text model, without any that predict further tokens; or so many billions
    config: dict[str, Any]  # config.json, without what has no part in the architecture
    extra: tuple[str, ...] = ()  # names of tensors that the checkpoint has beside those
