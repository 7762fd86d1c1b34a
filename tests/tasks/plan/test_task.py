"""Plans of `megatron rlhf`: reference models, forward passes, score heads, and vLLM beside GRPO's training."""

import json
import shlex
from functools import partial

import pytest
import torch
from megaswift.bridge.model.score_head import add_score_head
from megaswift.cli.main import main, read_options
from megaswift.tasks.plan.memory import OUTSIDE, host_bytes, memory_of_rank
from megaswift.tasks.plan.parameters import count_parameters
from megaswift.tasks.plan.run_plan import TEXT, Gpu, UnplannedRunError, check_fits, plan_run, time_line
from megaswift.tasks.plan.search import search
from megaswift.tasks.plan.speed import Machine
from megaswift.tasks.plan.task import Distillation, TaskWork
from megaswift.tasks.rollout.memory_budget import planned_engine_memory

GIB = 2**30
H200 = 139.7 * GIB
DPO, GRPO = "--rlhf_type dpo", "--rlhf_type grpo --reward_funcs accuracy --use_vllm true"
PPO, GKD = GRPO.replace("grpo", "ppo"), "--rlhf_type gkd --teacher_model MODEL --use_vllm true"


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
        ("--rlhf_type rm", PAIRS(outputs=1, scores_tokens=False)),
        ("--task_type reranker", TaskWork(outputs=1, scores_tokens=False)),
        ("--task_type seq_cls --num_labels 7", TaskWork(outputs=7, scores_tokens=False)),
        (GRPO, TaskWork("kept", 1, completions=16)),
        (f"{GRPO} --beta 0", TaskWork(completions=16)),
        (f"{GRPO} --beta 0 --packing false", TaskWork()),
        (f"{GRPO} --num_iterations 2", TaskWork("kept", 2, completions=16)),  # one of the policy before the steps
        (PPO, TaskWork("kept", 2, completions=16)),
        (f"{PPO} --beta 0", TaskWork(forwards=1, completions=16)),
        (GKD, TaskWork(distillation=Distillation(), completions=16)),
        (f"{GKD} --gkd_logits_topk 64 --sft_alpha 0.1", TaskWork(distillation=Distillation(64, True), completions=16)),
        ("--task_type embedding", TaskWork(scores_tokens=False)),
        ("--task_type generative_reranker", TaskWork(scores_tokens=False)),
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


CRITIC = 4_022_468_096 - 151_936 * 2560 + 151_936 * 2560 + 2560  # Qwen3-4B, whose embedding is tied, with a head


def test_a_critic_is_trained_too(options_of) -> None:
    """All its parameters are, also beside adapters. Only one of both has activations at a time."""
    policy, kept = (plan_run(options_of(flags), 1).memory for flags in (GRPO, f"{PPO} --offload_critic false"))
    assert kept.weights - policy.weights == 2 * CRITIC
    assert kept.gradients - policy.gradients == 4 * CRITIC
    assert kept.optimizer - policy.optimizer == 12 * CRITIC
    assert kept[3:] == policy[3:]
    adapters = plan_run(options_of(f"{PPO} --tuner_type lora --offload_critic false"), 1).memory
    assert adapters.optimizer > 12 * CRITIC


def test_an_offloaded_critic_takes_memory_in_its_own_step(options_of) -> None:
    plans = {flags: plan_run(options_of(f"{PPO} {flags}"), 1) for flags in ("", "--offload_critic false")}
    offloaded, kept = (plan.memory for plan in plans.values())
    assert offloaded[:3] == plan_run(options_of(GRPO), 1).memory[:3]
    logits = kept.logits  # the critic has none
    assert offloaded.activations + logits - 18 * CRITIC == pytest.approx(kept.activations, rel=1e-6)
    hosts = [host_bytes(plan.work, plan.layout) for plan in plans.values()]
    assert hosts == [14 * CRITIC, 0]


