"""Adapters alone to vLLM, on the CPU: in the trainer's processes and behind servers, beside the merged model.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from megaswift.tasks.rollout.client import ServerEngine
from megaswift.tasks.rollout.server_connection import ClientSettings
from megaswift.tasks.rollout.weight_sync import checksum, scaled

from tests import tiny
from tests.bridge.checkpoint.test_vllm import PYTHON, SHAPE
from tests.prepared import ON_CPU, ROOT
from tests.tasks.rollout.test_vllm import CLOSE
from tests.tasks.rollout.test_vllm_server import check, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
ADAPTER = {"lora_rank": 5, "lora_alpha": 10, "lora_dropout": 0.0}  # vLLM makes room for 8
SOME = {"use_rslora": True, "target_modules": ["q_proj", "v_proj", "linear_fc1"]}  # none of o, k, down
# processes, the trainer's layout, the adapter, ranks of an engine
CASES = {
    "one process": (1, {}, ADAPTER, 1),
    "an engine on each of two ranks": (2, {"tensor_model_parallel_size": 2}, ADAPTER | SOME, 1),
    "an engine over two ranks": (2, {"pipeline_model_parallel_size": 2}, ADAPTER, 2),
}


def launch(root: Path, family: str, case: str) -> subprocess.CompletedProcess[str]:
    processes, options, lora, ranks = CASES[case]
    tiny.save_tokenizer(tiny.save(root / "model", family, **SHAPE))
    job = {"model": str(root / "model"), "options": options, "lora": lora, "ranks": ranks}
    (root / "job.json").write_text(json.dumps(job))
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.tasks.rollout.adapter_worker"]
    return subprocess.run(
        [*command, root / "job.json", root / "results.json"],
        cwd=ROOT,
        env=dict(os.environ) | ON_CPU,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module", params=CASES)
def found(request, tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("vllm")
    done = launch(root, "qwen3", request.param)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((root / "results.json").read_text())


def test_it_says_what_the_merged_model_says(found) -> None:
    """Check the first adapter, and the one that replaced it."""
    assert found["greedy"] == [[True, True]] * len(found["greedy"])
    assert max(max(rank) for rank in found["log_probs"]) < CLOSE


def test_little_is_sent_and_compared(found) -> None:
    assert max(max(rank) for rank in found["bytes"]) < min(found["whole"]) / 4
    assert min(min(rank) for rank in found["compared"]) > 8
    assert min(found["beneath"]) > 8


def test_what_is_not_what_was_sent_is_named(found) -> None:
    assert all("lora_B.weight is not what was sent" in text for text in found["spoilt"])
    assert all("Qwen3ForCausalLM does not support adapters of model.norm" in text for text in found["homeless"])
    assert all("--vllm_max_lora_rank 8: an adapter of rank 9 has arrived" in text for text in found["high"])


def test_experts_on_a_cpu(tmp_path) -> None:
    """vLLM itself would end in an assertion."""
    done = launch(tmp_path, "qwen3_moe", "one process")
    assert done.returncode != 0
    assert "vLLM's CPU build does not support adapters in a model with experts" in done.stderr


def adapted(folder: Path, seed: int):
    """PEFT's model with a random adapter: its tensors by name, by what its product is multiplied, and both as one."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=5, lora_alpha=10, target_modules=["q_proj", "o_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return get_peft_model_state_dict(model), model.merge_and_unload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tiny.save(tmp_path_factory.mktemp("served"), "qwen3", **SHAPE)
    tiny.save_tokenizer(folder)
    return folder


def test_two_servers_one_of_two_engines(folder) -> None:
    """Side by side they are given adapters, by whichever way: what each of them says is what PEFT's model says."""
    rooms = {"vllm_enable_lora": True, "vllm_max_lora_rank": 8}
    with running(folder, **rooms, vllm_data_parallel_size=2) as first, running(folder, **rooms) as second:
        client = ServerEngine(
            [first.url, second.url], ClientSettings(timeout=900.0, bucket_bytes=40_000, adapter_rank=5)
        )
        try:
            for seed, way in enumerate(("body", "shared", "group")):
                tensors, model = adapted(folder, seed)
                client._transport = way
                client.update(scaled(tensors.items(), 2.0, torch.float32))
                check(client, model, times=2)
                found = client.checksums(list(tensors))
                assert found == {name: checksum(t) for name, t in scaled(tensors.items(), 2.0, torch.float32)}
        finally:
            client.close()
        for adapters, said in ((9, "have at most rank 8, not 9"), (0, "takes only adapters")):
            with pytest.raises(ValueError, match=said):
                ServerEngine([second.url], ClientSettings(timeout=60.0, adapter_rank=adapters))
