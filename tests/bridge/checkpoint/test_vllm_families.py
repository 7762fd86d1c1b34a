"""vLLM takes the saved folders of the families, and answers as transformers does with the models that they came from.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. A family takes half a minute on two cores: all
of them a quarter of an hour.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.bridge import families
from tests.bridge.checkpoint.test_vllm import _greedy, by_vllm
from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)
from tests.vllm_cpu import IS_0_32, LATENT_SETTINGS, LATENT_SIZES, PYTHON, VERSION

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
SHAPE = {"hidden_size": 128, "head_dim": 32}  # vLLM's attention takes few sizes of heads
TAKEN = (
    "seed_oss", "olmo2", "olmo3", "smollm3", "smollm3 windows", "apertus", "apertus biases", "arcee", "arcee biases",
    "cohere", "cohere2", "gemma", "exaone4", "exaone4 no windows", "glm", "glm4", "glm4_moe", "granite", "granitemoe",
    "granitemoeshared", "mixtral", "nemotron", "starcoder2", "olmoe", "qwen2_moe", "dots1", "exaone_moe", "phi3",
    "ernie4_5 no biases", "granitemoehybrid attention", "lfm2", "lfm2_moe",
)  # fmt: skip
LATENT_FAMILIES = ("glm4_moe_lite", "deepseek_v2", "deepseek_v2 Lite", "deepseek_v3")
UNGATED = "is_act_and_mul=False is supported only for CUDA, XPU and ROCm"
LATENT, MAMBA = "MLA is not supported on CPU", "module 'triton' has no attribute 'next_power_of_2'"
REFUSED = {  # why the build for CPUs of vLLM 0.26 refuses them
    "nemotron_h": UNGATED,
    "kimi_linear": LATENT,
    **dict.fromkeys(LATENT_FAMILIES, LATENT),
    "granitemoehybrid": MAMBA,
    "falcon_h1": MAMBA,
}
if IS_0_32:
    TAKEN += (*LATENT_FAMILIES, "granitemoehybrid", "falcon_h1")
    # Its kernels for Kimi delta attention are Triton's, which the build lacks.
    REFUSED = {"nemotron_h": UNGATED, "kimi_linear": "'_lib_fn_wrapper' object has no attribute 'get'"}
SETTINGS: dict[str, dict[str, Any]] = {  # vLLM's
    "kimi_linear": LATENT_SETTINGS | {"enable_prefix_caching": False},
    **dict.fromkeys(LATENT_FAMILIES, LATENT_SETTINGS),
}
# Sizes and keys of config.json that vLLM wants, and the hub's files have.
CHANGES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"mamba_d_head": 32},
    "granitemoehybrid attention": {"mamba_d_head": 32},
    "minimax": {"intermediate_size": 128},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "kimi_linear": LATENT_SIZES | {"linear_head_dim": 32},
    **dict.fromkeys(LATENT_FAMILIES, LATENT_SIZES),
}
RAW: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "lfm2": {"conv_dim": 128, "block_dim": 128, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0},
    "kimi_linear": {
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3, 4],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
}


@pytest.fixture(scope="module")
def save(tmp_path_factory, one_process):  # noqa: F811
    """A function that writes a family's folder as a run saves it, and returns it with transformers' tokens."""
    import torch

    from tests.bridge.families import VOCAB, reference, worker

    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 17, 40)]

    def saved(name: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        folder, tiny = tmp_path_factory.mktemp("family"), families.tinies()[name]
        raw = {"raw": RAW[name]} if name in RAW else {}
        # vLLM reads the decays that files of MiniMax may have, which are random here.
        extra = {"extra": None} if name == "minimax" else {}
        tiny = replace(tiny, config=partial(tiny.config, **SHAPE | CHANGES.get(name, {})), **raw, **extra)
        models: list[Any] = []

        def remembered(tiny: families.Tiny, seed: int) -> Any:
            models.append(random_model(tiny, seed))
            return models[-1]

        random_model = reference.random_model
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "random_model", remembered)
            reference.make(folder, tiny)
        ours = worker.open_model(folder / "fp32", one_process, torch.float32)
        worker.save(ours, folder / "fp32", folder / "saved", torch.float32, 10**9)
        return folder / "saved", prompts, [_greedy(models[-1], prompt) for prompt in prompts]

    return saved


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch):
    """A function from a folder to what our engines have vLLM's build for CPUs do for its model."""
    import torch
    from megaswift.tasks.rollout import vllm_kwargs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(vllm_kwargs, "is_vllm_before", lambda release: Version(release) > VERSION)
    return partial(vllm_kwargs.model_settings, {})


@pytest.mark.parametrize("name", TAKEN)
def test_greedy_tokens_are_those_of_transformers(name: str, save, needed) -> None:
    folder, prompts, expected = save(name)
    assert by_vllm([folder], prompts, settings=needed(folder) | SETTINGS.get(name, {}))[str(folder)] == expected
    assert len({token for tokens in expected for token in tokens}) > 10  # one that says one thing would prove nothing


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_build_for_cpus_refuses(name: str, save) -> None:
    """As soon as it takes one of these, it belongs to TAKEN."""
    folder, prompts, _ = save(name)
    assert REFUSED[name] in by_vllm([folder], prompts, settings=SETTINGS.get(name))[str(folder)]


@pytest.mark.parametrize("name", ["lfm2", "deepseek_v2 Lite"] if IS_0_32 else ["lfm2"])
def test_rotary_kernel_for_cpus(name: str, save, needed) -> None:
    """It leaves most heads as they are, of transformers' checkpoint too. Else nothing would be `needed`."""
    folder, prompts, expected = save(name)
    original, settings = folder.with_name("fp32"), SETTINGS.get(name, {})
    answers = by_vllm([folder, original], prompts, settings=settings)
    assert answers[str(folder)] == answers[str(original)] != expected
    assert by_vllm([original], prompts, settings=needed(original) | settings)[str(original)] == expected


@pytest.mark.skipif(not IS_0_32, reason="vLLM 0.26 gives these windows their length")
def test_wider_windows(save) -> None:
    """vLLM gives windows of Cohere2 a token more, of transformers' checkpoint too. Else nothing would be `needed`."""
    folder, prompts, expected = save("cohere2")
    original = folder.with_name("fp32")
    answers = by_vllm([folder, original], prompts)
    assert answers[str(folder)] == answers[str(original)] != expected


def test_lightning_attention_without_states(save) -> None:
    """vLLM has transformers' layers run, with all tokens of a step as one document and without earlier steps.

    0.32 refuses them. If it takes MiniMax-Text-01 again, and as transformers does, `STATELESS` needs no more name it.
    """
    folder, prompts, expected = save("minimax")
    original = folder.with_name("fp32")
    if IS_0_32:
        answers = by_vllm([folder, original], prompts)
        assert all("(linear_attention) does not dispatch" in answer for answer in answers.values())
        return
    for folders in ([folder], [original]):
        (alone,) = by_vllm(folders, prompts[:1]).values()
        (together,) = by_vllm(folders, prompts).values()
        assert alone[0][0] == expected[0][0]  # the weights are right
        assert alone[0] != expected[0]
        assert [tokens[0] for tokens in together] != [tokens[0] for tokens in expected]
