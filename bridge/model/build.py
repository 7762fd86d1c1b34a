"""The model builder: a checkpoint's config.json and the options -> this rank's chunks of a megatron-core GPTModel."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .. import patches, runtime
from ..families import family_of
from ..layers.delta_rule import make_delta_layout
from ..layers.embedding import AccumulatingEmbedding
from ..layers.logprobs import label_log_probs, log_probs_and_entropies
from ..layers.mtp import MtpBlock, shift_left
from ..layers.packed_seqs import AttentionSpan, Documents, make_packed_seqs, next_positions, to_device
from ..layers.pooling import ScoreHead, last_tokens, mean_tokens, unused
from ..layers.rope import RotaryRule, make_rotary_rule
from ..layers.spec import block_spec, mtp_spec
from ..mapping import fp8
from ..mapping.param_mapping import Architecture, Family, HfConfig, Layer
from ..options import BuildOptions
from .config import transformer_config
from .kernel_selection import Kernels, choose_kernels

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# (hidden states, this rank's rows of the output matrix, group=, sequence_parallel=, scored=: as of `label_log_probs`)
# -> a tensor, of any shape
OfHiddenStates = Callable[..., Tensor]


@dataclass
class Model:
    """This rank's part of the model."""

    chunks: list[GPTModel]  # one per virtual pipeline stage
    config: TransformerConfig
    architecture: Architecture
    kernels: Kernels
    ropes: tuple[RotaryRule, ...]  # for each of the architecture's, on this rank's device
    lora: Any = None  # lora/attach.py's Lora, where there are adapters
    trained_share: float = 1.0  # of its parameters, adapters among them
    prediction_scale: float = 0.0  # of the mean loss of the depths of multi-token prediction, beside the labels'

    def log_probs(
        self,
        chunk: torch.nn.Module,
        *,
        tokens: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        loss_weights: Tensor | None = None,
        scored: Tensor | None = None,
        temperature: float = 1.0,
        entropies: bool = False,
    ) -> Tensor:
        """One micro batch through one chunk (bare, or wrapped for data parallelism).

        tokens, labels, position_ids [rows, local length] on the device; cu_seqlens [documents + 1] int32 on the CPU.
        scored: which of rows * local length positions are asked for, [n] on the CPU; the others are 0. None: all.
        Returns log p(label) fp32 [rows, local length] on the last pipeline stage, else hidden states for the next.
        With layers of multi-token prediction and `loss_weights` of the labels: [1 + depths, rows, local length], after
        the labels' those of the tokens that the depths predict, each times its weight.
        `temperature`: by which logits are divided, as where the labels were drawn so. `entropies` (not with these
        layers): [2, rows, local length], beside them those of the distributions, which have no gradients.
        """
        documents = self.documents(position_ids, cu_seqlens, max_seqlen)
        if scored is not None and not self.architecture.mtp_depths:  # whose depths score the labels of further tokens
            documents.scored = to_device(scored, position_ids.device)
        return chunk(
            tokens,
            position_ids,
            None,
            labels=labels,
            loss_mask=loss_weights,
            packed_seq_params=documents,
            output_processor=functools.partial(
                self._log_probs_of_all_depths, temperature=temperature, entropies=entropies
            ),
        )

    def scores(
        self,
        chunk: torch.nn.Module,
        *,
        tokens: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        ends: Tensor,
    ) -> Tensor:
        """What the head makes of each document's last token: fp32 [documents, labels], on the last pipeline stage.

        Arguments and stages as of `log_probs`, of one row; ends [documents] on the CPU: see `last_tokens` in
        layers/pooling.py, which says how gradients add up. The same on every tensor- and context-parallel rank.
        """
        documents = self.documents(position_ids, cu_seqlens, max_seqlen)
        process = functools.partial(self._scores, ends=ends)
        return chunk(tokens, position_ids, None, packed_seq_params=documents, output_processor=process)

    def embeddings(
        self,
        chunk: torch.nn.Module,
        *,
        tokens: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        ends: Tensor,
        spans: Tensor,
        segments: Tensor,
        lengths: Sequence[int],
        pooling: Literal["last", "mean"],
    ) -> Tensor:
        """A vector of each document, not normalised: fp32 [documents, hidden_size], on the last pipeline stage.

        The last hidden state, behind its norm, of the last token or as a mean over tokens. As `scores`; spans, segments
        and lengths (of the documents, without padding): see `mean_tokens` in layers/pooling.py.
        """
        documents = self.documents(position_ids, cu_seqlens, max_seqlen)
        pool = functools.partial(last_tokens, ends=ends)
        if pooling == "mean":
            assert documents.positions is not None
            pool = functools.partial(
                mean_tokens, positions=documents.positions, spans=spans, segments=segments, lengths=lengths
            )
        process = functools.partial(self._embeddings, pool=pool)
        return chunk(tokens, position_ids, None, packed_seq_params=documents, output_processor=process)

    def choices(
        self,
        chunk: torch.nn.Module,
        *,
        tokens: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        ends: Tensor,
        choices: Sequence[int],
    ) -> Tensor:
        """log p of each of the tokens `choices` behind each document: fp32 [documents, choices]. As `scores`."""
        documents = self.documents(position_ids, cu_seqlens, max_seqlen)
        process = functools.partial(self._choices, ends=ends, choices=choices)
        return chunk(tokens, position_ids, None, packed_seq_params=documents, output_processor=process)

    def of_hidden_states(
        self,
        chunk: torch.nn.Module,
        *,
        tokens: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        make: OfHiddenStates,
        scored: Tensor | None = None,
    ) -> Tensor:
        """What `make` makes, on the last pipeline stage, of what the output layer is given. Else as `log_probs`."""
        documents = self.documents(position_ids, cu_seqlens, max_seqlen)
        if scored is not None:
            documents.scored = to_device(scored, position_ids.device)
        process = functools.partial(self._of_hidden_states, make=make)
        return chunk(tokens, position_ids, None, packed_seq_params=documents, output_processor=process)

    def output_matrix(self) -> Tensor:
        """This rank's rows of it, on the last pipeline stage."""
        chunk = self.chunks[-1]
        weight = chunk.shared_embedding_or_output_weight() if self.architecture.tied else chunk.output_layer.weight
        assert isinstance(weight, Tensor)
        return weight

    def documents(self, position_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> Documents:
        cp_size = parallel_state.get_context_parallel_world_size()
        documents = make_packed_seqs(
            position_ids,
            cu_seqlens,
            max_seqlen,
            ropes=self.ropes,
            spans=[AttentionSpan(layer.window, layer.chunk) for layer in (*self.architecture.layers, Layer())],
            dtype=self.config.params_dtype,
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=cp_size,
        )
        if self.architecture.mtp_depths:
            bounds = [0, position_ids.shape[1] * cp_size] if cu_seqlens is None else cu_seqlens.tolist()
            cp_rank = parallel_state.get_context_parallel_rank()
            documents.next_positions = next_positions(bounds, cp_rank, cp_size, position_ids.device)
        if any(layer.mixer == "gated_delta_net" for layer in self.architecture.layers):
            rows, length = position_ids.shape
            bounds = [0, length * cp_size] if cu_seqlens is None else cu_seqlens.tolist()
            kernel = self.architecture.transformer["linear_conv_kernel_dim"]
            documents.runs = make_delta_layout(bounds, rows, cp_size, kernel, position_ids.device)
        return documents

    def _scores(self, *, hidden_states: Tensor, output_layer: torch.nn.Module, ends: Tensor, **_: Any) -> Tensor:
        return output_layer(last_tokens(hidden_states, ends, sequence_parallel=self.config.sequence_parallel))

    def _embeddings(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        pool: functools.partial[Tensor],
        **_: Any,
    ) -> Tensor:
        _run_hooks(output_layer)
        weight = cast(Tensor | None, output_layer.weight)  # None where it is the embedding, which this chunk has
        return pool(unused(hidden_states, weight), sequence_parallel=self.config.sequence_parallel)

    def _choices(self, *, hidden_states: Tensor, ends: Tensor, choices: Sequence[int], **output: Any) -> Tensor:
        asked = ends if len(ends) else ends.new_tensor([-1])  # of nothing the kernels know nothing
        found = last_tokens(hidden_states, asked, sequence_parallel=self.config.sequence_parallel)
        hidden = found.to(hidden_states.dtype).unsqueeze(1).expand(-1, len(choices), -1).flatten(0, 1).unsqueeze(1)
        labels = to_device(torch.tensor(choices).repeat(1, len(asked)), hidden.device)
        log_probs = self._label_log_probs(
            **output | {"hidden_states": hidden, "labels": labels, "sequence_parallel": False}
        )
        return log_probs.view(-1, len(choices))[: len(ends)]

    def _of_hidden_states(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        packed_seq_params: Documents,
        make: OfHiddenStates,
        **_: Any,
    ) -> Tensor:
        return make(
            hidden_states,
            _matrix(output_layer, output_weight),
            group=parallel_state.get_tensor_model_parallel_group(),
            sequence_parallel=self.config.sequence_parallel,
            scored=packed_seq_params.scored,
        )

    def _log_probs_of_all_depths(
        self, *, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor | None, input_ids: Tensor, **output: Any
    ) -> Tensor:
        found = [self._label_log_probs(hidden_states=hidden_states, labels=labels, **output)]
        if self.architecture.mtp_depths and loss_mask is not None:
            model, documents = self.chunks[-1], output["packed_seq_params"]
            for hidden in model.mtp(hidden_states, model.embedding, input_ids, documents):
                labels, loss_mask = shift_left(labels, documents), shift_left(loss_mask, documents)
                found.append(self._label_log_probs(hidden_states=hidden, labels=labels, **output) * loss_mask)
        return torch.stack(found) if len(found) > 1 else found[0]

    def _label_log_probs(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        labels: Tensor,
        packed_seq_params: Documents,
        sequence_parallel: bool | None = None,
        temperature: float = 1.0,
        entropies: bool = False,
        **_,
    ) -> Tensor:
        find = log_probs_and_entropies if entropies else label_log_probs
        found = find(
            hidden_states,
            _matrix(output_layer, output_weight),
            labels,
            vocab_size=self.architecture.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            sequence_parallel=self.config.sequence_parallel if sequence_parallel is None else sequence_parallel,
            temperature=self.architecture.logits_scale * temperature,
            accumulate=self.config.accumulate_in_matmul,  # pyright: ignore[reportAttributeAccessIssue]
            scored=packed_seq_params.scored,
        )
        return torch.stack(found) if isinstance(found, tuple) else found


def _run_hooks(output_layer: torch.nn.Module) -> None:
    """Those before a module that is not called itself: they wait for an overlapped gathering of its matrix."""
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())


