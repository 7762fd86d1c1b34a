"""Plans beside what runs took (docs/results.json), and parameters beside transformers' counts."""

import json
from pathlib import Path

import pytest
import torch
from megaswift.bridge.checkpoint.pretrained import empty_model, load_config
from megaswift.tasks.options import PlanOptions
from megaswift.tasks.plan.gpu_layout import GpuLayout
from megaswift.tasks.plan.memory import Workload, memory_of_rank
from megaswift.tasks.plan.parameters import count_parameters
from megaswift.tasks.plan.search import search
from megaswift.tasks.plan.speed import Machine
from megaswift.tasks.plan.workload import make_workload
from megatron.core.pipeline_parallel import schedules

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
    """MLPs cost less memory than nothing and less time than layers, and are proposed before them."""
    work = workload_of(rows.ROWS["4b"].config, max_length=32_768, global_batch_size=2)
    plans = {
        choice: search(work, 1, H200, 10**12, {"micro_batch": 1, "recompute": [choice]}).plans[0]
        for choice in ("none", "mlp", "full")
    }
    none, mlp, full = plans.values()
    assert none.memory.activations > mlp.memory.activations > full.memory.activations
    assert none.seconds < mlp.seconds < full.seconds
    best = search(work, 1, H200, 139 * 2**30, {"micro_batch": 1}).plans[0].layout
    assert best.flags() == "--micro_batch_size 1 --recompute_modules mlp"
    experts = workload_of(rows.ROWS["moe"].config)
    assert {plan.layout.recompute for plan in search(experts, 1, H200, 10**12, {}).plans} == {"none"}


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
