"""Plans beside what runs took (docs/results.json), and parameters beside transformers' counts."""

import json
from itertools import pairwise

import pytest
import torch
from megaswift.bridge.checkpoint.pretrained import empty_model, load_config
from megaswift.tasks.options import PlanOptions
from megaswift.tasks.plan.gpu_layout import GpuLayout
from megaswift.tasks.plan.memory import Workload, memory_of_rank, stage_layers
from megaswift.tasks.plan.parameters import count_parameters
from megaswift.tasks.plan.search import search
from megaswift.tasks.plan.speed import Machine, seconds_per_step
from megaswift.tasks.plan.workload import make_workload

H200 = Machine(989e12)
DOCUMENT = 1000  # mean tokens of the benchmark's documents
LORA = {"tuner_type": "lora"}
# Rows of the benchmark: the layout that their flags ask for, and options of the plan.
RUNS = {
    ("0.6b", "ours"): (GpuLayout(1, micro_batch=4), {}),
    ("4b", "ours"): (GpuLayout(1, micro_batch=2), {}),
    ("4b", "lora"): (GpuLayout(1, micro_batch=2), LORA),
    ("moe", "ours"): (GpuLayout(1, micro_batch=2), {}),
    ("moe", "lora"): (GpuLayout(1, micro_batch=2), LORA),
    ("moe-ep2", "ours"): (GpuLayout(2, expert=2, micro_batch=2), {}),
    ("8b", "ours"): (GpuLayout(2, micro_batch=2), {}),
    ("8b-mb1", "ours"): (GpuLayout(2, micro_batch=1), {}),
    ("8b-offload", "ours"): (GpuLayout(1, micro_batch=1, offloads=True), {}),
}


@pytest.fixture(scope="module")
def workload_of(tmp_path_factory):
    def make(config, **options) -> Workload:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(config))
        return make_workload(config, load_config(folder), PlanOptions(str(folder), **options))

    return make


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_memory_and_speed_are_those_measured(run, rows, measured, workload_of) -> None:
    layout, options = RUNS[run]
    row, result = rows.ROWS[run[0]], measured[run]
    work = workload_of(row.config, document_length=DOCUMENT, global_batch_size=result["global_batch"], **options)
    gib = memory_of_rank(work, layout).total / 2**30
    highest = max(step["memory_gib"] for step in result["steps"])
    assert highest * 0.97 < gib < highest * 1.08
    if layout.offloads:  # its speed was measured later, with less of the state on the host
        result = measured[(*run, "--optimizer_offload_fraction 0.93")]
    times = sorted(after["at"] - before["at"] for before, after in pairwise(result["steps"][2:]))
    assert seconds_per_step(work, layout, H200) == pytest.approx(times[len(times) // 2], rel=0.1)


@pytest.mark.parametrize("name", ["4b", "moe", "vl-4b", "vl-moe"])
def test_parameters_are_those_of_transformers(name, rows, tmp_path) -> None:
    config = rows.ROWS[name].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = load_config(tmp_path)
    with torch.device("meta"):
        model = empty_model(settings)
    parameters = count_parameters(config, settings)
    assert parameters.total == sum(parameter.numel() for parameter in model.parameters())
    stages = stage_layers(len(parameters.layers), 2)
    halves = [parameters.of_stage(stages[n], is_first=n == 0, is_last=n == 1).total for n in (0, 1)]
    copies = parameters.tower.total + (parameters.embedding.total if parameters.tied else 0)
    assert sum(halves) == parameters.total + copies


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


def test_more_of_anything_takes_less_memory(rows, workload_of) -> None:
    work = workload_of(rows.ROWS["moe"].config, global_batch_size=32)
    base = memory_of_rank(work, GpuLayout(8)).total
    for change in (
        {"tensor": 2},
        {"pipeline": 2},
        {"context": 2},
        {"expert": 2},
        {"recomputes": True},
        {"offloads": True},
    ):
        assert memory_of_rank(work, GpuLayout(8, **change)).total < base, change
