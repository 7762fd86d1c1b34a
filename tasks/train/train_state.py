"""Training state besides the weights, for an exact resume: optimizer, schedule, random number generators.

Each rank writes one file. The optimizer's state can be loaded in any parallel layout from the files of all ranks, since
they hold regions of whole tensors (shard_regions.py). The rest is loaded from the file of the same rank.

    optimizer/exp_avg/decoder.layers.0.mlp.linear_fc1.weight@0,0    likewise each state; param: fp32 masters
    rng/...     states of random number generators
    fp8/...     Transformer Engine's scales of a module
"""

import json
import random
from collections.abc import Iterable, Iterator
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
from .optimizer import Shard, chained_optimizers, copy_masters_to_model, shards
from .step import TrainState

OPTIMIZER, RNG, FP8 = "optimizer/", "rng/", "fp8/"


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05}.safetensors"


def rank_tensors(training: TrainState, hf_config: dict[str, Any], *, optimizer: bool, rng: bool) -> dict[str, Tensor]:
    """Return the tensors of this rank's file by name. The optimizer's are views, which the next step changes.

    optimizer: include the optimizer's state and FP8 scales. rng: include random number generators. No collectives.
    """
    tensors = {}
    if optimizer:
        tensors |= {
            region.label: region.values
            for region in _regions(training, hf_config, shards(training.optimizer))
            if region.first
        }
        for name, module in _fp8_modules(training):
            tensors |= {f"{name}/{kind}": scale for kind, scale in read_scales(module).items()}
    return tensors | (_rng_tensors() if rng else {})


def optimizer_numbers(training: TrainState) -> dict[str, Any]:
    """Return the state that all ranks share, for JSON: optimizer and schedule steps, fp16 loss scale."""
    numbers: dict[str, Any] = {"schedule_steps": training.schedule.num_steps}
    if training.spikes:
        numbers["spikes"] = training.spikes.state()
    for part in chained_optimizers(training.optimizer):
        for group in part.param_groups:
            if "step" in group:
                numbers["optimizer_steps"] = group["step"]
        if scaler := getattr(part, "grad_scaler", None):
            numbers.setdefault("grad_scalers", []).append(scaler.state_dict() | {"scale": scaler.scale.item()})
    return numbers


def load_optimizer(
    training: TrainState, hf_config: dict[str, Any], folder: Path, numbers: dict[str, Any], *, same_layout: bool
) -> None:
    """Load optimizer and schedule from the files in `folder`, and copy the optimizer's masters to the weights.

    Every rank calls this after the weights are loaded. same_layout: the parallel layout is that of the files, so each
    rank also loads its FP8 scales. Raises ValueError on every rank if the files are incomplete.
    """

    def read() -> None:
        targets = list(shards(training.optimizer))
        try:
            load_regions(_regions(training, hf_config, targets), sorted(folder.glob("rank-*.safetensors")))
        except ValueError as error:
            raise ValueError(
                f"{folder}: {error}. Its run trained other parameters, with another optimizer, or in another dtype: "
                "give the options of that run, or --no_load_optim true to begin with a fresh optimizer"
            ) from None
        for shard in targets:
            shard.store()

    run_on_all_ranks(read)
    if same_layout:  # before the masters are copied, which quantizes them to FP8 with these scales
        scales = read_rank_tensors(folder, dist.get_rank(), FP8)
        for name, module in _fp8_modules(training):
            module_scales = {
                key.rpartition("/")[2]: scale for key, scale in scales.items() if key.startswith(f"{name}/")
            }
            if module_scales:
                set_scales(module, module_scales, training.model.config)
    copy_masters_to_model(training.optimizer, training.modules)
    _load_numbers(training, numbers)


def load_rng(folder: Path, rank: int) -> None:
    """Load the random number generators of `rank`, right before the first step, in the same layout only."""
    tensors = read_rank_tensors(folder, rank, RNG)
    torch.set_rng_state(tensors.pop(RNG + "torch"))
    version, state, gauss = _decode_json(tensors.pop(RNG + "python"))
    random.setstate((version, tuple(state), gauss))
    np.random.set_state(_decode_json(tensors.pop(RNG + "numpy")))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors.pop(RNG + "cuda"))
    tracker: Any = get_cuda_rng_tracker()
    is_graphable = tracker.use_cudagraphable_rng
    tracker.set_states({
        name.rpartition("/")[2]: convert_cuda_rng_state(state, to_graphable=is_graphable)
        for name, state in tensors.items()
    })  # fmt: skip


def _regions(training: TrainState, hf_config: dict[str, Any], targets: Iterable[Shard]) -> Iterator[ShardRegion]:
    """Yield the regions of all tensors in shards of this rank's optimizer state."""
    model = training.model
    trained_params = TrainedParams(model.parts, hf_config, model.lora.plan if model.lora else None)
    for parameter, start, state, sharded, _ in targets:
        if state:
            views = {f"{OPTIMIZER}{name}/": view for name, view in state.items()}
            yield from trained_params.regions(parameter, start, views, sharded=sharded)


def _load_numbers(training: TrainState, numbers: dict[str, Any]) -> None:
    for number, part in enumerate(chained_optimizers(training.optimizer)):
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


def _fp8_modules(training: TrainState) -> Iterator[tuple[str, Any]]:
    """Yield the modules that may have FP8 scales, with the prefix of the scales' names."""
    for number, chunk in enumerate(training.model.chunks if training.model.config.fp8 else ()):
        for name, module in chunk.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{FP8}{number}/{name}", module


def _rng_tensors() -> dict[str, Tensor]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": _encode_json(random.getstate())}
    name, keys, *gaussian_state = np.random.get_state()
    states["numpy"] = _encode_json([name, np.asarray(keys).tolist(), *gaussian_state])
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker: Any = get_cuda_rng_tracker()
    states |= {f"tracker/{name}": convert_cuda_rng_state(state) for name, state in tracker.get_states().items()}
    return {RNG + name: state for name, state in states.items()}


def _encode_json(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode_json(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def read_rank_tensors(folder: Path, rank: int, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a rank's file under a prefix."""
    return read_prefixed(folder / rank_file(rank), prefix)


def read_prefixed(file: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a file under a prefix."""
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(prefix)}  # noqa: SIM118
