"""Choices of experts that are repeated: beside a transformers model that is made to choose so, in passes that are
recomputed, and those that a model made itself."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.layers.replay import (
    CoreReplay,
    Replay,
    find_routers,
    record_experts,
    replay_choice,
    replay_experts,
)
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import Model, ModelInputs
from megaswift.bridge.model.outputs import LogProbs
from megaswift.templates.batching.collator import Batch, BatchLayout
from torch import Tensor

from tests.bridge.families import VOCAB, tinies
from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)

TINIES = tinies()
# By our rule, with groups and a bias; by megatron-core's function, of scores and of logits.
MODELS = "deepseek_v3", "qwen3_moe not normalised", "qwen3_moe"
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
LENGTHS = 9, 14
SOON = list(zip(MODELS, RECOMPUTED, strict=True))
each = pytest.mark.parametrize(
    ("name", "recomputed"),
    [pytest.param(*pair, marks=() if pair in SOON else pytest.mark.long) for pair in product(MODELS, RECOMPUTED)],
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of a variant: its folder, and transformers' model in it."""
    from tests.bridge.families import reference

    torch.set_num_threads(1)
    root, made = tmp_path_factory.mktemp("replay"), {}

    def make(name: str):
        if name not in made:
            model = reference.random_model(TINIES[name], seed=3)
            model.save_pretrained(root / name.replace(" ", "-"))
            made[name] = root / name.replace(" ", "-"), model
        return made[name]

    return make


def opened(folder, options, **changes) -> Model:
    from dataclasses import replace

    config = read_config(folder)
    model = build_model(config, replace(options, **changes), torch.float32)
    load_weights(model.chunks, config, folder)
    return model


def batch(seed: int) -> Batch:
    """Two documents of random tokens, end to end."""
    rng = np.random.default_rng(seed)
    documents = [[(rng.integers(3, VOCAB, n), np.ones(n, np.float32))] for n in LENGTHS]
    return BatchLayout(padding_free=True).batch(documents, 1.0)


def others(model: Model, seed: int) -> Tensor:
    """Experts by lot, distinct for each token: int16 [tokens, layers, topk]."""
    config = model.config
    shape = sum(LENGTHS), len(model.architecture.layers), config.num_moe_experts
    lots = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    return lots.argsort(-1)[..., : config.moe_router_topk].short()


def forward(model: Model, micro_batch: Batch, experts: Tensor | None) -> Tensor:
    (chunk,) = model.chunks
    if experts is not None:
        replay_experts(chunk, experts)
    inputs = ModelInputs(
        micro_batch.tokens, micro_batch.position_ids, micro_batch.cu_seqlens, micro_batch.max_seqlen, micro_batch.labels
    )
    return model.forward(chunk, inputs, LogProbs())


def gradients(model: Model) -> dict[str, Tensor]:
    (chunk,) = model.chunks
    found = {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}
    chunk.zero_grad()
    return found


def forced(model: Any, tokens: Tensor, experts: Tensor) -> Tensor:
    """What transformers' model makes of a document whose tokens go to these experts, by the weights of its logits."""
    settings, hooks, logits = model.config, [], {}
    for number, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "gate"):
            continue

        def keep(module, inputs, output, number=number):
            logits[number] = output[0]

        def choose(module, inputs, number=number):
            taken = experts[:, number].long()
            scores = logits[number].float()
            scores = scores.sigmoid() if settings.model_type == "deepseek_v3" else scores.softmax(-1)
            weights = scores.gather(1, taken)
            if settings.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return inputs[0], taken, weights * getattr(settings, "routed_scaling_factor", 1.0)

        hooks += [layer.mlp.gate.register_forward_hook(keep), layer.mlp.experts.register_forward_pre_hook(choose)]
    try:
        every = model(tokens[None]).logits[0].log_softmax(-1)
    finally:
        for hook in hooks:
            hook.remove()
    return every[:-1].gather(1, tokens[1:, None])[:, 0]


