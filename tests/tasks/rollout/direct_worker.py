"""Direct copies of weights into vLLM in the processes of a trainer, run by .venv-vllm's Python under its torchrun.

    torchrun --nproc-per-node 2 -m tests.tasks.rollout.direct_worker job.json results.json

job.json: {"models": three folders, "options": {flag: value}, "ranks": of an engine, "vision", "kernels": "plain" or
"CPU's"}. results.json: {what: what each rank found}.

vLLM's kernels for CPUs compute with repacked weights, those for GPUs with the parameters. "plain" has torch's
functions compute with the parameters, as those for GPUs do.
"""

import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import BuildOptions
from megaswift.bridge.parallel import barrier, initialize
from megaswift.tasks.options.rollout import EngineOptions
from megaswift.tasks.rollout import factory, vllm_layout, weight_sync
from megaswift.tasks.rollout.engine import Sampling
from megaswift.tasks.rollout.vllm_engine import VllmEngine
from megaswift.tasks.rollout.vllm_kwargs import with_normalizing_processor
from megaswift.tasks.rollout.weight_buckets import BucketWriter, SharedMemory

from tests.bridge.checkpoint.stream_worker import tensors_of
from tests.tasks.rollout.vllm_worker import FILTERED, distance, greedy_is_transformers, requests