def _matrix(output_layer: torch.nn.Module, output_weight: Tensor | None) -> Tensor:
    """What an output layer multiplies with: its own, or where they are tied the embedding's."""
    _run_hooks(output_layer)
    weight = output_layer.weight if output_weight is None else output_weight
    assert isinstance(weight, Tensor)
    return weight


def build_model(hf_config: HfConfig, options: BuildOptions, dtype: torch.dtype, *, adapters: bool = False) -> Model:
    """Build this rank's chunks, weights not yet set, on its device. The process groups must be there: parallel.py.

    `adapters`: there will be some, which want to see what goes into each matrix.
    """
    runtime.enable()
    patches.apply_patches()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # its advice is for its own launcher's users
    family = family_of(hf_config)
    architecture = family.describe(hf_config)
    if options.mtp_num_layers:
        architecture = _with_prediction(architecture, family, hf_config, options)
    if "num_moe_experts" in architecture.transformer and dtype == torch.float16:
        # megatron-core scales the loss for dense weights and for experts apart: the two can part.
        raise ValueError("--torch_dtype float16 is not for a mixture of experts: give bfloat16 or float32")
    kernels = choose_kernels(options, architecture, dtype)
    config = transformer_config(architecture, options, kernels, dtype)
    config.norms_apart = adapters  # type: ignore[attr-defined]
    stages = options.virtual_pipeline_model_parallel_size
    chunks = [_build_chunk(config, architecture, kernels, stage) for stage in (range(stages) if stages else [None])]
    ropes = tuple(make_rotary_rule(rope, runtime.device()) for rope in architecture.ropes)
    return Model(chunks, config, architecture, kernels, ropes, prediction_scale=options.mtp_loss_scaling_factor)


