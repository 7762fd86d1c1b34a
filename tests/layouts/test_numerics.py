"""What the comparison with transformers must notice (faults on purpose), other dtypes, MoE's extra losses, NaNs."""

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, one_hot

from tests import tiny
from tests.layouts import reference
from tests.layouts.launch import launch

pytestmark = pytest.mark.slow
BOUND = 1e-5  # relative, as in test_layouts.py
OURS = ("planted", "late")  # for the worker, not among the options; late: a step's outcome is not looked at
ONE_BATCH = {"micro_batch_size": reference.SAMPLES}
JOBS = {
    1: {
        "leak": ("qwen3", {"planted": "leak"}),
        "rope": ("qwen3", {"planted": "rope"}),
        "norms": ("qwen3", {"planted": "norms"}),
        "scale": ("qwen3", {"planted": "scale"}),
        "bf16": ("qwen3", {"torch_dtype": "bfloat16"}),
        "fp16": ("qwen3", {"torch_dtype": "float16"}),
        "sgd": ("qwen3", {"optimizer": "sgd"}),
        "aux": ("qwen3_moe", ONE_BATCH | {"moe_aux_loss_coeff": 0.5}),
        "z": ("qwen3_moe", ONE_BATCH | {"moe_z_loss_coeff": 0.05}),
        "roomy": ("qwen3_moe", {"moe_expert_capacity_factor": 4.0}),  # 8 experts of 2: capacity for every token
        "tight": ("qwen3_moe", {"moe_expert_capacity_factor": 0.5}),
    },
    2: {
        "shard": ("qwen3", {"planted": "shard", "tensor_model_parallel_size": 2, "sequence_parallel": True}),
        "leak CP": ("qwen3", {"planted": "leak", "context_parallel_size": 2}),
        "aux SP": (
            "qwen3_moe",
            ONE_BATCH | {"moe_aux_loss_coeff": 0.5, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        ),
        "infinite": ("qwen3", {"planted": "infinite"}),
        "infinite late": ("qwen3", {"planted": "infinite", "late": True}),
        "infinite fp16": ("qwen3", {"planted": "infinite", "torch_dtype": "float16"}),
    },
}


@pytest.fixture(scope="module")
def gave(tmp_path_factory):
    """What a job gave, by world size and name; one launch per world size."""
    folder, done = tmp_path_factory.mktemp("numerics"), {}
    for family in ("qwen3", "qwen3_moe"):
        tiny.save(folder / family, family)

    def result(world: int, name: str) -> dict:
        if world not in done:
            jobs = []
            for each, (family, flags) in JOBS[world].items():
                options = {"packing": True} | {flag: value for flag, value in flags.items() if flag not in OURS}
                job = {"name": each, "model": str(folder / family), "options": options}
                jobs.append(job | {flag: flags.get(flag) for flag in OURS})
            done[world] = launch(world, jobs, folder / f"world-{world}")
        found = done[world][name]
        assert "error" not in found, found.get("error")
        return found

    return result


@pytest.fixture(scope="module")
def expected():
    """transformers' first loss of both families."""
    torch.set_num_threads(1)
    losses = {}
    for family in ("qwen3", "qwen3_moe"):
        losses[family] = reference.loss_of(tiny.model(family), reference.samples(0)).item()
    return losses


@pytest.mark.parametrize(
    ("world", "fault"), [(1, "leak"), (1, "rope"), (1, "norms"), (1, "scale"), (2, "shard"), (2, "leak CP")]
)
def test_a_planted_fault_is_seen(world, fault, gave, expected):
    assert abs(gave(world, fault)["losses"][0] / expected["qwen3"] - 1) > 20 * BOUND


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.02), ("fp16", 0.003)])
def test_half_precision_stays_near(dtype, bound, gave, expected):
    result = gave(1, dtype)
    assert result["losses"][0] == pytest.approx(expected["qwen3"], rel=bound)
    assert all(norm is not None for norm in result["grad_norms"])


def test_sgd_with_momentum(gave):
    model = tiny.model("qwen3").train()
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": reference.WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=reference.LR,
        momentum=0.9,
    )
    losses = []
    for step in range(reference.STEPS):
        optimizer.zero_grad()
        loss = reference.loss_of(model, reference.samples(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), reference.CLIP)
        optimizer.step()
        losses.append(loss.item())
    assert gave(1, "sgd")["losses"] == pytest.approx(losses, rel=BOUND)


def with_router_loss(of_logits) -> float:
    """Gradient norm of transformers' first step with `of_logits(logits)` of every MoE layer added to the loss."""
    model, logits = tiny.model("qwen3_moe").train(), {}
    model.get_input_embeddings().padding_idx = None  # else transformers drops the gradient of the tail's tokens
    routers = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    for name, module in routers.items():

        def keep(module, inputs, _, name=name):
            seen = linear(inputs[0].reshape(-1, module.weight.shape[1]), module.weight)
            logits.setdefault(name, []).append(seen)

        module.register_forward_hook(keep)
    packs = reference.samples(0)
    # The tail of a pack is routed like everything else.
    tail = reference.PACK - sum(len(ids) for ids, _ in packs[0])
    packs = [[*pack, (np.zeros(tail, np.int64), np.zeros(tail, np.float32))] for pack in packs]
    loss = reference.loss_of(model, packs)
    for parts in logits.values():
        loss = loss + of_logits(torch.cat(parts))
    loss.backward()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), reference.CLIP))


def switch_loss(logits):
    """Fedus et al., https://arxiv.org/abs/2101.03961, equation 4, for 2 of 8 experts."""
    probabilities = logits.softmax(-1)
    chosen = one_hot(logits.topk(2).indices, 8).sum(1).float()
    return 0.5 * 8 * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()


@pytest.mark.parametrize(("world", "name"), [(1, "aux"), (2, "aux SP")])
def test_balancing_loss(world, name, gave):
    assert gave(world, name)["grad_norms"][0] == pytest.approx(with_router_loss(switch_loss), rel=BOUND)


def test_z_loss(gave):
    norm = with_router_loss(lambda logits: 0.05 * logits.logsumexp(-1).square().mean())
    assert gave(1, "z")["grad_norms"][0] == pytest.approx(norm, rel=BOUND)


def test_capacity_drops_what_is_beyond_it(gave, expected):
    assert gave(1, "roomy")["losses"][0] == pytest.approx(expected["qwen3_moe"], rel=BOUND)
    assert abs(gave(1, "tight")["losses"][0] / expected["qwen3_moe"] - 1) > 20 * BOUND


@pytest.mark.parametrize("name", ["infinite", "infinite late", "infinite fp16"])
def test_what_is_not_finite_stops_before_the_weights(name, gave):
    result = gave(2, name)
    assert "step 0" in result["stopped"]
    assert "loss of rank 1" in result["stopped"]
    assert result["kept"]
