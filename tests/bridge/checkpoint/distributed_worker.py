"""megatron-core checkpoints under torchrun: written in each layout of one number of processes, and read in each.

torchrun --nproc-per-node 2 -m tests.bridge.checkpoint.distributed_worker FOLDER

FOLDER has jobs.json, {name of a model: [layouts]}, and for each name NAME/fp32, a Hugging Face folder. What an earlier
launch has written there, with another number of processes, is read too. Rank 0 writes what is wrong to
FOLDER/results-2.json.
"""

import json
import os
import re
import sys
import zlib
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge import parallel, runtime
from megaswift.bridge.checkpoint.distributed import (
    load_distributed,
    load_distributed_adapter,
    save_distributed,
    save_distributed_adapter,
)
from megaswift.bridge.checkpoint.hub import mcore_folder, read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.sharding import sharded_state
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.mapping.local_params import collect_params, local_experts, shard_position
from megaswift.bridge.mapping.param_mapping import clip_spans
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import BuildOptions
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

from tests.bridge.families import LAYOUTS

VOCABULARY = re.compile("word_embeddings|output_layer")
PLAIN = ("qwen2", "qwen3", "qwen3_moe")  # models that a plain megatron-core is built for too
EVERYTHING = LoraSettings(
    rank=3,
    alpha=6,
    dropout=0.0,
    bias="none",
    dtype=None,
    rslora=False,
    dora=False,
    targets=("all-linear", "all-router"),
    regex=None,
    modules_to_save=("lm_head",),
)
ADAPTERS = {
    "everything": EVERYTHING,
    "words": replace(EVERYTHING, targets=("all-linear", "all-embedding"), modules_to_save=()),
    # Of fused matrices a part only, and magnitudes; biases that are trained beside them.
    "parts": replace(
        EVERYTHING,
        dora=True,
        bias="all",
        targets=("q_proj", "v_proj", "up_proj", "down_proj"),
        modules_to_save=("embed_tokens",),
    ),
}
ADAPTED = {  # models that have adapters
    "qwen2": ("parts",),
    "qwen3_moe": ("everything",),
    "deepseek_v3": ("everything", "words"),
}


def fresh(config: dict[str, Any], options: BuildOptions):
    """A model with nothing in it: what loading leaves out stays NaN."""
    model = build_model(config, options, torch.float32)
    with torch.no_grad():
        for tensor in collect_params(model.chunks).values():
            tensor.fill_(torch.nan)
    return model


def differing(wanted: dict[Any, Any], found: dict[Any, Any]) -> str:
    names = [str(key) for key in wanted if key not in found or not torch.equal(wanted[key], found[key])]
    return ", ".join(names[:3]) + ("" if len(names) <= 3 else f" and {len(names) - 3} others")


def round_trips(folder: Path, name: str, options: BuildOptions, layout: str) -> dict[str, str]:
    """What is lost between any layout that has been here before, or this one, and this one."""
    source = folder / name / "fp32"
    config = read_config(source)
    model = fresh(config, options)
    load_weights(model.chunks, config, source)
    wanted = collect_params(model.chunks)
    destination = folder / "mcore" / f"{name}@{dist.get_world_size()} {layout}"
    if dist.get_rank() == 0:
        destination.mkdir(parents=True)
    dist.barrier()
    save_distributed(model.chunks, config, source, destination, dtype=torch.float32, converted=True)
    problems = {}
    for written in sorted((folder / "mcore").glob(f"{name}@*")):
        read = fresh(config, options)
        load_distributed(read.chunks, config, written)
        problems[f"{written.name} -> {layout}"] = differing(wanted, collect_params(read.chunks))
    # What an optimizer asks: each of its parameters is some value's data.
    values = sharded_state(model.chunks, config).values()
    lost = {id(p) for chunk in model.chunks for p in chunk.parameters()} - {id(value.data) for value in values}
    problems[f"{name} {layout}: parameters"] = f"{len(lost)} are nobody's data" if lost else ""
    return problems


def adapted(config: dict[str, Any], options: BuildOptions, kind: str):
    """A model with adapters, of which nothing is set."""
    model = fresh(config, options)
    attach_adapters(model, config, ADAPTERS[kind], seed=0)
    with torch.no_grad():
        for tensor in trained(model).values():
            tensor.fill_(torch.nan)
    return model


def trained(model: Any) -> dict[Any, torch.Tensor]:
    plan = model.lora.plan
    tensors = collect_params(model.chunks) | collect_params(model.chunks, adapters=True)
    return {key: tensor for key, tensor in tensors.items() if key in plan.all_entries}


@torch.no_grad()
def fill(model: Any) -> None:
    """Set each of PEFT's tensors to random numbers of its own, as they are in every layout."""
    entries = model.lora.plan.entries | model.lora.plan.modules_to_save
    for key, tensor in trained(model).items():
        entry, size = entries[key], tensor.shape[entries[key].dim]
        ranks, rank = shard_position(key, entry)
        spans = entry.spans(tensor.shape, ranks, model.architecture)
        shapes = entry.hf_shapes(tensor.shape, spans)
        tensor.zero_()
        for at, span in clip_spans(spans, rank * size, (rank + 1) * size):
            if span.part is not None:
                name = entry.hf[span.part]
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole = torch.randn(shapes[name], generator=generator)
                whole = whole.t() if entry.transposed else whole
                tensor.narrow(entry.dim, at, span.length).copy_(whole.narrow(entry.dim, span.start, span.length))


