"""What waits on the host while completions are generated: its storages have no bytes then, and nothing else changes."""

import json

import pytest
import torch

from tests.tasks.preference.runs import Tensors
from tests.tasks.rl.runs import BASE, LORA, MOE, Place, Trained, of_training

pytestmark = pytest.mark.slow
later = pytest.mark.long
# Notes what there is of weights, gradients and optimizer at each generation, at the end of each sync, and afterwards.
NOTED = """
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from megaswift.cli.main import main
from megaswift.tasks.train import offload
from megaswift.tasks.train.optimizer import chained_optimizers
from megaswift.tasks.rollout import factory


def there(tensors):
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def note(self, state):
    training = self._training
    states = [state for part in chained_optimizers(training.optimizer) for state in part.optimizer.state.values()]
    optimizer = [tensor for state in states for tensor in state.values()]
    found = {"weights": offload.weights(training), "gradients": offload.gradients(training.modules)}
    row = {"state": state, "optimizer": there(optimizer)} | {name: there(list(each)) for name, each in found.items()}
    folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
    with (folder / f"noted-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")


generate, sent, awake = (getattr(factory.ModelRollout, name) for name in ("generate", "_sent", "awake"))


def noted_generate(self, *arguments):
    note(self, "generate")
    return generate(self, *arguments)


def noted_sent(self, training):
    note(self, "sync")
    return sent(self, training)


@contextmanager
def noted_awake(self):
    with awake(self):
        yield
    note(self, "train")


for name, noted in (("generate", noted_generate), ("_sent", noted_sent), ("awake", noted_awake)):
    setattr(factory.ModelRollout, name, noted)
sys.exit(main("megatron", sys.argv[1:]))
"""
BOTH = "--offload_model true --offload_optimizer true"


def noted(run: Trained, rank: int = 0) -> list[dict[str, int]]:
    return [json.loads(line) for line in (run.folder / f"noted-{rank}.jsonl").read_text().splitlines()]


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check(place: Place, flags: str, processes: int | None = None) -> None:
    """Bit for bit as without."""
    plain = place.run(flags, processes)
    run = place.run(f"{flags} {BOTH}", processes, script=NOTED)
    assert same(run.weights, plain.weights)
    assert [row["completion_ids"] for row in run.completions] == [row["completion_ids"] for row in plain.completions]
    for found, wanted in zip(run.steps, plain.steps, strict=True):
        memory = [name for name in found if name.startswith("memory/")]
        assert {name: v for name, v in of_training(found).items() if name not in memory} == of_training(wanted)
    for rank in range(processes or 1):
        for row in noted(run, rank):
            here = {name for name in ("weights", "gradients", "optimizer") if row[name]}
            assert here == {
                "train": {"weights", "gradients", "optimizer"}, "sync": {"weights"}, "generate": set()
            }[str(row["state"])]  # fmt: skip
        assert [row["state"] for row in noted(run, rank)][:3] == ["sync", "generate", "train"]
    assert {"memory/train_gib", "memory/sync_gib"} <= run.steps[0].keys()


def test_weights_and_optimizer_wait_on_the_host(place: Place) -> None:
    check(place, f"{BASE} --steps_per_generation 1")


@pytest.mark.parametrize(
    ("flags", "which"), [("--offload_model true", "weights"), ("--offload_optimizer true", "optimizer")]
)
@later
def test_one_of_them(flags: str, which: str, place: Place) -> None:
    run = place.run(f"{BASE} {flags}", script=NOTED)
    assert same(run.weights, place.run(BASE).weights)
    (row, *_) = [row for row in noted(run) if row["state"] == "generate"]
    assert {name for name in ("weights", "optimizer") if row[name]} == {"weights", "optimizer"} - {which}


@later
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--use_distributed_optimizer true --overlap_grad_reduce true --overlap_param_gather true", 2),
        ("--use_distributed_optimizer true --torch_dtype bfloat16 --accumulate_allreduce_grads_in_fp32 false", 2),
        ("--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2", 2),
        ("--tensor_model_parallel_size 2 --sequence_parallel true --async_save true --save_steps 1", 2),
        (f"{MOE} --expert_model_parallel_size 2", 2),
        ("--optimizer sgd --use_distributed_optimizer false", 2),
    ],
)
def test_layouts(flags: str, processes: int, place: Place) -> None:
    check(place, f"{flags} --steps_per_generation 1 --val_dataset val.jsonl --eval_steps 2", processes)


@later
def test_lora(place: Place) -> None:
    place.adapter()
    check(place, f"{LORA} --steps_per_generation 1")
