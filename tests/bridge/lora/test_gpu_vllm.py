"""vLLM on a GPU takes our adapters of stacked experts: PEFT's greedy tokens, and those of the merged folder.

pytest -m gpu tests/bridge/lora/test_gpu_vllm.py      # one GPU, and vLLM; each model starts twice
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import tiny
from tests.bridge.families import Tensors, Tiny, gpt_oss, qwen3_5_moe_text
from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)
from tests.prepared import ROOT

NEW_TOKENS, RANK = 16, 8
# Largest gap between the two best logits, over the standard deviation of all, at which rounding to fp16 may choose the
# other one. It moves the logits by about 0.015 of the standard deviation.
NEAR_TIE = 0.1
SHAPE = {"hidden_size": 256, "head_dim": 64}  # vLLM's attention on GPUs takes few sizes of heads
ROUTING = {"num_experts_per_tok": 8}  # all: otherwise rounding would send some tokens to other experts
ROPE = {
    "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25,
    "mrope_section": [4, 2, 2], "mrope_interleaved": True,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "rope_parameters": ROPE,
}  # fmt: skip
TOWER = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1, "out_hidden_size": 256, "patch_size": 16,
}  # fmt: skip
# Processes of images are not started for a model that sees none.
NO_MEDIA: dict[str, Any] = {"vllm_limit_mm_per_prompt": {"image": 0, "video": 0}}
pytestmark = pytest.mark.gpu
Tokens = list[list[int]]  # of each prompt


class Greedy(NamedTuple):
    """Tokens of an answer, and the gap between the two best logits at each."""

    tokens: list[int]
    gaps: list[float]


def with_tower(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "visual" in name} | qwen3_5_moe_text.stacked(tensors)


def add_processor(folder: Path) -> None:
    """Write what vLLM opens beside a model with a tower."""
    from tests.tiny_vision import qwen3_processor

    qwen3_processor().save_pretrained(folder)


# With matrices of usual sizes: rounding to fp16 moves logits of the tiny model by up to half of their spread.
GPT_OSS = replace(
    gpt_oss.TINY[""],
    config=partial(gpt_oss.config, **SHAPE | ROUTING, intermediate_size=128),
    stds={"_proj": 0.08},
)
QWEN3_5_MOE = replace(
    qwen3_5_moe_text.TINY["within"],
    config=partial(qwen3_5_moe_text.seeing, TOWER, **SHAPE | ROUTING | DELTA),
    files=with_tower,
    extra=None,
)
# The tiny model, the seed of its weights, further files, and options of `swift infer`.
MODELS: dict[str, tuple[Tiny, int, Callable[[Path], None], dict[str, Any]]] = {
    "gpt_oss": (GPT_OSS, 2, tiny.save_tokenizer, {"vllm_engine_kwargs": {"attention_backend": "TRITON_ATTN"}}),
    "qwen3_5_moe": (
        QWEN3_5_MOE,
        5,
        add_processor,
        NO_MEDIA | {"vllm_engine_kwargs": {"gdn_prefill_backend": "triton"}},
    ),
}


@pytest.fixture
def answers(tmp_path, one_process) -> Callable[[str], tuple[list[Greedy], Tokens, Tokens, list[Greedy]]]:  # noqa: F811
    """A function of a model's name: tokens of PEFT, of vLLM with the adapter and merged, of the model without."""

    def answer(name: str) -> tuple[list[Greedy], Tokens, Tokens, list[Greedy]]:
        model, seed, prepare, settings = MODELS[name]
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(3, 150, (length,), generator=generator).tolist() for length in (3, 17, 40)]
        save(tmp_path, model, seed, one_process)
        expected = greedy(tmp_path, prompts, model, adapted=True)
        for folder in ("base", "merged"):
            prepare(tmp_path / folder)
        jobs = [
            {"model": str(tmp_path / "base"), "adapters": [str(tmp_path / "adapter")], **settings},
            {"model": str(tmp_path / "merged"), **settings},
        ]
        adapted, merged = by_vllm(tmp_path, prompts, jobs)
        return expected, adapted, merged, greedy(tmp_path, prompts, model, adapted=False)

    return answer