def adapters_round_trip(folder: Path, name: str, options: BuildOptions, layout: str, kind: str) -> dict[str, str]:
    """What is lost of adapters between any layout that has been here before, or this one, and this one."""
    config = read_config(folder / name / "fp32")
    model = adapted(config, options, kind)
    fill(model)
    wanted = trained(model)
    destination = folder / "adapters" / f"{name} {kind}@{dist.get_world_size()} {layout}"
    if dist.get_rank() == 0:
        destination.mkdir(parents=True)
    dist.barrier()
    save_distributed_adapter(model.chunks, config, model.lora, destination, base="the base")
    problems = {}
    for written in sorted((folder / "adapters").glob(f"{name} {kind}@*")):
        read = adapted(config, options, kind)
        load_distributed_adapter(read.chunks, config, read.lora, written)
        problems[f"{written.name} -> {layout}"] = differing(wanted, trained(read))
    return problems


def plain_model(ours: Any, config: dict[str, Any]) -> GPTModel:
    """megatron-core's own model for the same config, with its own layers, and a vocabulary padded as it pleases."""
    transformer = copy(ours.config)
    transformer.sequence_parallel = False  # which its local norms refuse
    if transformer.num_moe_experts:
        spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=transformer.qk_layernorm, normalization="RMSNorm")
    multiple = 16 * transformer.tensor_model_parallel_size
    model = GPTModel(
        transformer,
        spec,
        vocab_size=-(-config["vocab_size"] // multiple) * multiple,
        max_sequence_length=256,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=ours.architecture.tied,
        position_embedding_type="rope",
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def state_of(model: GPTModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """Its sharded state, with the name that Transformer Engine's specification has for the norm before experts."""
    state = model.sharded_state_dict(metadata=metadata)
    for name, value in state.items():
        if "pre_mlp_layernorm" in name and any(name.replace("pre_mlp_layernorm.weight", "mlp.router.") in other
                                               for other in state):  # fmt: skip
            value.key = value.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return state


def by_our_names(model: GPTModel, experts: int) -> dict[str, torch.Tensor]:
    named = {}
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, index, rest = name.split(".", 3)
            name = f"decoder.layers.{model.decoder.layers[int(index)].layer_number - 1}.{rest}"
            if ".local_experts." in name:
                before, after = name.split(".local_experts.")
                index, rest = after.split(".", 1)
                name = f"{before}.{rest} of expert {local_experts(experts)[int(index)]}"
        named[name] = parameter
    return named


def with_plain(folder: Path, name: str, options: BuildOptions, layout: str) -> dict[str, str]:
    """What is lost between our checkpoints and a plain megatron-core, in both directions."""
    config = read_config(folder / name / "fp32")
    ours = fresh(config, options)
    load_weights(ours.chunks, config, folder / name / "fp32")
    held_by_us = collect_params(ours.chunks)
    experts = ours.config.num_moe_experts or 0
    wanted = {str(key): tensor for key, tensor in held_by_us.items()}
    problems = {}
    model = plain_model(ours, config)
    for written in sorted((folder / "mcore").glob(f"{name}@*")):
        inside = str(mcore_folder(written))
        metadata = dist_checkpointing.load_content_metadata(inside)
        assert metadata is not None
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        loaded, missing, unexpected = dist_checkpointing.load(state_of(model, metadata), inside, strict="return_all")
        model.load_state_dict({key: value for key, value in loaded.items() if "_extra" not in key}, strict=False)
        found = by_our_names(model, experts)
        # Of the vocabulary, what rank 0 has in both ways of padding: the other ranks' rows begin elsewhere.
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        rows = {key: min(len(wanted[key]), config["vocab_size"]) * first for key in wanted if VOCABULARY.search(key)}
        both = [{key: side[key][: rows.get(key)] for key in wanted} for side in (wanted, found)]
        said = differing(*both)
        said += ", ".join(sorted(missing)) + ", ".join(sorted(one for one in unexpected if "_extra_state" not in one))
        problems[f"{written.name} -> plain {layout}"] = said
    # megatron-core's writer asks torch.cuda: it gets the view that its other modules have on a CPU.
    filesystem_async.torch = state_dict_saver.torch = parallel_state.torch  # type: ignore[attr-defined]
    theirs = folder / "plain" / f"{name} {dist.get_world_size()} {layout}"
    if dist.get_rank() == 0:
        theirs.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(theirs))
    read = fresh(config, options)
    load_distributed(read.chunks, config, theirs)
    problems[f"{theirs.name} -> ours"] = differing(held_by_us, collect_params(read.chunks))
    return problems


def main(folder: Path) -> None:
    runtime.enable()
    world = int(os.environ["WORLD_SIZE"])
    jobs = json.loads((folder / "jobs.json").read_text())
    problems: dict[str, str] = {}
    for layout, flags in LAYOUTS[world].items():
        options = BuildOptions(**flags)
        parallel.initialize(options, seed=1)
        for name, layouts in jobs.items():
            if layout in layouts or not layout:
                problems |= round_trips(folder, name, options, layout)
                if name in PLAIN and "VPP" not in layout and "uneven" not in layout:
                    problems |= with_plain(folder, name, options, layout)
                for kind in ADAPTED.get(name, ()):
                    problems |= adapters_round_trip(folder, name, options, layout, kind)
        parallel_state.destroy_model_parallel()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {case: problem for case, problem in problems.items() if problem})
    if dist.get_rank() == 0:
        results = {"cases": sorted(problems), "problems": everyone}
        (folder / f"results-{world}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
