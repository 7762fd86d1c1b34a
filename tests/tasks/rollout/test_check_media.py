"""Models and media that an engine does not take."""

from types import SimpleNamespace
from typing import Any

import pytest
from megaswift.tasks.rollout import factory
from megaswift.templates.media.families import FAMILIES


@pytest.mark.parametrize(
    ("model_type", "has_videos", "said"),
    [
        ("qwen3_vl", True, None),
        ("glm4v_moe", False, None),
        ("glm4v_moe", True, "--use_vllm true: the data has videos, and vLLM takes those of Qwen3-VL alone"),
        ("qwen3_omni_moe", False, None),
        ("qwen3_omni_moe", True, "--use_vllm true: the data has videos, and vLLM takes those of Qwen3-VL alone"),
        (
            "qwen3_omni_moe_thinker",
            False,
            "--use_vllm true: vLLM has no class for qwen3_omni_moe_thinker",
        ),
        ("gemma3", False, "--use_vllm true: vLLM does not take the images of gemma3 in this version"),
    ],
)
def test_what_vllm_takes(monkeypatch: pytest.MonkeyPatch, model_type: str, has_videos: bool, said: str | None) -> None:
    monkeypatch.setattr(factory, "has_videos", lambda data: has_videos)
    vision = SimpleNamespace(family=FAMILIES[model_type])
    run: Any = SimpleNamespace(data=None, vision=vision, hf_config={"model_type": model_type}, most_images=1)
    for use_vllm in (True, False):
        options: Any = SimpleNamespace(
            vllm_mode=None, vllm_server_host=None, vllm_server_base_url=None, use_vllm=use_vllm
        )
        monkeypatch.setattr(factory.importlib.util, "find_spec", lambda name: object())
        if said and use_vllm:
            with pytest.raises(ValueError, match=said):
                factory.check_media(run, options)
        else:
            factory.check_media(run, options)
