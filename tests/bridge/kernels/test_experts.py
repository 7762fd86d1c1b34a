"""A whole layer of experts by our kernels against the same one by megatron-core's functions."""

import pytest
import torch

SHARED = {"decoder_sparse_step": 1, "mlp_only_layers": []}
MODELS = {  # a family, changes of its tiny model, flags
    "softmax": ("qwen3_moe", {"mlp_only_layers": []}, {}),
    "shared expert with a gate": ("qwen2_moe", SHARED, {}),
    "shared expert, overlapped": ("qwen2_moe", SHARED, {"moe_shared_expert_overlap": True}),
    "biases of experts": ("gpt_oss", {"layer_types": ["full_attention"]}, {}),
    "groups of sigmoids with a bias": ("deepseek_v3", {"first_k_dense_replace": 0}, {}),
}


@pytest.fixture(scope="module")
def options():
    """This process as the only one of a job."""
    from tests.bridge.families import worker

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_COMPILE_DISABLE"):
            patch.setenv(name, "")
            patch.delenv(name)
        # Gradients are looked at as autograd has them: no DistributedDataParallel has given them their sums.
        options = worker.options_of({"moe_aux_loss_coeff": 0.1, "gradient_accumulation_fusion": False})
        worker.parallel.initialize(options, seed=1)
        yield options
        worker.close()
        worker.dist.destroy_process_group()


def layer(options, family: str, changes: dict, dtype: torch.dtype = torch.float32, **flags):
    """The layer of experts of a model of one layer, with random parameters."""
    from dataclasses import replace

    from megaswift.bridge.model.build import build_model

    from tests import tiny

    raw = tiny.config(family, num_hidden_layers=1, **changes).to_dict()
    built = build_model(raw, replace(options, **flags), dtype).chunks[0].decoder.layers[0].mlp
    generator = torch.Generator().manual_seed(0)
    for tensor in (*built.parameters(), *(b for b in built.buffers() if b.is_floating_point())):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return built.train()


def run(built, x: torch.Tensor, slopes: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    output, _ = built(x)
    output.backward(slopes)
    return [output.detach(), x.grad, *(parameter.grad for parameter in built.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", MODELS)
def test_our_dispatch_gives_what_megatron_cores_does(device, options, name):
    family, changes, flags = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    x, slopes = (torch.randn(21, 2, 48, generator=generator).to(device) for _ in range(2))
    found = run(layer(options, family, changes, **flags), x, slopes)
    plain = layer(options, family, changes, moe_permute_fusion=False, **flags)
    for ours, theirs in zip(found, run(plain, x, slopes), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.gpu
def test_the_host_never_waits_and_gradients_are_added_to_main_grad(options):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "mlp_only_layers": []}
    x, slopes = (torch.randn(300, 1, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    built = layer(options, "qwen3_moe", sizes, torch.bfloat16, gradient_accumulation_fusion=True)
    wanted = run(layer(options, "qwen3_moe", sizes, torch.bfloat16, moe_permute_fusion=False), x, slopes)
    for parameter in built.parameters():
        parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
    run(built, x, slopes)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(built, x, slopes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for parameter, ours, theirs in zip(built.parameters(), found[2:], wanted[2:], strict=True):
        both = parameter.main_grad - 1 if parameter.dim() == 3 else ours  # an expert's is in main_grad
        torch.testing.assert_close(both.float() / 2, theirs.float(), rtol=0, atol=2e-2 * theirs.abs().max().item())