@each
def test_a_model_that_is_told_its_experts(name, recomputed, saved, one_process):  # noqa: F811
    """Two micro batches forward, then two backward: log-probabilities, and the gradients of routers, are those of a
    transformers model whose tokens go there."""
    folder, upstream = saved(name)
    model = opened(folder, one_process, **RECOMPUTED[recomputed])
    model.chunks[0].train()
    batches = [batch(seed) for seed in (1, 2)]
    told = [others(model, seed) for seed in (1, 2)]
    outputs = [forward(model, *each) for each in zip(batches, told, strict=True)]
    for output, micro_batch in zip(outputs, batches, strict=True):
        (output * micro_batch.loss_weights).sum().backward()
    found = gradients(model)
    upstream.zero_grad()
    for micro_batch, experts, output in zip(batches, told, outputs, strict=True):
        start = 0
        for length in LENGTHS:
            document = slice(start, start + length)
            wanted = forced(upstream, micro_batch.tokens[0, document], experts[document])
            torch.testing.assert_close(output[0, document][:-1], wanted, rtol=0, atol=2e-4)
            wanted.sum().backward()
            start += length
    for number in find_routers(model.chunks[0]):
        own = found[f"decoder.layers.{number}.mlp.router.weight"]
        theirs = upstream.model.layers[number].mlp.gate.weight.grad
        assert theirs.abs().max() > 0
        torch.testing.assert_close(own, theirs, rtol=0, atol=2e-4 * float(theirs.abs().max()))
    choosing = forward(model, batches[0], None)  # what was given is not given again
    assert (choosing - outputs[0]).abs().max() > 0.01


@each
def test_its_own_choices_change_nothing(name, recomputed, saved, one_process):  # noqa: F811
    folder, _ = saved(name)
    model = opened(folder, one_process, **RECOMPUTED[recomputed])
    (chunk,) = model.chunks
    batches = [batch(seed) for seed in (1, 2)]
    with record_experts(model.chunks) as recorded, torch.no_grad():
        chunk.eval()
        for micro_batch in batches:
            forward(model, micro_batch, None)
        seen = recorded()
    assert sorted(seen) == sorted(find_routers(chunk))
    chunk.train()
    plain = [forward(model, each, None) for each in batches]
    for output in plain:
        output.sum().backward()
    wanted = gradients(model)
    told = []
    for number in range(len(batches)):
        experts = torch.full_like(others(model, 0), -1)
        for layer, of_layer in seen.items():
            experts[:, layer] = of_layer[number]
        told.append(experts)
    repeated = [forward(model, *each) for each in zip(batches, told, strict=True)]
    for output in repeated:
        output.sum().backward()
    assert all(torch.equal(one, other) for one, other in zip(repeated, plain, strict=True))
    found = gradients(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_tokens_of_which_nothing_is_said_choose(saved, one_process):  # noqa: F811
    """Of the second document nothing is told: it is as if nothing were told at all, and the first as if all were."""
    folder, _ = saved("qwen3_moe")
    model = opened(folder, one_process)
    told, own = others(model, 1), forward(model, batch(1), None)
    every, half = forward(model, batch(1), told), told.clone()
    half[LENGTHS[0] :] = -1
    found = forward(model, batch(1), half)
    first = LENGTHS[0]
    torch.testing.assert_close(found[0, :first], every[0, :first], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0, first:], own[0, first:], rtol=0, atol=1e-5)
    assert (own - every).abs().max() > 0.01
    assert torch.equal(
        replay_choice(torch.tensor([[3, 1], [0, 2]]), torch.tensor([[5, 4], [-1, -1]])), torch.tensor([[5, 4], [0, 2]])
    )


def test_choices_are_written_down_with_the_best_first():
    """megatron-core leaves them in any order where no gradients are asked for; weights are summed in theirs."""

    class Router:
        training = False
        replay = Replay()

    def backwards(scores, topk, num_groups=None, group_topk=None):
        found = scores.topk(topk)
        return found.values.flip(1), found.indices.flip(1)

    Router.replay.is_recording = True
    scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, experts = CoreReplay(Router).get_replay_topk(scores, 3, None, None, backwards)
    assert torch.equal(experts, scores.topk(3).indices)
    assert torch.equal(Router.replay.pop_records()[0].long(), experts)


def test_dense_layers_have_no_router(saved, one_process):  # noqa: F811
    folder, _ = saved("qwen3_moe")
    model = opened(folder, one_process)
    assert sorted(find_routers(model.chunks[0])) == [0, 2, 3]
    assert len(model.architecture.layers) == 4
