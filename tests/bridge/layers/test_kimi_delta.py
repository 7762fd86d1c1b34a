"""The delta rule with a decay per channel, in chunks, against its recurrence, a token at a time."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from megaswift.bridge.layers.delta_rule import make_delta_layout
from megaswift.bridge.layers.kimi_delta import channel_delta_rule

HEADS, KEY, VALUE = 2, 6, 5
BOUNDS = [0, 70, 73, 203]  # documents of more than one chunk, and of a few tokens


def recurrence(query, key, value, decay, beta):
    """[tokens, heads, ...] of one row: in fp64."""
    query, key, value, decay, beta = (x.double() for x in (query, key, value, decay, beta))
    query, key = F.normalize(query, dim=-1) * KEY**-0.5, F.normalize(key, dim=-1)
    outputs = []
    for start, end in pairwise(BOUNDS):
        state = value.new_zeros(HEADS, KEY, VALUE)
        for at in range(start, end):
            state = decay[at].exp().unsqueeze(-1) * state
            error = value[at] - torch.einsum("hkv,hk->hv", state, key[at])
            state = state + beta[at, :, None, None] * key[at].unsqueeze(-1) * error.unsqueeze(-2)
            outputs.append(torch.einsum("hkv,hk->hv", state, query[at]))
    return torch.stack(outputs)


# The second takes a chunk's decays beyond what fp32 can invert; their sums are large numbers there, and round more.
@pytest.mark.parametrize(("strongest", "bound"), [(0.5, 1e-5), (30.0, 1e-3)])
def test_chunks_give_what_the_recurrence_gives(strongest, bound):
    torch.manual_seed(1)
    length = BOUNDS[-1]
    query, key = torch.randn(2, length, HEADS, KEY)
    parts = query, key, torch.randn(length, HEADS, VALUE)
    parts += -strongest * torch.rand(length, HEADS, KEY), torch.rand(length, HEADS)
    layout = make_delta_layout(BOUNDS, 1, 1, 4, torch.device("cpu"))
    results = []
    for is_chunked in (True, False):
        leaves = [x.clone().requires_grad_() for x in parts]
        output = channel_delta_rule(*leaves, layout) if is_chunked else recurrence(*leaves)
        (output * output.sin()).sum().backward()
        results.append([output.detach().float(), *(x.grad for x in leaves)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() < bound * expected.abs().max()
