"""On a GPU: offload gives the numbers of a run without it, and takes the memory that docs/memory.md computes.

pytest -m gpu tests/tasks/train/test_offload_gpu.py -s      # prints what was measured
"""

import json

import pytest

from tests import tiny
from tests.torchrun import torchrun

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
BF16 = {"torch_dtype": "bfloat16"}
HOST = {"optimizer_cpu_offload": True}
HALF = HOST | {"optimizer_offload_fraction": 0.5}
ACTIVATIONS = {"cpu_offloading": True, "cpu_offloading_num_layers": 3}
MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
SCALED = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "main_params_dtype": "fp16"}
SCALES = 3 / 256  # bytes of an element's scales
LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LOCAL = {"transformer_impl": "local"}
# name: (flags, bytes of an element's state on the GPU, the run that has the same losses, bound of relative errors)
RUNS = {
    "plain": (BF16, 12, "plain", 0),
    "host": (BF16 | HOST, 0, "plain", 1e-6),
    "half on the host": (BF16 | HALF, None, "plain", 1e-6),
    "moments in bf16": (BF16 | MOMENTS, 8, "plain", 1e-2),
    "moments in bf16, on the host": (BF16 | MOMENTS | HOST, 0, "moments in bf16", 1e-6),
    "scaled": (BF16 | SCALED, 4 + SCALES, "plain", 3e-2),
    "scaled, on the host": (BF16 | SCALED | HOST, 0, "scaled", 1e-6),
    "activations": (BF16 | ACTIVATIONS, 12, "plain", 1e-3),
    "recomputed layers, activations": (BF16 | ACTIVATIONS | LAYERS, 12, "plain", 1e-3),
    "local layers, activations, host": (BF16 | ACTIVATIONS | HOST | LOCAL, 0, "plain", 1e-2),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    model = tiny.save(folder / "qwen3", "qwen3", **SHAPE)
    jobs = [
        {"name": name, "model": str(model), "options": {"packing": True, "use_distributed_optimizer": True} | flags}
        for name, (flags, *_) in RUNS.items()
    ]
    jobs.insert(0, jobs[0] | {"name": "first"})  # allocates what the process keeps
    [host] = [job for job in jobs if job["name"] == "host"]
    jobs.append(host | {"name": "lost", "loses_bucket": True})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(
        "tests.tasks.train.offload_worker", folder / "jobs.json", folder / "results.json", processes=1, gpu=True
    )
    assert (folder / "results.json").exists(), f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_numbers_and_memory(name, results):
    run, plain, (_, state_bytes, other, bound) = results[name], results["plain"], RUNS[name]
    assert "error" not in run, run["error"]
    elements, saved = run["elements"], (plain["built"] - run["built"]) / run["elements"]
    print(f"{name}: losses {run['losses']}, {run['built'] / elements:.2f} bytes per parameter, {saved:.2f} fewer")
    assert run["losses"] == pytest.approx(results[other]["losses"], rel=bound)
    if state_bytes is None:
        assert 4 < saved < 8
    else:
        assert saved == pytest.approx(12 - state_bytes, abs=0.6)  # the allocator rounds up: 0.5 of 12
    if "host" in name and name != "half on the host":  # masters were never on the GPU together
        assert run["peak"] - run["built"] < 2.5 * elements
    assert (run["copies"] > 0) == ("activations" in name)


def test_a_lost_bucket_is_seen(results):
    assert results["lost"]["losses"][1:] != results["host"]["losses"][1:]
