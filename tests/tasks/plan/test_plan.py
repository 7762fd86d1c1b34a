"""Plans beside what runs took (docs/results.json), and parameters beside transformers' counts."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megaswift.bridge.checkpoint.pretrained import empty_model, load_config
from megaswift.bridge.kernels import flash_attention
from megaswift.cli.main import read_options
from megaswift.tasks.options import PlanOptions
from megaswift.tasks.plan import command
from megaswift.tasks.plan.gpu_layout import GpuLayout
from megaswift.tasks.plan.make_workload import make_workload
from megaswift.tasks.plan.memory import host_bytes, kept_attention_bytes, memory_of_rank
from megaswift.tasks.plan.parameters import count_parameters
from megaswift.tasks.plan.run_plan import plan_run
from megaswift.tasks.plan.search import search
from megaswift.tasks.plan.speed import Machine, seconds_per_step, step_time
from megaswift.tasks.plan.workload import Workload
from megatron.core.pipeline_parallel import schedules

from tests.bridge.families import test_prediction

ROOT = Path(__file__).parents[3]
H200 = Machine(989e12)


@pytest.fixture(scope="module")
def workload_of(tmp_path_factory):
    def make(config, **options) -> Workload:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(config))
        return make_workload(config, load_config(folder), PlanOptions(str(folder), **options))

    return make


def test_memory_and_speed_are_those_measured(bench, capsys) -> None:
    results = bench.plan_check.checks(json.loads((ROOT / "docs" / "results.json").read_text()))
    assert len(results) >= 20
    assert [result.cells for result in results if result.is_claimed and not result.is_close] == []


def test_a_plan_that_is_far_off_fails_the_check(bench, tmp_path, capsys, monkeypatch) -> None:
    runs = json.loads((ROOT / "docs" / "results.json").read_text())
    run = next(run for run in runs if (run["row"], run["system"]) == ("0.6b", "ours"))
    for step in run["steps"]:
        step["memory_gib"] *= 1.05  # the plan is now 5 % below
    (tmp_path / "results.json").write_text(json.dumps([run]))
    monkeypatch.setattr("sys.argv", ["plan_check.py", str(tmp_path / "results.json")])
    with pytest.raises(SystemExit, match="1"):
        bench.plan_check.main()
    assert "0 of 1 runs are within the bounds" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["4b", "moe", "vl-4b", "vl-moe"])
def test_parameters_are_those_of_transformers(name, rows, tmp_path) -> None:
    config = rows.ROWS[name].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = load_config(tmp_path)
    with torch.device("meta"):
        model = empty_model(settings)
    parameters = count_parameters(config, settings)
    assert parameters.total == sum(parameter.numel() for parameter in model.parameters())
    stages = GpuLayout(2, pipeline=2).stages(len(parameters.layers))
    halves = [parameters.of_stage(stages[n], is_first=n == 0, is_last=n == 1).total for n in (0, 1)]
    copies = parameters.embedding.total if parameters.tied else 0
    assert sum(halves) == parameters.language + copies


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3Next tied"])
def test_layers_of_prediction_are_on_the_last_stage(name, tmp_path) -> None:
    expected = test_prediction.make(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    without, parameters = (count_parameters(config, load_config(tmp_path), depths) for depths in (0, 1))
    assert parameters.total == without.total + parameters.prediction.total == expected["parameters"]
    assert parameters.prediction.expert == without.layers[1].expert > 0
    stages = GpuLayout(2, pipeline=2).stages(len(parameters.layers))
    first, last = (parameters.of_stage(stages[n], is_first=n == 0, is_last=n == 1) for n in (0, 1))
    assert first == without.of_stage(stages[0], is_first=True, is_last=False)
    assert first.total + last.total == parameters.language + parameters.embedding.total  # one copy, tied or not
    assert parameters.of_stage(range(4), is_first=True, is_last=True).total == parameters.language


def test_prediction_on_images(workload_of) -> None:
    """The tower's terms are those without prediction, but visual tokens pass through the output layers too."""
    from tests.bridge.vision import FAMILIES

    config = FAMILIES["qwen3_5"]().to_dict() | {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    config["text_config"]["mtp_num_hidden_layers"] = 1
    layout = GpuLayout(1)
    plans = {
        (depths, share): workload_of(config, mtp_num_layers=depths, image_share=share)
        for depths in (None, 1)
        for share in (0.0, 0.5)
    }
    memory = {key: memory_of_rank(work, layout) for key, work in plans.items()}
    times = {key: seconds_per_step(work, layout, H200) for key, work in plans.items()}
    assert [memory[1, share].weights - memory[None, share].weights for share in (0.0, 0.5)] == [
        2 * plans[1, 0.5].parameters.prediction.total
    ] * 2
    assert memory[1, 0.5].logits == memory[1, 0.0].logits == 2 * memory[None, 0.0].logits
    assert memory[None, 0.5].logits < memory[None, 0.0].logits
    assert times[1, 0.5] > times[None, 0.5] > 0


def test_memory_and_time_with_prediction(bench, workload_of) -> None:
    """DeepSeek-V3's layer has 11.5 billion parameters; its files have copies of embedding and output layer too."""
    config = bench.configs.MODELS["DeepSeek-V3"][0]
    without, work = (
        workload_of(config, global_batch_size=256, gpus=256, mtp_num_layers=depths) for depths in (None, 1)
    )
    parameters = work.parameters
    in_files = parameters.total + parameters.embedding.total + work.vocab_size * config["hidden_size"]
    assert in_files == pytest.approx(684.5e9, rel=1e-3)  # https://huggingface.co/deepseek-ai/DeepSeek-V3: 685B
    layout = GpuLayout(256, pipeline=16, expert=16, last=1, recompute="full")
    stage = parameters.prediction.expert / 16 + parameters.embedding.total
    assert memory_of_rank(work, layout).weights >= 2 * stage
    for recompute in ("none", "full"):
        sizes = GpuLayout(256, expert=64, recompute=recompute)
        more, less = (memory_of_rank(each, sizes) for each in (work, without))
        assert more.weights - less.weights == pytest.approx(
            2 * (parameters.prediction.expert / 64 + parameters.prediction.split + parameters.prediction.replicated)
        )
        assert more.activations + more.logits > less.activations + less.logits
        slower = step_time(work, sizes, H200).compute / step_time(without, sizes, H200).compute
        # One more layer and output layer beside 61 layers and one output layer.
        assert 1 / 61 < slower - 1 < 3 / 61


def test_layers_of_uneven_and_virtual_stages() -> None:
    assert list(map(len, GpuLayout(4, pipeline=4, first=12, last=10).stages(48))) == [12, 13, 13, 10]
    assert list(map(len, GpuLayout(2, pipeline=2, virtual=2).stages(8))) == [4, 4]
    assert not GpuLayout(4, pipeline=4).divides(50)
    assert GpuLayout(2, pipeline=2, recompute="full", recomputed=3).recomputed_share(12) == 0.25


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 1, 8), (4, 1, 2), (2, 2, 8), (4, 3, 8)])
def test_chunks_in_flight_are_those_of_the_schedule(stages, chunks, micro_batches, monkeypatch) -> None:
    layout = GpuLayout(stages, pipeline=stages, virtual=chunks)
    virtual = chunks if chunks > 1 else None
    state = schedules.parallel_state
    monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: stages)
    monkeypatch.setattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: virtual)
    for stage in range(stages):
        monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        total, _, warmup, _ = schedules.get_pp_rank_microbatches(micro_batches, chunks, stages)
        assert layout.chunks_in_flight(stage, micro_batches) == min(warmup + 1, total)


