"""Features of images and videos in the language model: in place of embeddings, and added behind its first layers."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


@dataclass(frozen=True)
class MediaFeatures:
    """Features of the visual tokens that this rank holds, for a micro batch. See model/vision_encoder.py.

    positions: [tokens] int64, indices into the hidden states [sequence * batch] of this rank. levels: [tokens,
    hidden_size] by level. Level 0 replaces embeddings; level n is added to the output of the n-th layer of the model.
    """

    positions: Tensor
    levels: dict[int, Tensor]

    def replace_embeddings(self, embeddings: Tensor) -> Tensor:
        """embeddings [sequence, batch, hidden_size] -> the same shape."""
        flat = embeddings.flatten(0, 1)
        return flat.index_copy(0, self.positions, self.levels[0].to(flat.dtype)).view(embeddings.shape)

    def add_to(self, hidden_states: Tensor, level: int) -> Tensor:
        """hidden_states [sequence, batch, hidden_size] -> the same shape."""
        return _AddRows.apply(hidden_states, self.levels[level], self.positions)  # pyright: ignore[reportReturnType]


class _AddRows(torch.autograd.Function):
    """Sum of hidden states [sequence, batch, hidden_size] and rows [n, hidden_size] at n different positions.

    `index_add` would use atomic operations. The output is no view, because the pipeline schedule frees the data of a
    stage's output.
    """

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.dtype = rows.dtype
        output = hidden_states.clone(memory_format=torch.contiguous_format)
        flat = output.view(-1, output.shape[-1])
        flat.index_copy_(0, positions, flat.index_select(0, positions) + rows.to(output.dtype))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        [grad], [positions] = grads, ctx.saved_tensors
        rows = grad.flatten(0, 1).index_select(0, positions).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return grad, rows, None


class DeepStackLayer(TransformerLayer):
    """Layer that adds features to its output: DeepStack, https://arxiv.org/abs/2406.04334."""

    def forward(self, *args, **kwargs):
        hidden_states, context = super().forward(*args, **kwargs)
        media: MediaFeatures | None = kwargs["packed_seq_params"].media
        if media is not None:
            assert isinstance(hidden_states, Tensor)
            hidden_states = media.add_to(hidden_states, self.layer_number)
        return hidden_states, context
