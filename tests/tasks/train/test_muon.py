"""Muon beside megatron-core's own, which uses emerging-optimizers; and in every layout beside one process."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from megaswift.bridge.model.build import build_model
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import SftOptions
from megaswift.tasks.rollout.memory_budget import _state_bytes
from megaswift.tasks.train.optimizer import build_optimizer, build_schedule, update, wrap_for_data_parallelism
from megaswift.tasks.train.step import TrainState
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from safetensors.torch import load_file

from tests import tiny
from tests.layouts.launch import launch
from tests.layouts.test_layouts import CP, EP, ETP, PP, SP, TP, VPP
from tests.selection import selected_params

RATES = {"lr": 0.01, "min_lr": 0.001, "weight_decay": 0.1, "clip_grad": 0.0, "use_distributed_optimizer": False}
# What our options are in megatron-core's config.
NAMES = {"muon_use_nesterov": "muon_nesterov"}
BOUND = 5e-5  # relative: the iteration magnifies what is small in a gradient


def training(family: str, dtype=torch.float32, **flags):
    options = compose(SftOptions, model="m", **{"optimizer": "muon"} | RATES | flags)
    model = build_model(tiny.config(family).to_dict(), options.build, dtype)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.chunks[0].parameters():
            parameter.normal_(std=0.2)
    return options, model, wrap_for_data_parallelism(model, options.build)


def set_gradients(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.chunks[0].parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))


def take_steps(model, step) -> dict[str, torch.Tensor]:
    for number in range(3):
        set_gradients(model, number)
        step()
    return {name: parameter.detach().clone() for name, parameter in model.chunks[0].named_parameters()}


def ours(family, dtype=torch.float32, **flags):
    options, model, chunks = training(family, dtype, **flags)
    optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule)
    build_schedule(optimizer, options.schedule, options.optimizer.weight_decay, 10).step(0)
    return take_steps(model, lambda: update(optimizer, options.optimizer.clip_grad)), optimizer, model


def megatrons(family, dtype=torch.float32, **flags):
    options, model, chunks = training(family, dtype, **flags)
    values = {name: value for name, value in vars(options.optimizer).items() if name.startswith("muon_")}
    values = {NAMES.get(name, name): value for name, value in values.items() if name not in ("muon_lr", "muon_min_lr")}
    config = OptimizerConfig(
        optimizer="muon", lr=RATES["lr"], weight_decay=RATES["weight_decay"], clip_grad=0.0, adam_beta1=0.9,
        adam_beta2=0.95, adam_eps=1e-8, bf16=dtype == torch.bfloat16, params_dtype=dtype, **values,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = RATES["lr"], RATES["weight_decay"] * group["wd_mult"]
    return take_steps(model, optimizer.step)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3", {}),
        ("qwen3", {"muon_use_nesterov": True, "muon_momentum": 0.8, "muon_scale_mode": "unit_rms_norm"}),
        ("qwen3", {"muon_split_qkv": False, "muon_num_ns_steps": 3, "muon_coefficient_type": "polar_express"}),
        ("qwen3", {"muon_fp32_matmul_prec": "highest", "muon_extra_scale_factor": 0.2}),
        ("qwen2", {"muon_scale_mode": "shape_scaling", "dtype": torch.bfloat16}),
        ("qwen3_next", {}),
        ("deepseek_v2", {}),
    ],
)
def test_a_step_is_megatron_cores_bit_for_bit(family, flags, alone):
    found, optimizer, _ = ours(family, **flags)
    expected = megatrons(family, **flags)
    buffers = [state for part in optimizer.chained_optimizers for state in part.optimizer.state.values()]
    assert any("momentum_buffer" in state for state in buffers)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if "layers" in name and value.ndim == 2 and name.endswith("weight"):
            assert torch.equal(found[name], value), name
        elif ".experts." not in name:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_experts_are_matrices_of_their_own(alone):
    """Each expert moves as the wheel's Muon moves it alone."""
    found, _, model = ours("qwen3_moe")
    _, before, _ = training("qwen3_moe")
    names = [name for name, _ in before.chunks[0].named_parameters() if ".experts." in name]
    assert len(names) == 6
    tensors = dict(before.chunks[0].named_parameters())
    for name in names:
        copies = [torch.nn.Parameter(expert.detach().clone()) for expert in tensors[name]]
        reference = Muon(copies, lr=RATES["lr"], momentum=0.9, weight_decay=RATES["weight_decay"])
        for number in range(3):
            set_gradients(model, number)
            for copy, gradient in zip(copies, dict(model.chunks[0].named_parameters())[name].main_grad, strict=True):
                copy.grad = gradient.clone()
            reference.step()
        torch.testing.assert_close(found[name], torch.stack(copies).detach(), rtol=0, atol=2e-3 * RATES["lr"])


def test_what_is_no_matrix_is_adamws(alone):
    _, optimizer, model = ours("qwen3_next")
    names = {id(parameter): name for name, parameter in model.chunks[0].named_parameters()}
    [states] = [part.optimizer.state for part in optimizer.chained_optimizers]
    adams = {names[id(parameter)] for parameter, state in states.items() if "exp_avg" in state}
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= adams
    assert any(name.endswith("conv1d.weight") for name in adams)
    assert any(name.endswith("linear_qkv.layer_norm_weight") or "layernorm" in name for name in adams)
    others = [name for name in names.values() if name not in adams]
    assert all(".layers." in name and name.endswith("weight") for name in others)
    assert any(".experts." in name for name in others)
    assert any("router" in name for name in others)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_its_memory_is_what_rollouts_leave_for_it(family, alone):
    _, optimizer, model = ours(family)
    options, *_ = training(family)
    for part in optimizer.chained_optimizers:
        for parameter, state in part.optimizer.state.items():
            size = sum(tensor.nbytes for tensor in state.values())
            assert size == parameter.numel() * _state_bytes(parameter, options, model.groups)


