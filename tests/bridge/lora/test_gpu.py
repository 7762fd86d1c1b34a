"""On GPUs: adapters train beside Transformer Engine's layers and ours as PEFT's do on a CPU in fp32.

pytest -m gpu tests/bridge/lora/test_gpu.py -s      # prints what was measured; two GPUs for some of it
"""

import numpy as np
import pytest
import torch
from megaswift.bridge.lora.layers import ExpertsAdapter, MatrixSharding
from safetensors.torch import load_file
from torch.distributed import ProcessGroup

from tests.bridge.lora.launched import Launched
from tests.layouts.test_layouts import EP, ETP, FULL, SP, TP

pytestmark = pytest.mark.gpu
BF16, LOCAL = {"torch_dtype": "bfloat16"}, {"transformer_impl": "local"}
ENGINE = BF16 | {"transformer_impl": "transformer_engine"}
RECOMPUTE = FULL | {"recompute_method": "uniform"}
LAYOUTS = {
    "bf16": (1, BF16),  # our layers; Transformer Engine's attention where heads have a multiple of eight
    "bf16 TE": (1, ENGINE),
    "bf16 local": (1, BF16 | LOCAL),
    "bf16 beside fp32": (1, BF16 | {"lora_dtype": "float32"}),
    "bf16 recompute": (1, BF16 | RECOMPUTE),
    "bf16 TE recompute": (1, ENGINE | RECOMPUTE),
    "fp32 local": (1, LOCAL),
    "FP8 TE": (1, ENGINE | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}),
    "fp32 local TP2 SP": (2, LOCAL | {TP: 2, SP: True}),
    "bf16 TP2 SP": (2, BF16 | {TP: 2, SP: True}),
    "bf16 TE TP2 SP": (2, ENGINE | {TP: 2, SP: True}),
    "fp32 local EP2": (2, LOCAL | {EP: 2}),
    "bf16 EP2": (2, BF16 | {EP: 2}),
    "bf16 TE TP2 SP EP2": (2, ENGINE | {TP: 2, SP: True, EP: 2, ETP: 1}),
}
EVERY, TWO = ("bf16", "bf16 TE", "bf16 local", "fp32 local"), ("fp32 local TP2 SP", "bf16 TP2 SP", "bf16 TE TP2 SP")
SPREAD = ("fp32 local EP2", "bf16 EP2", "bf16 TE TP2 SP EP2")
WHERE = {  # all with rank 3
    "qwen3": (*EVERY, "bf16 beside fp32", "bf16 recompute", "bf16 TE recompute", *TWO),
    "embedding": ("bf16 beside fp32", "fp32 local"),  # an embedding's adapters are about 1: in bf16 all is rounding
    "DoRA": (*EVERY, "bf16 TE recompute", *TWO),
    "all biases": (*EVERY, "bf16 TE recompute", *TWO),
    "experts": (*EVERY, "bf16 beside fp32", "bf16 TE recompute", *SPREAD),
    "experts and routers": (*EVERY, "bf16 recompute", *SPREAD),
    "stacked experts": (*EVERY, "bf16 recompute", *SPREAD),
    "stacked experts and MLPs": (*EVERY, *SPREAD),
}
TRAINED = [(case, layout) for case, layouts in WHERE.items() for layout in layouts]
FP8 = [(case, "FP8 TE") for case in ("qwen3", "DoRA")]
UNWATCHED = [
    (case, layout) for case in ("qwen3", "DoRA", "embedding", "experts and routers") for layout in ("bf16", "bf16 TE")
]
FAULTS = {
    "scaling": ("qwen3", "bf16"),
    "swapped": ("qwen3", "bf16 TE"),
    "shard": ("qwen3", "bf16 TE"),
    "doubled": ("all biases", "bf16 TE"),
    "lost": ("all biases", "bf16 TE"),
    "experts": ("experts and routers", "bf16"),
}
WAYS = {
    "trained": ({}, TRAINED + FP8),
    "unwatched": ({"unwatched": True, "steps": 1}, UNWATCHED),
    **{fault: ({"planted": fault}, [place]) for fault, place in FAULTS.items()},
}
# Bounds of losses and gradient norms (relative), of log-probabilities (mean), and of adapters and biases (how far they
# are from the reference's, over how far these have moved; in bf16 most of it is their own rounding).
EXACT, ROUNDED = (1e-4, 1e-4, 1e-4, 1e-3), (1e-2, 4e-2, 8e-2, 4e-1)
BIASED = (1e-2, 2.5e-2, 8e-2, 4e-1)  # q's, k's and v's biases have a twentieth of the gradient norm
ROUTED = (2e-2, 8e-2, 3e-1, 8e-1)  # of bf16 through experts: rounding sends some tokens to others
IN_FP8 = 5e-2  # of losses from bf16's, relative


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    return Launched(tmp_path_factory.mktemp("lora"), LAYOUTS, WAYS, gpu=True)


