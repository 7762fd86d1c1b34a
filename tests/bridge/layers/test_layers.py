"""The layers that are ours, one by one, against torch and transformers."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megaswift.bridge.families import family_of
from megaswift.bridge.families.decoder import read_rope
from megaswift.bridge.layers import logprobs
from megaswift.bridge.layers.packed_seqs import AttentionSpan, make_packed_seqs, make_segments
from megaswift.bridge.layers.rope import inverse_frequencies, make_rotary_rule
from megaswift.bridge.layers.sinks import KernelAttention, masked_attention
from megaswift.bridge.model.config import transformer_config
from megaswift.bridge.model.kernel_selection import Kernels
from megaswift.bridge.options import BuildOptions
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests import tiny

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * plane for plane in range(16)],
    "long_factor": [1.0 + 0.5 * plane for plane in range(16)],
    "original_max_position_embeddings": 64,
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.3},
    "yarn, its own factor": YARN | {"attention_factor": 1.4},
    "yarn, two amounts": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, one amount": YARN | {"mscale": 0.7},
    "longrope": LONGROPE,
    "longrope, its own factor": LONGROPE | {"attention_factor": 1.4},
    "longrope, shrunk": LONGROPE | {"factor": 0.5},
}


@pytest.mark.parametrize("name", ROPES)
def test_ropes_are_those_of_transformers(name):
    settings = {"max_position_embeddings": 512, "rope_parameters": ROPES[name] | {"rope_theta": 1000.0}}
    found = make_rotary_rule(read_rope(settings | {"max_position_embeddings": 512}, 32), torch.device("cpu"))
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, **settings)
    embedding = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(found.frequencies, embedding.inv_freq, rtol=1e-6, atol=0)
    assert found.factor == pytest.approx(embedding.attention_scaling)
    if found.long_frequencies is not None:
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=65)
        torch.testing.assert_close(found.long_frequencies, long, rtol=1e-6, atol=0)


def test_an_unknown_rope_is_an_error():
    with pytest.raises(ValueError, match="'spiral' is not supported"):
        inverse_frequencies(32, 1000.0, {"rope_type": "spiral", "factor": 2.0})


@pytest.mark.parametrize("cp_size", [1, 2])
def test_each_document_turns_by_the_factors_for_its_length(cp_size):
    """LongRoPE: one pack of documents on both sides of the original length, and packs on one side."""
    settings = {"max_position_embeddings": 512, "rope_parameters": LONGROPE | {"rope_theta": 1000.0}}
    rule = make_rotary_rule(read_rope(settings | {"max_position_embeddings": 512}, 32), torch.device("cpu"))
    embedding = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=2, **settings))
    for lengths in ((8, 96, 64, 68), (8, 64), (96, 68)):
        bounds = [0, *np.cumsum(lengths).tolist()]
        positions = torch.cat([torch.arange(length) for length in lengths])
        expected = torch.cat([embedding(torch.zeros(1), torch.arange(n)[None])[0][0] for n in lengths])
        for rank in range(cp_size):
            here = held_by(rank, cp_size, bounds)
            documents = make_packed_seqs(
                positions[here][None],
                torch.tensor(bounds, dtype=torch.int32),
                max(lengths),
                ropes=[rule],
                spans=[AttentionSpan()],
                dtype=torch.float32,
                cp_rank=rank,
                cp_size=cp_size,
            )
            torch.testing.assert_close(documents.rotary[0].cos[:, 0, 0], expected[here])


def test_sinks_by_a_flash_kernel_and_with_every_score_in_memory():
    """The two ways agree, gradients too; the kernel is torch's for CPUs, which like the GPU's gives the logarithms."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(7, 3, 8, generator=generator, requires_grad=True) for _ in range(3)]  # [tokens, heads, dim]
    sinks = torch.randn(3, generator=generator, requires_grad=True)
    slopes = torch.randn(7, 3, 8, generator=generator)
    aten = torch.ops.aten

    def batched(x):
        return x.transpose(0, 1).unsqueeze(0)  # [1, heads, tokens, dim]

    def tokens(x):
        return x.squeeze(0).transpose(0, 1)

    def forward(*states):
        output, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(*map(batched, states), 0.0, True, scale=0.3)
        return tokens(output), log_sum.squeeze(0)

    def backward(*states):
        *rest, whole = states
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(batched, rest), whole.unsqueeze(0), 0.0, True, scale=0.3
        )
        return tuple(map(tokens, grads))

    flash = KernelAttention.apply(*inputs, sinks, forward, backward)
    plain = tokens(masked_attention(*map(batched, inputs), None, sinks, 0.3, 0.0))
    torch.testing.assert_close(flash, plain)
    found, expected = (torch.autograd.grad((x * slopes).sum(), (*inputs, sinks)) for x in (flash, plain))
    for mine, autograds in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, autograds)
    frozen = KernelAttention.apply(*inputs, sinks.detach(), forward, backward)
    for mine, autograds in zip(torch.autograd.grad((frozen * slopes).sum(), inputs), expected[:3], strict=True):
        torch.testing.assert_close(mine, autograds)
    assert (plain - tokens(masked_attention(*map(batched, inputs), None, sinks - 9, 0.3, 0.0))).abs().max() > 0.1


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("scored", [None, [1, 2, 7, 9]])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_label_log_probs(alone, temperature, scored, monkeypatch):
    """Chunks that do not divide, a padded vocabulary whose padding is far larger than any logit."""
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 3)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 2, 8, generator=generator, requires_grad=True)  # [sequence, batch, hidden_size]
    weight = torch.randn(24, 8, generator=generator)
    weight[21:] = 1e3
    weight.requires_grad_()
    labels = torch.randint(0, 21, (2, 5), generator=generator)
    slopes = torch.randn(2, 5, generator=generator)
    places = None if scored is None else torch.tensor(scored)

    def gradients(value):
        return torch.autograd.grad((value * slopes).sum(), (hidden, weight))

    logits = (hidden.transpose(0, 1) @ weight[:21].t()) / temperature
    expected = logits.log_softmax(-1).gather(2, labels[..., None]).squeeze(2)
    if places is not None:
        expected = expected * torch.zeros(10).index_fill(0, places, 1.0).view(2, 5)
    output = logprobs.OutputMatrix(weight, 21, alone, positions=places)
    found = logprobs.label_log_probs(hidden, output, labels, temperature=temperature)
    torch.testing.assert_close(found, expected)
    for mine, torchs in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(mine, torchs)


