"""Input of output processors."""

from types import SimpleNamespace
from typing import Any

import torch
from megaswift.bridge.model.model import LastStage


def test_a_weight_in_two_places_is_waited_for_where_it_is() -> None:
    """megatron-core's hooks gather a parameter before the module that has it runs: here, the embedding."""
    gathered, absent = [], torch.nn.Module()
    embedding, output_layer = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    for name, module in (("embedding", embedding), ("output layer", output_layer)):
        module.register_forward_pre_hook(lambda *_, name=name: gathered.append(name))
    absent.weight = None  # type: ignore[assignment]
    chunk = SimpleNamespace(embedding=SimpleNamespace(word_embeddings=embedding))
    model, nothing = SimpleNamespace(chunks=[chunk]), (None,) * 3
    for layer, tied, expected in (
        (output_layer, None, output_layer.weight),
        (output_layer, output_layer.weight, output_layer.weight),  # a copy of the first stage's embedding
        (absent, embedding.weight, embedding.weight),
    ):
        inputs: Any = (model, *nothing, layer, tied)
        assert LastStage(*inputs).output_matrix() is expected
    assert gathered == ["output layer", "output layer", "embedding"]
