"""Experts of an engine's tokens: compared with transformers' routers, over HTTP, and in a run's episodes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from megaswift.tasks.rl.episode import Episode, from_tensors, sequences_of, to_tensors
from megaswift.tasks.rollout.completion_json import as_json, from_json
from megaswift.tasks.rollout.engine import Completion, Request, Sampling
from megaswift.tasks.rollout.transformers_engine import TransformersEngine
from megaswift.templates.batching.collator import BatchLayout
from megaswift.templates.batching.episode_batches import BatchPlan
from megaswift.templates.batching.prompt_dataloader import Prompt

from tests import tiny


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> TransformersEngine:
    torch.set_num_threads(1)
    folder = tiny.save(tmp_path_factory.mktemp("model"), "qwen3_moe")
    tiny.save_tokenizer(folder)
    made = TransformersEngine(folder, dtype=torch.float32, batch_size=3)
    made.eos_ids = set(range(0, tiny.VOCAB, 9))  # some end early
    return made


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, tiny.VOCAB, (length,), generator=generator).tolist() for length in (5, 17, 2, 9)]
    return [Request(prompt, seed=10 + number) for number, prompt in enumerate(prompts)]


@torch.no_grad()
def routed(engine: TransformersEngine, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Return the choices of each layer's router in one pass over a document."""
    layers, found, hooks = engine.replica.model.model.layers, {}, []
    for number, layer in enumerate(layers):
        if hasattr(layer.mlp, "gate"):

            def keep(module, inputs, output, number=number):
                found[number] = output[2]

            hooks.append(layer.mlp.gate.register_forward_hook(keep))
    engine.replica.model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def test_the_experts_of_transformers_tokens(engine):
    sampling = Sampling(max_new_tokens=12, experts=True)
    completions = engine.generate(requests(), sampling)
    assert len({len(one.tokens) for one in completions}) > 1
    for request, found in zip(requests(), completions, strict=True):
        wanted = routed(engine, request.tokens + found.tokens)
        assert found.experts is not None
        assert found.experts.shape == (len(request.tokens) + len(found.tokens) - 1, 4, 2)
        assert sorted(wanted) == [0, 2, 3]
        assert (found.experts[:, 1] == -1).all()  # a dense layer
        for layer, experts in wanted.items():
            assert np.array_equal(found.experts[:, layer], experts[:-1].numpy())
    plain = engine.generate(requests(), replace(sampling, experts=False))
    assert all(one.experts is None for one in plain)
    assert [one.tokens for one in plain] == [one.tokens for one in completions]


def test_a_model_that_does_not_say_its_experts(tmp_path):
    folder = tiny.save(tmp_path, "qwen3")
    tiny.save_tokenizer(folder)
    made = TransformersEngine(folder, dtype=torch.float32)
    with pytest.raises(
        ValueError, match="--router_replay_mode R3: transformers' Qwen3ForCausalLM does not expose the chosen"
    ):
        made.generate(requests()[:1], Sampling(max_new_tokens=2, experts=True))


@pytest.mark.parametrize(("least", "most", "kind"), [(0, 127, "uint8"), (0, 511, "uint16"), (-1, 127, "int16")])
def test_experts_over_the_wire(least, most, kind):
    experts = np.random.default_rng(0).integers(least, most, (7, 3, 2), endpoint=True)
    experts[0, 0], experts[1, 0] = least, most
    sent = as_json(Completion([5, 6], [-1.0, -0.5], "stop", experts))
    assert sent["experts"]["dtype"] == kind
    found = from_json(json.loads(json.dumps(sent)))
    assert found.experts is not None
    assert np.array_equal(found.experts, experts)
    assert (found.tokens, found.log_probs, found.finish) == ([5, 6], [-1.0, -0.5], "stop")
    assert from_json(json.loads(json.dumps(as_json(replace(found, experts=None))))).experts is None


def episodes() -> list[Episode]:
    rng, found = np.random.default_rng(0), []
    for number, (before, after) in enumerate([(4, 3), (2, 7), (6, 0), (3, 5)]):
        prompt = Prompt(f"row {number}", rng.integers(3, 50, before).tolist(), {"goal": number})
        experts = rng.integers(0, 8, (before + max(after - 1, 0), 4, 2)).astype(np.uint8)
        completion = Completion(rng.integers(3, 50, after).tolist(), [-1.0] * after, "stop", experts)
        found.append(Episode.from_completion(prompt, 0, completion, ""))
    return found


def test_experts_of_the_last_token_are_not_known():
    for episode in episodes():
        assert episode.experts is not None
        assert episode.experts.dtype == np.int16
        assert len(episode.experts) == len(episode.tokens)
        assert (episode.experts[:-1] >= 0).all() or not episode.length
        assert (episode.experts[-1] == -1).all() == (episode.length > 0)


def test_experts_go_through_a_checkpoint():
    for sent, found in zip(episodes(), from_tensors(to_tensors(episodes())), strict=True):
        assert sent.experts is not None
        assert np.array_equal(found.experts, sent.experts)  # pyright: ignore[reportArgumentType]
        assert found.experts.dtype == np.int16  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("pack", [None, 24])
@pytest.mark.parametrize("context", [1, 2])
def test_experts_lie_beside_their_tokens(context, pack):
    """On each rank, and together they are what went in."""
    sequences = sequences_of(episodes(), drop_truncated=False)
    together: dict[int, np.ndarray] = {}
    for rank in range(context):
        layout = BatchLayout(
            stage="prompts",
            context_parallel_size=context,
            context_parallel_rank=rank,
            length_multiple=2,
        )
        plan = BatchPlan(layout, micro_batch_size=1 if pack else 2, rank=0, ranks=1, pack_length=pack)
        for batch in plan.batches(sequences):
            assert batch.experts is not None
            assert batch.experts.shape == (batch.tokens.shape[1], 4, 2)
            for item, experts in plan.token_values_by_document(batch, batch.experts.numpy()).items():
                together[item] = np.maximum(together.get(item, np.full_like(experts, -1)), experts)
    assert sorted(together) == [0, 1, 2, 3]
    for item, experts in together.items():
        assert np.array_equal(experts, sequences.experts[item])
