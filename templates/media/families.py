"""Families of vision-language models by the model_type of their config.json. Imports no torch.

The processors of these families have one form, that of Qwen2-VL. To add such a family, add a row.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class VisionFamily:
    """What differs between the processors of the families.

    norm_bbox: form of boxes that the model learned
    has_timestamps: each patch of time of a video has its own block of tokens, behind its time as text; the limits of a
        video are those of all its frames together
    """

    norm_bbox: Literal["norm1000", "none"]
    has_timestamps: bool = False


FAMILIES = {
    "qwen2_vl": VisionFamily("norm1000"),
    "qwen2_5_vl": VisionFamily("none"),
    "qwen3_vl": VisionFamily("norm1000", has_timestamps=True),
    "qwen3_vl_moe": VisionFamily("norm1000", has_timestamps=True),
}
