"""The kernels between the matrix of queries, keys and values and attention, against torch's autograd in fp64."""

import pytest
import torch
import torch.nn.functional as F

CASES = {
    "Qwen3": {"norm": True},
    "zero-centred norms, gates, a quarter turns": {"norm": True, "zero": True, "gated": True, "planes": 3, "dim": 24},
    "no norms, neighbours turn": {"interleaved": True},
    "norms, half turns by neighbours": {"norm": True, "interleaved": True, "planes": 4, "view": True},
    "norms, nothing turns": {"norm": True, "planes": 0, "view": True},
    "one query a group, half turns": {"queries": 1, "planes": 4},
    "no norms, heads padded with zeros": {"queries": 1, "dim": 18, "planes": 9, "padded": 40},
    "no norms, 12 planes": {"queries": 1, "dim": 24, "planes": 12},
    "no norms, 12 planes, padded": {"queries": 1, "dim": 24, "planes": 12, "padded": 32},
    "norms, gates, neighbours turn, padded": {"norm": True, "gated": True, "interleaved": True, "padded": 32},
    "frozen norms, gates": {"norm": True, "frozen": True, "gated": True, "view": True},
}


def plain(mixed, weights, angles, groups, queries, dim, gated, eps, zero, interleaved):
    """What megatron-core's SelfAttention and transformers' rotary embeddings do."""
    parts = [queries, queries, 1, 1] if gated else [queries, 1, 1]
    query, *gate, key, value = mixed.unflatten(-1, (groups, -1, dim)).split(parts, dim=3)
    query, key, value = query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)
    if weights is not None:
        query, key = (F.rms_norm(x, (dim,), w + zero, eps) for x, w in zip((query, key), weights, strict=True))
    if angles is not None:
        turning = 2 * angles.shape[-1]
        every = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
        cos, sin = every.cos()[:, :, None], every.sin()[:, :, None]

        def turned(x):
            x, rest = x[..., :turning], x[..., turning:]
            if interleaved:
                across = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
            else:
                across = torch.cat((-x[..., turning // 2 :], x[..., : turning // 2]), -1)
            return torch.cat((x * cos + across * sin, rest), -1)

        query, key = turned(query), turned(key)
    return query, key, value, *(x.flatten(2, 3) for x in gate)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(140, 1), (23, 3)], ids=["packed", "padded"])
def test_split_heads(case, shape, device, monkeypatch):
    from megaswift.bridge.kernels import qkv

    monkeypatch.setattr(qkv, "PROGRAMS", 4)  # fewer than there are tiles
    case = {"norm": False, "zero": False, "gated": False, "queries": 3, "planes": 8, "dim": 16} | CASES[case]
    groups, queries, dim, planes = 2, case["queries"], case["dim"], case["planes"]
    interleaved, gated = case.get("interleaved", False), case["gated"]
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    mixed = random(*shape, groups * (queries * (2 if gated else 1) + 2) * dim).requires_grad_()
    trained = not case.get("frozen")
    weights = [(random(dim) + 1).requires_grad_(trained) for _ in range(2)] if case["norm"] else None
    # Laid out by rows, as position ids are.
    angles = random(shape[1], shape[0], planes).transpose(0, 1) * 9 if planes else None
    expected = plain(mixed, weights, angles, groups, queries, dim, gated, 1e-2, case["zero"], interleaved)

    def here(x):
        return x.detach().to(device, torch.float32).requires_grad_(x.requires_grad)

    inputs = [here(mixed), *map(here, weights or ())]
    padded = case.get("padded")
    heads = qkv.HeadLayout(
        groups, queries, dim, gated, 1e-2, case["zero"], interleaved, case.get("view", False), padded
    )
    turns = None if angles is None else (here(angles.cos()), here(angles.sin()))
    found = qkv.split_heads(inputs[0], (inputs[1], inputs[2]) if weights else None, turns, heads)
    assert (found[3] is not None) == gated
    found = [x for x in found if x is not None]
    # Their gradients come with strides of their own, as a view's would.
    slopes = [random(*x.shape[:2], 2 * x.shape[2], x.shape[3])[:, :, ::2] for x in found]
    asked = 1 + 2 * (weights is not None and trained)
    grads = torch.autograd.grad(found, inputs[:asked], [here(x) for x in slopes])
    exact = torch.autograd.grad(expected, [mixed, *(weights or ())][:asked], [x[..., :dim] for x in slopes])
    for mine in found[:3]:
        assert mine.shape[-1] == (padded or dim)
        assert not mine[..., dim:].any()
    found = [x[..., :dim] for x in found]
    for mine, reference in zip((*found, *grads), (*expected, *exact), strict=True):
        assert mine.shape == reference.shape
        torch.testing.assert_close(mine.double().cpu(), reference, rtol=2e-5, atol=2e-5)


def test_self_attention(device):
    """A model with gates and zero-centred norms: the same numbers with the kernel as without."""
    from megaswift.bridge import parallel
    from megaswift.bridge.layers.self_attention import FusedSelfAttention
    from megaswift.bridge.model.build import build_model
    from megaswift.bridge.model.model import ModelInputs
    from megaswift.bridge.model.outputs import LogProbs
    from megaswift.bridge.options import BuildOptions

    from tests import tiny
    from tests.layouts.worker import close

    about = tiny.config("qwen3_next", num_hidden_layers=2, layer_types=["full_attention"] * 2).to_dict()
    parallel.initialize(BuildOptions(), seed=1)
    tokens, results, hooked = torch.arange(24, device=device)[None] % 7, [], []
    try:
        for fusion in (False, True):
            options = BuildOptions(
                apply_rope_fusion=fusion, transformer_impl="local", gradient_accumulation_fusion=False
            )
            model = build_model(about, options, torch.float32)
            generator = torch.Generator(device).manual_seed(0)
            for parameter in model.chunks[0].parameters():
                torch.nn.init.normal_(parameter, std=0.2, generator=generator)
            attention = [m for m in model.chunks[0].modules() if isinstance(m, FusedSelfAttention)]
            assert len(attention) == 2 * fusion
            for module in attention:
                module.k_layernorm.register_forward_pre_hook(lambda module, _: hooked.append(module))
            ends = torch.tensor([0, 10, 24], dtype=torch.int32)
            found = model.forward(model.chunks[0], ModelInputs(tokens, tokens, ends, 14, labels=tokens), LogProbs())
            found.sum().backward()
            results.append([found, *(parameter.grad for parameter in model.chunks[0].parameters())])
    finally:
        close()
        torch.distributed.destroy_process_group()
    assert len(hooked) == 2
    for plain_one, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain_one, rtol=1e-4, atol=1e-4)
