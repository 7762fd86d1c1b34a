"""Weight gradients added to `main_grad`, under megatron-core's protocol for its data-parallel hook."""

import pytest
import torch
from megaswift.bridge.kernels.weight_gradient import accumulate


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, accumulate(weight, grad, x)


def wrapped(weight: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
    """As megatron-core's DistributedDataParallel has it: a buffer, a mark, and a hook that reads and drops `grad`."""
    weight.main_grad = torch.randn(weight.shape, dtype=dtype, device=weight.device)
    weight.grad_added_to_main_grad = False

    def hook(*_):
        assert weight.grad is not None  # what the wrapper asks under overlapped reduction
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    weight.accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    weight.accumulator.register_hook(hook)
    return weight


def close_to(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected.double()).norm() <= tolerance * expected.double().norm())


@pytest.mark.parametrize("shared", [False, True])
def test_the_hook_finds_the_sum(shared):
    """With a weight that the embedding has too, both gradients are in it, and the weight stays as it was."""
    torch.manual_seed(0)
    weight = wrapped(torch.nn.Parameter(torch.randn(5, 3)), torch.float32)
    weight.zero_out_wgrad = shared
    expected, before = weight.main_grad.double(), weight.detach().clone()
    for _ in range(2):
        x = torch.randn(7, 3, requires_grad=True)
        loss = Product.apply(x, weight).square().sum()
        exact = weight.detach().double().requires_grad_()
        exact_loss = (x.double() @ exact.t()).square().sum()
        if shared:
            loss, exact_loss = loss + weight[[1, 4]].sum(), exact_loss + exact[[1, 4]].sum()
        loss.backward()
        exact_loss.backward()
        expected += exact.grad
    assert weight.grad is None
    assert close_to(weight.main_grad, expected, 1e-6)
    assert torch.equal(weight, before)


def test_without_the_hook_the_weight_is_not_added_to():
    weight = torch.nn.Parameter(torch.randn(5, 3))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(5, 3), False
    before = weight.detach().clone()
    for _ in range(3):
        Product.apply(torch.randn(7, 3), weight).sum().backward()
    assert torch.equal(weight, before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "total"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_on_a_gpu(dtype, total):
    torch.manual_seed(0)
    weight = wrapped(torch.nn.Parameter(torch.randn(96, 64, dtype=dtype, device="cuda")), total)
    x = torch.randn(1, 200, 64, dtype=dtype, device="cuda").squeeze(0)
    grad = torch.randn(96, 200, dtype=dtype, device="cuda").t()
    expected = weight.main_grad.double() + grad.double().t() @ x.double()
    at = weight.main_grad.data_ptr()
    accumulate(weight, grad, x)
    assert weight.main_grad.data_ptr() == at
    assert close_to(weight.main_grad, expected, 1e-5 if total == torch.float32 else 5e-3)


def test_linears_of_megatron_core_add_to_it_without_apex():
    from megaswift.bridge import patches
    from megatron.core.tensor_parallel import layers

    patches._provide_weight_gradients_without_apex()
    assert layers._grad_accum_fusion_available
    for total in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.randn(5, 3).bfloat16())
        weight.main_grad = torch.randn(5, 3).to(total)
        x, grad = torch.randn(7, 2, 3).bfloat16(), torch.randn(7, 2, 5).bfloat16()
        expected = weight.main_grad.double() + grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
        made = layers.linear_with_grad_accumulation_and_async_allreduce(
            x, weight, None, gradient_accumulation_fusion=True, allreduce_dgrad=False, sequence_parallel=False
        )
        made.backward(grad)
        assert close_to(weight.main_grad, expected, 1e-6 if total == torch.float32 else 5e-3)
        assert weight.grad is None
