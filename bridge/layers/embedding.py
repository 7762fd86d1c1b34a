"""megatron-core's embedding, with its sparse gradient added to `main_grad` row by row."""

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from ..kernels import usable
from ..kernels.weight_gradient import has_main_grad, needs_grad_in_hook


class AccumulatingEmbedding(VocabParallelEmbedding):
    def forward(self, input_: Tensor) -> Tensor:
        """Return the embeddings of token ids [batch, sequence]: [batch, sequence, hidden_size].

        With sequence parallelism: [sequence / TP, batch, hidden_size].
        """
        weight = self.weight
        if (
            not (torch.is_grad_enabled() and has_main_grad(weight) and usable(weight, input_))
            or needs_grad_in_hook(weight)
        ):  # fmt: skip
            return super().forward(input_)
        from ..kernels.embedding import Embedding

        is_partial = self.num_embeddings_per_partition < self.num_embeddings
        embeddings = Embedding.apply(weight, input_ - self.vocab_start_index, is_partial)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(
                embeddings.transpose(0, 1).contiguous(), group=self.tp_group
            )
        return reduce_from_tensor_model_parallel_region(embeddings, group=self.tp_group)
