"""Plans of training runs: none that fitted is refused, and what is proposed instead fits."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest
from megaswift.bridge.mapping.architecture import HfConfig
from megaswift.bridge.option_groups import with_flags
from megaswift.cli.main import read_options
from megaswift.tasks.plan import run_plan
from megaswift.tasks.plan.memory import OUTSIDE
from megaswift.tasks.plan.run_plan import (
    TEXT,
    Gpu,
    Images,
    UnplannedRunError,
    check_fits,
    memory_line,
    plan_run,
    step_bytes,
    time_line,
    tower_patches,
)
from megaswift.tasks.plan.speed import Machine, step_time
from megaswift.tasks.run import context

GIB = 2**30
H200 = Machine(989e12)
H100 = Gpu("NVIDIA H100 80GB HBM3", 79.1 * GIB, 8)
# Rows and systems of the benchmark that ran on H200s.
RUNS = ["0.6b ours", "4b ours", "4b lora", "moe ours", "moe lora", "moe-ep2 ours", "8b ours", "8b-mb1 ours",
        "8b-offload ours"]  # fmt: skip


@pytest.fixture
def command(rows, tmp_path):
    """Return a function that makes the command line of a benchmark's row."""

    def words(name: str, more: str = "", gpus: int = 2) -> list[str]:
        row = rows.ROWS[name]
        (tmp_path / "config.json").write_text(json.dumps(row.config))
        batch = f"--micro_batch_size {row.micro_batch} --global_batch_size {row.batch_on(gpus)}"
        data = "--packing true --max_length 4096 --dataset x.jsonl --train_iters 1"
        return ["sft", "--model", str(tmp_path), *f"{batch} {row.layout} {data} {more}".split()]

    return words


def options_of(words: list[str]):
    return read_options("megatron", words)[0]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_refused_only_with_much_less_memory_than_it_took(run, rows, measured, command) -> None:
    name, system = run.split()
    result = measured[name, system]
    world = result["gpus"]
    options = options_of(command(name, rows.VARIANTS[system], world))
    took = max(step["memory_gib"] for step in result["steps"]) * GIB
    assert plan_run(options, world).is_measured
    check_fits(options, world, Gpu("NVIDIA H200", 0.97 * took, 8))
    with pytest.raises(ValueError, match=r"needs at least .* GiB of each GPU, which has "):
        check_fits(options, world, Gpu("NVIDIA H200", 0.8 * took, 8))


@pytest.mark.parametrize(
    ("name", "world", "more"),
    [
        ("8b", 2, ""),
        ("8b", 1, ""),
        ("8b", 1, "--tensor_model_parallel_size 1 --packing false"),
        ("moe", 1, ""),
        ("30b", 4, "--expert_model_parallel_size 4"),
    ],
)
def test_the_proposed_flags_fit(name, world, more, command) -> None:
    words = command(name, more)
    with pytest.raises(ValueError, match="Set --") as error:
        check_fits(options_of(words), world, H100)
    proposal = shlex.split(re.findall(r"Set (--.*), for", str(error.value))[0])
    options = options_of([*words, *proposal])
    check_fits(options, world, H100)
    assert plan_run(options, world).memory.total <= H100.memory - OUTSIDE


def test_more_gpus_are_proposed_where_no_layout_fits(command) -> None:
    options = options_of(command("30b", "--expert_model_parallel_size 1"))
    with pytest.raises(ValueError, match=r"It fits on \d+ GPUs\. --plan off") as error:
        check_fits(options, 1, Gpu("NVIDIA L40S", 44.4 * GIB, 8))
    cluster = int(re.findall(r"on (\d+) GPUs", str(error.value))[0])
    assert 61e9 / cluster < 44.4 * GIB  # the weights alone are 61 GB


def test_an_unknown_gpu_is_no_reason_to_refuse(command) -> None:
    check_fits(options_of(command("8b")), 1, Gpu("NVIDIA GeForce GTX 1080", 8 * GIB, 1))