def run(job: dict[str, Any], place: Path) -> dict[str, Any]:
    options, folders = BuildOptions(**job["options"]), [Path(folder) for folder in job["models"]]
    initialize(options, seed=3)
    if job["kernels"] == "plain":
        use_parameters()
    settings = EngineOptions(
        vllm_max_model_len=128,
        vllm_max_num_seqs=8,
        vllm_tensor_parallel_size=job["ranks"],
        vllm_engine_kwargs=with_normalizing_processor({}),  # loaded weights too: models with the same tensors
    )
    vision = job.get("vision", False)
    config = read_config(folders[0])
    model = build_model(config, options, torch.float32, vision=vision)
    expected = []
    for number, folder in enumerate(folders[1:], 1):
        load_weights(model.parts, config, folder)
        exported = place / f"exported {number}"
        if dist.get_rank() == 0:
            exported.mkdir()
        barrier()
        save_weights(model.parts, config, folder, exported, dtype=torch.float32, max_shard_bytes=10**9)
        fresh = VllmEngine(exported, settings, dtype=torch.float32, load=True)
        expected.append(state(fresh))
        fresh.close()
    engine = VllmEngine(folders[0], settings, dtype=torch.float32)
    engine.eos_ids = set()  # by chance any token would come
    run = SimpleNamespace(hf_config=config, dtype=torch.float32, sees_media=vision, model_folder=folders[0])
    rollout = factory.ModelRollout(run, model, engine, job["ranks"], "", frees_weights=vision)  # type: ignore[arg-type]
    found: dict[str, Any] = {"ways": [], "differ": [], "compared": []}
    for number, folder in enumerate(folders):
        load_weights(model.parts, config, folder)
        with torch.no_grad():
            for tensor in engine.layout.targets.values() if engine.layout else ():
                tensor.fill_(torch.nan)  # lost, as when an engine has slept
        with mock.patch.object(factory, "stream_weights", wraps=factory.stream_weights) as stream:
            rollout.syncs += 1
            stats = rollout._send(engine)
        found["ways"].append("loaders" if stream.called else "direct")
        found["compared"].append(stats.compared)
        if number:
            found["differ"].append(differences(state(engine), expected[number - 1]))
    found["problem"] = engine.layout_problem
    if found["ways"][-1] == "direct":
        (plan,) = rollout._direct._plans.values()
        found["copies"], found["transfers"] = plan.copies, plan.transfers
        found["tensors"] = len(engine.layout.shapes) if engine.layout else 0
    if not vision:
        asked = requests(dist.get_rank() // job["ranks"])
        found["greedy"] = greedy_is_transformers(engine, asked, folders[-1])
        found["log_probs"] = max(distance(engine, asked, folders[-1], way) for way in (FILTERED, Sampling()))
    if found["ways"][-1] == "direct":
        found["fault"] = with_fault(rollout, engine)
    found["buckets"] = through_buckets(engine, [place / "exported 1", place / "exported 2"], expected)
    engine.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {name: [one.get(name) for one in everyone] for name in found}


def with_fault(rollout: factory.ModelRollout, engine: VllmEngine) -> str:
    """Return the error of a sync whose last rank finds another digest in a tensor than in its source."""
    digest = weight_sync.digest
    is_last = dist.get_rank() == dist.get_world_size() - 1
    count = iter(range(10**6))
    fault = mock.patch.object(weight_sync, "digest", lambda tensor: digest(tensor) + (is_last and next(count) == 1))
    try:
        with fault:
            rollout._send(engine)
    except RuntimeError as error:
        return str(error)
    return ""


def through_buckets(engine: VllmEngine, folders: list[Path], expected: list[dict[str, torch.Tensor]]) -> list[str]:
    """Return what differs after two updates of the engine's model by a server's worker, in several buckets each."""
    from megaswift.tasks.rollout.vllm_transfer import BucketTransferEngine

    (model,) = engine.llm.apply_model(lambda model: model)
    device, vllm_config = torch.device("cpu"), engine.llm.llm_engine.vllm_config
    worker = BucketTransferEngine(vllm_config.weight_transfer_config, vllm_config, device, model)
    wrong = []
    for folder, tensors in zip(folders, expected, strict=True):
        worker.start_weight_update()
        weights = sorted((name, tensor) for name, tensor in tensors_of(folder).items())
        for start in range(0, len(weights), 20):
            memory = SharedMemory(2**24)
            bucket = BucketWriter(memory.flat)
            for name, tensor in weights[start : start + 20]:
                bucket.put(name, tensor)
            info = {"entries": bucket.entries, "handle": list(memory.handle), "start": 0, "bytes": bucket.used}
            worker.update_weights(info)
            memory.close()
        worker.finish_weight_update()
        wrong += differences(state(engine), tensors)
    return wrong if worker._layout is not None or engine.layout_problem else ["the layout was not recorded", *wrong]


def state(engine: VllmEngine) -> dict[str, torch.Tensor]:
    (model,) = engine.llm.apply_model(lambda model: model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def differences(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    wrong = sorted(tensors.keys() ^ expected.keys())
    return wrong + [name for name in tensors.keys() & expected.keys() if not torch.equal(tensors[name], expected[name])]


def use_parameters() -> None:
    """Have vLLM's layers compute with their parameters by torch's functions."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
    try:
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    except ImportError:  # vLLM 0.32
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        CPUUnquantizedExperts._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))  # any sizes
        CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
        CPUUnquantizedExperts.apply = apply_experts
    else:

        def init_moe_torch(self, layer) -> None:
            experts = range(layer.w13_weight.size(0))
            layer.gate_up_linear = [lambda x, i=i: F.linear(x, layer.w13_weight[i]) for i in experts]
            layer.down_linear = [lambda x, i=i: F.linear(x, layer.w2_weight[i]) for i in experts]
            cpu_fused_moe._CPU_MOE_LAYER_CACHE[id(layer)] = weakref.ref(layer)

        cpu_fused_moe.CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")
        cpu_fused_moe.CPUFusedMOE.init_moe_torch = init_moe_torch
    vllm_layout.PLAIN_EXPERTS.add("CPU")


def apply_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    **settings: Any,
) -> None:
    """Write into `output` what experts with SwiGLU compute, as vLLM's FusedMoEExpertsModular.apply does."""
    output.zero_()
    for expert, (gate_up, down) in enumerate(zip(w1, w2, strict=True)):
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[tokens], gate_up).chunk(2, dim=-1)
        weights = topk_weights[tokens, choices, None]
        output.index_add_(0, tokens, F.linear(F.silu(gate) * up, down) * weights)


def main(job: Path, results: Path) -> None:
    found = run(json.loads(job.read_text()), job.parent)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