def test_types_of_the_optimizer_and_of_gradients(rows, workload_of) -> None:
    layout = GpuLayout(1)
    plain, small = (
        memory_of_rank(workload_of(rows.ROWS["4b"].config, **types), layout)
        for types in (
            {},
            {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8", "accumulate_allreduce_grads_in_fp32": False},
        )
    )
    assert small.optimizer == plain.optimizer * 7 / 12
    assert small.gradients == plain.gradients / 2


def test_stages_of_a_search(rows, workload_of) -> None:
    """A last stage with fewer layers is proposed, which evens out the output layer, and virtual stages are."""
    work = workload_of(rows.ROWS["30b-pp4"].config, global_batch_size=64, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    plans = search(work, 4, H200, 139 * 2**30, {"pipeline": 4, "micro_batch": 1}).plans
    assert str(plans[0].layout) == "PP4 last 9"
    assert "PP4 VPP2" in [str(plan.layout) for plan in plans]
    pinned = search(work, 4, H200, 139 * 2**30, {"pipeline": 4, "first": 12, "last": 10}).plans
    assert {str(plan.layout) for plan in pinned} == {"PP4 first 12 last 10"}


def test_layouts_that_a_search_proposes_are_consistent(rows, workload_of) -> None:
    work = workload_of(rows.ROWS["moe"].config, global_batch_size=32)
    result = search(work, 8, H200, 70 * 2**30, {"pipeline": 2})
    assert result.plans == sorted(result.plans, key=lambda plan: plan.seconds)
    assert result.best
    for plan in result.plans:
        layout = plan.layout
        assert layout.pipeline == 2
        assert layout.tensor * layout.pipeline * layout.context * layout.data == 8
        assert layout.expert * layout.expert_data * layout.pipeline == 8
        assert work.global_batch % (layout.micro_batch * layout.data) == 0
        assert plan.memory.total <= 70 * 2**30
    assert result.smallest
    assert result.smallest.memory.total <= min(plan.memory.total for plan in result.plans)


def test_what_is_recomputed(rows, workload_of) -> None:
    """MLPs cost less memory than nothing and less time than layers; some layers are proposed where they are enough."""
    work = workload_of(rows.ROWS["4b"].config, max_length=32_768, global_batch_size=2)
    pins = {"micro_batch": 1, "offloaded_layers": 0}
    plans = {
        choice: search(work, 1, H200, 10**12, pins | {"recompute": [choice], "recomputed": None}).plans[0]
        for choice in ("none", "mlp", "full")
    }
    none, mlp, full = plans.values()
    assert none.memory.activations > mlp.memory.activations > full.memory.activations
    assert none.seconds < mlp.seconds < full.seconds
    best = [search(work, 1, H200, gib * 2**30, pins | {"offloads": False}).plans[0] for gib in (200, 139, 120, 100)]
    choices = [(plan.layout.recompute, plan.layout.recomputed) for plan in best]
    assert choices == [("none", None), ("mlp", None), ("full", 27), ("full", None)]
    assert [plan.seconds for plan in best] == sorted(plan.seconds for plan in best)
    assert best[2].layout.flags() == (
        "--micro_batch_size 1 --recompute_granularity full --recompute_method block --recompute_num_layers 27"
    )
    experts = workload_of(rows.ROWS["moe"].config)
    assert {plan.layout.recompute for plan in search(experts, 1, H200, 10**12, {}).plans} == {"none"}


def test_inputs_of_recomputed_layers_go_to_the_host_where_it_pays(rows, workload_of) -> None:
    """Long documents: attention is computed once then. Short ones: it is a small part of a step."""
    chosen = {}
    for length, host in itertools.product((4096, 131_072), (80e9, 40e9)):
        work = workload_of(rows.ROWS["4b"].config, max_length=length, global_batch_size=2)
        machine = replace(H200, host_memory=host)
        chosen[length, host] = search(work, 1, machine, 120 * 2**30, {"recompute": ["full"], "micro_batch": 1}).plans[0]
    every = chosen[131_072, 80e9]
    assert [plan.layout.offloaded_layers for plan in chosen.values()] == [0, 0, 36, 0]
    assert every.layout.flags().endswith(
        "--cpu_offloading true --cpu_offloading_num_layers 36 --recompute_method uniform --recompute_num_layers 1"
    )
    assert 40e9 < host_bytes(work, every.layout) == 2 * 36 * 131_072 * (2560 + 4096) < 80e9
    assert every.seconds < 0.9 * chosen[131_072, 40e9].seconds
    for excluded in (
        workload_of(rows.ROWS["glm-4.7-flash-4"].config, max_length=131_072),  # latent attention
        workload_of(rows.ROWS["4b"].config, max_length=131_072, fp8_format="hybrid"),
        workload_of(rows.ROWS["vl-4b"].config, max_length=131_072),
    ):
        assert not search(excluded, 1, H200, 10**12, {"recompute": ["full"]}).plans[0].layout.offloaded_layers


def test_numbers_of_layers_on_the_host(rows, workload_of) -> None:
    """A searched number is the shortest stage's. One that is set has all layers recomputed, and no limit."""
    work = workload_of(rows.ROWS["4b"].config, max_length=131_072, global_batch_size=4)
    sizes = {"pipeline": 4, "tensor": 1, "context": 1, "micro_batch": 1, "offloads": False}
    uneven = sizes | {"first": None, "last": 6, "virtual": 1, "recompute": ["full"], "recomputed": None}
    assert search(work, 4, H200, 10**12, uneven).plans[0].layout.offloaded_layers == 6
    times = [
        step_time(work, GpuLayout(4, pipeline=4, recompute="full", offloaded_layers=layers), H200).compute
        for layers in (0, 3, 6, 9)
    ]
    assert sorted(times, reverse=True) == times
    assert times[0] - times[1] == pytest.approx(times[2] - times[3])
    pins = {"offloaded_layers": 36, "micro_batch": 1}
    for memory in (10**12, 100 * 2**30):
        layout = search(work, 1, replace(H200, host_memory=0), memory, pins).plans[0].layout
        assert (layout.recompute, layout.recomputed, layout.offloaded_layers) == ("full", None, 36)
    # A run takes no more than the layers that are recomputed.
    for layers, has_plan in ((9, True), (10, False)):
        pins = {"offloaded_layers": layers, "recompute": ["full"], "recomputed": 9, "micro_batch": 1}
        assert bool(search(work, 1, H200, 10**12, pins).plans) == has_plan


def test_from_a_layout_with_activations_on_the_host_to_one_without() -> None:
    with_host = GpuLayout(1, recompute="full", offloaded_layers=36)
    changes = with_host.changes(GpuLayout(1, recompute="full"))
    assert changes == "--cpu_offloading false --cpu_offloading_num_layers 0"


def test_keys_and_values_of_a_ring_wait_for_the_gpu(rows, workload_of) -> None:
    """Six buffers of each layer that the host is ahead: 4,096 kernels, of which experts need more."""
    for name, layers, groups in (("1.7b-32k-cp2", 28, 8), ("30b-32k-lora", 4096 / 180, 4)):
        row = rows.ROWS[name]
        work = workload_of(row.config, max_length=row.length, tuner_type="lora", lora_dropout=0.0, cp_comm_type="p2p")
        one, ring = (memory_of_rank(work, GpuLayout(size, context=size)).activations for size in (1, 4))
        assert ring - one / 4 == pytest.approx(6 * layers * 2 * 2 * groups * 128 * row.length / 4)


def test_gathered_keys_and_values_are_those_of_one_layer(rows, workload_of, monkeypatch) -> None:
    """The default where FlashAttention-4 is installed, but for latent attention. It also keeps what is offloaded."""
    row = rows.ROWS["4b-128k-cp2"]
    for is_installed in (False, True):
        monkeypatch.setattr(flash_attention, "is_installed", lambda is_installed=is_installed: is_installed)
        work = workload_of(row.config, max_length=row.length)
        assert work.gathers_keys == is_installed
        assert not workload_of(rows.ROWS["glm-4.7-flash-4"].config).gathers_keys
    assert not workload_of(row.config, cp_comm_type="p2p").gathers_keys
    one, gathered = (memory_of_rank(work, GpuLayout(size, context=size)).activations for size in (1, 2))
    assert gathered - one / 2 == pytest.approx(5 * 2 * 2 * 8 * 128 * row.length)
    one, two = (GpuLayout(size, context=size, recompute="full", offloaded_layers=36) for size in (1, 2))
    assert kept_attention_bytes(work, two) == kept_attention_bytes(work, one) > 0
    assert kept_attention_bytes(replace(work, gathers_keys=False), two) == 0


def test_what_bounds_a_small_micro_batch(rows, workload_of) -> None:
    """The host, that launches as many kernels, or the gradients of experts, which are added to their sums each time."""
    small, large = (workload_of(rows.ROWS["0.6b"].config, max_length=length) for length in (64, 128))
    layout = GpuLayout(1)
    assert seconds_per_step(small, layout, H200) == pytest.approx(seconds_per_step(large, layout, H200))
    whole, halves = (
        seconds_per_step(workload_of(rows.ROWS["moe"].config), GpuLayout(1, micro_batch=size), H200) for size in (2, 1)
    )
    sums = 8 * 128 * 3 * 2048 * 768  # bytes of the experts' fp32 sums, added to eight times more
    assert halves - whole > 8 * 8 * sums / H200.bandwidth


def test_other_gpus_have_their_own_memory_and_links(rows, workload_of) -> None:
    work = workload_of(rows.ROWS["4b"].config)
    h100, h200, l40s = (Machine.of(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L40S"))
    assert h100
    assert h200
    assert l40s
    assert Machine.of("NVIDIA GeForce GTX 1080") is None
    assert (h100.peak_flops, h200.bandwidth) == (h200.peak_flops, H200.bandwidth)
    layouts = [GpuLayout(2, tensor=size, micro_batch=8) for size in (1, 2)]
    fast, slow = ([seconds_per_step(work, layout, gpu) for layout in layouts] for gpu in (h200, l40s))
    assert slow[1] - slow[0] > 5 * (fast[1] - fast[0]) > 0


def test_why_other_layouts_lose(rows, tmp_path, capsys) -> None:
    """Those that fit are slower, by what has grown most; those that are faster do not fit."""
    (tmp_path / "config.json").write_text(json.dumps(rows.ROWS["8b"].config))
    assert command.run(PlanOptions(str(tmp_path), gpus=4, gpu="h200", rows=20), {}) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    first = next(number for number, line in enumerate(lines) if line[:1] == ["layout"]) + 1
    table = lines[first : lines.index([], first)]
    shares = [float(line[-2].removesuffix("%")) for line in table[1:]]
    assert shares == sorted(shares)
    assert table[0][0] == "DP4"
    assert {line[-1] for line in table if line[0] == "TP4"} == {"(exchange)"}
    assert len({tuple(word for word in line if not word.startswith("VPP")) for line in table}) == len(table)
    larger = [" ".join(line) for line in lines if line[0:1] == ["DP4,"]]
    assert len(larger) == 1
    assert re.fullmatch(
        r"DP4, micro batch 4: [\d.]+ s/step, but (\d+\.\d) GiB, \d+\.\d too many; activations 76\.5", larger[0]
    )


def test_the_time_of_a_pipeline(rows, workload_of) -> None:
    """Idle are three of four stages while a micro batch passes; with virtual stages less, and more is sent."""
    work = workload_of(rows.ROWS["8b"].config | {"vocab_size": 1}, global_batch_size=16)
    plain, virtual = (step_time(work, GpuLayout(4, pipeline=4, virtual=chunks), H200) for chunks in (1, 3))
    assert plain.idle == pytest.approx(3 / 16 * (plain.compute + plain.exchange), rel=0.01)
    assert virtual.idle == pytest.approx(plain.idle / 3, rel=0.05)
    assert virtual.exchange == pytest.approx(3 * plain.exchange)


def test_more_of_anything_takes_less_memory(rows, workload_of) -> None:
    work = workload_of(rows.ROWS["moe"].config, global_batch_size=32)
    base = memory_of_rank(work, GpuLayout(8)).total
    for change in (
        {"tensor": 2},
        {"pipeline": 2},
        {"context": 2},
        {"expert": 2},
        {"recompute": "full"},
        {"offloads": True},
    ):
        assert memory_of_rank(work, GpuLayout(8, **change)).total < base, change


def test_experts_are_split_where_no_more_can_be_distributed(rows, workload_of) -> None:
    """Ranks that split an expert have the inputs of all of its tokens, and half of its columns."""
    few = rows.ROWS["moe"].config | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12_288}
    work = workload_of(few, gpus=16, global_batch_size=16)
    whole, split = (memory_of_rank(work, GpuLayout(16, expert=8, expert_tensor=size)) for size in (1, 2))
    experts = sum(layer.expert for layer in work.parameters.layers)
    assert experts == 8 * 8 * 3 * 2048 * 12_288  # layers, experts, matrices
    assert whole.weights - split.weights == 2 * experts / 16
    assert whole.gradients - split.gradients == 4 * experts / 16
    assert whole.optimizer == split.optimizer
    inputs = 2 * 4096 * 8 * 2 * 2048 * 1.1  # bf16, tokens, layers, experts of a token, hidden size, the busiest rank
    assert split.activations - whole.activations == pytest.approx(inputs)
    # Rows of an expert are gathered within a node; gradients of experts need no exchange.
    waits = [step_time(replace(work, lora_rank=8), GpuLayout(8, expert_tensor=size), H200).exchange for size in (1, 2)]
    assert waits[0] == 0 < waits[1]
    found = search(work, 16, H200, 40 * 2**30, {}).plans
    sizes = {(plan.layout.expert, plan.layout.expert_tensor) for plan in found}
    assert (8, 2) in sizes
    assert all(expert == 8 for expert, tensor in sizes if tensor > 1)
    pinned = search(work, 16, H200, 40 * 2**30, {"expert_tensor": 4, "expert": 2}).plans
    assert {(plan.layout.expert, plan.layout.expert_tensor) for plan in pinned} == {(2, 4)}
    assert "EP2 ETP4" in str(pinned[0].layout)
    assert "--expert_tensor_parallel_size 4" in pinned[0].layout.flags()
    many = workload_of(rows.ROWS["moe"].config, gpus=8, global_batch_size=16)
    assert all(plan.layout.expert_tensor == 1 for plan in search(many, 8, H200, 40 * 2**30, {}).plans)


def test_a_run_with_split_experts_is_not_of_a_measured_kind(rows, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(rows.ROWS["moe"].config))
    data = f"sft --model {tmp_path} --packing true --max_length 4096 --dataset x.jsonl --train_iters 1"
    for flags, is_measured in (("", True), ("--expert_tensor_parallel_size 2", False)):
        plan = plan_run(read_options("megatron", f"{data} {flags}".split())[0], 2)
        assert plan.is_measured == is_measured
        assert plan.layout.expert_data == (2 if is_measured else 1)
