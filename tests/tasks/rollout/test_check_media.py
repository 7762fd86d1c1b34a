"""Models and media that an engine does not take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.tasks.rollout import factory, vllm_images
from megaswift.tasks.rollout.vllm_images import check_model
from megaswift.templates.media.families import FAMILIES

from tests import tiny

VIDEOS = "--use_vllm true: the data has videos, and vLLM takes those of Qwen3-VL and Qwen3.5 alone"


@pytest.mark.parametrize(
    ("model_type", "has_videos", "said"),
    [
        ("qwen3_vl", True, None),
        ("glm4v_moe", False, None),
        ("glm4v_moe", True, VIDEOS),
        ("qwen3_omni_moe", False, None),
        ("qwen3_omni_moe", True, VIDEOS),
        (
            "qwen3_omni_moe_thinker",
            False,
            "--use_vllm true: vLLM has no class for qwen3_omni_moe_thinker",
        ),
        ("kimi_vl", False, "--use_vllm true: vLLM reads the images of kimi_vl by the checkpoint's own code"),
        ("kimi_k25", False, "--use_vllm true: vLLM's build for CPUs has no latent attention before 0.32, as kimi_k25"),
        ("gemma3", False, "--use_vllm true: vLLM does not take the images of gemma3 in this version"),
        ("gemma4", False, "--use_vllm true: vLLM does not take the images of gemma4 in this version"),
    ],
)
def test_what_vllm_takes(monkeypatch: pytest.MonkeyPatch, model_type: str, has_videos: bool, said: str | None) -> None:
    monkeypatch.setattr(factory, "has_videos", lambda data: has_videos)
    monkeypatch.setattr(vllm_images, "is_vllm_before", lambda release: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    vision = SimpleNamespace(family=FAMILIES[model_type])
    config = {"model_type": model_type, "text_config": {"kv_lora_rank": 512 if model_type == "kimi_k25" else None}}
    run: Any = SimpleNamespace(data=None, vision=vision, hf_config=config, most_images=1)
    for use_vllm in (True, False):
        options: Any = SimpleNamespace(
            vllm_mode=None,
            vllm_server_host=None,
            vllm_server_base_url=None,
            use_vllm=use_vllm,
            vllm_engine_kwargs={},
        )
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        if said and use_vllm:
            with pytest.raises(ValueError, match=said):
                factory.check_media(run, options)
        else:
            factory.check_media(run, options)


LATENT, UNGATED = "has no latent attention before 0.32", "does not compute experts without a gate"
MAMBA, DELTA = "does not compute Mamba-2", "does not compute Kimi delta attention"
ATTENTION = {"layer_types": ["attention"] * 4}


@pytest.mark.parametrize(
    ("family", "changes", "before", "since"),
    [
        ("lfm2", {}, None, None),
        ("falcon_h1", {}, MAMBA, None),
        ("granitemoehybrid", {}, MAMBA, None),
        ("granitemoehybrid", ATTENTION, None, None),
        ("nemotron_h", {}, MAMBA, UNGATED),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp"]}, MAMBA, None),
        ("deepseek_v2", {}, LATENT, None),
        ("kimi_linear", {}, LATENT, DELTA),
        ("deepseek_v32", {}, LATENT, "does not compute sparse attention"),
    ],
)
def test_models_that_vllm_lacks_on_cpus(
    monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], before: str | None, since: str | None
) -> None:
    """In vLLM before 0.32 and since."""
    config = tiny.config(family, **changes).to_dict()
    for on_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        for is_older, problem in ((True, before), (False, since)):
            monkeypatch.setattr(vllm_images, "is_vllm_before", lambda release, is_older=is_older: is_older)
            if problem is None or on_gpu:
                check_model("--use_vllm true", config)
            else:
                with pytest.raises(ValueError, match=f"--use_vllm true: .* {problem}, as {family} has"):
                    check_model("--use_vllm true", config)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_mixers_without_states_in_vllm(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    message = (
        "--use_vllm true: vLLM has no class for minimax after 0.23, and keeps no states of its lightning attention"
    )
    with pytest.raises(ValueError, match=message):
        check_model("--use_vllm true", tiny.config("minimax").to_dict())
    check_model("--use_vllm true", tiny.config("minimax", layer_types=["full_attention"] * 4).to_dict())