def test_a_fault_of_the_plan_stops_no_run(command, monkeypatch, caplog) -> None:
    monkeypatch.setattr(run_plan, "make_workload", lambda *arguments: {}["sizes"])
    check_fits(options_of(command("8b")), 1, Gpu("NVIDIA L40S", 44.4 * GIB, 8))
    assert caplog.messages == ["The run's memory was not planned: KeyError('sizes')"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--fp8_format hybrid --fp8_recipe tensorwise --first_last_layers_bf16 true", "--first_last_layers_bf16"),
        ("--optimizer sgd", "--optimizer sgd"),
        ("--tuner_type lora --target_modules q_proj", "--target_modules"),
        ("--tuner_type lora --adapters a", "--adapters"),
        ("--freeze_parameters_ratio 0.5", "--freeze_parameters_ratio"),
        ("--pipeline_model_parallel_layout Et*36L", "--pipeline_model_parallel_layout"),
        ("--torch_dtype float32", "weights in float32"),
        ("--task_type embedding --packing false", "--task_type embedding without --packing true"),
    ],
)
def test_what_is_not_planned_is_not_refused(more, reason, command) -> None:
    options = options_of(command("8b", more))
    assert memory_line(options, 1) == f"not planned: {reason}"
    with pytest.raises(UnplannedRunError, match=reason):
        plan_run(options, 1)
    check_fits(options, 1, H100)


OTHERS = "--recompute_modules moe_act", "--packing false", "--moe_expert_capacity_factor 1", "--enable_dft_loss true"


@pytest.mark.parametrize("more", OTHERS)
def test_beyond_measured_runs_only_states_count(more, command) -> None:
    plan = plan_run(options_of(command("moe", more)), 1)
    assert not plan.is_measured
    assert plan.least_bytes == pytest.approx(18 * plan.work.parameters.total)


def test_the_line_of_a_dry_run(command) -> None:
    packed = memory_line(options_of(command("8b")), 2)
    assert packed.startswith(
        "133.6 GiB of each GPU by the plan: weights 15.3, gradients 30.5, optimizer 45.8, activations "
    )
    samples = memory_line(options_of(command("8b", "--packing false")), 2)
    assert samples.startswith(
        "133.6 GiB of each GPU by the plan, if all samples have --max_length tokens: weights 15.3, "
    )
    words = [word for word in command("8b", "--packing false") if word not in ("--max_length", "4096")]
    assert memory_line(options_of(words), 2) == (
        "91.5 GiB of each GPU by the plan, and activations, which depend on lengths (--max_length is not set): "
        "weights 15.3, gradients 30.5, optimizer 45.8"
    )


AWQ, MXFP4 = {"quant_method": "awq", "bits": 4}, {"quant_method": "mxfp4"}


@pytest.mark.parametrize(("name", "is_inner"), [("gpt-oss-20b-lora", False), ("vl-4b", True), ("vl-4b", False)])
def test_quantized_weights_are_planned_as_bf16(name, is_inner, command, tmp_path) -> None:
    options = options_of(command(name))
    plain = plan_run(options, 1).memory
    config = json.loads((tmp_path / "config.json").read_text())

    def quantize(quantization: HfConfig) -> None:
        key = {"quantization_config": quantization}
        quantized = config | ({"text_config": config["text_config"] | key} if is_inner else key)
        (tmp_path / "config.json").write_text(json.dumps(quantized))

    quantize(MXFP4)
    assert plan_run(options, 1).memory == plain
    quantize(AWQ)
    with pytest.raises(UnplannedRunError, match=r"quantization_config has quant_method 'awq'"):
        plan_run(options, 1)


def test_the_time_of_a_dry_run(command, measured) -> None:
    h200 = Gpu("NVIDIA H200", 139.8 * GIB, 8)
    line = time_line(options_of(command("8b")), 2, TEXT, 1000, h200, 200)
    assert line
    total, speed = re.fullmatch(
        r"(\d+)m \d+s for 200 steps: .* s/step, ([\d,]+) tokens/s/GPU by the plan, on H200", line
    ).groups()  # type: ignore[union-attr]
    steps = measured["8b", "ours"]["steps"]
    seconds = (steps[-1]["at"] - steps[-3]["at"]) / 2
    assert int(total) * 60 == pytest.approx(200 * seconds, rel=0.15)
    assert int(speed.replace(",", "")) == pytest.approx(16 * 4096 / seconds / 2, rel=0.15)
    assert time_line(options_of(command("8b", "--packing false")), 2, TEXT, 1000, h200, 200) is None
    assert time_line(options_of(command("8b", "--optimizer sgd")), 2, TEXT, 1000, h200, 200) is None


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("moe", "--fp8_format hybrid", "--fp8_format is planned for dense models"),
        ("vl-4b", "--precompute_features true", "--precompute_features"),
        ("vl-4b", "--freeze_llm true", "--freeze_llm"),
        ("vl-4b-trained", "--tuner_type lora", "adapters of a vision tower"),
    ],
)
def test_what_is_not_planned_of_some_models(name, more, reason, command) -> None:
    assert memory_line(options_of(command(name, more)), 1).startswith(f"not planned: {reason}")


