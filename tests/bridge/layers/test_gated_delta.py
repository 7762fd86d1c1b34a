"""The gated delta rule and its convolution against transformers' own, on documents of odd lengths."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from megaswift.bridge.families import qwen3_5_text
from megaswift.bridge.layers.delta_rule import CHUNK, causal_conv, delta_rule, make_delta_layout
from megaswift.bridge.layers.gated_delta import GatedDeltaNet

GROUPS, HEADS, KEY, VALUE, KERNEL = 3, 2, 16, 24, 4
CPU = torch.device("cpu")
# A document of one token, ones about a chunk long, one of several chunks, and one alone in several rows.
PACKS = [([0, 1, 64, 130, 331], 1), ([0, 63, 127, 192, 394], 2), ([0, 200], 3), ([0, 2], 2)]


def inputs(tokens: int, rows: int) -> tuple[torch.Tensor, ...]:
    """query, key, value, decay, beta, [tokens, rows, ...]; decays from none to nearly all."""
    torch.manual_seed(3)
    query, key = torch.randn(2, tokens, rows, GROUPS, KEY)
    value = torch.randn(tokens, rows, GROUPS, HEADS, VALUE)
    decay = -torch.rand(tokens, rows, GROUPS, HEADS) * torch.tensor([0.0, 3.0])
    beta = torch.rand(tokens, rows, GROUPS, HEADS)
    return tuple(x.requires_grad_() for x in (query, key, value, decay, beta))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize(("bounds", "rows"), PACKS)
def test_rule_is_transformers_own_for_each_document(bounds, rows, rule):
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    given = query, key, value, decay, beta = inputs(bounds[-1], rows)
    layout = make_delta_layout(bounds, rows, 1, KERNEL, CPU)
    assert sum(layout.steps) == rows * sum(-(-(end - start) // CHUNK) for start, end in pairwise(bounds))
    found = delta_rule(*(x.flatten(0, 1) for x in given), layout).view(value.shape)
    expected = []
    for start, end in pairwise(bounds):
        q, k, v, g, b = (x[start:end].transpose(0, 1) for x in (query, key, value, decay, beta))
        output, _ = getattr(theirs, rule)(
            *(x.repeat_interleave(HEADS, dim=2) for x in (q, k)),
            v.flatten(2, 3),
            g=g.flatten(2),
            beta=b.flatten(2),
            use_qk_l2norm_in_kernel=True,
        )
        expected.append(output.transpose(0, 1).unflatten(2, (GROUPS, HEADS)))
    expected = torch.cat(expected)
    assert relative(found, expected) < 1e-5
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weight).sum(), given)
    reference = torch.autograd.grad((expected * weight).sum(), given)
    assert max(map(relative, ours, reference)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("bounds", "rows"), PACKS)
def test_convolution_is_transformers_own_for_each_document(bounds, rows):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    torch.manual_seed(3)
    x, weight = torch.randn(bounds[-1], rows, 10), torch.randn(10, 1, KERNEL)
    found = causal_conv(x.flatten(0, 1), weight, make_delta_layout(bounds, rows, 1, KERNEL, CPU)).view(x.shape)
    documents = (x[start:end].permute(1, 2, 0) for start, end in pairwise(bounds))
    expected = torch.cat(
        [causal_conv1d_fn(document, weight.squeeze(1), activation="silu").permute(2, 0, 1) for document in documents]
    )
    assert relative(found, expected) < 1e-5


def test_half_precision_goes_in_and_comes_out():
    given = [x.detach().bfloat16() for x in inputs(70, 1)]
    found = delta_rule(*(x.flatten(0, 1) for x in given), make_delta_layout([0, 70], 1, 1, KERNEL, CPU))
    exact = delta_rule(*(x.float().flatten(0, 1) for x in given), make_delta_layout([0, 70], 1, 1, KERNEL, CPU))
    assert found.dtype == torch.bfloat16
    assert relative(found.float(), exact) < 1e-2  # rounded once, at the end


def test_steps_follow_one_another():
    """The n-th chunk of a document lies as many places behind the n-th step's first as every chunk of it does."""
    layout = make_delta_layout([0, 10, 200, 201, 330], 1, 1, KERNEL, CPU)
    assert layout.steps == [4, 2, 2]
    chunks = layout.slots // CHUNK
    firsts = [0, 4, 6]
    for start, end in ((10, 200), (201, 330)):
        ranks = {int(chunks[token]) - firsts[(token - start) // CHUNK] for token in range(start, end)}
        assert len(ranks) == 1


def test_positions_of_context_parallel_ranks_are_put_in_place():
    bounds, ranks = [0, 8, 24], 2
    of_rank: list[list[int]] = [[], []]
    for start, end in pairwise(bounds):
        part = (end - start) // 4
        for rank in range(ranks):
            for number in (rank, 3 - rank):
                of_rank[rank] += range(start + number * part, start + (number + 1) * part)
    laid = torch.tensor(of_rank[0] + of_rank[1])
    layout = make_delta_layout(bounds, 1, ranks, KERNEL, CPU)
    assert laid[layout.document_order].tolist() == list(range(24))
    assert torch.arange(24)[layout.rank_order].tolist() == laid.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate False; this family is supported with True only"),
        (
            {"output_gate_type": "sigmoid"},
            "output_gate_type 'sigmoid'; this family is supported with 'swish' or 'silu' only",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; this family is supported with 'silu' or 'swish' only"),
        (
            {"layer_types": ["sliding_attention"] * 32},
            "set one for each of the 32 layers, full_attention or linear_attention",
        ),
        ({"layer_types": ["full_attention"] * 31}, "one for each of the 32 layers"),
        ({"linear_num_key_heads": 12}, "linear_num_value_heads 32 and linear_num_key_heads 12: the second must divide"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling of type 'dynamic'"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        qwen3_5_text.FAMILY.describe(changes)
    with pytest.raises(ValueError, match=message):
        qwen3_5_text.FAMILY.describe({"text_config": changes, "vision_config": {}})


def test_heads_that_ranks_do_not_divide_are_refused():
    def group(size: int) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: size, rank=lambda: 0)

    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, linear_num_key_heads=6, linear_num_value_heads=12
    )
    groups = SimpleNamespace(tp=group(2), cp=group(2))
    with pytest.raises(ValueError, match="--tensor_model_parallel_size 2 x --context_parallel_size 2 does not divide"):
        GatedDeltaNet(config, 1, in_proj=None, out_proj=None, pg_collection=groups)
