"""The systems that are measured: the command of each for a row, and what its log says of a step.

Both get the same checkpoint, text, pack length, batches, optimizer and learning rate, log every step, and run with the
same environment. megaswift gets nothing further but its layout: its defaults are what is measured.

ms-swift (https://github.com/modelscope/ms-swift, Apache-2.0) gets the fastest settings that we found: cuDNN attention,
no recomputation, the fused cross entropy, permute fusion (experts) and overlaps (several GPUs). Its `chatml` template
gives the same tokens as the tokenizer's own, but also trains on the newline behind each document. It packs the same
documents by another algorithm and shuffles the packs with another generator, so that a step sees other documents; how
full packs are and how long documents are is the same, and so is the work. (A pack that is not full it does not pad.)
"""

import importlib.metadata
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

from rows import VARIANTS, Row

LEARNING = "--lr 1e-5 --lr_decay_style constant"
PEER = (
    "--template chatml --use_hf true --finetune true --attention_backend fused --recompute_granularity none "
    "--cross_entropy_loss_fusion true --gradient_accumulation_fusion false --load_from_cache_file false "
    "--dataset_num_proc 8 --dataloader_num_workers 4 --no_save_optim true --no_save_rng true"
)
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "transformers")


def peer_script(site: Path | None) -> Path:
    """ms-swift's training script: in `site`, else of the installed package. Raises FileNotFoundError."""
    found = site or next(map(Path, (importlib.util.find_spec("swift") or _missing()).submodule_search_locations or []))
    script = found / "swift" if site else found
    script = script / "cli" / "_megatron" / "sft.py"
    return script if script.exists() else _missing()


def _missing() -> Any:
    raise FileNotFoundError("ms-swift is not installed: pip install ms-swift, or give --peer-site")


def command(
    system: str, row: Row, model: Path, data: Path, out: Path, *, gpus: int, steps: int, site: Path | None, flags: str
) -> list[str]:
    """argv of a run that writes `out`/logging.jsonl. `flags`: further ones of ours."""
    common = f"--model {model} --dataset {data} --packing true --max_length {row.length} --output_dir {out} "
    common += f"--micro_batch_size {row.micro_batch} --global_batch_size {row.batch_on(gpus)} --train_iters {steps} "
    common += f"--add_version false --logging_steps 1 --save_steps 100000 {LEARNING} {row.layout}"
    if system != "peer":
        return [sys.executable, "-m", "megaswift.cli.main", "megatron", "sft", *_words(common, VARIANTS[system], flags)]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={gpus or 1}", f"--master_port={port}"]
    kind = f"--model_type {row.config['model_type']}"
    return [*launch, str(peer_script(site)), *_words(common, kind, PEER, row.peer)]


def _words(*texts: str) -> list[str]:
    return " ".join(texts).split()


def environment(system: str, caches: Path, *, gpus: int, site: Path | None) -> dict[str, str]:
    """That of a run: the first GPUs, no network, and caches of its own in the work folder."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = shown.split(",") if shown else [str(number) for number in range(gpus)]
    wanted = {
        "CUDA_VISIBLE_DEVICES": ",".join(devices[:gpus]),
        "NPROC_PER_NODE": str(gpus or 1),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HOME": str(caches / "hf"),
        "MODELSCOPE_CACHE": str(caches / "modelscope"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    if system == "peer" and site:
        wanted["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    # Without compiled files every process would compile PyTorch's sources anew.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | wanted


def step_of(system: str, line: dict[str, Any], gpus: int) -> dict[str, Any] | None:
    """Return a line of logging.jsonl as {step, loss, grad_norm, memory_gib[, tokens, flops]}; None if it has no step.

    Memory is `torch.cuda.max_memory_reserved` in both. `tokens`: real ones, of all GPUs, since the start. `flops`: of
    the step, by megaswift/tasks/observability/flops.py.
    """
    if "loss" not in line:
        return None
    if system == "peer":
        step = int(line["iteration"].split("/")[0])
        return {
            "step": step,
            "loss": line["loss"],
            "grad_norm": line["grad_norm"],
            "memory_gib": line["memory(GiB)"],
            "own_clock": step * line["train_speed(s/it)"],  # seconds since the training began
        }
    kept = {name: line[name] for name in ("step", "loss", "grad_norm", "memory_gib", "tokens") if name in line}
    return kept | {"flops": line["tflops_per_gpu"] * 1e12 * line["seconds_per_step"] * max(gpus, 1)}


def versions(system: str, site: Path | None) -> dict[str, str]:
    """Of what the system computes with, as far as it is installed."""
    path = [str(site), *sys.path] if site and system == "peer" else sys.path
    names = (*PACKAGES, "ms-swift", "mcore-bridge") if system == "peer" else PACKAGES
    found = {}
    for name in names:
        for distribution in importlib.metadata.distributions(name=name, path=path):
            found.setdefault(name, distribution.version)
    return found
