"""Stacked experts, against each expert written out by itself."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megaswift.bridge import runtime
from megaswift.bridge.layers.experts import GroupedExperts, SharedExperts, repeat_bias
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

COUNTS = [5, 0, 11]  # rows of each expert
HIDDEN, WIDTH = 16, 24


@pytest.fixture(autouse=True, scope="module")
def nothing_is_compiled():
    """megatron-core's quick_gelu would take 15 s."""
    runtime.enable()


def config(**changes):
    settings = {
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "hidden_size": HIDDEN,
        "moe_ffn_hidden_size": WIDTH,
        "moe_grouped_gemm": True,
        "moe_apply_probs_on_input": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "bias_activation_fusion": False,
        "accumulate_in_experts": False,
        "fuse_expert_activation": False,
        "recompute_granularity": None,
        "recompute_modules": None,
        "architecture": SimpleNamespace(expert_bias=True, expert_latent=None),
    }
    return SimpleNamespace(**settings | changes)


def group(rank: int = 0, size: int = 1):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def experts(rank: int = 0, size: int = 1, **changes) -> GroupedExperts:
    groups = SimpleNamespace(ep=group(), tp=group(), expt_tp=group(rank, size))
    module = GroupedExperts(len(COUNTS), config(**changes), groups)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def rows_and_probs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(COUNTS), HIDDEN, generator=generator), torch.rand(sum(COUNTS), generator=generator)


def one_by_one(module: GroupedExperts, rows, probs, inner, *, on_input: bool = False) -> torch.Tensor:
    """`inner`: gate and up -> what lies between an expert's two matrices."""
    expert, outputs = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS)), []
    first, second = module.linear_fc1, module.linear_fc2
    for row, prob, e in zip(rows, probs, expert, strict=True):
        row = row * prob if on_input else row
        gate, up = (first.weight[e] @ row + first.bias[e]).chunk(2)
        output = second.weight[e] @ inner(gate, up) + second.bias[e]
        outputs.append(output if on_input else output * prob)
    return torch.stack(outputs)


def clamped(gate, up):
    """As GPT-OSS has it."""
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize(
    ("changes", "inner"),
    [
        ({}, lambda gate, up: F.silu(gate) * up),
        ({"activation_func": F.gelu}, lambda gate, up: F.gelu(gate) * up),
        (
            {"activation_func": quick_gelu, "activation_func_clamp_value": 2.0, "glu_linear_offset": 1.0},
            clamped,
        ),
        ({"moe_apply_probs_on_input": True}, lambda gate, up: F.silu(gate) * up),
    ],
    ids=["silu", "gelu", "clamped", "weighted inputs"],
)
def test_activations_and_biases(changes, inner):
    module, (rows, probs) = experts(**changes), rows_and_probs()
    found, _ = module(rows, torch.tensor(COUNTS), probs)
    wanted = one_by_one(module, rows, probs, inner, on_input="moe_apply_probs_on_input" in changes)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("name", ["linear_fc1", "linear_fc2"])
def test_grouped_products_give_what_a_loop_gives(name):
    """The way of a GPU in bf16, and its gradients; an expert without rows too."""
    linear = getattr(experts(params_dtype=torch.bfloat16), name)
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    x = torch.randn(sum(COUNTS), linear.weight.shape[2], dtype=torch.bfloat16, requires_grad=True)
    slopes = torch.randn(sum(COUNTS), linear.weight.shape[1])

    def run(counts):
        output = linear(x, ends, counts) + repeat_bias(linear.added_bias(), x, ends, counts)
        return output, *torch.autograd.grad((output.float() * slopes).sum(), (x, linear.weight, linear.bias))

    for grouped, looped in zip(run(None), run(COUNTS), strict=True):
        torch.testing.assert_close(grouped, looped, rtol=1e-2, atol=1e-2)


def test_one_rank_adds_the_bias_of_a_sum_and_all_have_its_gradient():
    first, second = experts(0, 2), experts(1, 2)
    rows, probs = rows_and_probs()
    gradients = []
    for module, adds in ((first, True), (second, False)):
        with_bias, _ = module(rows, torch.tensor(COUNTS), probs)
        with_bias.sum().backward()
        gradients.append(module.linear_fc2.bias.grad)
        with torch.no_grad():
            module.linear_fc2.bias += 1.0
            other, _ = module(rows, torch.tensor(COUNTS), probs)
        torch.testing.assert_close(other - with_bias, probs[:, None].expand_as(other) * adds, atol=1e-4, rtol=0)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients)


def test_the_parameters_of_shared_experts_are_waited_for_where_the_dispatcher_begins_with_them(monkeypatch):
    """It does so without calling the module, whose hooks wait for parameters that are still being gathered."""
    module, order = SharedExperts.__new__(SharedExperts), []
    torch.nn.Module.__init__(module)
    module.linear_fc1 = torch.nn.Linear(2, 2)
    for part in module.modules():
        part.register_forward_pre_hook(lambda part, _: order.append(type(part).__name__))
    monkeypatch.setattr(SharedExpertMLP, "wait_current_stream", lambda _: order.append("other stream"))
    module.wait_current_stream()
    assert order == ["SharedExperts", "Linear", "other stream"]