def test_a_teacher_has_weights_and_outputs(options_of, rows, tmp_path) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text(json.dumps(rows.ROWS["8b"].config))
    gkd = f"{GKD} --lmbda 0 --global_batch_size 4 --packing_length 4096".replace("MODEL", str(teacher))
    alone = plan_run(options_of("--rlhf_type orpo --global_batch_size 4 --packing_length 4096"), 1).memory
    parameters, matrix = 8_190_735_360, 151_936 * 4096
    outputs = 2 * 4096 * 4 * 4096  # hidden states of four packs
    plan = plan_run(options_of(gkd), 1)
    assert plan.memory.weights - alone.weights == 2 * parameters
    assert plan.memory.activations - alone.activations == outputs
    assert (plan.memory.gradients, plan.memory.optimizer) == (alone.gradients, alone.optimizer)
    top = plan_run(options_of(f"{gkd} --gkd_logits_topk 64"), 1).memory
    assert top.activations - alone.activations == 8 * 64 * 4 * 4096
    server = gkd.replace(f"--teacher_model {teacher}", "--teacher_model_server http://127.0.0.1:1 --gkd_logits_topk 64")
    assert plan_run(options_of(server), 1).memory == top._replace(weights=alone.weights)
    short = f"{gkd} --offload_teacher_model true --max_length 128 --packing_length 128"
    offloaded = plan_run(options_of(short), 1)
    assert offloaded.memory.weights - alone.weights == 2 * matrix
    assert offloaded.memory.activations + offloaded.memory.logits == outputs / 32 + 2 * parameters
    assert host_bytes(offloaded.work, offloaded.layout) == 2 * parameters


def test_a_teacher_takes_the_time_of_forward_passes(options_of, rows, tmp_path) -> None:
    gpu, seconds = Gpu("NVIDIA H200", H200, 8), {}
    (tmp_path / "teacher").mkdir()
    for row in ("4b", "8b"):
        (tmp_path / "teacher" / "config.json").write_text(json.dumps(rows.ROWS[row].config))
        gkd = f"{GKD} --lmbda 0 --max_length 8192".replace("MODEL", str(tmp_path / "teacher"))
        line = time_line(options_of(gkd), 1, TEXT, None, gpu, 1)
        seconds[row] = float(line.split(": ")[1].split()[0])
    alone = float(time_line(options_of(""), 1, TEXT, None, gpu, 1).split(": ")[1].split()[0])
    assert seconds["4b"] > alone * 5 / 4
    # Parameters without embeddings; the output layers are for trained tokens alone. At two thirds of the peak.
    products = 2 * (6.95e9 - 3.63e9 + 0.69 * (0.62e9 - 0.39e9)) * 16 * 8192
    assert seconds["8b"] - seconds["4b"] == pytest.approx(products / 0.6e15, rel=0.15)


@pytest.fixture
def headed(rows, tmp_path):
    """Return a function that writes the config.json of a row's model with a head of one label."""

    def write(row: str, **changes) -> str:
        folder = tmp_path / f"headed-{row}"
        folder.mkdir(exist_ok=True)
        config = add_score_head(rows.ROWS[row].config | {"architectures": ["Qwen3ForCausalLM"]}, 1) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


@pytest.mark.parametrize("row", ["4b", "8b"])  # tied embeddings, and not
def test_a_critic_begins_as_a_reward_model(row, options_of, headed) -> None:
    from_model, from_reward = (
        plan_run(options_of(f"{PPO} --offload_critic false {flags}", row), 1).memory
        for flags in ("", f"--critic_model {headed(row)}")
    )
    assert from_reward == from_model


def test_a_reward_model_is_on_the_first_gpu(options_of, headed) -> None:
    pipeline = "--pipeline_model_parallel_size 2 --tuner_type lora --beta 0"
    alone = plan_run(options_of(f"{GRPO} --beta 0"), 1).memory.weights
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        flags = f"{GRPO} --beta 0 --reward_model {headed('4b', dtype=dtype)}"
        assert plan_run(options_of(flags), 1).memory.weights - alone == size * CRITIC
    assert plan_run(options_of(f"{flags} {pipeline}"), 2).memory.weights > 4 * CRITIC
    quantized = headed("4b", quantization_config={"quant_method": "awq", "bits": 4})
    assert plan_run(options_of(f"{GRPO} --beta 0 --reward_model {quantized}"), 1).memory.weights == alone


def test_what_a_teacher_does_not_divide(options_of, rows, tmp_path) -> None:
    """28 layers do not go into 3 stages, as 36 do, nor layers that take from others into two."""
    teachers = {}
    for row in ("1.7b", "gemma-4-e2b"):
        (tmp_path / row).mkdir()
        (tmp_path / row / "config.json").write_text(json.dumps(rows.ROWS[row].config))
        teachers[row] = GKD.replace("MODEL", str(tmp_path / row))
    for flags, world in ((teachers["1.7b"], 3), (teachers["gemma-4-e2b"], 2)):
        with pytest.raises(UnplannedRunError, match="a critic or teacher that the layout does not divide"):
            plan_run(options_of(f"{flags} --pipeline_model_parallel_size {world}"), world)
    work = plan_run(options_of(teachers["gemma-4-e2b"]), 1).work
    layouts = [plan.layout for plan in search(work, 4, Machine(989e12), 140 * GIB, {}).plans]
    assert layouts
    assert {layout.pipeline for layout in layouts} == {1}
    work = plan_run(options_of(teachers["1.7b"]), 1).work
    layouts = [plan.layout for plan in search(work, 6, Machine(989e12), 140 * GIB, {}).plans]
    assert layouts
    assert all(layout.last for layout in layouts if layout.pipeline == 3)  # stages of 9, 9 and 10, or 13, 13 and 10


