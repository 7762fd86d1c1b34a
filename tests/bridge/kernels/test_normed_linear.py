"""Norms with linear layers or an MLP behind them, as one function, against torch's autograd in double precision."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

EPS, ROWS, SIZE, WIDTH = 1e-3, 70, 40, 56


def parameters(device, *frozen: str) -> dict[str, torch.nn.Parameter]:
    """Parameters of a norm and an MLP, with a gradient from before in `main_grad`."""
    torch.manual_seed(0)
    shapes = {
        "norm": (SIZE,), "norm_bias": (SIZE,), "first": (WIDTH, SIZE), "first_bias": (WIDTH,),
        "second": (SIZE, WIDTH), "second_bias": (SIZE,),
    }  # fmt: skip
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.nn.Parameter(torch.randn(*shape, device=device), requires_grad=name not in frozen)
        made[name].main_grad = torch.randn(*shape, device=device)
        made[name].grad_added_to_main_grad = False
    return made


def norm_of(x, made, centred: bool):
    if centred:
        return F.layer_norm(x, (SIZE,), made["norm"], made["norm_bias"], EPS)
    return F.rms_norm(x, (SIZE,), made["norm"], EPS)


def check(run, formula, device, frozen: tuple[str, ...], names: list[str]) -> list[torch.Size]:
    """Compare results and gradients. Returns the shapes that `run` saves for its backward pass, without parameters."""
    made = parameters(device, *frozen)
    before = {name: parameter.main_grad.clone() for name, parameter in made.items()}
    exact = {name: made[name].detach().double().requires_grad_(made[name].requires_grad) for name in names}
    x = torch.randn(ROWS, SIZE, device=device, requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    outputs = run(x, made)
    references = formula(exact_x, exact)
    slopes = [torch.randn(*output.shape, device=device) for output in outputs]
    torch.autograd.backward(outputs, slopes)
    torch.autograd.backward(references, [slope.double() for slope in slopes])
    for output, reference in zip(outputs, references, strict=True):
        torch.testing.assert_close(output.double(), reference, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=1e-5, atol=5e-4)
    for name in names:
        parameter = made[name]
        if name in frozen:
            assert not parameter.grad_added_to_main_grad
            assert torch.equal(parameter.main_grad, before[name])
            continue
        added = parameter.main_grad - before[name] if parameter.grad_added_to_main_grad else parameter.grad
        assert parameter.grad_added_to_main_grad or name in ("first_bias", "second_bias")
        torch.testing.assert_close(added.double(), exact[name].grad, rtol=1e-4, atol=2e-3)
    return saved_shapes(lambda: run(x, made), list(made.values()))


def saved_shapes(run, parameters: list[torch.nn.Parameter]) -> list[torch.Size]:
    """Return the shapes of tensors that are saved for a backward pass, without parameters."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    assert kept
    places = {parameter.data_ptr() for parameter in parameters}
    return [tensor.shape for tensor in saved if tensor.data_ptr() not in places]


@pytest.mark.parametrize("frozen", [(), ("norm", "norm_bias", "first_bias")], ids=["", "frozen norm and bias"])
@pytest.mark.parametrize("centred", [True, False], ids=["LayerNorm", "RMSNorm"])
def test_a_norm_with_a_linear_layer(centred, frozen, device):
    from megaswift.bridge.kernels.norm import NormKernel
    from megaswift.bridge.kernels.normed_linear import normed_linear

    names = ["norm", *(["norm_bias"] if centred else []), "first", "first_bias"]
    kernel = NormKernel(EPS, is_centred=centred, is_zero_centred=False)

    def run(x, made):
        norm = made["norm"], made["norm_bias"] if centred else None
        return normed_linear(x, norm, made["first"], made["first_bias"], kernel)

    def formula(x, made):
        return F.linear(norm_of(x, made, centred), made["first"], made["first_bias"]), x * 1

    assert check(run, formula, device, frozen, names) == [(ROWS, SIZE)]


@pytest.mark.parametrize("frozen", [(), ("norm", "norm_bias", "second_bias")], ids=["", "frozen norm and bias"])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_a_norm_with_an_mlp(approximate, frozen, device):
    from megaswift.bridge.kernels.norm import NormKernel
    from megaswift.bridge.kernels.normed_linear import normed_mlp

    kernel = NormKernel(EPS, is_centred=True, is_zero_centred=False)

    def layers(made):
        return [(made[name], made[f"{name}_bias"]) for name in ("norm", "first", "second")]

    def run(x, made):
        return [normed_mlp(x, *layers(made), approximate, kernel)]

    def formula(x, made):
        hidden = F.gelu(F.linear(norm_of(x, made, True), *layers(made)[1]), approximate=approximate)
        return [x + F.linear(hidden, *layers(made)[2])]

    saved = check(run, formula, device, frozen, list(parameters(device)))
    assert sorted(saved) == [(ROWS, SIZE), (ROWS, WIDTH)]


@pytest.mark.parametrize(
    ("kind", "architecture", "padded_dim"),
    [
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", None),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", None),
        ("internvl_qwen3", "InternVLForConditionalGeneration", None),
        ("kimi_vl", "KimiVLForConditionalGeneration", None),
        ("gemma4", "Gemma4ForConditionalGeneration", None),
        ("gemma4", "Gemma4ForConditionalGeneration", 32),
    ],
)
def test_layers_of_towers_have_the_gradients_of_plain_torch(kind, architecture, padded_dim, device, monkeypatch):
    """Those with a GELU, gated and scaled ones, and norms of heads: some run one function, some two, some none."""
    from types import SimpleNamespace

    from megaswift.bridge.families import family_of
    from megaswift.bridge.layers.patch_plan import plan_patches
    from megaswift.bridge.layers.vision_tower import Attention, TowerLayer, attend

    from tests.bridge.vision import FAMILIES

    torch.manual_seed(0)
    config = FAMILIES[kind]().to_dict() | {"architectures": [architecture]}
    vision = family_of(config).describe(config, vision=True).vision
    settings = SimpleNamespace(params_dtype=torch.float32)
    layer = TowerLayer(vision, settings, torch.device(device), Attention(partial(attend, scale=0.3), padded_dim))
    plan = plan_patches(torch.tensor([[1, 4, 6], [1, 8, 4]]), vision, torch.device(device))
    x = torch.randn(len(plan.cos), vision.hidden_size, device=device, requires_grad=True)
    slopes = torch.randn_like(x)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)

    with monkeypatch.context() as plain:
        plain.setattr("megaswift.bridge.layers.vision_tower.usable", lambda *_: False)
        plain.setattr("megaswift.bridge.layers.norm.usable", lambda *_: False)
        expected = layer(x, plan, plan.full)
        expected.backward(slopes)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"x": x.grad}

    x.grad = None
    for parameter in layer.parameters():
        parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    output = layer(x, plan, plan.full)
    output.backward(slopes)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    for name, parameter in layer.named_parameters():
        grad = parameter.main_grad if parameter.grad_added_to_main_grad else parameter.grad
        torch.testing.assert_close(grad, gradients[name], rtol=1e-3, atol=1e-3 * float(gradients[name].abs().max()))
    torch.testing.assert_close(x.grad, gradients["x"], rtol=1e-3, atol=1e-3 * float(gradients["x"].abs().max()))
