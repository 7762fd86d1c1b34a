"""Systems under test: their commands for a row, and parsers of their logs.

Both systems get the same checkpoint, text, pack length, batch sizes, optimizer, learning rate and environment, and log
every step. megaswift gets no other flags but its layout, because its defaults are measured.

ms-swift (https://github.com/modelscope/ms-swift, Apache-2.0) gets the fastest settings that we found: cuDNN attention,
no recomputation, the fused cross entropy, permute fusion (experts) and overlaps (several GPUs). Its `chatml` template
(`qwen3_vl` with pictures, which needs qwen-vl-utils and av) gives the same tokens as the checkpoint's own template, but
also trains on the newline after each document. It packs and shuffles with other algorithms, so the documents of a step
differ. Fill of packs and lengths of documents are the same, and so is the work. It does not pad a pack that is not
full. DPO runs without packs, so that a step of both systems has the same number of pairs. `peer-flash` runs
FlashAttention-2: flash-attn, or without it PyTorch's kernels (flash_attn_interface.py).
"""

import importlib.metadata
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

from flash_attn_interface import write_flash_attn
from row import Row
from rows import PEERS, VARIANTS

LEARNING = "--lr 1e-5 --lr_decay_style constant"
PEER = (
    "--use_hf true --finetune true --recompute_granularity none "
    "--cross_entropy_loss_fusion true --gradient_accumulation_fusion false --load_from_cache_file false "
    "--dataset_num_proc 8 --dataloader_num_workers 4 --no_save_optim true --no_save_rng true"
)
COIN, PEER_COIN = (Path(__file__).with_name(f"coin_reward{of}.py") for of in ("", "_peer"))
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn-4", "triton", "transformers")
ROLLOUT_METRICS = "timing_s/", "weight_sync/", "memory/", "completions/mean_length", "sampling/"  # prefixes in the log


def peer_script(site: Path | None, task: str) -> Path:
    """Return ms-swift's script of a task, in `site` or the installed package. Raises FileNotFoundError."""
    package = site or next(
        map(Path, (importlib.util.find_spec("swift") or _missing()).submodule_search_locations or [])
    )
    script = package / "swift" if site else package
    script = script / "cli" / "_megatron" / f"{task}.py"
    return script if script.exists() else _missing()


def _missing() -> Any:
    raise FileNotFoundError("ms-swift is not installed: pip install ms-swift, or give --peer-site")


def command(
    system: str,
    row: Row,
    model: Path,
    data: Path,
    out: Path,
    *,
    gpus: int,
    steps: int,
    site: Path | None,
    flags: str,
    teacher: Path | None = None,
) -> list[str]:
    """Return the argv of a run that writes `out`/logging.jsonl. flags: extra flags for megaswift"""
    task, sizes = (
        ("rlhf", rlhf_flags(system, row)) if row.rlhf else ("sft", f"--packing true --max_length {row.length}")
    )
    common = f"--model {model} --dataset {data} {sizes} --output_dir {out} "
    common += f"--micro_batch_size {row.micro_batch} --global_batch_size {row.batch_on(gpus)} --train_iters {steps} "
    common += f"--teacher_model {teacher} " if teacher else ""
    common += f"--add_version false --logging_steps 1 --save_steps 100000 {LEARNING} {row.layout}"
    if system not in PEERS:
        return [sys.executable, "-m", "megaswift.cli.main", "megatron", task, *_words(common, VARIANTS[system], flags)]
    if row.rlhf and row.rlhf.servers:
        raise RuntimeError("rows with servers have no command of ms-swift")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={gpus or 1}", f"--master_port={port}"]
    kind = f"--model_type {row.config['model_type']} --template {'qwen3_vl' if row.pictures else 'chatml'}"
    return [*launch, str(peer_script(site, task)), *_words(common, kind, PEER, PEERS[system], row.peer)]


def rlhf_flags(system: str, row: Row) -> str:
    """Return the flags of the task. No row of the data is as long as --max_length, which bounds prompts in GRPO."""
    assert row.rlhf
    flags = f"--rlhf_type {row.rlhf.kind} {row.rlhf.flags} --max_length {row.length * 5 // 4}"
    if row.rlhf.generates:
        flags += f" --external_plugins {PEER_COIN if system in PEERS else COIN}"
    if system not in PEERS:
        flags += f" {row.rlhf.packs}"
    # Of DPO's pairs megaswift bounds both sequences together, ms-swift each.
    return flags + (f" --rollout_num_gpus {row.rlhf.servers}" if row.rlhf.servers else "")


def _words(*texts: str) -> list[str]:
    return " ".join(texts).split()


def environment(
    system: str, caches: Path, *, gpus: int, site: Path | None, engine_site: Path | None = None, servers: int = 0
) -> dict[str, str]:
    """Return the environment of a run: the first GPUs, no network, and separate caches.

    engine_site: packages of vLLM, behind those of training
    servers: GPUs that do not train
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(gpus)]
    variables = {
        "CUDA_VISIBLE_DEVICES": ",".join(devices[:gpus]),
        "NPROC_PER_NODE": str(gpus - servers) if gpus else os.environ.get("NPROC_PER_NODE", "1"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HOME": str(caches / "hf"),
        "MODELSCOPE_CACHE": str(caches / "modelscope"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
    }
    if system in PEERS:
        folders = [str(site) if site else None, os.environ.get("PYTHONPATH"), str(engine_site) if engine_site else None]
        has_package = importlib.util.find_spec("flash_attn") or (site and (site / "flash_attn").is_dir())
        if system == "peer-flash" and not has_package:
            folders.insert(0, str(write_flash_attn(caches / "flash_attn")))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    elif engine_site:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(engine_site)]))
    # With PYTHONDONTWRITEBYTECODE every process would compile PyTorch's sources again.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | variables


def step_of(system: str, line: dict[str, Any], gpus: int) -> dict[str, Any] | None:
    """Return a line of logging.jsonl as {step, loss, grad_norm, memory_gib[, ...]}; None if it has no step.

    memory_gib: `torch.cuda.max_memory_reserved` in both systems
    Of megaswift alone:
    tokens: without padding, of all GPUs, since the start
    flops: of the step, by megaswift/tasks/observability/flops.py
    images, visual_tokens, vision_share: of the step; the share of the vision tower in its time
    timing_s/..., weight_sync/..., and others: of a step of GRPO
    """
    if "loss" not in line:
        return None
    if system in PEERS:
        step = int(line["iteration"].split("/")[0])
        return {
            "step": step,
            "loss": line["loss"],
            "grad_norm": line["grad_norm"],
            "memory_gib": line["memory(GiB)"],
            "own_clock": step * line["train_speed(s/it)"],  # seconds since the training began
        } | {name: line[name] for name in line if name == "completions/mean_length"}
    names = ("step", "loss", "grad_norm", "memory_gib", "tokens", "images", "visual_tokens", "vision_share")
    fields = {name: line[name] for name in line if name in names or name.startswith(ROLLOUT_METRICS)}
    return fields | {"flops": line["tflops_per_gpu"] * 1e12 * line["seconds_per_step"] * max(gpus, 1)}


def versions(system: str, site: Path | None) -> dict[str, str]:
    """Return the versions of the installed packages that the system uses."""
    path = [str(site), *sys.path] if site and system in PEERS else sys.path
    names = (*PACKAGES, "ms-swift", "mcore-bridge", "flash-attn") if system in PEERS else PACKAGES
    installed = {}
    for name in names:
        for distribution in importlib.metadata.distributions(name=name, path=path):
            installed.setdefault(name, distribution.version)
    return installed
