"""The choice of experts in a kernel against megatron-core's and ours in plain PyTorch."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch


def logits_of(tokens: int, experts: int) -> torch.Tensor:
    return torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2


# A smallest sum of 0.6: some tokens' sums are below it, some above.
@pytest.mark.parametrize(("sigmoid", "normalize", "smallest"), [*product((False, True), (False, True), (1e-20, 0.6))])
@pytest.mark.parametrize("biased", [False, True])
def test_chooses_and_weighs_as_in_plain_pytorch(device, sigmoid, normalize, smallest, biased):
    from megaswift.bridge.kernels.routing import RoutingForm, route
    from megaswift.bridge.layers.router import choose_experts
    from megaswift.bridge.mapping.architecture import Routing

    logits = logits_of(19, 12).to(device)
    bias = torch.rand(12, device=device) if biased else None
    config = SimpleNamespace(
        moe_router_score_function="sigmoid" if sigmoid else "softmax",
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk=3,
        moe_router_topk_scaling_factor=2.5,
    )
    exact = logits.clone().requires_grad_()
    rule = Routing(normalize=normalize, smallest_sum=smallest)
    wanted, wanted_experts = choose_experts(exact, bias, rule, config)  # pyright: ignore[reportArgumentType]
    given = logits.float().requires_grad_()
    weights, experts = route(given, bias, RoutingForm(3, sigmoid, normalize, smallest, 2.5))
    assert torch.equal(experts.long(), wanted_experts)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-6)
    slopes = torch.randn_like(weights)
    weights.backward(slopes)
    wanted.backward(slopes.double())
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("function", "before"), [("softmax", False), ("softmax", True), ("sigmoid", False)])
def test_chooses_and_weighs_as_megatron_core(device, function, before):
    from megaswift.bridge.kernels.routing import RoutingForm, route
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    logits = logits_of(33, 128).float().to(device)
    wanted, wanted_experts = topk_routing_with_score_function(
        logits, 8, use_pre_softmax=before, score_function=function, dense_output=True
    )
    weights, experts = route(logits, None, RoutingForm(8, function == "sigmoid", not before, 1e-20, 1.0))
    assert torch.equal(experts.long(), wanted_experts)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_takes_the_experts_that_it_is_given(device, sigmoid):
    """Of every other token; the others choose."""
    from megaswift.bridge.kernels.routing import RoutingForm, route
    from megaswift.bridge.layers.router import choose_experts
    from megaswift.bridge.mapping.architecture import Routing

    config = SimpleNamespace(
        moe_router_score_function="sigmoid" if sigmoid else "softmax",
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk=3,
        moe_router_topk_scaling_factor=2.5,
    )
    logits = logits_of(19, 12).to(device)
    told = logits_of(19, 12).flip(0, 1).argsort(-1)[:, :3].short().to(device)
    told[1::2] = -1
    exact, given = logits.clone().requires_grad_(), logits.float().requires_grad_()
    wanted, wanted_experts = choose_experts(exact, None, Routing(), config, told)  # pyright: ignore[reportArgumentType]
    weights, experts = route(given, None, RoutingForm(3, sigmoid, True, 1e-20, 2.5), told)
    assert torch.equal(experts[::2].short(), told[::2])
    assert torch.equal(experts.long(), wanted_experts)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-6)
    slopes = torch.randn_like(weights)
    weights.backward(slopes)
    wanted.backward(slopes.double())
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_what_is_no_number_has_distinct_experts(device):
    from megaswift.bridge.kernels.routing import RoutingForm, route

    logits = torch.tensor([[float("nan")] * 5, [1.0, float("nan"), -float("inf"), float("nan"), 2.0]], device=device)
    weights, experts = route(logits, None, RoutingForm(3, False, True, 1e-20, 1.0))
    assert weights.isnan().all()
    assert experts.tolist() == [[0, 1, 2], [4, 0, 1]]
