"""What converting a checkpoint takes: memory beyond the imports', and bytes read from files.

torchrun --nproc-per-node 2 -m tests.bridge.checkpoint.memory_worker FOLDER

Loads FOLDER/source in bf16, split over the processes (TP), and saves it to FOLDER/saved. Each rank writes
FOLDER/memory-{rank}.json: {"peak": bytes of resident memory at most beyond those before the model was built, "read":
bytes that loading read from files, "held": bytes of this rank's tensors}.
"""

import json
import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import BuildOptions


def resident() -> int:
    """Bytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def read_so_far() -> int:
    """Bytes that this process has taken from files, in the page cache or not."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def main(folder: Path) -> None:
    options = BuildOptions(tensor_model_parallel_size=int(os.environ["WORLD_SIZE"]))
    parallel.initialize(options, seed=1)
    parallel.barrier()
    config = read_config(folder / "source")
    before = resident()
    model = build_model(config, options, torch.bfloat16)
    start = read_so_far()
    load_weights(model.chunks, config, folder / "source")
    read = read_so_far() - start
    if dist.get_rank() == 0:
        (folder / "saved").mkdir()
    parallel.barrier()
    arguments = (model.chunks, config, folder / "source", folder / "saved")
    save_weights(*arguments, dtype=torch.bfloat16, max_shard_bytes=10**9)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    mine = sum(tensor.nbytes for tensor in collect_params(model.chunks).values())
    (folder / f"memory-{dist.get_rank()}.json").write_text(json.dumps({"peak": peak, "read": read, "held": mine}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
