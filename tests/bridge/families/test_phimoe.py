"""Phi-MoE beside transformers: SparseMixer's weights and gradients, and logits with the output layer's bias."""

from copy import deepcopy

import pytest
import torch

from tests.bridge.families.test_families import TINIES, one_process  # noqa: F401


@pytest.mark.parametrize("margin", [0.01, 0.3])
def test_weights_and_gradients_are_those_of_transformers(margin):
    from megaswift.bridge.layers.router import mix_sparsely
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    torch.manual_seed(0)
    logits = torch.randn(300, 8, dtype=torch.float64)
    logits[:20] -= 5  # all of them negative
    factors, results = torch.randn(300, 2, dtype=torch.float64), []
    for compute in (
        lambda x: mix_sparsely(x, margin),
        lambda x: sparsemixer(x, jitter_eps=margin, training=False),
    ):
        leaf = logits.clone().requires_grad_()
        weights, experts = compute(leaf)
        (weights * factors).sum().backward()
        results.append((weights.detach(), experts, leaf.grad))
    torch.testing.assert_close(*results)
    assert 0.01 < (results[0][0] < 1).float().mean() < 0.99


def test_experts_to_replay_have_weights():
    from megaswift.bridge.layers.router import mix_sparsely

    weights, experts = mix_sparsely(torch.tensor([[3.0, 1.0, 2.9, 0.0]]), 0.05, torch.tensor([[1, 2]]))
    assert experts.tolist() == [[1, 2]]
    among_three = torch.tensor([3.0, 1.0, 2.9]).softmax(0)[1]
    torch.testing.assert_close(weights[0], torch.stack((among_three, torch.tensor([2.9, 3.0]).softmax(0)[0])))


@pytest.mark.slow
def test_logits_have_the_bias(tmp_path, one_process):  # noqa: F811
    from megaswift.bridge.model.model import ModelInputs
    from megaswift.bridge.model.outputs import Logits, LogProbs
    from transformers import AutoModelForCausalLM

    from tests.bridge.families import reference, worker

    reference.make(tmp_path / "phimoe", TINIES["phimoe"])
    source = tmp_path / "phimoe" / "fp32"
    model = worker.open_model(source, one_process, torch.float32)
    model.chunks[0].eval()
    ids, positions = torch.arange(3, 43)[None], torch.arange(40)[None]
    inputs = ModelInputs(ids, positions, None, 40, labels=ids)
    with torch.no_grad():
        logits = model.forward(model.chunks[0], inputs, Logits())
        _, entropies = model.forward(model.chunks[0], inputs, LogProbs(entropies=True))
        expected = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies, torch.special.entr(expected.softmax(-1)).sum(-1), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_an_output_layer_is_saved_with_its_bias():
    from peft import LoraConfig, get_peft_model

    from tests.bridge.lora.test_targets import plan, transformers_model

    settings = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapted = get_peft_model(deepcopy(transformers_model("phimoe")), settings)
    names = {name.replace("modules_to_save.default.", "") for name, p in adapted.named_parameters() if p.requires_grad}
    table = plan("phimoe", targets=("q_proj",), modules_to_save=("lm_head",)).modules_to_save
    assert {name for entry in table.values() for name in entry.hf} == {name for name in names if "lm_head" in name}
