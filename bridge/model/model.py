"""Built model and its forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..layers.deepstack import MediaFeatures
from ..layers.delta_rule import make_delta_layout
from ..layers.layer_inputs import LayerInputs
from ..layers.packed_seqs import AttentionSpan, Documents, make_packed_seqs, next_positions, to_device
from ..layers.replay import replay_experts
from ..layers.rope import RotaryRule
from ..mapping.architecture import Architecture, Layer
from .kernel_selection import Kernels
from .vision_encoder import VisionEncoder


@dataclass(frozen=True)
class ModelInputs:
    """Micro batch. Tensors are on the model's device unless marked CPU."""

    tokens: Tensor  # [rows, local length] int64
    position_ids: Tensor  # [rows, local length] int64, restarting in each document, at 0 or behind its prefix
    cu_seqlens: Tensor | None  # [documents + 1] int32, CPU: boundaries in the full row; None: one document per row
    max_seqlen: int  # length of the longest document
    labels: Tensor | None = None  # [rows, local length] int64
    loss_weights: Tensor | None = None  # [rows, local length] fp32: weights of the labels
    token_shares: Tensor | None = None  # [rows, local length] fp32: 1 / number of all tokens, 0 for padding
    loss_positions: Tensor | None = None  # [n] int64, CPU: scored indices into rows * local length; None: all
    experts: Tensor | None = None  # [local length, layers, topk] int16, CPU: experts to replay; -1: the router's choice
    # [3, rows, local length] int64: positions of time, height and width for the ropes; None: position_ids
    rope_positions: Tensor | None = None
    media: MediaFeatures | None = None  # features of the visual tokens
    prefixes: Tensor | None = None  # [documents] int64, CPU: document whose tokens precede those of each; -1: none
    # [blocks, 3] int64, CPU: row, first and last + 1 position in the full row of tokens that attend to each other
    blocks: Tensor | None = None


@dataclass(frozen=True)
class LastStage:
    """Input of an output processor: the last pipeline stage before its output layer."""

    model: "Model"
    inputs: ModelInputs
    documents: Documents
    hidden_states: Tensor  # [length, rows, hidden_size]; length / TP under sequence parallelism
    output_layer: torch.nn.Module
    tied_weight: Tensor | None  # the embedding's weight if the output layer is tied
    embeddings: Tensor | None = None  # those of the tokens, with features of media in place; None: not changed

    def output_matrix(self) -> Tensor:
        """Return this rank's rows of the output layer's weight, [vocabulary / TP, hidden_size]."""
        self.run_hooks()
        weight = self.output_layer.weight if self.tied_weight is None else self.tied_weight
        assert isinstance(weight, Tensor)
        return weight

    def output_bias(self) -> Tensor:
        """Return this rank's part of the output layer's bias, [vocabulary / TP], of a model that has one."""
        bias = self.output_layer.bias
        assert isinstance(bias, Tensor)
        return bias

    def run_hooks(self) -> None:
        """Run the forward hooks of the output layer, or of the embedding in its place.

        They wait for its weight under overlapped parameter gather.
        """
        module = self.output_layer
        if self.tied_weight is not None and module.weight is None:
            module = self.model.chunks[-1].embedding.word_embeddings
        for hook in module._forward_pre_hooks.values():
            hook(module, ())


OutputProcessor = Callable[[LastStage], Tensor]  # see outputs.py


@dataclass
class Model:
    """This rank's chunks of the model, with their config."""

    chunks: list[GPTModel]  # one per virtual pipeline stage
    config: TransformerConfig
    architecture: Architecture
    kernels: Kernels
    ropes: tuple[RotaryRule, ...]  # of Architecture.ropes, on this rank's device
    groups: ProcessGroupCollection  # process groups of its parallel layout
    lora: Any = None  # lora/attach.py's Lora; None without adapters
    trained_share: float = 1.0  # fraction of trained parameters, including adapters
    mtp_loss_scale: float = 0.0  # weight of the mean multi-token prediction loss
    vision: VisionEncoder | None = None

    @property
    def parts(self) -> list[GPTModel]:
        """Modules that hold weights: the chunks, and that of the vision tower, which can be used as a chunk there."""
        return [*self.chunks, *([cast(GPTModel, self.vision.part)] if self.vision else [])]

    def forward(self, chunk: torch.nn.Module, inputs: ModelInputs, output: OutputProcessor) -> Tensor:
        """Run the forward pass of one micro batch through one chunk (bare, or wrapped for data parallelism).

        Returns the result of `output` on the last pipeline stage, else hidden states for the next stage.
        """
        documents = self._documents(inputs)
        if inputs.experts is not None:
            replay_experts(chunk, inputs.experts)

        def process(*, hidden_states: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, **_: Any):
            return output(LastStage(self, inputs, documents, hidden_states, output_layer, output_weight, embeddings))

        documents.media = inputs.media
        embeddings, bare_chunk = None, cast(GPTModel, getattr(chunk, "module", chunk))
        media, layer_input_size = inputs.media, self.architecture.layer_input_size
        if (media is not None or layer_input_size) and hasattr(bare_chunk, "embedding"):
            embeddings = bare_chunk.embedding(inputs.tokens, inputs.position_ids)
            embeddings = embeddings if media is None else media.replace_embeddings(embeddings)
        if embeddings is not None and layer_input_size:
            layer_inputs, visual = cast(LayerInputs, bare_chunk.embedding.layer_inputs), media and media.positions
            embeddings = layer_inputs.give_to(documents, inputs.tokens, embeddings, visual)
        return chunk(
            inputs.tokens,
            inputs.position_ids,
            None,
            decoder_input=embeddings if bare_chunk.pre_process else None,
            packed_seq_params=documents,
            output_processor=process,
        )

    def output_matrix(self) -> Tensor:
        """Return this rank's rows of the output layer's weight, on the last pipeline stage."""
        chunk = self.chunks[-1]
        weight = chunk.shared_embedding_or_output_weight() if self.architecture.tied else chunk.output_layer.weight
        assert isinstance(weight, Tensor)
        return weight

    def _documents(self, inputs: ModelInputs) -> Documents:
        """Prepare the packed documents of a micro batch, once for all layers."""
        cp_size, cp_rank = self.groups.cp.size(), self.groups.cp.rank()
        device = inputs.position_ids.device
        documents = make_packed_seqs(
            inputs.position_ids,
            inputs.cu_seqlens,
            inputs.max_seqlen,
            ropes=self.ropes,
            spans=[AttentionSpan(layer.window, layer.chunk) for layer in (*self.architecture.layers, Layer())],
            dtype=self.config.params_dtype,
            cp_rank=cp_rank,
            cp_size=cp_size,
            rope_positions=inputs.rope_positions,
            prefixes=() if inputs.prefixes is None else inputs.prefixes.tolist(),
            blocks=() if inputs.blocks is None else inputs.blocks.tolist(),
            blocks_in_windows=self.architecture.blocks_in_windows,
        )
        if inputs.token_shares is not None:
            documents.token_shares = inputs.token_shares.t()
        if inputs.loss_positions is not None:
            documents.loss_positions = to_device(inputs.loss_positions, device)
        rows, length = inputs.position_ids.shape
        bounds = [0, length * cp_size] if inputs.cu_seqlens is None else inputs.cu_seqlens.tolist()
        if self.architecture.mtp_depths:
            documents.next_positions = next_positions(bounds, cp_rank, cp_size, device)
        if kernel := self.architecture.convolution:
            documents.delta_layout = make_delta_layout(bounds, rows, cp_size, kernel, device)
        return documents
