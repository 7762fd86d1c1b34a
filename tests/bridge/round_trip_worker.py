"""HF -> megatron-core -> HF under torchrun: every layout of one number of processes in one launch.

torchrun --nproc-per-node 2 -m tests.bridge.round_trip_worker FOLDER

FOLDER has a model folder for each of models.MODELS. Rank 0 writes what it found to FOLDER/results-2.json.
"""

import errno
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge import parallel, runtime, save
from megaswift.bridge.build import build_model
from megaswift.bridge.load import load_weights
from megaswift.bridge.options import KernelOptions, MoEOptions, ParallelOptions, RecomputeOptions
from megaswift.bridge.safetensors_io import SafetensorsFolder
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from tests.bridge.models import MODELS

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [
        {},
        {CP: 2},
        {PP: 2},
        {PP: 2, VPP: 2},
        {PP: 2, "decoder_first_pipeline_num_layers": 3},
        {EP: 2},
        {TP: 2, ETP: 2},
        {TP: 2},
    ],
    4: [
        {TP: 4, ETP: 4},
        {TP: 2, PP: 2, VPP: 2},
        {PP: 4},
        {EP: 4},
        {EP: 2, PP: 2},
        {TP: 2, EP: 2},
        {TP: 2, EP: 2, ETP: 2},
        {TP: 2, PP: 2},
    ],
}


@dataclass
class Options(ParallelOptions, RecomputeOptions, MoEOptions, KernelOptions):
    pass


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def build(source: Path, options: Options, dtype: torch.dtype):
    """A model whose every parameter comes from `source`: what loading leaves out stays NaN."""
    config = config_of(source)
    model = build_model(config, options, dtype)
    with torch.no_grad():
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
    load_weights(model.chunks, config, source)
    return model


def round_trip(source: Path, destination: Path, options: Options, dtype: torch.dtype, max_shard_bytes: int) -> str:
    """What differs between a model folder and what becomes of it; empty where nothing does."""
    chunks = build(source, options, dtype).chunks
    if dist.get_rank() == 0:
        destination.mkdir()
    dist.barrier()
    save.save_weights(chunks, config_of(source), source, destination, dtype=dtype, max_shard_bytes=max_shard_bytes)
    before = {name: tensor.to(dtype) for name, tensor in tensors_of(source).items()}
    after = tensors_of(destination)
    if before.keys() != after.keys():
        return f"names differ: {sorted(before.keys() ^ after.keys())}"
    return ", ".join(name for name in before if not torch.equal(before[name], after[name]))


def round_trips(folder: Path, world: int) -> dict[str, str]:
    problems = {}
    for layout in LAYOUTS[world]:
        options = Options(**layout)  # type: ignore[arg-type]
        parallel.initialize(options, seed=1)
        for number, name in enumerate(MODELS):
            if EP in layout and "moe" not in name:
                continue
            last = layout == LAYOUTS[world][-1]
            destination = folder / (f"{name} saved by {world}" if last else f"out-{world}-{len(problems)}")
            dtype, size = (torch.float32, torch.bfloat16)[number % 2], (10**9, 30_000)[number % 2]
            problems[f"{layout}: {name}"] = round_trip(folder / name, destination, options, dtype, size)
            dist.barrier()
            if dist.get_rank() == 0 and not last:
                shutil.rmtree(destination)
        if not last:
            parallel_state.destroy_model_parallel()
    return problems