def _with_prediction(
    architecture: Architecture, family: Family, hf_config: HfConfig, options: BuildOptions
) -> Architecture:
    depths = options.mtp_num_layers or 0
    if options.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"--mtp_num_layers {depths} needs --pipeline_model_parallel_size 1 in this version: its layers share the "
            "embedding with the first stage, and the output layer with the last"
        )
    if family.mtp_mappings is None:
        raise ValueError(f"--mtp_num_layers {depths}: layers of multi-token prediction are not known of {family.name}")
    family.mtp_mappings(hf_config, depths)
    return replace(architecture, mtp_depths=depths)


def _build_chunk(
    config: TransformerConfig, architecture: Architecture, kernels: Kernels, vp_stage: int | None
) -> GPTModel:
    tp = config.tensor_model_parallel_size
    model = GPTModel(
        config,
        block_spec(config, transformer_engine=kernels.transformer_engine, vp_stage=vp_stage),  # pyright: ignore[reportArgumentType]
        vocab_size=-(-architecture.vocab_size // tp) * tp,  # padded up to what TP divides, inside only
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="none",  # attention turns queries and keys itself: see layers/attention.py
        vp_stage=vp_stage,
    )
    if architecture.num_labels is not None and model.post_process:
        head = ScoreHead(architecture.num_labels, config.hidden_size, config.params_dtype)
        model.output_layer = head  # pyright: ignore[reportAttributeAccessIssue]
    fp8.move_to_device(model, runtime.device())
    if config.fp8:
        fp8.check_sizes(model.decoder)
    if architecture.mtp_depths:
        layer, norm = mtp_spec(config, transformer_engine=kernels.transformer_engine)
        model.mtp = MtpBlock(  # pyright: ignore[reportAttributeAccessIssue]
            config, architecture.mtp_depths, layer, norm
        ).to(runtime.device())
    if model.pre_process and config.accumulate_in_matmul:  # pyright: ignore[reportAttributeAccessIssue]
        # A GPTModel makes its embedding by itself, of no spec.
        model.embedding.word_embeddings.__class__ = AccumulatingEmbedding
    if architecture.embedding_scale != 1.0 and model.pre_process:
        scale = float(torch.tensor(architecture.embedding_scale, dtype=config.params_dtype))
        model.embedding.register_forward_hook(lambda module, inputs, output: cast(Tensor, output) * scale)
    return model


def enable_grads_through_frozen(chunk: GPTModel) -> None:
    """Let all parameters that are trained have gradients beside frozen ones: called once it is known which are.

    Raises ValueError for biases beside frozen matrices in FP8.
    """
    trained = any(parameter.requires_grad for parameter in chunk.parameters())
    if chunk.pre_process and trained and chunk.config.recompute_granularity:
        # What is recomputed gives its parameters gradients only where what goes into it has one.
        chunk.embedding.register_forward_hook(_with_gradient)
    for name, module in chunk.named_modules():
        bias, weight = getattr(module, "bias", None), getattr(module, "weight", None)
        if bias is None or weight is None or not bias.requires_grad or weight.requires_grad or not _adds_bias(module):
            continue
        if chunk.config.fp8:
            raise ValueError(f"--fp8_format: the bias of {name} is to be trained, and its matrix is not; leave one out")
        module.register_forward_hook(_with_bias_gradient, prepend=True)


def _with_gradient(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _adds_bias(module: Any) -> bool:
    """Whether the bias is added in the same autograd function as the product, of megatron-core's or Transformer
    Engine's: these give it no gradient where the matrix has none."""
    if isinstance(module, ColumnParallelLinear):
        return not module.skip_bias_add
    return not getattr(module, "te_return_bias", True)


def _with_bias_gradient(module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0] + (module.bias - module.bias.detach()), output[1]
