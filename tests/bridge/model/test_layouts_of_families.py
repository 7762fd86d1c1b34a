"""Layouts and settings that some models' layers do not allow, refused by the flag."""

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.model.config import transformer_config
from megaswift.bridge.model.kernel_selection import choose_kernels
from megaswift.bridge.options import BuildOptions

from tests.bridge.families import tinies

REFUSED = [
    (
        "gemma4_text layer inputs",
        "Gemma4",
        {"pipeline_model_parallel_size": 2},
        "layers of this model read the embeddings",
    ),
    (
        "gemma4_text experts",
        "Gemma4",
        {"moe_router_load_balancing_type": "sinkhorn"},
        "leaves out this model's factors on experts' weights",
    ),
    ("gemma4_text experts", "Gemma4", {"moe_shared_expert_overlap": True}, "has another input than the experts"),
    ("nemotron_h latent", "NemotronH", {"moe_shared_expert_overlap": True}, "has another input than the experts"),
]


@pytest.mark.parametrize(("tiny", "name", "options", "message"), REFUSED)
def test_refused(tiny, name, options, message):
    raw = tinies()[tiny].config().to_dict() | {"architectures": [f"{name}ForCausalLM"]}
    architecture = family_of(raw).describe(raw)
    built = BuildOptions(**options)
    kernels = choose_kernels(built, architecture, torch.float32)
    with pytest.raises(ValueError, match=f"--{next(iter(options))} .*{message}"):
        transformer_config(architecture, built, kernels, torch.float32)
