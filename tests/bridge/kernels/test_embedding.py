"""Gradients of an embedding that are added to `main_grad` row by row, against torch's own in fp64."""

import pytest
import torch


@pytest.mark.parametrize("first", [0, 9])
def test_an_embedding_with_its_gradient(first, device):
    """An id that is there more often than a program sums at once; of two ranks, the rows that each has."""
    from megaswift.bridge.kernels.embedding import Embedding

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 18, (3, 25), generator=generator)
    ids[1] = 11
    whole = torch.randn(18, 300, generator=generator, dtype=torch.float64).requires_grad_()
    slopes = torch.randn(25, 3, 300, generator=generator, dtype=torch.float64).transpose(0, 1)
    rows = slice(first, first + 9) if first else slice(None)
    here = (ids >= first)[..., None]
    (expected,) = torch.autograd.grad(torch.nn.functional.embedding(ids, whole) * here, whole, slopes)

    weight = torch.nn.Parameter(whole[rows].detach().to(device, torch.float32))
    before = torch.randn(weight.shape, generator=generator).to(device)
    weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    found = Embedding.apply(weight, (ids - first).to(device), first > 0)
    torch.testing.assert_close(found.double().cpu(), (whole[ids] * here).detach(), rtol=1e-6, atol=0)
    found.backward(slopes.to(device, torch.float32))
    torch.testing.assert_close((weight.main_grad - before).double().cpu(), expected[rows], rtol=1e-5, atol=1e-5)
    assert weight.grad_added_to_main_grad


@pytest.mark.parametrize("use", ["alone", "tied", "tied, overlapped"])
def test_the_layer_in_the_place_of_megatron_cores(use, alone, device):
    """Where the hook of a tied weight expects a gradient, autograd's is left to it."""
    from megaswift.bridge.layers.embedding import AccumulatingEmbedding
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    config = ModelParallelConfig(use_cpu_initialization=True, perform_initialization=False)
    layer = VocabParallelEmbedding(18, 30, init_method=torch.nn.init.normal_, config=config, tp_group=alone).to(device)
    torch.nn.init.normal_(layer.weight)
    ids, slopes = torch.tensor([[3, 17, 3], [0, 5, 3]], device=device), torch.randn(2, 3, 30, device=device)
    before = layer(ids)
    (expected,) = torch.autograd.grad(before, layer.weight, slopes)
    layer.__class__ = AccumulatingEmbedding
    weight = layer.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    weight.zero_out_wgrad, weight.has_overlapped_reduction = use != "alone", use == "tied, overlapped"
    found = layer(ids)
    found.backward(slopes)
    assert torch.equal(found, before)
    assert weight.grad_added_to_main_grad == (use != "tied, overlapped")
    if use != "alone":
        assert (weight.grad is None) == (use == "tied")
    torch.testing.assert_close(weight.grad if use == "tied, overlapped" else weight.main_grad, expected)


def test_a_tied_weight_gets_the_gradients_of_both_uses(alone, device):
    """As megatron-core's hook sums them, over two micro batches; the output layer's is autograd's, or its own."""
    from megaswift.bridge.kernels.embedding import Embedding
    from megaswift.bridge.kernels.weight_gradient import linear

    torch.manual_seed(0)
    ids = torch.tensor([[3, 17, 3], [0, 5, 3]], device=device)
    for multiply in (linear, torch.nn.functional.linear):
        weight = torch.nn.Parameter(torch.randn(18, 30, device=device))
        weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros_like(weight), False, True
        calls = []

        def hook(*_, weight=weight, calls=calls):
            calls.append(weight.grad)
            if weight.grad is not None:
                weight.main_grad.add_(weight.grad)
            weight.grad = None

        accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(hook)
        exact = weight.detach().double().requires_grad_()
        for _ in range(2):
            rows = Embedding.apply(weight, ids, False).flatten(0, 1)
            multiply(rows, weight, None).square().sum().backward()
            rows = torch.nn.functional.embedding(ids, exact).flatten(0, 1)
            torch.nn.functional.linear(rows, exact).square().sum().backward()
        assert len(calls) == 2
        torch.testing.assert_close(weight.main_grad.double(), exact.grad, rtol=1e-5, atol=1e-3)
