"""Tiny models that see and hear, and documents with images, videos and audios: beside transformers'."""

from collections.abc import Callable
from typing import Any

from tests.bridge.audio import TOWER, TOWER_2D
from tests.bridge.families.qwen3_omni_moe_text import MOE
from tests.bridge.vision import AUDIO, AXIAL, IMAGE, ROPE, ROPE3, START, TEXT, VIDEO, VISION3

AUDIO_START, AUDIO_END = 247, 248  # token ids
SECONDS = 1.5  # of a patch of time
POSITIONS = 4  # of a second
TOKENS = {"vision_start_token_id": START, "audio_start_token_id": AUDIO_START, "position_id_per_seconds": POSITIONS}


def qwen3_omni_moe() -> Any:
    """The thinker: transformers' class of the whole model has no forward pass."""
    from transformers import Qwen3OmniMoeThinkerConfig

    return Qwen3OmniMoeThinkerConfig(
        text_config=TEXT | MOE | {"head_dim": 16, "rope_parameters": ROPE3},
        vision_config=VISION3,
        audio_config=TOWER_2D,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        **TOKENS,
    )


def qwen2_5_omni() -> Any:
    """Windows of 2 x 2 merged squares, as of Qwen2.5-VL; an audio is cut into chunks of 20 frames."""
    from transformers import Qwen2_5OmniThinkerConfig

    vision = {
        "depth": 4, "hidden_size": 24, "num_heads": 2, "intermediate_size": 20, "out_hidden_size": 48, "patch_size": 4,
        "window_size": 16, "fullatt_block_indexes": [1, 3], "rope_parameters": AXIAL,
    }  # fmt: skip
    return Qwen2_5OmniThinkerConfig(
        text_config=TEXT | {"rope_parameters": ROPE | {"mrope_section": [2, 3, 1]}},
        vision_config=vision,
        audio_config=TOWER | {"n_window": 10},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=AUDIO,
        **TOKENS,
    )


FAMILIES: dict[str, Callable[[], Any]] = {"qwen3_omni_moe": qwen3_omni_moe, "qwen2_5_omni": qwen2_5_omni}