def distance(weights: Path, reference: Path, **changes: Any) -> float:
    """The largest difference of log-probabilities to transformers on `reference`, relative to their spread.

    `changes` are made to the config.json that comes with `weights`.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(reference) | changes
    model = build_model(config, Options(), torch.float32)
    load_weights(model.chunks, config, weights)
    ids = torch.randint(3, config["vocab_size"], (1, 65), generator=torch.Generator().manual_seed(4))
    tokens, labels = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        ours = model.log_probs(
            model.chunks[0],
            tokens=tokens.to(runtime.device()),
            labels=labels.to(runtime.device()),
            position_ids=torch.arange(64, device=runtime.device()).unsqueeze(0),
            cu_seqlens=torch.tensor([0, 64], dtype=torch.int32),
            max_seqlen=64,
        )
        logits = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)(tokens).logits
    theirs = logits.log_softmax(-1).gather(2, labels[..., None]).squeeze(2)
    return ((ours.cpu() - theirs).abs().max() / theirs.std()).item()


FAULTS = {  # names that change places in the checkpoint
    "norms of the layer": ("input_layernorm", "post_attention_layernorm"),
    "norms of the heads": ("q_norm", "k_norm"),
    "keys and values": ("k_proj", "v_proj"),
    "gate and up": ("gate_proj", "up_proj"),
    "experts": ("experts.0.", "experts.1."),
}


def distances(folder: Path) -> dict[str, float]:
    """From transformers: each model, and what faults do to one."""
    found = {name: distance(folder / name, folder / name) for name in MODELS}
    moe, llama = folder / "qwen3_moe", folder / "llama, tied"
    found["fault: routing weights normalised"] = distance(moe, moe, norm_topk_prob=True)
    rope = config_of(llama)["rope_parameters"]
    found["fault: rope unscaled"] = distance(llama, llama, rope_parameters=rope | {"rope_type": "default"})
    found["fault: rope scaled otherwise"] = distance(llama, llama, rope_parameters=rope | {"low_freq_factor": 2.0})
    for fault, (one, other) in FAULTS.items():
        damaged = folder / f"damaged-{len(found)}"
        damaged.mkdir()
        swapped = {
            name.replace(one, "*").replace(other, one).replace("*", other): tensor
            for name, tensor in tensors_of(moe).items()
        }
        save_file(swapped, damaged / "model.safetensors")
        found[f"fault: {fault}"] = distance(damaged, moe)
    return found


def message_on_wrong_shape(folder: Path) -> str:
    """What a user reads where a tensor has the transposed shape of the model's."""
    source, damaged = folder / "qwen2, tied", folder / "damaged-shape"
    shutil.copytree(source, damaged, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = tensors_of(source)
    tensors["model.layers.2.mlp.down_proj.weight"] = tensors["model.layers.2.mlp.down_proj.weight"].t().contiguous()
    save_file(tensors, damaged / "model.safetensors")
    return message(build, damaged, Options(), torch.float32)


def message_on_full_disk(folder: Path) -> str:
    """What every rank raises where one of them cannot write: none is left waiting for another."""
    chunks = build(folder / "qwen2, tied", Options(**{TP: 2}), torch.float32).chunks
    real = save.write_shard

    def full(*arguments):
        if dist.get_rank() == 1:
            next(iter(arguments[-1]))  # the first tensor is written, then the disk is full
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    save.write_shard = full
    source, destination = folder / "qwen2, tied", folder / "full"
    destination.mkdir(exist_ok=True)
    arguments = (chunks, config_of(source), source, destination)
    answer = message(save.save_weights, *arguments, dtype=torch.float32, max_shard_bytes=50_000)
    save.write_shard = real
    answers: list[Any] = [None, None]
    dist.all_gather_object(answers, answer)
    return answers[0] if answers[0] == answers[1] else f"the ranks differ: {answers}"


def message(function, *arguments, **keywords) -> str:
    try:
        function(*arguments, **keywords)
    except (ValueError, OSError) as error:
        return str(error)
    return "no error"


def share_read(folder: Path, options: Options) -> float:
    """The share of a model's bytes that this rank reads."""
    source, counted = folder / "qwen2, tied", 0
    read = SafetensorsFolder.read

    def counting(*arguments):
        nonlocal counted
        tensor = read(*arguments)
        counted += tensor.nbytes
        return tensor

    SafetensorsFolder.read = counting
    build(source, options, torch.float32)
    SafetensorsFolder.read = read
    return counted / sum(tensor.nbytes for tensor in tensors_of(source).values())


def main(folder: Path) -> None:
    runtime.enable()
    world = int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {"problems": round_trips(folder, world)}
    if world == 1:
        results |= {"distances": distances(folder), "wrong shape": message_on_wrong_shape(folder)}
    if world == 2:  # still in the last layout: TP2
        results |= {"share read": share_read(folder, Options(**{TP: 2})), "full disk": message_on_full_disk(folder)}
    if dist.get_rank() == 0:
        (folder / f"results-{world}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
