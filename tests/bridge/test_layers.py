"""The layers that are ours, one by one, against torch and transformers."""

import os
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from megaswift.bridge.layers import logprobs
from megaswift.bridge.layers.attention import make_segments
from megaswift.bridge.layers.rope import inverse_frequencies
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPES = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("scaling", ROPES, ids=[rope["rope_type"] for rope in ROPES])
def test_rope_frequencies_are_those_of_transformers(scaling):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=scaling | {"rope_theta": 1000.0},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(32, 1000.0, scaling), expected, rtol=1e-6, atol=0)


def test_an_unknown_rope_is_an_error():
    with pytest.raises(ValueError, match="'yarn' is not supported: only default, linear and llama3"):
        inverse_frequencies(32, 1000.0, {"rope_type": "yarn", "factor": 2.0})


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_label_log_probs(alone, temperature, monkeypatch):
    """Chunks that do not divide, a padded vocabulary whose padding is far larger than any logit."""
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 3)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 2, 8, generator=generator, requires_grad=True)  # [sequence, batch, hidden_size]
    weight = torch.randn(24, 8, generator=generator)
    weight[21:] = 1e3
    weight.requires_grad_()
    labels = torch.randint(0, 21, (2, 5), generator=generator)
    slopes = torch.randn(2, 5, generator=generator)

    def gradients(value):
        return torch.autograd.grad((value * slopes).sum(), (hidden, weight))

    logits = (hidden.transpose(0, 1) @ weight[:21].t()) / temperature
    expected = logits.log_softmax(-1).gather(2, labels[..., None]).squeeze(2)
    found = logprobs.label_log_probs(
        hidden, weight, labels, vocab_size=21, group=alone, sequence_parallel=False, temperature=temperature
    )
    torch.testing.assert_close(found, expected)
    for mine, torchs in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(mine, torchs)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_segments_find_every_key_that_a_query_may_see(cp_size):
    bounds, cpu = [0, 8, 32, 48], torch.device("cpu")
    document = torch.zeros(48, dtype=torch.long)
    for number, start in enumerate(bounds[1:-1], 1):
        document[start:] = number
    # Each rank's tokens, as the collator deals them: chunks r and 2 x CP - 1 - r of every document.
    held = []
    for rank in range(cp_size):
        mine = []
        for start, end in pairwise(bounds):
            chunks = torch.arange(start, end).chunk(2 * cp_size)
            mine += [chunks[rank], chunks[2 * cp_size - 1 - rank]] if cp_size > 1 else [torch.arange(start, end)]
        held.append(torch.cat(mine))
    gathered = torch.cat(held)
    for rank in range(cp_size):
        segments = make_segments(bounds, rank, cp_size, cpu)
        keys = gathered if segments.key_index is None else gathered[segments.key_index]
        pairs = zip(held[rank].split(segments.queries), keys.split(segments.keys), strict=True)
        for queries, seen in pairs:
            for place, query in enumerate(queries.tolist()):
                visible = seen[: len(seen) - len(queries) + place + 1]
                wanted = [t for t in range(query + 1) if document[t] == document[query]]
                assert visible.tolist() == wanted
