"""Kimi delta attention of Kimi-Linear (https://arxiv.org/abs/2510.26692): a `self_attention` for layer specs.

It is the gated delta rule (delta_rule.py) with a decay for each channel of a key. A group is one head. Decays and
output gates are projections of two latent vectors per token, which each tensor-parallel rank computes whole.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..mapping.architecture import KimiDelta
from .delta_rule import CHUNK, DeltaLayout, StateScan, causal_conv, future_mask, l2_normalize, to_chunks
from .fla_kernels import FlaKernels, boundaries, from_row, to_row
from .grouped_mixer import GroupedMixer, Groups, MixerWeight, make_parameter
from .linear import ReplicatedLinear, column_linear

ROWS = 16  # queries of a chunk whose decays are in memory at a time


class KimiDeltaAttention(GroupedMixer):
    """Kimi delta attention, with the arguments of `GroupedMixer`."""

    token_inputs = 3

    def _groups(self, config: TransformerConfig) -> Groups:
        sizes: KimiDelta = config.architecture.kimi_delta  # type: ignore[attr-defined]
        self.heads, self.dim, self.kernel = sizes.heads, sizes.head_dim, sizes.kernel
        noun = "heads of this model's Kimi delta attention"
        qkv = 3 * self.dim
        return Groups(sizes.heads, noun, (qkv, self.dim, self.dim, 1), projected=(qkv, 1))

    def _add_modules(self, config: TransformerConfig) -> None:
        dim, width = self.dim, self.heads * self.dim
        self.decay_down, self.gate_down = (ReplicatedLinear(config, config.hidden_size, dim) for _ in range(2))
        self.decay_up, self.gate_up = (column_linear(self.column, config, dim, width, self.tp_group) for _ in range(2))
        self.conv1d = MixerWeight(config, self.groups * 3 * dim, 1, self.kernel, split=True)
        # As checkpoints have them.
        self.A_log = make_parameter(config, 1, 1, self.groups, 1, fp32=True, split=True, dim=2)
        self.dt_bias = make_parameter(config, self.groups * dim, fp32=True, split=True)
        self.norm = MixerWeight(config, dim)

    def _project(self, hidden_states: Tensor) -> Sequence[Tensor]:
        projected, _ = self.in_proj(hidden_states)
        convolved, beta = projected.unflatten(-1, (self.groups, -1)).split((3 * self.dim, 1), dim=-1)
        (gate, _), (decay, _) = (
            self.gate_up(self.gate_down(hidden_states)),
            self.decay_up(self.decay_down(hidden_states)),
        )
        return convolved, *(x.unflatten(-1, (self.groups, -1)) for x in (gate, decay)), beta

    def _mix(self, qkv: Tensor, decay: Tensor, beta: Tensor, layout: DeltaLayout) -> Tensor:
        """qkv [sequence, rows, heads, 3 * dim], decay [..., dim], beta [..., 1], of full documents
        -> [sequence, rows, heads, 1, dim]"""
        sequence, rows, heads, _ = qkv.shape
        weight, dt_bias, a_log = (self._local(x, heads) for x in (self.conv1d(), self.dt_bias, self.A_log.flatten()))
        inputs = (x.flatten(0, 1) for x in (qkv.flatten(2), decay, beta.sigmoid().squeeze(-1)))
        output = self._run(*inputs, weight.flatten(0, 1), a_log, dt_bias, layout)
        return output.view(sequence, rows, heads, 1, self.dim)

    def _run_torch(
        self,
        qkv: Tensor,
        decay: Tensor,
        beta: Tensor,
        weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        layout: DeltaLayout,
    ) -> Tensor:
        """qkv [tokens, heads * 3 * dim], decay [tokens, heads, dim], beta [tokens, heads]; a_log [heads, 1], dt_bias
        [heads, dim] -> [tokens, heads, dim]"""
        convolved = causal_conv(qkv, weight, layout).unflatten(-1, (-1, 3 * self.dim))
        query, key, value = convolved.chunk(3, dim=-1)
        decay = -a_log.exp() * F.softplus(decay.float() + dt_bias)
        return channel_delta_rule(query, key, value, decay, beta, layout)

    def _run_fla(
        self,
        kernels: FlaKernels,
        qkv: Tensor,
        decay: Tensor,
        beta: Tensor,
        weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        layout: DeltaLayout,
    ) -> Tensor:
        convolved = kernels.convolve(qkv, weight, layout).unflatten(-1, (-1, 3 * self.dim))
        query, key, value = (x.contiguous() for x in convolved.chunk(3, dim=-1))
        output, _ = kernels.channel_delta_rule(
            query,
            key,
            value,
            g=to_row(decay, layout),
            beta=to_row(beta, layout),
            A_log=a_log.flatten(),
            dt_bias=dt_bias.flatten(),
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            **boundaries(layout),
        )
        return from_row(output, layout)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Ranks normalize different heads by the same weight, so its gradient is summed over them.
        weight = copy_to_tensor_model_parallel_region(self.norm(), group=self.tp_group)
        normed = F.rms_norm(x.float(), (self.dim,), weight.float(), self.config.layernorm_epsilon)
        return (normed * gate.float().sigmoid()).to(x.dtype)


def channel_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, layout: DeltaLayout
) -> Tensor:
    """Return the output of the delta rule with a decay per channel, computed in fp32; queries and keys are normalized.

    query, key [tokens, heads, key dim]; value [tokens, heads, value dim]; decay (log, <= 0) like key;
    beta [tokens, heads] -> the shape and dtype of value. A state S decays to diag(exp(decay)) S before each token.
    """
    dtype = value.dtype
    query, key = (l2_normalize(x) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    # [chunks, heads, CHUNK, dim]
    query, key, value, decay = (to_chunks(x, layout).movedim(1, -2) for x in (query, key, value.float(), decay.float()))
    beta = to_chunks(beta.float(), layout).movedim(1, -1).unsqueeze(-1)

    log_decay = decay.cumsum(-2)  # from the chunk's start
    products, scores = _decayed_products(query, key, log_decay)
    targets = torch.cat((value * beta, key * (beta * log_decay.exp())), dim=-1)
    solution = torch.linalg.solve_triangular(products * beta, targets, upper=False, unitriangular=True)
    new_values, read_keys = solution.split((value.shape[-1], key.shape[-1]), dim=-1)

    chunk_decay = log_decay[..., -1:, :]
    decayed_key = (key * (chunk_decay - log_decay).exp()).mT
    transition = torch.diag_embed(chunk_decay.exp().squeeze(-2)) - decayed_key @ read_keys
    states = StateScan.apply(transition, decayed_key @ new_values, layout.steps)
    assert isinstance(states, Tensor)

    output = (query * log_decay.exp()) @ states + scores @ (new_values - read_keys @ states)
    return output.movedim(-2, 1).flatten(0, 1).index_select(0, layout.slots).to(dtype)


def _decayed_products(query: Tensor, key: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return products of keys, and of queries, with earlier keys that decayed since: [chunks, heads, CHUNK, CHUNK].

    The decays between each two tokens are a number per channel: a few rows at a time, and never their inverse, which
    overflows.
    """
    blocks = []
    for start in range(0, CHUNK, ROWS):
        rows, columns = slice(start, start + ROWS), slice(0, start + ROWS)
        relative = log_decay[..., rows, :].unsqueeze(-2) - log_decay[..., columns, :].unsqueeze(-3)
        future = future_mask(key.device)[rows, columns].unsqueeze(-1)
        decayed = key[..., columns, :].unsqueeze(-3) * relative.masked_fill(future, -torch.inf).exp()
        pairs = decayed @ torch.stack((key[..., rows, :], query[..., rows, :]), dim=-1)  # [..., ROWS, columns, 2]
        blocks.append(F.pad(pairs, (0, 0, 0, CHUNK - start - ROWS)))
    products, scores = torch.cat(blocks, dim=-3).unbind(-1)
    return products, scores