def held_by(rank, cp_size, bounds):
    """A rank's tokens, as the collator deals them: chunks r and 2 x CP - 1 - r of every document."""
    mine = []
    for start, end in pairwise(bounds):
        chunks = torch.arange(start, end).chunk(2 * cp_size)
        mine += [chunks[rank], chunks[2 * cp_size - 1 - rank]] if cp_size > 1 else [torch.arange(start, end)]
    return torch.cat(mine)


@pytest.mark.parametrize(
    "reach",
    [
        AttentionSpan(),
        AttentionSpan(window=5),
        AttentionSpan(window=9),
        AttentionSpan(chunk=5),
        AttentionSpan(chunk=16),
    ],
    ids=str,
)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_segments_find_every_key_that_a_query_may_see(cp_size, reach):
    bounds, cpu = [0, 8, 32, 48], torch.device("cpu")
    document, position = torch.zeros(48, dtype=torch.long), torch.arange(48)
    for number, start in enumerate(bounds[1:-1], 1):
        document[start:] = number
        position[start:] = torch.arange(48 - start)
    held = [held_by(rank, cp_size, bounds) for rank in range(cp_size)]
    gathered = torch.cat(held)
    for rank in range(cp_size):
        segments = make_segments(bounds, rank, cp_size, cpu, reach)
        keys = gathered if segments.key_index is None else gathered[segments.key_index]
        pairs = zip(held[rank].split(segments.queries), keys.split(segments.keys), strict=True)
        for queries, seen in pairs:
            for place, query in enumerate(queries.tolist()):
                visible = seen[: len(seen) - len(queries) + place + 1]
                if segments.window is not None:
                    visible = visible[-segments.window :]
                wanted = [
                    t
                    for t in range(query + 1)
                    if document[t] == document[query]
                    and (reach.window is None or t > query - reach.window)
                    and (reach.chunk is None or position[t] // reach.chunk == position[query] // reach.chunk)
                ]
                assert visible.tolist() == wanted


def test_a_reach_beyond_every_document_costs_nothing():
    segments = make_segments([0, 8, 32, 48], 0, 1, torch.device("cpu"), AttentionSpan(window=24, chunk=24))
    assert (segments.window, segments.chunked, segments.queries) == (None, False, [8, 24, 16])


@pytest.mark.parametrize(("attention", "fused"), [("transformer_engine", True), ("varlen", False), ("sdpa", False)])
def test_latent_heads_turn_by_transformer_engine_where_attention_is_its_and_layers_are_ours(attention, fused):
    about = tiny.config("deepseek_v2").to_dict()
    architecture, options = family_of(about).describe(about), BuildOptions()
    kernels = Kernels(False, attention, "alltoall", "plain")
    assert transformer_config(architecture, options, kernels, torch.bfloat16).apply_rope_fusion == fused
