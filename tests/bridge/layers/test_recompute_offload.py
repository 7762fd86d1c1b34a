"""Recomputed layers with offload: attention's kernel runs once, and gradients are those of a plain pass."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from megaswift.bridge import runtime
from megaswift.bridge.layers import activation_offload, recompute_offload
from megaswift.bridge.layers.recompute_offload import _ChunkRecompute, offload_recomputed
from megaswift.bridge.layers.sinks import KernelAttention
from megatron.core.models.gpt import GPTModel
from torch import Tensor

LAYERS, HEADS, TOKENS, DIM = 3, 2, 5, 8


@pytest.fixture(autouse=True)
def offloads_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.enable()
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)


class Layers:
    """Layers of a weight and attention, by PyTorch's kernel for CPUs.

    kernels: calls of its forward pass
    kept_inputs: inputs of layers but the first that are on the device after the forward pass
    """

    def __init__(self) -> None:
        self.kept_inputs: list[weakref.ref[Tensor]] = []
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(LAYERS, HEADS * DIM, HEADS * DIM, generator=generator) / 4
        self.inputs = torch.randn(TOKENS, HEADS * DIM, generator=generator)
        self.slopes = torch.randn(TOKENS, HEADS * DIM, generator=generator)
        self.kernels = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.kernels += 1
        states = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, True)
        return output.squeeze(0).transpose(0, 1), log_sum.squeeze(0)

    def attend_backward(self, *states: Tensor) -> tuple[Tensor, ...]:
        *rest, log_sum = states
        batched = (x.transpose(0, 1).unsqueeze(0) for x in rest)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = backward(*batched, log_sum.unsqueeze(0), 0.0, True)
        return tuple(x.squeeze(0).transpose(0, 1) for x in grads)

    def grads(self, checkpoint: Callable[..., Tensor] | None) -> tuple[Tensor, ...]:
        """Return the gradients of the weights and of the inputs."""
        weights, inputs = self.weights.clone().requires_grad_(), self.inputs.clone().requires_grad_()
        hidden, self.kept_inputs = inputs, []
        for weight in weights.unbind():

            def layer(hidden: Tensor, weight: Tensor = weight) -> Tensor:
                heads = (hidden @ weight).view(TOKENS, HEADS, DIM)
                output = KernelAttention.apply(heads, heads * 2, heads * 3, None, self.attend, self.attend_backward)
                return hidden + output.flatten(1)  # type: ignore[union-attr]

            self.kept_inputs.append(weakref.ref(hidden))
            hidden = layer(hidden) if checkpoint is None else checkpoint(layer, False, hidden)
        self.kept_inputs = [each for each in self.kept_inputs[1:] if each() is not None]
        (hidden * self.slopes).sum().backward()
        assert weights.grad is not None
        assert inputs.grad is not None
        return weights.grad, inputs.grad


# The last layer's input leaves with the pass.
@pytest.mark.parametrize(("limit", "kernels", "inputs"), [(LAYERS, LAYERS, 1), (1, 2 * LAYERS - 1, LAYERS - 1)])
def test_attention_runs_once_in_offloaded_layers(limit: int, kernels: int, inputs: int) -> None:
    plain = Layers()
    expected = plain.grads(None)
    assert plain.kernels == LAYERS
    recomputed, recompute = Layers(), _ChunkRecompute(limit, unit=1)
    for _ in range(2):
        recomputed.kernels = 0
        recompute.begin(torch.nn.Module(), ())
        grads = recomputed.grads(recompute.checkpoint)
        recompute.end(torch.nn.Module(), (), None)
        assert recomputed.kernels == kernels
        assert len(recomputed.kept_inputs) == inputs
        for ours, plains in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, plains)
    assert recompute_offload._current is None


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 2**30)
    monkeypatch.setattr(activation_offload.SavedTensor, "__init__", lambda *_: pytest.fail("left the device"))
    recompute = _ChunkRecompute(LAYERS, unit=1)
    grads, expected = Layers().grads(recompute.checkpoint), Layers().grads(None)
    for ours, plains in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, plains)


@pytest.mark.parametrize(
    ("num_layers", "method", "message"),
    [
        (5, "uniform", "a pipeline stage has 4 layers. Set at most these"),
        (3, "block", "3: more than --recompute_num_layers 1 of a chunk"),
    ],
)
def test_layers_that_are_not_recomputed(num_layers: int, method: str, message: str) -> None:
    config = SimpleNamespace(recompute_method=method, recompute_num_layers=1)
    layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    chunk = SimpleNamespace(config=config, decoder=SimpleNamespace(layers=layers))
    with pytest.raises(ValueError, match=message):
        offload_recomputed(cast(list[GPTModel], [chunk, chunk]), num_layers)
