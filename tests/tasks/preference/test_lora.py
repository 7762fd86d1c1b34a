"""Adapters trained by DPO: beside TRL's with PEFT, and measured against the base that nothing has touched."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.preference import by_hand, upstream
from tests.tasks.preference.runs import Place, Tensors, Trained, assert_close, assert_same_steps, assert_same_weights

pytestmark = pytest.mark.slow
LORA = "--tuner_type lora --lora_rank 5 --lora_alpha 10 --lora_dropout 0 --merge_lora false"


@pytest.fixture(scope="module")
def adapter(place: Place) -> Path:
    """One that changes the base: its B is not zero."""
    return save_adapter(place, "adapter")


def save_adapter(place: Place, name: str, modules_to_save: list[str] | None = None) -> Path:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=5, lora_alpha=10, target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=modules_to_save
    )
    model = get_peft_model(upstream.causal(place.folder / "qwen3"), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.copy_(parameter + noise if "modules_to_save" in parameter_name else noise * 2)
    model.save_pretrained(str(place.folder / name))
    return place.folder / name


def agree(ours: Trained, theirs: tuple[upstream.Log, Any], start: Tensors) -> None:
    log, model = theirs
    for found, row in zip(ours.steps, log, strict=True):
        wanted = {name: row[name] for name in row if "rewards/" in name or "logps/" in name}
        if abs(row["rewards/margins"]) < 1e-6:  # which of two equal rewards is the higher one is chance
            del wanted["rewards/accuracies"]
        assert_close(found, wanted | {name: row[name] for name in ("loss", "grad_norm")})
    assert_same_weights(ours.adapter, upstream.adapter_of(model), start)


def rows(place: Place) -> list[dict]:
    return [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in place.train]


def test_measured_against_the_base(place: Place, adapter: Path) -> None:
    ours = place.run("dpo", f"--adapters {adapter} {LORA}")
    assert "reference: the model without its adapters" in ours.printed
    model, base = upstream.adapted(place.folder / "qwen3", adapter), upstream.causal(place.folder / "qwen3")
    start = {name: tensor.clone() for name, tensor in upstream.adapter_of(model).items()}
    theirs = upstream.dpo(place.folder, model, rows(place), base)
    assert abs(ours.steps[0]["rewards/chosen"]) > 0.1  # the adapter that it starts from is no zero
    agree(ours, theirs, start)


@pytest.mark.long
def test_without_a_reference(place: Place, adapter: Path) -> None:
    ours = place.run("orpo", f"--adapters {adapter} {LORA} --micro_batch_size 4 --loss_scale last_round")
    model = upstream.adapted(place.folder / "qwen3", adapter)
    start = {name: tensor.clone() for name, tensor in upstream.adapter_of(model).items()}
    agree(ours, upstream.unreferenced(place.folder, model, rows(place), "orpo"), start)


@pytest.mark.long
def test_measured_against_the_adapter_that_it_starts_from(place: Place, adapter: Path) -> None:
    """As TRL does where it is given PEFT's model and no reference."""
    ours = place.run("dpo", f"--adapters {adapter} --ref_adapters {adapter} {LORA}")
    model = upstream.adapted(place.folder / "qwen3", adapter)
    start = {name: tensor.clone() for name, tensor in upstream.adapter_of(model).items()}
    agree(ours, upstream.dpo(place.folder, model, rows(place)), start)


@pytest.mark.long
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_the_reference_is_the_base_where_a_matrix_is_trained_whole(module: str, place: Place) -> None:
    """And where it begins with another than the base's."""
    adapter = save_adapter(place, f"whole-{module}", [module])
    run = place.run("dpo", f"--adapters {adapter} {LORA} --modules_to_save {module}")
    base, folder = upstream.causal(place.folder / "qwen3"), place.folder / "qwen3"
    before = by_hand.dpo(upstream.adapted(folder, adapter).eval(), base, folder, place.train[:4])
    assert abs(before["rewards/chosen"]) > 0.01
    assert_close(run.steps[0], before)
    after = by_hand.dpo(upstream.adapted(folder, run.checkpoint).eval(), base, folder, place.val)
    (row,) = run.evaluations
    assert_close(row, {f"eval_{name}": value for name, value in after.items()})


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("dpo", "--tensor_model_parallel_size 2 --sequence_parallel true"),
        ("dpo", "--pipeline_model_parallel_size 2"),
        ("dpo", "--context_parallel_size 2"),
        ("dpo", "--overlap_grad_reduce true --overlap_param_gather true"),
        ("dpo", "--use_distributed_optimizer true --precompute_ref_log_probs true"),
        ("orpo", "--context_parallel_size 2"),
        ("simpo", "--pipeline_model_parallel_size 2"),
        ("cpo", "--tensor_model_parallel_size 2"),
        ("kto", "--pipeline_model_parallel_size 2"),
        ("kto", "--overlap_grad_reduce true --overlap_param_gather true"),
    ],
)
@pytest.mark.parametrize("module", ["", "embed_tokens"])
def test_two_processes(kind: str, flags: str, module: str, place: Place, adapter: Path) -> None:
    given = save_adapter(place, "whole-embed_tokens", [module]) if module else adapter
    base = f"--adapters {given} {LORA}" + (f" --modules_to_save {module}" if module else "")
    found, wanted = place.run(kind, f"{base} {flags}", 2), place.run(kind, base)
    assert_same_steps(found, wanted)
    model = upstream.adapted(place.folder / "qwen3", given)
    assert_same_weights(found.adapter, wanted.adapter, upstream.adapter_of(model))


@pytest.mark.long
def test_a_reward_models_head_is_trained_beside_adapters(place: Place) -> None:
    from peft import AutoPeftModelForSequenceClassification

    run = place.run("rm", LORA)
    model = AutoPeftModelForSequenceClassification.from_pretrained(run.checkpoint, dtype=torch.float32).eval()
    after = by_hand.reward(model, place.folder / "qwen3", place.val, centering=0.05)
    (row,) = run.evaluations
    assert_close(row, {f"eval_{name}": value for name, value in after.items()})
