"""Per-layer embeddings: each token gives each layer a vector of its own (Gemma 4 E2B, E4B).

It is the sum of a row of a second embedding table and of a projection of the token's embedding. A layer multiplies it
by a projection of its output, and adds a projection of the product.
"""

import math

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from .deferred_grad import add_shared_grad, shared_leaf
from .linear import ReplicatedLinear
from .norm import Norm
from .packed_seqs import Documents
from .residual import ScaledLayer


class LayerInputs(MegatronModule):
    """Embedding of tokens for each layer."""

    def __init__(self, config: TransformerConfig, vocab_size: int, groups: ProcessGroupCollection):
        super().__init__(config)
        size: int = config.architecture.layer_input_size  # type: ignore[attr-defined]
        self.size, width = size, config.num_layers * size
        vision = config.architecture.vision  # type: ignore[attr-defined]
        self.visual_tokens: tuple[int, int] | None = vision and vision.layer_input_tokens
        assert config.init_method is not None
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            width,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=groups.tp,
        )
        # megatron-core's Muon leaves embeddings to AdamW.
        self.word_embeddings.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self.layer_projection = ReplicatedLinear(config, config.hidden_size, width)
        self.norm = Norm(config, size, config.layernorm_epsilon)

    def forward(self, tokens: Tensor, embeddings: Tensor, visual: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return each layer's vectors, [sequence, rows, size], divided like the embeddings by sequence parallelism.

        tokens: [rows, sequence]. embeddings: of the tokens, with features, [sequence (/ TP), rows, hidden_size]
        visual: positions of the features among the embeddings
        """
        if self.visual_tokens is not None:
            visual_token, padding = self.visual_tokens
            tokens = torch.where(tokens == visual_token, padding, tokens)
        rows = self.word_embeddings(tokens)
        rows = rows if self.config.sequence_parallel else rows.transpose(0, 1)
        if visual is not None:  # padding, whose embedding transformers does not train
            is_visual = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=rows.device)
            is_visual.view(-1)[visual] = True
            rows = torch.where(is_visual[..., None], rows.detach(), rows)
        scale = float(torch.tensor(math.sqrt(self.size), dtype=rows.dtype))  # as transformers rounds it
        projected = self.layer_projection(embeddings) * self.config.hidden_size**-0.5
        rows, projected = (x.unflatten(-1, (-1, self.size)) for x in (rows, projected))
        vectors = (self.norm(projected) + rows * scale) * 2**-0.5
        return vectors.permute(2, 0, 1, 3).contiguous().unbind(0)

    def give_to(self, documents: Documents, tokens: Tensor, embeddings: Tensor, visual: Tensor | None = None) -> Tensor:
        """Compute the vectors for the layers of a micro batch; return the embeddings, whose gradients come last.

        Arguments as of `forward`.
        """
        vectors = self(tokens, embeddings, visual)
        documents.layer_inputs = tuple(map(shared_leaf, vectors))
        for vector, leaf in zip(vectors, documents.layer_inputs, strict=True):
            embeddings = add_shared_grad(embeddings, vector, leaf)
        return embeddings


class InputLayer(TransformerLayer):
    """Layer that adds norm(W2 (act(W1 x) * v)) to its output x, where v is the layer's vector of the token."""

    def __init__(self, config: TransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        size: int = config.architecture.layer_input_size  # type: ignore[attr-defined]
        self.input_gate = ReplicatedLinear(config, config.hidden_size, size)
        self.input_proj = ReplicatedLinear(config, size, config.hidden_size)
        self.input_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args, **kwargs):
        hidden_states, context = super().forward(*args, **kwargs)
        assert isinstance(hidden_states, Tensor)
        documents: Documents = kwargs["packed_seq_params"]
        vector = documents.layer_inputs[self.layer_number - 1]
        gated = self.config.activation_func(self.input_gate(hidden_states)) * vector
        return hidden_states + self.input_norm(self.input_proj(gated)), context


class ScaledInputLayer(ScaledLayer, InputLayer):
    """Layer with per-layer inputs, whose output is then multiplied by a number of the checkpoint."""
