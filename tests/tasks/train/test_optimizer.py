"""The learning-rate schedules, against transformers' of the same name; groups of parameters, against PEFT's."""

import math

import pytest
import torch
import transformers
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.model.build import build_model
from megaswift.bridge.option_groups import compose
from megaswift.bridge.options import ParallelOptions
from megaswift.tasks.options import SftOptions
from megaswift.tasks.options.groups import ScheduleOptions
from megaswift.tasks.train.optimizer import _overlaps, build_optimizer, build_schedule, wrap_for_data_parallelism

from tests import tiny

STEPS, LR = 40, 2.0


class Optimizer:
    """What a schedule needs of an optimizer."""

    def __init__(self):
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.1}]


def rates(**flags) -> list[float]:
    optimizer = Optimizer()
    options = ScheduleOptions(lr=LR, **flags)
    schedule = build_schedule(optimizer, options, 0.1, STEPS)  # type: ignore[arg-type]
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step(1)
    return found


def expected(make, *args, **kwargs) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    schedule = make(optimizer, *args, **kwargs)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_cosine_with_a_warmup_and_a_floor():
    reference = expected(
        transformers.get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=4,
        num_training_steps=STEPS,
        min_lr=0.5,
    )
    assert rates(lr_warmup_fraction=0.1, min_lr=0.5) == pytest.approx(reference)
    assert rates(lr_warmup_iters=4, min_lr=0.5) == pytest.approx(reference)


def test_linear():
    reference = expected(transformers.get_linear_schedule_with_warmup, num_warmup_steps=5, num_training_steps=STEPS)
    assert rates(lr_decay_style="linear", lr_warmup_iters=5) == pytest.approx(reference)


def test_constant():
    reference = expected(transformers.get_constant_schedule_with_warmup, num_warmup_steps=5)
    assert rates(lr_decay_style="constant", lr_warmup_iters=5) == pytest.approx(reference)


def test_inverse_square_root():
    found = rates(lr_decay_style="inverse-square-root", lr_warmup_iters=4)
    assert found == pytest.approx([LR * min(step / 4, math.sqrt(4 / max(step, 1))) for step in range(STEPS)])


def test_warmup_stable_decay():
    found = rates(lr_decay_style="WSD", lr_warmup_iters=4, lr_wsd_decay_iters=10, lr_wsd_decay_style="linear")
    assert found[4:31] == [LR] * 27
    assert found[31:] == pytest.approx([LR * (1 - step / 10) for step in range(1, 10)])


def test_decay_that_ends_before_the_run():
    assert rates(lr_decay_iters=20, min_lr=0.5)[21:] == [0.5] * 19


def test_a_warmup_longer_than_the_run_is_an_error():
    with pytest.raises(ValueError, match="--lr_warmup_iters 40 must be less than the 40 steps of the run"):
        rates(lr_warmup_iters=40)


def test_a_last_part_that_leaves_no_room_for_the_rate_itself_is_an_error():
    with pytest.raises(ValueError, match="--lr_wsd_decay_iters 30 and 20 steps of warmup are more than the 40 steps"):
        rates(lr_decay_style="WSD", lr_warmup_iters=20, lr_wsd_decay_iters=30)


@pytest.mark.parametrize(
    ("flags", "processes", "expected"),
    [
        ({}, 1, (False, False)),
        ({}, 2, (True, True)),
        ({"use_distributed_optimizer": False}, 2, (True, False)),
        ({"overlap_grad_reduce": False}, 2, (False, False)),
        ({"overlap_param_gather": False}, 2, (True, False)),
        ({"overlap_grad_reduce": True}, 1, (True, False)),
    ],
)
def test_communication_is_overlapped_where_there_is_some(flags, processes, expected):
    assert _overlaps(ParallelOptions(**flags), processes) == expected


ADAPTED = {"lora_rank": 4, "target_modules": ["q_proj", "down_proj"], "lora_bias": "all"}
RATES = {"lr": 0.02, "min_lr": 0.005, "weight_decay": 0.1, "lr_warmup_iters": 4, "use_distributed_optimizer": False}


def adapted(**flags):
    """A tiny Qwen2 with adapters and trained biases, wrapped, and its optimizer."""
    options = compose(SftOptions, **ADAPTED | RATES | flags)
    config = tiny.config("qwen2").to_dict()
    model = build_model(config, options.build, torch.float32, adapters=True)
    attach_adapters(model, config, LoraSettings.from_options(options.lora), seed=0)
    chunks = wrap_for_data_parallelism(model, options.build)
    return options, model, chunks, build_optimizer(model, chunks, options.optimizer, options.schedule)


