"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2).

At each position, depth k combines the hidden state of depth k - 1 (depth 0: the model's final hidden state, after its
norm) with the embedding of the token k positions later. Its output predicts the token after that one. Embedding and
output layer are shared with the model. Names are those of megatron-core's MultiTokenPredictionBlock.

The last pipeline stage has these layers, and a copy of the first stage's embedding. Both start from the same values and
get the sum of both gradients, so that the same updates keep them equal.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .linear import ReplicatedLinear
from .norm import NormBuilder
from .packed_seqs import Documents


class MtpLayer(MegatronModule):
    """Layer of one prediction depth."""

    def __init__(self, config: TransformerConfig, depth: int, layer: ModuleSpec, norm: NormBuilder):
        super().__init__(config=config)
        self.enorm, self.hnorm, self.final_layernorm = (
            norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon) for _ in range(3)
        )
        self.eh_proj = ReplicatedLinear(config, 2 * config.hidden_size, config.hidden_size)
        self.mtp_model_layer: Any = build_module(
            layer,
            config=config,
            layer_number=config.num_layers + depth,
            is_mtp_layer=True,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        if hasattr(self.mtp_model_layer.mlp, "set_layer_number"):
            # megatron-core adds the model's number of layers: balancing losses are logged with its last layer's.
            self.mtp_model_layer.mlp.set_layer_number(0)

    def forward(self, hidden: Tensor, embedding: Tensor, documents: Documents) -> Tensor:
        """Return the hidden states; all are [sequence (/ TP under sequence parallelism), batch, hidden_size]."""

        def run(hidden: Tensor, embedding: Tensor) -> Tensor:
            inputs = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1))
            output, _ = self.mtp_model_layer(hidden_states=inputs, attention_mask=None, packed_seq_params=documents)
            return self.final_layernorm(output)

        if self.training and self.config.recompute_granularity == "full":
            return tensor_parallel.checkpoint(run, False, hidden, embedding)  # pyright: ignore[reportReturnType]
        return run(hidden, embedding)


class MtpBlock(MegatronModule):
    """Layers of all prediction depths: `mtp` of a GPTModel."""

    def __init__(self, config: TransformerConfig, depths: int, layer: ModuleSpec, norm: NormBuilder):
        super().__init__(config=config)
        self.layers = torch.nn.ModuleList(MtpLayer(config, depth + 1, layer, norm) for depth in range(depths))

    def forward(
        self,
        hidden: Tensor,
        embedding: torch.nn.Module,
        tokens: Tensor,
        documents: Documents,
        inputs: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the hidden states of each depth, given the model's `hidden`; tokens [batch, local sequence].

        inputs: of the model, with features of media in place of embeddings; None: the tokens' embeddings
        """
        depths = []
        for layer in self.layers:
            if inputs is None:
                tokens = shift_left(tokens, documents)
                shifted = embedding(input_ids=tokens, position_ids=None)
            else:
                shifted = inputs = shift_states(inputs, documents, sequence_parallel=self.config.sequence_parallel)
            hidden = layer(hidden, shifted, documents)
            depths.append(hidden)
        return depths


class PredictingModel(GPTModel):
    """GPTModel with multi-token prediction on its last pipeline stage."""

    def add_prediction(self, depths: int, layer: ModuleSpec, norm: NormBuilder, device: torch.device) -> None:
        """Build the layers on the last stage, and its copy of the embedding if there are several stages."""
        is_only_stage = self.pre_process and self.post_process
        if self.post_process:
            self.mtp = MtpBlock(self.config, depths, layer, norm).to(device)
        if self.post_process and not is_only_stage:
            self.embedding = LanguageModelEmbedding(
                self.config,
                self.vocab_size,
                self.max_sequence_length,
                position_embedding_type="none",
                tp_group=self.pg_collection.tp,
            ).to(device)
            copy: Any = self.embedding.word_embeddings.weight
            copy.shared = copy.is_embedding_or_output_parameter = True  # the gradient norm counts it once
            if self.share_embeddings_and_output_weights:
                self.output_layer.weight = None  # pyright: ignore[reportAttributeAccessIssue]
                copy.zero_out_wgrad = True  # as of one stage that has both uses of a weight
        if not is_only_stage and hasattr(self, "embedding"):
            # ZeRO-1 shards it alike on both stages: it has a bucket of its own.
            self.embedding.word_embeddings.weight.shared_embedding = True  # type: ignore[attr-defined]

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return the weight of the embedding, if this stage has it, as megatron-core's models with prediction do."""
        if hasattr(self, "embedding"):
            return self.embedding.word_embeddings.weight
        return super().shared_embedding_or_output_weight()


def reduce_embedding_gradients(chunks: Iterable[torch.nn.Module]) -> None:
    """Sum the gradients of the embedding, and of its adapter, over the first and the last pipeline stage.

    chunks: wrapped for data parallelism, whose gradients megatron-core has finalized. It has summed those of a weight
    that is the output layer as well.
    """
    for chunk in chunks:
        model = cast(PredictingModel, getattr(chunk, "module", chunk))
        is_shared = isinstance(model, PredictingModel) and hasattr(model, "embedding")
        if not is_shared or (model.pre_process and model.post_process):
            continue
        tied = model.embedding.word_embeddings.weight if model.share_embeddings_and_output_weights else None
        for parameter in model.embedding.parameters():
            if parameter.requires_grad and parameter is not tied:
                dist.all_reduce(parameter.main_grad, group=model.embd_group)  # type: ignore[attr-defined]


def shift_states(states: Tensor, documents: Documents, *, sequence_parallel: bool) -> Tensor:
    """Return the states at the next position of the same document; 0 at its end.

    states: [sequence (/ TP under sequence parallelism), batch, hidden_size]
    """
    assert documents.next_positions is not None
    positions, groups = documents.next_positions, [parallel_state.get_context_parallel_group()]
    if sequence_parallel:
        tensor = cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())
        positions, groups = positions.chunk(tensor.size())[tensor.rank()], [tensor, *groups]
    for group in groups:
        # Each rank takes other states, so that the gradients of all have to be summed.
        states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True, group=group)
    has_next = (positions >= 0).to(states.dtype)
    return states.index_select(0, positions.clamp(min=0)) * has_next[:, None, None]


def shift_left(values: Tensor, documents: Documents) -> Tensor:
    """Return the values at the next position of the same document, [batch, local sequence]; 0 at its end."""
    assert documents.next_positions is not None
    group = cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())
    gathered = values
    if group.size() > 1:
        parts = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(parts, values.contiguous(), group=group)
        gathered = torch.cat(parts, dim=1)
    has_next = documents.next_positions >= 0
    return gathered[:, documents.next_positions.clamp(min=0)] * has_next.to(gathered.dtype)