def test_layers_of_prediction_take_memory(bench, command, tmp_path) -> None:
    words = command("moe", "--mtp_num_layers 1")
    reason = "--mtp_num_layers 1: layers of multi-token prediction are not known of qwen3_moe"
    assert memory_line(options_of(words), 1) == f"not planned: {reason}"
    (tmp_path / "config.json").write_text(json.dumps(bench.configs.MODELS["DeepSeek-V3"][0]))
    layout = "--expert_model_parallel_size 64 --global_batch_size 256"
    without, predicting = (
        plan_run(options_of(command_line.split()), 256)
        for command_line in (
            f"sft --model {tmp_path} {layout} --packing true --max_length 4096 --dataset x.jsonl {more}"
            for more in ("", "--mtp_num_layers 1")
        )
    )
    assert predicting.work.depths == 1
    assert predicting.memory.total > without.memory.total
    assert not predicting.is_of_measured_kind


def test_images_take_memory(command) -> None:
    options = options_of(command("vl-4b-trained"))
    text, images = (plan_run(options, 1, images).memory for images in (TEXT, Images(0.5)))
    tower = 415_347_712  # parameters of Qwen3-VL-4B's tower and mergers, as its checkpoint has them
    assert images.weights - text.weights == 2 * tower
    assert images.optimizer - text.optimizer == 12 * tower
    assert images.activations > 1.3 * text.activations
    line = memory_line(options, 1, Images(0.25))
    assert " GiB of each GPU by the plan, with 25% of the tokens in images: weights 8.3, " in line
    alone = options_of(command("vl-4b", "--language_model_only true"))
    assert plan_run(alone, 1).memory == text


def test_a_recomputed_tower_follows_the_language_model(command) -> None:
    """Its forward passes are recomputed when the language model's activations are freed; else they are kept."""
    plans = {
        more: plan_run(options_of(command("vl-4b-pp2", f"--vit_gradient_checkpointing {more}")), 2, Images(0.5)).memory
        for more in ("true", "false")
    }
    text = plan_run(options_of(command("vl-4b-pp2")), 2, TEXT).memory
    patches = 32 * 0.5 * 4096 / 2 * 4  # patches of 32 micro batches on one of two ranks
    values = 6 * 1024 + 4096  # inputs of norms, queries, keys, values, attention's output, the GELU's input
    assert plans["false"].activations - plans["true"].activations > 2**34
    assert plans["false"].activations > text.activations + 2 * 24 * values * patches
    features = 2 * 2 * 4 * 2560 * 32 * 0.5 * 4096 * 1.35
    assert plans["true"].activations < text.activations + 1.2 * features


@pytest.mark.parametrize(
    ("name", "gpus", "memory"), [("vl-4b-trained-mb1", 1, 140), ("vl-4b-tp2", 2, 90), ("vl-4b-pp2", 2, 140)]
)
def test_a_trained_tower_takes_the_memory_that_is_free(name, gpus, memory, command) -> None:
    """Up to all patches of a step, whose bytes are counted by hand: 24 layers and their mergers."""
    options = options_of(command(name))
    plans = {gib: plan_run(options, gpus, gpu_bytes=gib * GIB).memory for gib in (40, memory, 400)}
    patches = {gib: tower_patches(options, gpus, gib * GIB) for gib in plans}
    assert patches[40] < patches[memory] < patches[400]
    assert 0.75 * memory < (plans[memory].total + OUTSIDE) / GIB <= 0.85 * memory
    values = 24 * (6 * 1024 + 4096) + 3 * 4 * 1024  # of norms, attention, MLP and mergers
    step = options.training.global_batch_size
    mean = 4096 * 0.5 * 4 / gpus  # patches of a micro batch; their sum varies less
    least = {"vl-4b-trained-mb1": 1, "vl-4b-tp2": 2, "vl-4b-pp2": 0}[name]
    further = mean * (step + 0.35 * step**0.5 - least - 0.35 * least**0.5)
    pixels, features = 3 * 2 * 16**2, 4 * 2560 * 2 / 4 * gpus
    more = 0 if name == "vl-4b-pp2" else pixels + features  # which a pipeline has anyway
    difference = plans[400].activations - plans[40].activations
    assert patches[400] > 1.35 * mean * step
    assert difference == pytest.approx(2 * (values + more) * further, rel=0.02)