def test_stages_have_parts_of_both_models(options_of) -> None:
    """The last stage has the output layer of the student, and the copy of the embedding."""
    flags = f"{GKD} --lmbda 0 --pipeline_model_parallel_size 2 --global_batch_size 2 --max_length 8192"
    plan = plan_run(options_of(flags), 2)
    alone = plan_run(options_of("--pipeline_model_parallel_size 2 --global_batch_size 2"), 2).memory
    assert plan.memory.weights == 2 * alone.weights  # the teacher is a model of the same shape
    assert plan.memory.gradients == alone.gradients


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
        ("--task_type embedding --packing false", "--task_type embedding without --packing true"),
        (f"{GKD} --seq_kd true", "--seq_kd true with a teacher that generates in the processes"),
        (f"{GKD} --teacher_tensor_model_parallel_size 2", "--teacher_tensor_model_parallel_size"),
        (f"{GKD} --use_vllm false", "generation by transformers (--use_vllm false)"),
        (f"{GKD} --fp8_format hybrid --fp8_recipe tensorwise", "--fp8_format beside a teacher"),
        (f"{PPO} --critic_pipeline_model_parallel_size 2", "--critic_pipeline_model_parallel_size"),
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


@pytest.mark.parametrize(
    ("flags", "others"),
    [
        ("dpo", " beside a reference model"),
        ("kto", " beside a reference model"),
        ("rm", ""),
        ("grpo --document_length 1024", " beside a reference model, without generation"),
        ("grpo --beta 0", ", without generation"),
        ("ppo", " beside a reference model and a critic, without generation"),
        ("ppo --beta 0 --tuner_type lora", " beside a critic, without generation"),
        ("gkd --teacher_model MODEL", " beside MODEL, without generation"),
    ],
)
def test_the_command_of_megatron_plan(flags, others, rows, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(rows.ROWS["4b"].config))
    flags, others = (text.replace("MODEL", str(tmp_path)) for text in (flags, others))
    words = ["plan", "--model", str(tmp_path), "--gpus", "2", "--rows", "1", "--rlhf_type", *flags.split()]
    assert main("megatron", words) == 0
    printed = capsys.readouterr().out
    assert f", for {flags.split()[0]}{others}\n" in printed
    lines = printed.splitlines()
    command = next(line for line in lines if " megatron rlhf " in line).replace("--max_length ...", "--max_length 1024")
    command = command.split()
    vllm = ["--use_vllm", "true"] if flags.split()[0] in ("grpo", "ppo", "gkd") else []
    options = read_options("megatron", command[2:] + vllm)[0]
    assert options.rlhf_type == flags.split()[0]
    assert options.training.global_batch_size == (64 if "document_length" in flags else 16)
    memory = plan_run(options, 2).memory.total / GIB
    assert f" {memory:.1f} " in printed


@pytest.mark.parametrize(
    ("row", "flags", "error"),
    [
        ("4b", "--beta 0", "--beta: planned for --rlhf_type grpo and ppo alone."),
        ("4b", "--fp8_format hybrid", "--rlhf_type dpo: not planned in FP8 beside a reference model."),
        ("vl-4b", "", "--rlhf_type dpo: not planned with images. Set --image_share 0"),
        ("4b", "--teacher_model x", "--rlhf_type gkd and --teacher_model need each other."),
        ("4b", "--rlhf_type gkd --teacher_model ./none", "--teacher_model ./none: no such folder."),
        ("4b", "--rlhf_type gkd --teacher_model BERT", "--teacher_model BERT: config.json names the architecture Bert"),
        ("4b", "--rlhf_type gkd --teacher_model MODEL --fp8_format hybrid", "--rlhf_type gkd: not planned in FP8."),
    ],
)
def test_what_megatron_plan_refuses(row, flags, error, rows, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(rows.ROWS[row].config))
    task = [] if "--rlhf_type" in flags else ["--rlhf_type", "dpo"]
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    flags, error = (text.replace("BERT", str(bert)) for text in (flags, error))
    words = ["plan", "--model", str(tmp_path), *task, *flags.replace("MODEL", str(tmp_path)).split()]
    assert main("megatron", words) == 1
    assert f"error: {error}" in capsys.readouterr().err
