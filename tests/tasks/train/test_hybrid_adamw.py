"""AdamW with its state on the host or in narrow types: the numbers of AdamW, or of the types' own rounding."""

import copy
import json

import pytest
import torch
from megaswift.bridge import pinned_memory
from megaswift.bridge.model.build import build_model
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import SftOptions
from megaswift.tasks.train import device_visits, hybrid_adamw
from megaswift.tasks.train.hybrid_adamw import HybridAdamW, StatePlacement, check_host_memory
from megaswift.tasks.train.optimizer import (
    build_optimizer,
    chained_optimizers,
    copy_masters_to_model,
    shards,
    update,
    wrap_for_data_parallelism,
)
from safetensors.torch import load_file
from torch import Tensor

from tests import tiny
from tests.torchrun import torchrun

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((30, 70), (5,), (0,), (900,))
HOST = {"optimizer_cpu_offload": True}
HALF_HOST = HOST | {"optimizer_offload_fraction": 0.5}
NONE_HOST = HOST | {"optimizer_offload_fraction": 0.0}
BF16 = {"torch_dtype": "bfloat16"}
ZERO = {"use_distributed_optimizer": True}
ACTIVATIONS = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = LAYERS | {"recompute_method": "block", "recompute_num_layers": 2}
PP2 = {"pipeline_model_parallel_size": 2}
# name: (processes, flags of a run, those of the run that gives the same numbers)
RUNS = {
    "none": (1, NONE_HOST, {}),
    "half": (1, HALF_HOST, {}),
    "all": (1, HOST, {}),
    "bf16, all": (1, BF16 | HOST, BF16),
    "bf16, half": (1, BF16 | HALF_HOST, BF16),
    "activations": (1, ACTIVATIONS, {}),
    "activations of all layers, all": (1, ACTIVATIONS | HOST | {"cpu_offloading_num_layers": 4}, {}),
    "recomputed, activations": (1, ACTIVATIONS | LAYERS, {}),
    "recomputed in pairs, activations of all": (
        1,
        LAYERS | {"recompute_num_layers": 2, "cpu_offloading": True, "cpu_offloading_num_layers": 4},
        {},
    ),
    "two recomputed, activations": (1, ACTIVATIONS | BLOCK, {}),
    "PP2, recomputed, activations": (2, ACTIVATIONS | LAYERS | PP2, PP2),
    "DP2 ZeRO-1, half": (2, ZERO | HALF_HOST, ZERO),
    "DP2 ZeRO-1 bf16, all": (2, ZERO | BF16 | HOST, ZERO | BF16),
    "DP2, none": (2, NONE_HOST, {}),
    "DP2, all": (2, HOST, {}),
    "PP2, activations": (2, ACTIVATIONS | PP2, PP2),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(device_visits, "BUCKET", 512)
    monkeypatch.setattr(hybrid_adamw, "DEVICE_BUCKET", 512)


def parameters() -> tuple[list[Tensor], dict[Tensor, Tensor]]:
    """Two masters without storage with their bf16 parameters, an empty tensor, and an fp32 parameter."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    copies = {value: value.bfloat16() for value in values[:2]}
    for master in copies:
        master.untyped_storage().resize_(0)
    return values, copies


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** (seed - 2) for shape in SHAPES]


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    [group] = optimizer.param_groups
    for parameter, gradient in zip(group["params"], gradients(seed), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def states(optimizer: HybridAdamW) -> list[dict[str, Tensor]]:
    return [optimizer.plain_state(parameter)[0] for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_states_are_those_of_torch(fraction):
    values, copies = parameters()
    placement = StatePlacement(fraction, exp_avg="fp32", exp_avg_sq="fp32")
    optimizer = HybridAdamW([{"params": values}], copies, placement, **SETTINGS)
    reference = [(copies[value].float() if value in copies else value.clone()).requires_grad_() for value in values]
    torch_adamw = torch.optim.AdamW(reference, **SETTINGS)
    hosted = sum(parameter.numel() for parameter in optimizer._on_host)
    assert hosted <= fraction * sum(map(torch.numel, values))
    assert bool(hosted) == bool(fraction)
    for seed in range(4):
        step(optimizer, seed)
        step(torch_adamw, seed)
    for parameter, expected, state in zip(values, reference, states(optimizer), strict=True):
        master = state["param"] if parameter in copies else parameter
        torch.testing.assert_close(master.flatten(), expected.detach().flatten(), rtol=1e-6, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq"):
            expected_state = torch_adamw.state[expected].get(name, torch.zeros(0)).flatten()
            torch.testing.assert_close(state[name], expected_state, rtol=1e-6, atol=1e-12)
        if parameter in copies:
            assert torch.equal(copies[parameter].flatten(), master.bfloat16())


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_bf16_moments_are_rounded_once_a_step(fraction):
    """By hand: moments are read from bf16, updated in fp32, used, and rounded to nearest even."""
    values, copies = parameters()
    weights = [copies[value].float() if value in copies else value.clone() for value in values]
    optimizer = HybridAdamW([{"params": values}], copies, StatePlacement(fraction, "bf16", "bf16"), **SETTINGS)
    means, squares = ([torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES] for _ in range(2))
    (beta1, beta2), rate, eps = SETTINGS["betas"], SETTINGS["lr"], SETTINGS["eps"]
    for number in range(3):
        step(optimizer, number)
        for weight, mean, square, gradient in zip(weights, means, squares, gradients(number), strict=True):
            mean32 = mean.float() + (gradient - mean.float()) * (1 - beta1)
            square32 = square.float() * beta2 + gradient * gradient * (1 - beta2)
            denominator = (square32 / (1 - beta2 ** (number + 1))).sqrt() + eps
            weight.mul_(1 - rate * SETTINGS["weight_decay"])
            weight.sub_(rate / (1 - beta1 ** (number + 1)) * mean32 / denominator)
            mean.copy_(mean32)
            square.copy_(square32)
    for parameter, weight, mean, square, state in zip(values, weights, means, squares, states(optimizer), strict=True):
        master = state["param"] if parameter in copies else parameter
        # fp32 arithmetic in another order moves a few values over a rounding boundary of bf16.
        torch.testing.assert_close(master.flatten(), weight.flatten(), rtol=1e-4, atol=1e-5)
        for stored, expected in ((state["exp_avg"], mean), (state["exp_avg_sq"], square)):
            assert stored.dtype == torch.bfloat16
            assert (stored != expected.flatten()).sum() <= len(stored) // 100
            torch.testing.assert_close(stored, expected.flatten(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_scaled_states_stay_near_those_in_fp32(dtype, fraction):
    """The error of a weight is a share of the distance that it moved."""
    moved = []
    for placement in (StatePlacement(fraction), StatePlacement(fraction, dtype, dtype, "fp16")):
        values, copies = parameters()
        optimizer = HybridAdamW([{"params": values}], copies, placement, **SETTINGS)
        start = [states(optimizer)[0]["param"].clone(), values[3].clone()]
        for seed in range(4):
            step(optimizer, seed)
        moved.append([states(optimizer)[0]["param"] - start[0], values[3] - start[1]])
    for exact, rounded in zip(*moved, strict=True):
        error = float((rounded - exact).norm() / exact.norm())
        assert 0 < error < {"fp16": 0.05, "fp8": 0.15}[dtype]


@pytest.mark.parametrize("placement", [StatePlacement(1.0, "fp8", "bf16"), StatePlacement(0.5, "fp16", "fp8", "fp16")])
def test_nothing_changes_where_the_norm_is_not_finite(placement):
    values, copies = parameters()
    optimizer = HybridAdamW([{"params": values}], copies, placement, **SETTINGS)
    step(optimizer, 0)
    before = copy.deepcopy((states(optimizer), list(copies.values()), values[2:]))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(torch.nan), torch.tensor(1.0)
    step(optimizer, 1)
    after = (states(optimizer), list(copies.values()), values[2:])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("types", [(), ("bf16", "fp8", "fp16")])
def test_states_that_visit_the_device_are_those_that_stay(types):
    """The arithmetic is the same. Bits are equal, but for masters beside bf16 copies (state_tensor.py)."""
    found = []
    for fraction in (0.0, 0.6, 1.0):
        values, copies = parameters()
        optimizer = HybridAdamW([{"params": values}], copies, StatePlacement(fraction, *types), **SETTINGS)
        for seed in range(3):
            step(optimizer, seed)
        found.append((states(optimizer), list(copies.values()), values[2:]))
    tolerance = 0 if types else 2**-22
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=tolerance, atol=0)


@pytest.mark.parametrize("direction", ["arrive", "leave"])
def test_a_state_that_does_not_travel_is_seen(direction, monkeypatch):
    copy_states = device_visits._copy_states
    found = []
    for fails in (False, True):
        values, copies = parameters()
        optimizer = HybridAdamW([{"params": values}], copies, StatePlacement(1.0), **SETTINGS)
        on_host = {state.values.data_ptr() for parts in optimizer._states.values() for state in parts.values()}

        def copy_some(sources, targets, fails=fails, on_host=on_host):
            leaves = any(state.values.data_ptr() in on_host for state in targets.values())
            if not fails or leaves != (direction == "leave"):
                copy_states(sources, targets)

        monkeypatch.setattr(device_visits, "_copy_states", copy_some)
        for seed in range(3):
            step(optimizer, seed)
        found.append(copies[values[0]])
    assert not torch.equal(*found)


def test_pinned_memory_is_divided():
    allocator = pinned_memory.PinnedAllocator("--flag")
    tensors = [
        allocator.zeros(size, dtype) for size, dtype in ((5, torch.float32), (300, torch.int8), (0, torch.float32))
    ]
    tensors.append(allocator.zeros(pinned_memory.BLOCK // 4, torch.float32))  # does not fit into the rest
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        assert tensor.data_ptr() % 16 == 0
        tensor.fill_(number + 1)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [], [4]]


def test_masters_take_no_memory_beside_the_states(alone):
    options = compose(SftOptions, lr=1e-3, use_distributed_optimizer=True, exp_avg_dtype="bf16", **HALF_HOST)
    model = build_model(tiny.config("qwen3").to_dict(), options.build, torch.bfloat16)
    chunks = wrap_for_data_parallelism(model, options.build)
    optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule)
    [part] = chained_optimizers(optimizer)
    hosted = part.optimizer._on_host
    masters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    assert 0 < len(hosted) < len(masters)
    for master in masters:
        size = 0 if master in hosted else 4 * master.numel()
        assert master.untyped_storage().nbytes() == size
        assert part.optimizer.state[master]["exp_avg"].dtype == torch.bfloat16
        assert part.optimizer.state[master]["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("distributed", [False, True])
def test_narrow_moments_of_weights_that_megatron_core_writes(alone, distributed):
    """FP8 weights are written from the masters by megatron-core, after AdamW. Here it writes bf16."""
    options = compose(
        SftOptions, lr=1e-2, use_distributed_optimizer=distributed, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
    )
    runs = []
    for in_fp8 in (False, True):
        torch.manual_seed(0)
        model = build_model(tiny.config("qwen3").to_dict(), options.build, torch.bfloat16)
        with torch.no_grad():
            for parameter in model.chunks[0].parameters():
                parameter.normal_(std=0.1)
        chunks = wrap_for_data_parallelism(model, options.build)
        model.config.fp8_param = in_fp8
        optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.chunks[0].parameters():
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))  # type: ignore[attr-defined]
            update(optimizer, 1.0)
        weights = [parameter.detach().clone() for parameter in model.chunks[0].parameters()]
        states = [shard.state for shard in shards(optimizer)]
        runs.append((weights, states))
        # As when a checkpoint has been read into the states.
        for shard in shards(optimizer):
            shard.state["param"].add_(1.0)
            shard.store()
        copy_masters_to_model(optimizer, chunks)
        for parameter, weight in zip(model.chunks[0].parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.float(), weight.float() + 1, rtol=2**-7, atol=1e-2)
    (weights, states), (fp8_weights, fp8_states) = runs
    assert all(torch.equal(a, b) for a, b in zip(weights, fp8_weights, strict=True))
    for state, fp8_state in zip(states, fp8_states, strict=True):
        assert state.keys() == fp8_state.keys() == {"exp_avg", "exp_avg_sq", "param"}
        assert state["exp_avg"].dtype == fp8_state["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(state["exp_avg"], fp8_state["exp_avg"])


def test_masters_in_fp16_of_weights_in_fp32_are_refused(alone):
    options = compose(SftOptions, lr=1e-3, main_params_dtype="fp16")
    model = build_model(tiny.config("qwen3").to_dict(), options.build, torch.float32)
    chunks = wrap_for_data_parallelism(model, options.build)
    with pytest.raises(ValueError, match=r"--main_params_dtype fp16: weights in fp32 have no masters\. Remove it"):
        build_optimizer(model, chunks, options.optimizer, options.schedule)


def test_too_little_host_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(hybrid_adamw, "available_host_memory", lambda: 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_host_memory(StatePlacement(1.0), 2**25, torch.bfloat16)
    with pytest.raises(ValueError, match=r"needs 1\.2 GiB of this machine's memory, and 1\.0 GiB are free\. Lower"):
        check_host_memory(StatePlacement(1.0), 2**26, torch.bfloat16)
    with pytest.raises(ValueError, match=r"needs 1\.5 GiB"):  # masters in fp32 beside weights in fp16
        check_host_memory(StatePlacement(1.0), 2**26, torch.float16)
    check_host_memory(StatePlacement(0.5), 2**26, torch.bfloat16)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of RUNS, of the runs that they are compared with ("plain ..."), and of one with a fault."""
    folder = tmp_path_factory.mktemp("offload")
    model, results = tiny.save(folder / "qwen3", "qwen3"), {}
    for world in (1, 2):
        jobs = []
        for name, (processes, flags, plain) in RUNS.items():
            if processes == world:
                runs = {name: flags, f"plain {name}": plain}
                jobs += [
                    {"name": run, "model": str(model), "options": {"packing": True} | each, "save": str(folder / run)}
                    for run, each in runs.items()
                ]
        fault = {"name": f"fault {world}", "model": str(model), "loses_bucket": True}
        jobs.append(fault | {"options": {"packing": True} | HOST})
        inputs, outputs = folder / "jobs.json", folder / f"results-{world}.json"
        inputs.write_text(json.dumps(jobs))
        done = torchrun("tests.tasks.train.offload_worker", inputs, outputs, processes=world)
        assert outputs.exists(), f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        results |= json.loads(outputs.read_text())
    return folder, results


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_trains_as_without_offload(name, results):
    folder, runs = results
    run, plain = runs[name], runs[f"plain {name}"]
    assert "error" not in run, run["error"]
    assert run["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert run["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-6)
    assert (run["copies"] > 0) == ("activations" in name)
    files, plain_files = (sorted((folder / each).glob("*.safetensors")) for each in (name, f"plain {name}"))
    assert len(files) == len(plain_files) > 0
    for file, plain_file in zip(files, plain_files, strict=True):
        weights, expected = load_file(file), load_file(plain_file)
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "plain"), [(1, "plain all"), (2, "plain DP2, all")])
def test_a_lost_bucket_is_seen(world, plain, results):
    runs = results[1]
    assert runs[f"fault {world}"]["losses"] != pytest.approx(runs[plain]["losses"], rel=1e-5)