def result_of(launched: Launched, case: str, layout: str, way: str = "trained") -> dict:
    world = LAYOUTS[layout][0]
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    result = launched.result(case, layout, way)
    assert ("layers: Transformer Engine" in result["kernels"]) == (" TE" in layout), result["kernels"]
    assert result["base"], "weights of the base have changed"
    assert result["alike"], "ranks that hold the same tensors hold different ones"
    return result


def distances(launched: Launched, case: str, layout: str, way: str = "trained") -> tuple[float, ...]:
    """Of losses, gradient norms, log-probabilities and adapters, as the bounds are."""
    result, expected = result_of(launched, case, layout, way), launched.reference(case)
    losses = np.abs(np.array(result["losses"]) / np.array(expected.losses) - 1).max()
    norms = np.abs(np.array(result["grad_norms"]) / np.array(expected.grad_norms) - 1).max()
    log_probs = np.abs(np.array(result["log_probs"]) - np.array(expected.log_probs)).mean()
    saved, begun = launched.tensors(case, layout, way), load_file(launched.adapter(case) / "adapter_model.safetensors")
    assert saved.keys() == expected.tensors.keys()
    names = [name for name in saved if "lora_" in name or name.endswith("bias")]
    apart = sum((saved[name].float() - expected.tensors[name]).square().sum() for name in names)
    moved = sum((begun[name] - expected.tensors[name]).square().sum() for name in names)
    found = losses, norms, log_probs, float(apart / moved) ** 0.5
    words = zip(("loss", "gradient norm", "log-probabilities", "adapters"), found, strict=True)
    print(f"\n{case}, {way}, {layout}:", ", ".join(f"{word} {value:.1e}" for word, value in words))
    return found


def bounds_of(case: str, layout: str) -> tuple[float, ...]:
    if "fp32 local" in layout:
        return EXACT
    return ROUTED if "experts" in case else BIASED if "biases" in case else ROUNDED


@pytest.mark.parametrize(("case", "layout"), TRAINED)
def test_trains_as_peft_does(case, layout, launched):
    found = distances(launched, case, layout)
    assert all(distance < bound for distance, bound in zip(found, bounds_of(case, layout), strict=True)), found


@pytest.mark.parametrize(("case", "layout"), FP8)
def test_losses_in_fp8_are_those_of_bf16(case, layout, launched):
    losses, exact = (np.array(result_of(launched, case, where)["losses"]) for where in (layout, "bf16 TE"))
    distances(launched, case, layout)
    distance = np.abs(losses / exact - 1).max()
    print(f"from bf16: {distance:.1e}")
    assert 0 < distance < IN_FP8, "0: nothing was in FP8"


@pytest.mark.parametrize(("case", "layout"), UNWATCHED)
def test_the_host_does_not_wait_within_a_step(case, layout, launched):
    result_of(launched, case, layout, "unwatched")


@pytest.mark.parametrize("fault", FAULTS)
def test_sees_a_fault(fault, launched):
    case, layout = FAULTS[fault]
    found, bounds = distances(launched, case, layout, fault), bounds_of(case, layout)
    # Not by the adapters: some faults have moved these to begin with.
    assert max(distance / bound for distance, bound in zip(found[:3], bounds[:3], strict=True)) > 1.5, found


@pytest.mark.parametrize("rank", [3, 8, 11, 64, 67])  # of twice the last, the kernels' tiles would be too large
def test_experts_adapters_in_one_product_are_those_one_by_one(rank):
    """Forward and backward, also of experts that no token has come to."""
    counts = [5, 0, 17, 1, 0, 40, 0]
    device = torch.device("cuda")
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    place = MatrixSharding(None, ProcessGroup, sequence_parallel=False, communicates=False)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    weight = torch.randn(len(counts), 32, 24, device=device)
    parts = torch.eye(2, dtype=torch.bool, device=device).repeat_interleave(16, 0)  # gates and ups
    adapter = ExpertsAdapter(weight, parts, rank, 2.0, torch.float32, place)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter)
    x, grad = (torch.randn(sum(counts), size, device=device) for size in (24, 32))
    found = {}
    for dtype, given in ((torch.float32, counts), (torch.bfloat16, None)):
        _ = [torch.full((1 << 12,), torch.nan, device=device) for _ in range(500)]  # what is left unwritten is these
        inputs = x.to(dtype).requires_grad_()
        output = adapter(inputs, weight.to(dtype), ends, given)
        gradients = torch.autograd.grad(output, [inputs, *adapter.parameters()], grad.to(dtype))
        found[dtype] = [output.detach(), *gradients]
    for name, exact, rounded in zip(("output", "x", "A", "B"), *found.values(), strict=True):
        distance = ((exact - rounded.float()).norm() / exact.norm()).item()
        print(f"\nrank {rank}, {name}: {distance:.1e}")
        assert distance < 2e-2, name
