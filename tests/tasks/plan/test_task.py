"""Plans of `megatron rlhf`: reference models, forward passes, score heads, and vLLM beside GRPO's training."""

import json
import shlex
from functools import partial

import pytest
import torch
from megaswift.cli.main import main, read_options
from megaswift.tasks.plan.memory import OUTSIDE, host_bytes, memory_of_rank
from megaswift.tasks.plan.parameters import count_parameters
from megaswift.tasks.plan.run_plan import TEXT, Gpu, UnplannedRunError, check_fits, plan_run, time_line
from megaswift.tasks.plan.task import TaskWork
from megaswift.tasks.rollout.memory_budget import planned_engine_memory

GIB = 2**30
H200 = 139.7 * GIB
DPO, GRPO = "--rlhf_type dpo", "--rlhf_type grpo --reward_funcs accuracy --use_vllm true"


PAIRS = partial(TaskWork, documents=2)


@pytest.fixture
def options_of(rows, tmp_path):
    """Return a function that reads the options of a task on Qwen3-4B, or on another row's model."""

    def read(flags: str, row: str = "4b"):
        (tmp_path / "config.json").write_text(json.dumps(rows.ROWS[row].config))
        task = "rlhf" if "--rlhf_type" in flags else "sft"
        data = "--packing true --max_length 4096 --packing_length 8192 --dataset x.jsonl --train_iters 1"
        words = [task, "--model", str(tmp_path), *shlex.split(f"{data} {flags}".replace("MODEL", str(tmp_path)))]
        return read_options("megatron", words)[0]

    return read


@pytest.mark.parametrize(
    ("flags", "work"),
    [
        ("", TaskWork()),
        (DPO, PAIRS("kept", 1)),
        (f"{DPO} --ref_model MODEL", PAIRS("kept", 1)),
        (f"{DPO} --offload_ref_model true", PAIRS("offloaded", 1)),
        (f"{DPO} --precompute_ref_log_probs true", PAIRS()),
        (f"{DPO} --reference_free true", PAIRS()),
        (f"{DPO} --tuner_type lora", PAIRS("none", 1)),
        (f"{DPO} --tuner_type lora --ref_model MODEL", PAIRS("kept", 1)),
        ("--rlhf_type orpo", PAIRS()),
        ("--rlhf_type simpo", PAIRS()),
        ("--rlhf_type kto", TaskWork("kept", 3)),
        ("--rlhf_type kto --loss_type apo_zero_unpaired", TaskWork("kept", 1)),
        ("--rlhf_type kto --precompute_ref_log_probs true", TaskWork("none", 1)),
        ("--rlhf_type rm", PAIRS(outputs=1)),
        ("--task_type reranker", TaskWork(outputs=1)),
        ("--task_type seq_cls --num_labels 7", TaskWork(outputs=7)),
        (GRPO, TaskWork("kept", 1, completions=16)),
        (f"{GRPO} --beta 0", TaskWork(completions=16)),
        (f"{GRPO} --beta 0 --packing false", TaskWork()),
    ],
)
def test_what_a_task_adds(flags, work, options_of) -> None:
    assert TaskWork.of(options_of(flags)) == work


def test_a_reference_has_the_weights_again(options_of) -> None:
    alone, beside = (plan_run(options_of(flags), 1).memory for flags in ("--rlhf_type orpo", DPO))
    assert beside.weights == 2 * alone.weights
    assert beside.total - alone.total == alone.weights
    with_adapters = plan_run(options_of(f"{DPO} --tuner_type lora"), 1).memory
    assert with_adapters == plan_run(options_of("--tuner_type lora"), 1).memory
    assert plan_run(options_of(f"{DPO} --offload_ref_model true"), 1).memory == alone  # more than its weights
    short = "--max_length 128 --packing_length 128"
    offloaded = plan_run(options_of(f"{DPO} --offload_ref_model true {short}"), 1).memory
    assert offloaded.activations + offloaded.logits == offloaded.weights


def test_a_reference_takes_time(options_of) -> None:
    gpu = Gpu("NVIDIA H200", H200, 8)
    seconds = []
    for flags in ("", "--rlhf_type orpo", DPO, "--rlhf_type kto"):
        line = time_line(options_of(flags), 1, TEXT, None, gpu, 1)
        seconds.append(float(line.split(": ")[1].split()[0]))
    assert seconds[0] == seconds[1]
    # A forward pass is a third of a step's products, and less of all of it.
    assert seconds[1] * 1.25 < seconds[2] < seconds[1] * 1.34
    assert seconds[3] - seconds[1] == pytest.approx(3 * (seconds[2] - seconds[1]), rel=0.02)
    assert time_line(options_of(GRPO), 1, TEXT, None, gpu, 1) is None