def groups_of(model, optimizer) -> dict[str, dict]:
    """The group of each parameter that the optimizer has, by name."""
    names = {id(parameter): name for name, parameter in model.chunks[0].named_parameters()}
    return {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_b_learns_faster_in_lora_plus(kind, alone):
    """Learning rates and decay by kind of parameter as in PEFT, throughout the schedule."""
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    peft = get_peft_model(tiny.model("qwen2"), LoraConfig(r=4, target_modules=ADAPTED["target_modules"]))
    settings = {"lr": RATES["lr"], "loraplus_lr_ratio": 8.0, "loraplus_weight_decay": RATES["weight_decay"]}
    reference = create_loraplus_optimizer(peft, torch.optim.AdamW, **settings)
    kinds = {id(parameter): name.split(".")[-3] for name, parameter in peft.named_parameters() if "lora_" in name}
    expected = {
        kinds[id(p)]: (group["lr"], group["weight_decay"]) for group in reference.param_groups for p in group["params"]
    }
    assert expected["lora_B"][0] == 8 * expected["lora_A"][0]

    options, model, _, optimizer = adapted(lorap_lr_ratio=8.0, optimizer=kind)
    schedule = build_schedule(optimizer, options.schedule, options.optimizer.weight_decay, STEPS)
    schedule.step(4)  # the warmup
    groups = groups_of(model, optimizer)
    found = {name.split(".")[-1]: (group["lr"], group["weight_decay"]) for name, group in groups.items()}
    assert found.pop("bias") == (RATES["lr"], 0.0)
    assert found == {name: pytest.approx(values) for name, values in expected.items()}
    for _ in range(STEPS):
        schedule.step(1)
        now = {name.split(".")[-1]: group["lr"] for name, group in groups.items()}
        assert now["lora_B"] == pytest.approx(8 * now["lora_A"])


def test_without_lora_plus_all_learn_alike(alone):
    options, model, _, optimizer = adapted()
    build_schedule(optimizer, options.schedule, options.optimizer.weight_decay, STEPS).step(4)
    assert {group["lr"] for group in groups_of(model, optimizer).values()} == {RATES["lr"]}


def test_magnitudes_do_not_decay(alone):
    options, model, _, optimizer = adapted(use_dora=True)
    build_schedule(optimizer, options.schedule, options.optimizer.weight_decay, STEPS)
    decays = {name.split(".")[-1]: group["weight_decay"] for name, group in groups_of(model, optimizer).items()}
    assert decays == {"lora_A": 0.1, "lora_B": 0.1, "magnitude": 0.0, "bias": 0.0}


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_decays_of_states_do_not_decay(family, alone):
    options = compose(SftOptions, **RATES)
    model = build_model(tiny.config(family).to_dict(), options.build, torch.float32)
    chunks = wrap_for_data_parallelism(model, options.build)
    optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule)
    decays = {name: group["wd_mult"] for name, group in groups_of(model, optimizer).items()}
    assert {value for name, value in decays.items() if name.endswith("A_log")} == {0.0}
    assert {value for name, value in decays.items() if "in_proj" in name} == {1.0}


def test_frozen_weights_have_neither_gradients_nor_state(alone):
    _, model, chunks, optimizer = adapted()
    trained = [parameter for parameter in model.chunks[0].parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.chunks[0].parameters() if not parameter.requires_grad]
    assert sum(buffer.grad_data.numel() for buffer in chunks[0].buffers) == sum(p.numel() for p in trained)
    assert not any(hasattr(parameter, "main_grad") for parameter in frozen)
    [part] = optimizer.chained_optimizers
    assert {id(parameter) for parameter in part.optimizer.state} == {id(parameter) for parameter in trained}


def test_adapters_in_a_half_precision_of_their_own_are_refused(alone):
    with pytest.raises(ValueError, match=r"--lora_dtype float16 cannot be used with a model of another type\. Set"):
        adapted(lora_dtype="float16")


def whole(family: str, dtype: torch.dtype = torch.float32, **flags):
    """A tiny model that is fully trained, wrapped, and its options."""
    options = compose(SftOptions, **RATES | flags)
    model = build_model(tiny.config(family).to_dict(), options.build, dtype)
    return options, model, wrap_for_data_parallelism(model, options.build)


@pytest.mark.parametrize("is_applied", [False, True])
def test_weight_decay_of_query_and_key_norms(is_applied, alone):
    options, model, chunks = whole("qwen3", apply_wd_to_qk_layernorm=is_applied)
    groups = groups_of(model, build_optimizer(model, chunks, options.optimizer, options.schedule))
    decayed = {name for name, group in groups.items() if group["wd_mult"] == 1.0}
    norms = {f"decoder.layers.{n}.self_attention.{x}_layernorm.weight" for n in range(4) for x in "qk"}
    matrices = {name for name, parameter in model.chunks[0].named_parameters() if parameter.dim() > 1}
    assert norms <= groups.keys()
    assert decayed == matrices | (norms if is_applied else set())


def test_a_model_without_query_and_key_norms_has_none_to_decay(alone):
    options, model, chunks = whole("llama", apply_wd_to_qk_layernorm=True)
    with pytest.raises(ValueError, match="--apply_wd_to_qk_layernorm true: the model has no norms of queries and keys"):
        build_optimizer(model, chunks, options.optimizer, options.schedule)


@pytest.mark.parametrize(("in_fp32", "total"), [(True, 1 + 2**-10), (False, 1.0)])
def test_gradients_of_micro_batches_are_summed_in_their_type(in_fp32, total, alone):
    """1 + 2^-10 has more digits than bf16, so that a sum in bf16 is 1."""
    _, model, chunks = whole("qwen3", torch.bfloat16, accumulate_allreduce_grads_in_fp32=in_fp32)
    assert chunks[0].ddp_config.grad_reduce_in_fp32 is in_fp32
    parameter = model.chunks[0].decoder.final_layernorm.weight
    for gradient in (1.0, 2**-10):
        (parameter * gradient).sum().backward()
    assert set(parameter.main_grad.tolist()) == {total}
