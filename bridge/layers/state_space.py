"""State-space duality of Mamba-2 (https://arxiv.org/abs/2405.21060, section 6), over packed documents.

Each head keeps a state matrix that decays and adds each token's value at the token's key:

    S_t = exp(a dt_t) S_{t-1} + dt_t B_t x_t',    y_t = S_t' C_t

It is computed as the delta rule is (delta_rule.py): in chunks of 64 tokens, and one step per chunk of the documents.
"""

import torch
from torch import Tensor

from .delta_rule import DeltaLayout, consecutive_steps, future_mask, to_chunks


class _DecayScan(torch.autograd.Function):
    """States at the start of every chunk: 0, then `decay * state + update` of the previous chunk.

    decay [chunks, ..., 1, 1], update [chunks, ..., state dim, value dim], sorted as in DeltaLayout.
    """

    @staticmethod
    def forward(ctx, decay: Tensor, update: Tensor, steps: list[int]) -> Tensor:
        states = torch.zeros_like(update)
        for previous, current in consecutive_steps(steps):
            torch.addcmul(update[previous], decay[previous], states[previous], out=states[current])
        ctx.save_for_backward(decay, states)
        ctx.steps = steps
        return states

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        decay, states = ctx.saved_tensors
        grad_states = grad.clone()  # d loss / d state, through later chunks too
        grad_update = torch.zeros_like(grad_states)  # d loss / d (the state at the chunk's end)
        for previous, current in reversed(list(consecutive_steps(ctx.steps))):
            grad_update[previous] = grad_states[current]
            grad_states[previous] += decay[previous] * grad_states[current]
        return (grad_update * states).sum((-2, -1), keepdim=True), grad_update, None


def state_space(value: Tensor, key: Tensor, query: Tensor, dt: Tensor, decay: Tensor, layout: DeltaLayout) -> Tensor:
    """Return the output y, computed in fp32, in the shape and dtype of value.

    value x [tokens, groups, heads, value dim]; key B and query C [tokens, groups, state dim]; the heads of a group have
    the same ones. dt and decay = a dt (<= 0) [tokens, groups, heads].
    """
    dtype = value.dtype
    value = value.float() * dt.float().unsqueeze(-1)
    value = to_chunks(value, layout).movedim(1, -2)  # [chunks, groups, heads, CHUNK, value dim]
    key, query = (to_chunks(x.float(), layout).movedim(1, -2).unsqueeze(2) for x in (key, query))
    log_decay = to_chunks(decay.float(), layout).movedim(1, -1).unsqueeze(-1).cumsum(-2)  # from the chunk's start
    relative_decay = (log_decay - log_decay.mT).masked_fill(future_mask(log_decay.device), -torch.inf).exp()
    chunk_decay = log_decay[..., -1:, :]
    update = (key * (chunk_decay - log_decay).exp()).mT @ value
    states = _DecayScan.apply(chunk_decay.exp(), update, layout.steps)
    assert isinstance(states, Tensor)
    output = (query @ key.mT * relative_decay) @ value + (query * log_decay.exp()) @ states
    return output.movedim(-2, 1).flatten(0, 1).index_select(0, layout.slots).to(dtype)