def test_towers_of_other_runs_keep_no_more_than_they_must(command) -> None:
    """Of those without a trained tower, those that recompute it, and runs of which activations are not known."""
    for name, more in (
        ("vl-4b", ""),
        ("vl-4b-tp2", "--vit_gradient_checkpointing true"),
        ("vl-4b-pp2", "--vit_gradient_checkpointing false"),
        ("vl-4b-tp2", "--packing false"),
        ("vl-4b-tp2", "--freeze_llm true"),
    ):
        assert tower_patches(options_of(command(name, more)), 2, 140 * GIB) == 0
    eight = options_of(command("vl-4b-tp2"))
    assert tower_patches(eight, 8, 140 * GIB) > 0


def test_weights_in_fp8(command) -> None:
    plain, cached, stored = (
        plan_run(options_of(command("8b", more)), 2).memory
        for more in ("", "--fp8_format hybrid", "--fp8_format hybrid --fp8_param_gather true")
    )
    assert stored.weights == plain.weights == cached.weights
    matrices = 36 * (4096 * 128 * (32 + 2 * 8 + 32) + 3 * 4096 * 12_288)
    assert cached.reserve - plain.reserve == 2 * matrices  # a copy of each and its transpose, a byte a value
    assert stored.reserve == plain.reserve
    assert stored.activations == cached.activations < 0.95 * plain.activations


def test_a_part_of_the_optimizer_on_the_host(command) -> None:
    most, plain, all_of_it = (
        plan_run(options_of(command("8b-offload", more)), 1).memory
        for more in (
            "--optimizer_offload_fraction 0.75",
            "--optimizer_cpu_offload false --optimizer_offload_fraction 1",
            "--optimizer_offload_fraction 1",
        )
    )
    assert (most.optimizer, all_of_it.optimizer) == (plain.optimizer / 4, 0)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_activations_on_the_host(command, recompute: str) -> None:
    """Of 36 layers of 2,560 values a token: three stay on the GPU, with their attention's outputs of 4,096 values."""
    words = f"--max_length 131072 --recompute_granularity {recompute} --cpu_offloading true --cpu_offloading_num_layers"
    plain, half, every = (
        plan_run(options_of(command("4b-128k", f"{words} {layers}", gpus=1)), 1) for layers in (0, 18, 36)
    )
    assert plain.memory.activations > half.memory.activations > every.memory.activations
    assert every.is_of_measured_kind == (recompute == "full")
    times = [step_time(plan.work, plan.layout, H200) for plan in (plain, every)]
    if recompute == "full":
        kept = 2 * 131_072 * (36 * 2560 - 3 * (2560 + 4096))
        assert plain.memory.activations - every.memory.activations == pytest.approx(kept)
        # Attention is most of the time, and is not computed again.
        assert times[1].compute < 0.85 * times[0].compute
        assert times[1].host == 0
    else:  # more leaves than PCIe takes while the layers compute
        assert times[1].compute == times[0].compute
        assert times[1].host > times[0].host


def test_the_first_rank_compares_with_its_own_gpu(command, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name=H100.name, total_memory=int(H100.memory))
    monkeypatch.setattr(context.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(context.torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(context.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(run_plan, "host_memory_share", lambda processes: 10**12 / processes)
    options = options_of(command("8b"))
    with pytest.raises(ValueError, match=r"which has 79\.1\. Set --"):
        context._check_fits(options)
    monkeypatch.setattr(context.dist, "get_world_size", lambda: 8)
    context._check_fits(with_flags(options, micro_batch_size=1))


def test_a_step_of_grpo_takes_what_one_of_sft_takes(command) -> None:
    words = command("4b", "--packing_length 4096 --max_length 1024")
    grpo = read_options("megatron", ["rlhf", "--rlhf_type", "grpo", "--reward_funcs", "format", *words[1:]])[0]
    memory = plan_run(options_of(words), 2, TEXT).memory
    step = memory.activations + memory.logits + memory.reserve
    assert step_bytes(grpo, 2, 80 * GIB, 1536) == pytest.approx(step * run_plan.MARGIN)
    grpo.data.packing = False  # micro batches of single sequences
    alone = step_bytes(grpo, 2, 80 * GIB, 4096)
    assert alone == pytest.approx(step * run_plan.MARGIN)
    grpo.build.moe_router_dtype = "fp64"  # a flag beside which activations were not measured
    assert step_bytes(grpo, 2, 80 * GIB, 4096) is None
