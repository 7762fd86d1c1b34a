"""What has adapters: all-linear is transformers' linear layers, names are what they say, the rest is refused."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.lora.adapter_mapping import AdapterPlan, plan_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.mapping.param_mapping import expand_mappings
from megaswift.tasks.rollout.lora_support import unsupported_by_vllm

from tests.bridge.families import tinies

# transformers has linear layers for them; all-linear is without routers, and a gate of a single row is too low a rank.
# No loss reaches an indexer, and transformers' kernels compute the output of Mamba-2 layers without adapters.
WITHOUT = re.compile(r".+\.(shared_expert_gate|router(\.proj)?|indexer\.\w+|(mixer|mamba)\.out_proj)")
PLAIN = LoraSettings(4, 8.0, None, "none", None, False, False, ("all-linear",), None, ())
FAMILIES = sorted(
    name for name, tiny in tinies().items() if " " not in name and not (tiny.files or tiny.raw or tiny.model)
)
FAMILIES += "gemma4_text experts", "gemma4_text layer inputs"


@cache
def transformers_model(tiny: str) -> Any:
    """Without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tinies()[tiny].config())


def plan(tiny: str, **changes: Any) -> AdapterPlan:
    model = transformers_model(tiny)
    raw = model.config.to_dict() | {"architectures": [type(model).__name__]}
    family = family_of(raw)
    architecture = family.describe(raw)
    return plan_adapters(expand_mappings(family, raw, architecture), replace(PLAIN, **changes), architecture)


def leaves(found: AdapterPlan) -> set[str]:
    return {name.rpartition(".")[2] for name in found.modules}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_is_every_linear_layer(family):
    linear = {
        name
        for name, module in transformers_model(family).named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not WITHOUT.fullmatch(name)
    }
    found = plan(family)
    assert {name for name in found.modules if ".experts." not in name} - found.stacked_parameters.keys() == linear
    experts = {name for name, _ in transformers_model(family).named_parameters() if ".experts." in name}
    skipped = [name for name in found.skipped_modules if not WITHOUT.fullmatch(name)]
    assert bool(experts) == (found.has_experts or bool(skipped))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "is_read"),
    [("gpt_oss", True), ("gemma4_text experts", False), ("llama4_text", False), ("nemotron_h", False)],
)
def test_vllm_reads_stacked_experts_of_some_models(family, is_read):
    reason = unsupported_by_vllm(replace(PLAIN, rank=8), plan(family))
    assert reason is None if is_read else "which it does not read in PEFT's form" in (reason or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        (("linear_qkv",), {"q_proj", "k_proj", "v_proj"}),
        (("linear_fc1", "o_proj"), {"gate_proj", "up_proj", "o_proj"}),
        (("self_attn.o_proj",), {"o_proj"}),
        (("all-embedding", "linear_fc2"), {"embed_tokens", "down_proj"}),
    ],
)
def test_targets_are_names_of_either_side(targets, wanted):
    assert leaves(plan("qwen3", targets=targets)) == wanted


@pytest.mark.slow
def test_mla_and_routers_have_names_too():
    assert leaves(plan("deepseek_v3", targets=("linear_kv_up_proj", "q_a_proj"))) == {"kv_b_proj", "q_a_proj"}
    assert leaves(plan("deepseek_v3", targets=("all-router",))) == {"gate"}
    regex = r".+\.layers\.[01]\..+\.kv_b_proj"
    assert plan("deepseek_v3", targets=(), regex=regex).modules == [
        f"model.layers.{layer}.self_attn.kv_b_proj" for layer in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3", {"targets": ("q_porj",)}, "--target_modules q_porj matches no module.*q_proj"),
        ("qwen3", {"targets": ("q_proj", "w1")}, "--target_modules w1 matches no module"),
        ("qwen3", {"targets": (), "regex": "q_proj"}, "--target_regex q_proj matches no module"),
        ("qwen3", {"targets": ("lm_head",)}, "--modules_to_save lm_head"),
        ("qwen3", {"rank": 0}, "--lora_rank 0"),
        ("qwen3", {"modules_to_save": ("norm",)}, "--modules_to_save norm"),
        ("qwen3", {"bias": "all"}, "--lora_bias all"),
        ("llama", {"targets": ("all-embedding",)}, "--modules_to_save embed_tokens"),
        ("qwen3_moe", {"targets": ("gate_proj", "down_proj")}, "experts have adapters"),
        ("qwen3_moe", {"dropout": 0.1}, "--lora_dropout 0.1"),
        ("qwen3_moe", {"dora": True}, "--use_dora true"),
        ("gpt_oss", {"targets": ("experts.down_proj",)}, "experts have adapters"),
        ("llama4_text", {"targets": ("experts.down_proj",)}, "experts have adapters"),
        ("nemotron_h", {"targets": ("experts.down_proj",)}, "experts have adapters"),
        (
            "nemotron_h",
            {"targets": ("out_proj",)},
            "which transformers' kernels compute without adapters: leave it out of --target_modules",
        ),
    ],
)
def test_what_cannot_be_is_refused(family, changes, words):
    with pytest.raises(ValueError, match=words):
        plan(family, **changes)


@pytest.mark.slow
def test_dropout_left_out_is_what_can_be():
    assert plan("qwen3").dropout == 0.05
    assert plan("qwen3", dora=True).dropout == 0
    assert plan("qwen3_moe").dropout == 0
    assert plan("qwen3_moe", targets=("linear_qkv",)).dropout == 0.05