@pytest.mark.parametrize("row", ["4b", "8b"])  # tied embeddings, and not
@pytest.mark.parametrize(("flags", "labels"), [("--rlhf_type rm", 1), ("--task_type seq_cls --num_labels 7", 7)])
def test_a_head_replaces_the_output_layer(flags, labels, row, options_of, rows) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    plan = plan_run(options_of(flags, row), 1)
    config = AutoConfig.for_model(**rows.ROWS[row].config, num_labels=labels)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    assert plan.work.parameters.language == model.num_parameters()
    assert plan.memory.logits == 0


def test_completions_come_behind_prompts(options_of) -> None:
    lengths = "--packing false --max_completion_length 1000"
    assert plan_run(options_of(f"{GRPO} {lengths}"), 1).work.length == 5096
    assert plan_run(options_of(GRPO), 1).work.length == 8192
    assert plan_run(options_of(f"{DPO} --packing false"), 1).work.length == 8192  # each answer has up to --max_length
    assert plan_run(options_of("--rlhf_type kto --packing false"), 1).work.length == 4096


def test_completions_fill_packs(options_of) -> None:
    """As many as there are if all are as long as can be. A rank that has none trains one of padding."""
    lengths = "--max_length 512 --max_completion_length 512 --global_batch_size 24"
    packs = {length: plan_run(options_of(f"{GRPO} {lengths} --packing_length {length}"), 1) for length in (1024, 5120)}
    assert [plan.work.global_batch for plan in packs.values()] == [24, 5]
    few = f"{GRPO} --max_length 1024 --max_completion_length 1024 --global_batch_size 64 --packing_length 32768"
    plans = [plan_run(options_of(few), world) for world in (4, 8)]
    four, eight = (memory_of_rank(plan.work, plan.layout) for plan in plans)
    assert [plan.work.global_batch for plan in plans] == [4, 4]
    assert [plan.work.batch for plan in plans] == [64, 64]  # a layout divides the completions
    assert eight.activations == four.activations > 0


def test_a_score_head_leaves_embeddings_of_layers(rows) -> None:
    from transformers import AutoConfig

    config = rows.ROWS["gemma-4-e2b"].config | {"num_hidden_layers": 5, "num_kv_shared_layers": 0}
    config |= {"layer_types": config["layer_types"][:5]}
    parameters = count_parameters(config, AutoConfig.for_model(**config))
    headed = TaskWork(outputs=1).of_parameters(parameters, config["hidden_size"])
    assert headed.language == parameters.language + config["hidden_size"]  # its output layer was the embedding
    assert headed.layer_inputs.split == 262_144 * 5 * 256


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--task_type embedding", "--task_type embedding"),
        ("--rlhf_type gkd --teacher_model x", "--rlhf_type gkd"),
        ("--rlhf_type ppo --reward_funcs accuracy", "--rlhf_type ppo"),
        (f"{DPO} --ref_model x", "--ref_model"),
        (f"{DPO} --sync_ref_model true", "--sync_ref_model"),
        (f"{DPO} --fp8_format hybrid --fp8_recipe tensorwise", "--fp8_format beside a reference model"),
        (f"{GRPO} --ref_tensor_model_parallel_size 2", "--ref_tensor_model_parallel_size"),
        (f"{GRPO} --teacher_model x", "--teacher_model"),
        (f"{GRPO} --use_vllm false", "generation by transformers (--use_vllm false)"),
        ("--rlhf_type grpo --reward_funcs accuracy", "generation by transformers (--use_vllm false)"),  # it is not here
        ("--task_type reranker --packing false", "--task_type reranker without --packing true"),
        (f"{DPO} --ref_model x --precompute_ref_log_probs true", "--ref_model"),
        (
            f"{DPO} --ref_model MODEL --precompute_ref_log_probs true --tuner_type lora",
            "--precompute_ref_log_probs with adapters beside a reference model",
        ),
        (f"{GRPO} --vllm_mode colocate --sleep_level 0", "--sleep_level 0"),
        (f"{DPO} --optimizer sgd", "--optimizer sgd"),
    ],
)
def test_tasks_that_are_not_planned(flags, reason, options_of) -> None:
    with pytest.raises(UnplannedRunError) as error:
        plan_run(options_of(flags), 1)
    assert str(error.value) == reason


