"""Mamba-2's states in chunks against their recurrence, a token at a time, and the arguments of mamba_ssm's kernel."""

from itertools import pairwise

import pytest
import torch
from megaswift.bridge.layers.delta_rule import make_delta_layout
from megaswift.bridge.layers.mamba import Mamba2
from megaswift.bridge.layers.state_space import state_space
from megaswift.bridge.mapping.architecture import Mamba

from tests.bridge.layers.linear_attention import mixer

GROUPS, HEADS, DIM, STATE, KERNEL = 2, 3, 5, 4, 4
BOUNDS = [0, 70, 73, 203]  # documents of more than one chunk, and of less than the convolution's width
CPU = torch.device("cpu")


def recurrence(value, key, query, dt, decay, bounds):
    """value [tokens, groups, heads, dim], key and query [tokens, groups, state], of one row: in fp64."""
    value, key, query, dt, decay = (x.double() for x in (value, key, query, dt, decay))
    outputs = []
    for start, end in pairwise(bounds):
        state = value.new_zeros(*value.shape[1:3], key.shape[-1], value.shape[-1])
        for at in range(start, end):
            update = dt[at, ..., None, None] * key[at, :, None, :, None] * value[at, :, :, None]
            state = decay[at, ..., None, None].exp() * state + update
            outputs.append(torch.einsum("ghsd,gs->ghd", state, query[at]))
    return torch.stack(outputs)


@pytest.mark.parametrize("rows", [1, 2])
def test_chunks_give_what_the_recurrence_gives(rows):
    torch.manual_seed(1)
    length = BOUNDS[-1]
    value = torch.randn(length, rows, GROUPS, HEADS, DIM)
    key, query = torch.randn(2, length, rows, GROUPS, STATE)
    dt = torch.rand(length, rows, GROUPS, HEADS)
    decay = -torch.rand(length, rows, GROUPS, HEADS)
    parts = value, key, query, dt, decay
    layout = make_delta_layout(BOUNDS, rows, 1, KERNEL, CPU)
    results = []
    for is_chunked in (True, False):
        leaves = [x.clone().requires_grad_() for x in parts]
        if is_chunked:
            output = state_space(*(x.flatten(0, 1) for x in leaves), layout).view_as(value)
        else:
            output = torch.stack([recurrence(*(x[:, r] for x in leaves), BOUNDS) for r in range(rows)], dim=1)
        (output * output.sin()).sum().backward()
        results.append([output.detach().float(), *(x.grad for x in leaves)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("rows", "pieces"), [(1, 1), (2, 1), (2, 2)])
def test_the_kernel_gets_one_row_of_documents(rows, pieces):
    """Its stand-in computes what mamba_ssm documents of its arguments."""
    torch.manual_seed(2)
    heads = HEADS * pieces  # heads in a group

    def scan(x, dt, A, B, C, *, chunk_size, D, seq_idx):
        assert x.shape == (1, rows * BOUNDS[-1], GROUPS * heads, DIM)
        assert all(part.is_contiguous() for part in (x, dt, B, C))
        assert seq_idx.dtype == torch.int32
        borders = [0, *(torch.nonzero(seq_idx[0].diff()).flatten() + 1).tolist(), x.shape[1]]
        by_group = x[0].unflatten(1, (GROUPS, heads)), B[0], C[0], dt[0].unflatten(1, (GROUPS, heads))
        decay = by_group[3] * A.view(GROUPS, heads)
        return (recurrence(*by_group, decay, borders).flatten(1, 2) + D[:, None] * x[0]).unsqueeze(0).float()

    sizes = Mamba(GROUPS * heads, DIM, GROUPS, STATE, KERNEL, True, (0.0, float("inf")), pieces)
    sections = (HEADS * DIM + 2 * STATE // pieces, HEADS * DIM, HEADS)
    layer = mixer(Mamba2, mamba=sizes, heads=HEADS, key_dim=STATE // pieces, sections=sections)
    channels, length = GROUPS * pieces * layer.sections[0], BOUNDS[-1]
    arguments = (
        torch.randn(length * rows, channels),
        torch.rand(length * rows, GROUPS, heads),
        torch.randn(channels, 1, KERNEL),
        torch.randn(channels),
        -torch.rand(GROUPS, heads),
        torch.randn(GROUPS, heads),
    )
    layout = make_delta_layout(BOUNDS, rows, 1, KERNEL, CPU)
    found = layer._run_mamba_ssm(scan, *arguments, layout)
    expected = layer._run_torch(*arguments, layout)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
