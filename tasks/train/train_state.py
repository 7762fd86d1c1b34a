"""Training state: everything but the weights that makes a resumed run the same: optimizer, schedule, random numbers.

Each rank writes what it holds into a file of its own. The optimizer's state is read from those of all ranks, in any
layout, since they have boxes of whole tensors (shard_regions.py); the rest from that of the same rank.

    optimizer/exp_avg/decoder.layers.0.mlp.linear_fc1.weight@0,0    so of each state; param: fp32 masters of the weights
    rng/...     generators of random numbers
    fp8/...     Transformer Engine's scales of a module
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker
from safetensors import safe_open
from torch import Tensor, nn

from ...bridge.checkpoint.shard_regions import ShardRegion, TrainedParams, load_regions
from ...bridge.mapping.fp8 import read_scales, set_scales
from ..distributed.collectives import run_on_all_ranks
from .optimizer import parts, put_masters, shards
from .step import TrainState

OPTIMIZER, RNG, FP8 = "optimizer/", "rng/", "fp8/"


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05}.safetensors"


def rank_tensors(training: TrainState, hf_config: dict[str, Any], *, optimizer: bool, rng: bool) -> dict[str, Tensor]:
    """Return the tensors of this rank's file, by name. Those of the optimizer are views, which the next step changes.

    `optimizer`: its state, and the scales of FP8. `rng`: the generators of random numbers. No rank waits for another.
    """
    tensors = {}
    if optimizer:
        tensors |= {box.label: box.values for box in _boxes(training, hf_config) if box.first}
        for name, module in _in_fp8(training):
            tensors |= {f"{name}/{kind}": scale for kind, scale in read_scales(module).items()}
    return tensors | (_rng() if rng else {})


def optimizer_numbers(training: TrainState) -> dict[str, Any]:
    """Return what all ranks share, for JSON: steps of the optimizer and the schedule, fp16's loss scale."""
    numbers: dict[str, Any] = {"schedule_steps": training.schedule.num_steps}
    if training.spikes:
        numbers["spikes"] = training.spikes.state()
    for part in parts(training.optimizer):
        for group in part.param_groups:
            if "step" in group:
                numbers["optimizer_steps"] = group["step"]
        if scaler := getattr(part, "grad_scaler", None):
            numbers.setdefault("grad_scalers", []).append(scaler.state_dict() | {"scale": scaler.scale.item()})
    return numbers


def load_optimizer(
    training: TrainState, hf_config: dict[str, Any], folder: Path, numbers: dict[str, Any], *, same_layout: bool
) -> None:
    """Give optimizer and schedule what the files of `folder` have, and the weights what the optimizer's masters are.

    Every rank calls this, once the weights are read. `same_layout`: each rank holds what the rank that wrote its file
    held, and takes its scales of FP8 too. Raises ValueError, on every rank, where the files lack something.
    """

    def read() -> None:
        try:
            load_regions(_boxes(training, hf_config), sorted(folder.glob("rank-*.safetensors")))
        except ValueError as error:
            raise ValueError(
                f"{folder}: {error}. Its run trained other parameters, with another optimizer, or in another dtype: "
                "give the options of that run, or --no_load_optim true to begin with a fresh optimizer"
            ) from None

    run_on_all_ranks(read)
    if same_layout:  # first: weights in FP8 are made of the masters by these scales
        scales = read_own(folder, dist.get_rank(), FP8)
        for name, module in _in_fp8(training):
            of_module = {key.rpartition("/")[2]: scale for key, scale in scales.items() if key.startswith(f"{name}/")}
            if of_module:
                set_scales(module, of_module, training.model.config)
    put_masters(training.optimizer, training.chunks)
    _load_numbers(training, numbers)


def load_rng(folder: Path, rank: int) -> None:
    """Give this process's generators the state of `rank`'s: in the same layout, as the last thing before a step."""
    tensors = read_own(folder, rank, RNG)
    torch.set_rng_state(tensors.pop(RNG + "torch"))
    version, state, gauss = _from_json(tensors.pop(RNG + "python"))
    random.setstate((version, tuple(state), gauss))
    np.random.set_state(_from_json(tensors.pop(RNG + "numpy")))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors.pop(RNG + "cuda"))
    tracker: Any = get_cuda_rng_tracker()
    graphable = tracker.use_cudagraphable_rng
    tracker.set_states({
        name.rpartition("/")[2]: convert_cuda_rng_state(state, to_graphable=graphable)
        for name, state in tensors.items()
    })  # fmt: skip


def _boxes(training: TrainState, hf_config: dict[str, Any]) -> Iterator[ShardRegion]:
    """Yield all that this rank's optimizer holds."""
    model = training.model
    trained = TrainedParams(model.chunks, hf_config, model.lora.plan if model.lora else None)
    for parameter, start, state, sharded in shards(training.optimizer):
        if state:
            runs = {f"{OPTIMIZER}{name}/": run for name, run in state.items()}
            yield from trained.regions(parameter, start, runs, sharded=sharded)


def _load_numbers(training: TrainState, numbers: dict[str, Any]) -> None:
    for number, part in enumerate(parts(training.optimizer)):
        for group in part.param_groups:
            if "step" in group:
                group["step"] = numbers.get("optimizer_steps", numbers["schedule_steps"])
        if (scaler := getattr(part, "grad_scaler", None)) and (scalers := numbers.get("grad_scalers")):
            saved = scalers[min(number, len(scalers) - 1)]
            scaler.load_state_dict(saved | {"scale": torch.tensor([saved["scale"]], dtype=torch.float32)})
    if training.spikes and "spikes" in numbers:
        training.spikes.load(numbers["spikes"])
    training.schedule.num_steps = numbers["schedule_steps"]
    training.schedule.step(0)  # the learning rate of the next step


def _in_fp8(training: TrainState) -> Iterator[tuple[str, Any]]:
    """Yield the modules that may have scales, by the names of these."""
    for number, chunk in enumerate(training.model.chunks if training.model.config.fp8 else ()):
        for name, module in chunk.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{FP8}{number}/{name}", module


def _rng() -> dict[str, Tensor]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": _as_json(random.getstate())}
    name, keys, *rest = np.random.get_state()
    states["numpy"] = _as_json([name, np.asarray(keys).tolist(), *rest])
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker: Any = get_cuda_rng_tracker()
    states |= {f"tracker/{name}": convert_cuda_rng_state(state) for name, state in tracker.get_states().items()}
    return {RNG + name: state for name, state in states.items()}


def _as_json(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_json(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def read_own(folder: Path, rank: int, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a rank's file under a prefix."""
    return read_prefixed(folder / rank_file(rank), prefix)


def read_prefixed(file: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a file under a prefix."""
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(prefix)}  # noqa: SIM118