def test_images_are_not_planned(options_of) -> None:
    with pytest.raises(UnplannedRunError, match="--rlhf_type dpo with a vision tower"):
        plan_run(options_of(DPO, "vl-4b"), 1)
    assert plan_run(options_of(f"{DPO} --language_model_only true", "vl-4b"), 1).work.tower is None


def test_servers_generate_elsewhere(options_of) -> None:
    options = options_of("--rlhf_type grpo --reward_funcs accuracy --vllm_mode server --sleep_level 0")
    assert plan_run(options, 1).memory == plan_run(options_of(GRPO), 1).memory


def test_an_offloaded_reference_is_on_the_host(options_of) -> None:
    plans = [plan_run(options_of(f"{DPO} {flags}"), 1) for flags in ("", "--offload_ref_model true")]
    kept, offloaded = (host_bytes(plan.work, plan.layout) for plan in plans)
    assert offloaded - kept == plans[1].memory.weights


def test_a_run_that_cannot_fit_beside_its_reference(options_of) -> None:
    gpu = Gpu("NVIDIA H100 80GB HBM3", 79.1 * GIB, 8)
    check_fits(options_of(f"{DPO} --optimizer_cpu_offload true", "8b"), 1, gpu)
    with pytest.raises(ValueError, match=r"training needs at least .*Set .*--optimizer_cpu_offload true"):
        check_fits(options_of(DPO, "8b"), 1, gpu)


@pytest.mark.parametrize("beta", ["", "--beta 0"])
def test_vllm_has_what_training_leaves(beta, options_of) -> None:
    options = options_of(f"{GRPO} {beta} --use_vllm true --sleep_level 2")
    budget, memory = planned_engine_memory(options, 1, H200), plan_run(options, 1).memory
    held = memory.weights + OUTSIDE + (0 if budget.offload_optimizer else memory.optimizer)
    assert budget.sleeps
    assert 0 < H200 * (0.95 - budget.share) - held - 2 * GIB < 0.011 * H200  # a hundredth is rounded away
    assert str(budget) == f"{budget.share:.2f} of the GPU, by turns with training"


def test_vllm_beside_training_where_both_fit(options_of) -> None:
    options = options_of(f"{GRPO} --use_vllm true --tuner_type lora")
    budget, plan = planned_engine_memory(options, 1, H200), plan_run(options, 1)
    assert not budget.sleeps
    assert plan.memory.total + OUTSIDE + budget.share * H200 < H200
    assert budget.share * H200 > plan.memory.weights


def test_vllm_that_cannot_fit(options_of) -> None:
    with pytest.raises(ValueError, match="do not fit beside the trainer"):
        planned_engine_memory(options_of(f"{GRPO} --use_vllm true --offload_optimizer false"), 1, 60 * GIB)
    assert planned_engine_memory(options_of(f"{GRPO} --teacher_model x"), 1, H200) is None


@pytest.mark.parametrize("flags", ["dpo", "kto", "rm", "grpo --document_length 1024", "grpo --beta 0"])
def test_the_command_of_megatron_plan(flags, rows, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(rows.ROWS["4b"].config))
    words = ["plan", "--model", str(tmp_path), "--gpus", "2", "--rows", "1", "--rlhf_type", *flags.split()]
    assert main("megatron", words) == 0
    printed = capsys.readouterr().out
    assert (" beside a reference model" in printed) == (flags in ("dpo", "kto", "grpo --document_length 1024"))
    command = printed.splitlines()[-1].replace("--max_length ...", "--max_length 1024").split()
    vllm = ["--use_vllm", "true"] if flags.startswith("grpo") else []
    options = read_options("megatron", command[2:] + vllm)[0]
    assert options.rlhf_type == flags.split()[0]
    assert options.training.global_batch_size == (64 if "document_length" in flags else 16)
    memory = plan_run(options, 2).memory.total / GIB
    assert f" {memory:.1f} " in printed


@pytest.mark.parametrize(
    ("row", "flags", "error"),
    [
        ("4b", "--beta 0", "--beta: planned for --rlhf_type grpo alone."),
        ("4b", "--fp8_format hybrid", "--rlhf_type dpo: not planned in FP8 beside a reference model."),
        ("vl-4b", "", "--rlhf_type dpo: not planned with images. Set --image_share 0"),
    ],
)
def test_what_megatron_plan_refuses(row, flags, error, rows, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(rows.ROWS[row].config))
    assert main("megatron", ["plan", "--model", str(tmp_path), "--rlhf_type", "dpo", *flags.split()]) == 1
    assert f"error: {error}" in capsys.readouterr().err