def by_vllm(root: Path, prompts: Tokens, jobs: list[dict[str, Any]]) -> list[Tokens]:
    """Greedy tokens for each job and prompt, as `swift infer` has vLLM generate them."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    settings = {"torch_dtype": "float16", "vllm_gpu_memory_utilization": 0.3}
    content = {"prompts": prompts, "new_tokens": NEW_TOKENS, "models": [settings | job for job in jobs]}
    (root / "jobs.json").write_text(json.dumps(content))
    command = [sys.executable, "tests/bridge/lora/vllm_worker.py", str(root / "jobs.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def save(root: Path, model: Tiny, seed: int, one_process) -> None:  # noqa: F811
    """Write a checkpoint, an adapter with random values, and the merged checkpoint."""
    from megaswift.bridge.checkpoint.adapter_files import load_adapter, save_adapter
    from megaswift.bridge.checkpoint.hub import read_config
    from megaswift.bridge.checkpoint.load import load_weights
    from megaswift.bridge.checkpoint.save import save_weights
    from megaswift.bridge.lora.attach import attach_adapters
    from megaswift.bridge.lora.settings import LoraSettings
    from megaswift.bridge.model.build import build_model
    from megaswift.bridge.options import LoraOptions
    from safetensors.torch import load_file, save_file

    from tests.bridge.families.reference import random_model

    base, adapter, merged = (root / name for name in ("base", "adapter", "merged"))
    network = random_model(model, seed)
    network.save_pretrained(base)
    if model.files:
        file = base / "model.safetensors"
        save_file({n: t.contiguous() for n, t in model.files(load_file(file)).items()}, file, {"format": "pt"})
    config = read_config(base)
    built = build_model(config, one_process, torch.float32, adapters=True)
    load_weights(built.chunks, config, base)
    options = LoraOptions(lora_rank=RANK, lora_alpha=2 * RANK, lora_dropout=0.0)
    attach_adapters(built, config, LoraSettings.from_options(options), seed=1)
    for folder in (adapter, merged):
        folder.mkdir()
    save_adapter(built.chunks, config, built.lora, adapter, base=str(base))
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(adapter / "adapter_model.safetensors")
    random = {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    assert any(".experts." in name for name in random)
    save_file(random, adapter / "adapter_model.safetensors", {"format": "pt"})
    load_adapter(built.chunks, config, built.lora, adapter)
    save_weights(built.chunks, config, base, merged, merge=True, dtype=torch.float32, max_shard_bytes=10**9)


@torch.no_grad()
def greedy(root: Path, prompts: Tokens, model: Tiny, *, adapted: bool) -> list[Greedy]:
    """Return what transformers generates in fp32 for each prompt."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if model.model else AutoModelForCausalLM
    network: Any = kind.from_pretrained(root / "base", dtype=torch.float32, attn_implementation="eager")
    if adapted:
        network = PeftModel.from_pretrained(network, str(root / "adapter"))
    network.eval()
    answers = []
    for prompt in prompts:
        tokens, gaps = [], []
        for _ in range(NEW_TOKENS):
            logits = network(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
            best = logits.topk(2)
            gaps.append(float((best.values[0] - best.values[1]) / logits.std()))
            tokens.append(int(best.indices[0]))
        answers.append(Greedy(tokens, gaps))
    return answers


def count_equal(expected: list[Greedy], tokens: Tokens) -> int:
    """Return the number of equal tokens in front of the first difference of each answer, which is near a tie."""
    count = 0
    for (own, gaps), answer in zip(expected, tokens, strict=True):
        differs = next((place for place in range(NEW_TOKENS) if own[place] != answer[place]), NEW_TOKENS)
        assert min(gaps[differs : differs + 1], default=0) < NEAR_TIE, (own, answer, gaps)
        count += differs
    return count


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_peft_and_of_the_merged_folder(name: str, answers) -> None:
    expected, adapted, merged, without = answers(name)
    counts = count_equal(expected, merged), count_equal(expected, adapted)
    print(f"\n{name}: {counts} of {len(expected) * NEW_TOKENS} tokens are equal; {adapted == merged=}")
    assert min(counts) > 24
    assert all(one.tokens != other.tokens for one, other in zip(expected, without, strict=True))
    assert len({token for one in expected for token in one.tokens}) > 10  # one that says one thing proves nothing


def test_a_difference_that_is_no_tie_is_seen() -> None:
    expected = [Greedy([1] * NEW_TOKENS, [0.5] * NEW_TOKENS)]
    with pytest.raises(AssertionError):
        count_equal(expected, [[1] * (NEW_TOKENS - 1) + [2]])