def test_a_step_is_clipped_and_one_that_is_not_finite_changes_nothing(alone):
    options, model, chunks = training("qwen3", muon_lr=0.05, muon_min_lr=0.02)
    optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule)
    schedule = build_schedule(optimizer, options.schedule, 0.1, 10)
    schedule.step(0)
    rates = {
        group.get("muon", False): (pytest.approx(group["lr"]), group["min_lr"]) for group in optimizer.param_groups
    }
    assert rates == {True: (0.05, 0.02), False: (0.01, 0.001)}
    state = TrainState(model, chunks, optimizer, schedule, 1.0)
    assert state.learning_rate == pytest.approx(0.01)

    def all_values() -> list[torch.Tensor]:
        states = [value for part in optimizer.chained_optimizers for value in part.optimizer.state.values()]
        return [*model.chunks[0].parameters(), *(tensor for each in states for tensor in each.values())]

    set_gradients(model, 0)
    update(optimizer, 1.0)
    before = [value.detach().clone() for value in all_values()]
    set_gradients(model, 1)
    next(iter(model.chunks[0].parameters())).main_grad[0, 0] = torch.nan
    norm, _ = update(optimizer, 1.0)
    assert not norm.isfinite()
    assert all(torch.equal(*pair) for pair in zip(before, all_values(), strict=True))
    # Clipped to a norm of 1, gradients leave a momentum of (1 - 0.9) of it.
    set_gradients(model, 0)
    squares = sum(parameter.main_grad.square().sum() for parameter in model.chunks[0].parameters())
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    weight = dict(model.chunks[0].named_parameters())[name]
    [part] = optimizer.chained_optimizers
    torch.testing.assert_close(part.optimizer.state[weight]["momentum_buffer"], 0.1 * weight.main_grad / squares.sqrt())


EXACT = {"muon_fp32_matmul_prec": "highest", "lr": 0.0003}
MUON, DIST = EXACT | {"optimizer": "muon"}, EXACT | {"optimizer": "dist_muon"}
SHARDS = {"muon_tp_mode": "distributed"}
LAYOUTS = {
    "qwen3 TP2 SP": ("qwen3", MUON | {TP: 2, SP: True}),
    "qwen3 TP2 distributed": ("qwen3", MUON | SHARDS | {TP: 2}),
    "qwen3 PP2 VPP2": ("qwen3", MUON | {PP: 2, VPP: 2}),
    "qwen3 CP2": ("qwen3", MUON | {CP: 2}),
    "qwen3 DP2": ("qwen3", DIST),
    "qwen3_moe DP2 EP2": ("qwen3_moe", DIST | {EP: 2}),
    "qwen3_moe TP2 SP ETP2": ("qwen3_moe", MUON | {TP: 2, SP: True, ETP: 2}),
    "qwen3_moe TP2 SP ETP2 distributed": ("qwen3_moe", MUON | SHARDS | {TP: 2, SP: True, ETP: 2}),
    "qwen3_moe TP2 SP EP2": ("qwen3_moe", DIST | {TP: 2, SP: True, EP: 2}),
    "deepseek_v2 TP2 SP": ("deepseek_v2", MUON | {TP: 2, SP: True}),
    "qwen3_next TP2 SP": ("qwen3_next", MUON | {TP: 2, SP: True}),
    "qwen3_next CP2": ("qwen3_next", DIST | {CP: 2}),
    "a shard alone": ("qwen3", MUON | {TP: 2, "muon_tp_mode": "blockwise"}),
}


DEFAULT = ("qwen3 TP2 SP", "qwen3_moe DP2 EP2", "a shard alone")


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """What each selected layout gave, and its family in one process."""
    folder, found = tmp_path_factory.mktemp("muon"), {}
    names = [params["name"] for params in selected_params(request) if "name" in params]
    layouts = {name: LAYOUTS[name] for name in names}
    for family, _ in layouts.values():
        if not (folder / family).exists():
            tiny.save(folder / family, family)
    for world, jobs in ((1, {family: (family, MUON) for family, _ in layouts.values()}), (2, layouts)):
        found |= launch(
            world,
            [
                {"name": name, "model": str(folder / family), "options": {"packing": True} | flags,
                 "save": str(folder / f"saved {name}")}
                for name, (family, flags) in jobs.items()
            ],
            folder / f"world-{world}",
        )  # fmt: skip
    for name, result in found.items():
        assert "error" not in result, f"{name}: {result['error']}"
        files = (folder / f"saved {name}").glob("*.safetensors")
        result["parameters"] = {key: value for file in files for key, value in load_file(file).items()}
    return found


def distance(result, reference) -> float:
    """The largest difference of losses and parameters, relative to the largest value."""
    pairs = [(torch.tensor(result["losses"]), torch.tensor(reference["losses"]))]
    parameters, expected = result["parameters"], reference["parameters"]
    assert parameters.keys() == expected.keys()
    pairs += [(parameters[key], expected[key]) for key in expected]
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long) for name in LAYOUTS]
)
def test_a_layout_gives_the_numbers_of_one_process(name, results):
    found = distance(results[name], results[LAYOUTS[name][0]])
    if name == "a shard alone":
        assert found > 20 * BOUND  # it is another update
    else:
        assert found < BOUND
