"""The vision tower in bf16 on a GPU, with each attention, against transformers' in fp32: features and gradients."""

from types import SimpleNamespace

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.layers.patch_plan import plan_patches
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.mapping.param_mapping import expand_mappings
from torch import Tensor

pytestmark = pytest.mark.gpu

GRIDS = torch.tensor([[1, 32, 64], [1, 6, 10], [1, 48, 40], [1, 64, 64]])
OUTPUT = 256


def reference_tower(hidden_size: int):
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    tower = {
        "depth": 4, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size + 48, "num_heads": 4,
        "out_hidden_size": OUTPUT, "patch_size": 16, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 400,
    }  # fmt: skip
    text = {"hidden_size": OUTPUT, "num_hidden_layers": 4, "intermediate_size": 64, "vocab_size": 100, "head_dim": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3VLConfig(vision_config=tower, text_config=text | heads)
    torch.manual_seed(0)
    model = Qwen3VLVisionModel._from_config(config.vision_config, dtype=torch.float32, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.05)
        parameter.data.copy_(parameter.bfloat16())
    return config.to_dict() | {"architectures": ["Qwen3VLForConditionalGeneration"]}, model.cuda()


def run_reference(model, patches: Tensor, slopes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    result = model(patches, grid_thw=GRIDS.cuda())
    features = torch.stack([result.pooler_output, *result.deepstack_features])
    (features * slopes).sum().backward()
    return features.detach().float(), {f"model.visual.{n}": p.grad.float() for n, p in model.named_parameters()}


def error(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).detach().norm() / reference.norm())


@pytest.mark.parametrize("has_main_grad", [False, True], ids=["autograd", "main_grad"])
@pytest.mark.parametrize("attention", ["transformer_engine", "torch"])
@pytest.mark.parametrize("hidden_size", [256, 288], ids=["64 dims", "72 dims"])
def test_tower_equals_transformers(hidden_size: int, attention: str, has_main_grad: bool) -> None:
    if attention == "transformer_engine":
        pytest.importorskip("transformer_engine.pytorch")
    config, model = reference_tower(hidden_size)
    patches = torch.randn(int(GRIDS.prod(1).sum()), 3 * 2 * 16 * 16, device="cuda").bfloat16().float()
    slopes = torch.randn(3, len(patches) // 4, OUTPUT, device="cuda").bfloat16().float()
    features, gradients = run_reference(model, patches, slopes)
    bf16_features, bf16_gradients = run_reference(model.bfloat16(), patches.bfloat16(), slopes.bfloat16())

    family = family_of(config)
    architecture = family.describe(config, vision=True)
    assert architecture.vision
    settings = SimpleNamespace(params_dtype=torch.bfloat16, attention_kernel=attention)
    part = TowerPart(architecture.vision, None, settings, torch.device("cuda"))  # type: ignore[arg-type]
    weights = {f"model.visual.{name}": parameter.data for name, parameter in model.named_parameters()}
    rows = expand_mappings(family, config, architecture, weights)

    def as_ours(name: str, parameter: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        parts = [tensors[source] for source in rows[name].hf]
        spans = rows[name].spans(parameter.shape, 1, architecture)
        starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
        joined = torch.cat(parts)
        pieces = [joined[starts[span.part] + span.start : starts[span.part] + span.stop] for span in spans]
        return torch.cat(pieces).view_as(parameter)

    parameters = collect_params([part])
    for name, parameter in parameters.items():
        parameter.data.copy_(as_ours(name, parameter, weights))
        if has_main_grad:
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    plan = plan_patches(GRIDS, architecture.vision, torch.device("cuda"))
    assert plan.padding
    tower = part.vision
    output = tower.merge(tower.encode(patches.bfloat16(), plan), plan)
    (output * slopes.bfloat16()).sum().backward()
    assert error(output.float(), features) < 1.2 * error(bf16_features, features) + 1e-3
    for name, parameter in parameters.items():
        is_accumulated = getattr(parameter, "grad_added_to_main_grad", False)
        gradient = parameter.main_grad if is_accumulated else parameter.grad.float()
        exact, half = (as_ours(name, parameter, tensors) for tensors in (gradients, bf16_gradients))
        assert error(gradient, exact) < 1.5 * error(half, exact) + 5e-3, name
