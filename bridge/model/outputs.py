"""Output processors: what the last pipeline stage returns of a micro batch (`Model.forward`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from ..layers.logprobs import (
    BIAS_COLUMNS,
    OutputMatrix,
    chunk_logits,
    label_log_probs,
    log_probs_and_entropies,
    with_bias,
)
from ..layers.mtp import shift_left
from ..layers.packed_seqs import to_device
from ..layers.pooling import add_zero_gradient, last_tokens, mean_tokens
from .model import LastStage


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of the labels, fp32 [rows, local length], 0 outside of `loss_positions`.

    temperature: divides the logits. entropies: [2, rows, local length], the second those of the distributions, with
    gradients if `trains_entropy`; not with multi-token prediction. With multi-token prediction and `loss_weights`:
    [1 + depths, rows, local length], those of each depth times their weights.
    """

    temperature: float = 1.0
    entropies: bool = False
    trains_entropy: bool = False

    def __call__(self, stage: LastStage) -> Tensor:
        model, inputs, documents = stage.model, stage.inputs, stage.documents
        labels, weights = inputs.labels, inputs.loss_weights
        assert labels is not None
        depths = model.architecture.mtp_depths and weights is not None
        # A depth's labels are at later positions than `loss_positions`.
        positions = None if model.architecture.mtp_depths else documents.loss_positions
        values = [self._of(stage, stage.hidden_states, labels, positions)]
        if depths and weights is not None:
            chunk = model.chunks[-1]
            for hidden in chunk.mtp(stage.hidden_states, chunk.embedding, inputs.tokens, documents, stage.embeddings):
                labels, weights = shift_left(labels, documents), shift_left(weights, documents)
                values.append(self._of(stage, hidden, labels, positions) * weights)
        return torch.stack(values) if len(values) > 1 else values[0]

    def _of(self, stage: LastStage, hidden: Tensor, labels: Tensor, positions: Tensor | None) -> Tensor:
        output = replace(_output_matrix(stage), positions=positions)
        temperature = stage.model.architecture.logits_scale * self.temperature
        if self.entropies:
            settings = {"temperature": temperature, "trains_entropy": self.trains_entropy}
            return torch.stack(log_probs_and_entropies(hidden, output, labels, **settings))
        return label_log_probs(hidden, output, labels, temperature=temperature)


@dataclass(frozen=True)
class DocumentScores:
    """Outputs of the head for each document's last token: fp32 [documents, labels], the same on every tensor- and
    context-parallel rank.

    ends [documents], CPU: see `last_tokens` in layers/pooling.py, which says how gradients add up.
    """

    ends: Tensor

    def __call__(self, stage: LastStage) -> Tensor:
        hidden = last_tokens(stage.hidden_states, self.ends, sequence_parallel=stage.model.config.sequence_parallel)
        return stage.output_layer(hidden)


@dataclass(frozen=True)
class TokenValues:
    """Output of a head of one label for every token, fp32 [rows, local length]: a critic's values.

    A token's value depends on it and on those before it, so it is that of the state in which the next one is drawn.
    """

    def __call__(self, stage: LastStage) -> Tensor:
        stage.run_hooks()
        weight, config, group = stage.output_layer.weight, stage.model.config, stage.model.groups.tp
        assert isinstance(weight, Tensor)
        if config.sequence_parallel:  # each rank has a part of the tokens: sum the gradients of the weight
            weight = copy_to_tensor_model_parallel_region(weight, group=group)
        values = F.linear(stage.hidden_states.float(), weight.float())[..., 0]
        if config.sequence_parallel:  # each rank computes the whole loss: give it the gradients of its own part
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)
        return values.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Embeddings:
    """Vector of each document, not normalized: fp32 [documents, hidden_size].

    The last hidden state, after the final norm, of the last token or as a mean over tokens. ends, spans, segments and
    lengths (of the documents, without padding): see `last_tokens` and `mean_tokens` in layers/pooling.py.
    """

    pooling: Literal["last", "mean"]
    ends: Tensor
    spans: Tensor
    segments: Tensor
    lengths: Sequence[int]

    def __call__(self, stage: LastStage) -> Tensor:
        stage.run_hooks()
        weight = stage.output_layer.weight  # None where it is the embedding, which this chunk has
        assert weight is None or isinstance(weight, Tensor)
        hidden, parallel = add_zero_gradient(stage.hidden_states, weight), stage.model.config.sequence_parallel
        if self.pooling == "last":
            return last_tokens(hidden, self.ends, sequence_parallel=parallel)
        assert stage.documents.positions is not None
        return mean_tokens(
            hidden,
            positions=stage.documents.positions,
            spans=self.spans,
            segments=self.segments,
            lengths=self.lengths,
            sequence_parallel=parallel,
        )


@dataclass(frozen=True)
class Choices:
    """Log-probabilities of some tokens after each document: fp32 [documents, tokens]. ends: as above."""

    ends: Tensor
    tokens: Sequence[int]

    def __call__(self, stage: LastStage) -> Tensor:
        ends = self.ends if len(self.ends) else self.ends.new_tensor([-1])  # kernels take no empty input
        states = stage.hidden_states
        last = last_tokens(states, ends, sequence_parallel=stage.model.config.sequence_parallel)
        hidden = last.to(states.dtype).unsqueeze(1).expand(-1, len(self.tokens), -1).flatten(0, 1).unsqueeze(1)
        labels = to_device(torch.tensor(self.tokens).repeat(1, len(ends)), hidden.device)
        output = replace(_output_matrix(stage), positions=None, sequence_parallel=False)
        values = label_log_probs(hidden, output, labels, temperature=stage.model.architecture.logits_scale)
        return values.view(-1, len(self.tokens))[: len(self.ends)]


@dataclass(frozen=True)
class Logits:
    """Logits of every position, over the whole vocabulary: fp32 [rows, local length, vocab_size], without gradients."""

    def __call__(self, stage: LastStage) -> Tensor:
        model, hidden = stage.model, stage.hidden_states
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=model.groups.tp)
        weight, cap = stage.output_matrix(), model.architecture.logits_cap
        hidden = hidden.transpose(0, 1)
        if model.architecture.logits_bias:
            hidden = F.pad(hidden, (0, 1), value=1.0)
            weight = torch.cat((weight, stage.output_bias().unsqueeze(1)), dim=1)
        logits = chunk_logits(hidden, weight, len(weight), cap) / model.architecture.logits_scale
        shards = [torch.empty_like(logits) for _ in range(model.groups.tp.size())]
        dist.all_gather(shards, logits.contiguous(), group=model.groups.tp)
        return torch.cat(shards, -1)[..., : model.architecture.vocab_size]


@dataclass(frozen=True)
class HiddenStates:
    """Result of a function of the hidden states before the output layer, and of its matrix; a tensor of any shape."""

    compute: Callable[[Tensor, OutputMatrix], Tensor]

    def __call__(self, stage: LastStage) -> Tensor:
        return self.compute(stage.hidden_states, _output_matrix(stage))


def _output_matrix(stage: LastStage) -> OutputMatrix:
    model, weight = stage.model, stage.output_matrix()
    has_bias = model.architecture.logits_bias
    return OutputMatrix(
        with_bias(weight, stage.output_bias()) if has_bias else weight,
        model.architecture.vocab_size,
        model.groups.tp,
        sequence_parallel=model.config.sequence_parallel,
        positions=stage.documents.loss_positions,
        accumulate=model.config.accumulate_in_matmul,  # pyright: ignore[reportAttributeAccessIssue]
        cap=model.architecture.logits_cap,
        bias_columns=BIAS_COLUMNS if has_bias else 0,
    )
