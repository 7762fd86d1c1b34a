"""Conversion of a row's checkpoint to megatron-core's format and back, beside a plain copy of its folder.

    python scripts/bench/conversion.py 235b-4 --processes 1 4 --disk /some/disk --work /some/disk --out DIR
    python scripts/bench/conversion.py tiny --processes 1 2 --out DIR                # tries the script, on any machine

One process runs `swift export`, several run `megatron export`, with experts (of a dense model: matrices) split over
them. What comes back is compared with the source, byte by byte. Before each reading the files are evicted from the page
cache (`--warm`: kept). The results are appended to DIR/results.json, for report.py.
"""

# pyright: reportMissingImports=false

import argparse
import json
import mmap
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from disk import copied, file_system, files_of, forget, keep_logs, size_of
from make import WRITERS, paths
from measure import run_command
from megaswift.cli.launch import visible_gpus
from records import Run, append, compile_packages, heading, now, prepare
from report import markdown
from rows import ROWS
from systems import environment

PHASE = re.compile(r"(Reading|Writing) \.\.\. ([\d.]+) s")


class Converter:
    """Commands that convert a model with some number of processes."""

    def __init__(self, name: str, work: Path, disk: Path, processes: int, timeout: float):
        self.gpus = min(visible_gpus(), processes)
        if visible_gpus() and self.gpus < processes:
            raise RuntimeError(f"needs {processes} GPUs")
        self._disk, self._processes, self._end = disk, processes, time.perf_counter() + timeout
        variables = environment("ours", work / "caches" / "ours", gpus=self.gpus, site=None)
        self._environment = variables | {"NPROC_PER_NODE": str(processes)}
        axis = "expert" if "num_experts" in ROWS[name].config else "tensor"
        layout = [f"--{axis}_model_parallel_size", str(processes)] if processes > 1 else []
        program = ["megatron" if processes > 1 else "swift", "export"]
        self._command = [sys.executable, "-m", "megaswift.cli.main", *program, *layout]

    def convert(self, source: list[str], destination: Path) -> Run:
        """Convert into a folder. Return seconds of the command, of its parts, and the command.

        Raises RuntimeError if it fails.
        """
        argv = [*self._command, *source, "--output_dir", str(destination)]
        called = shlex.join(["python", *argv[1:]])
        print(f"== {called}", flush=True)
        log = self._disk / f"{destination.name}.log"
        seconds = run_command(argv, self._environment, log, timeout=self._end - time.perf_counter())
        parts = {name.lower(): float(part) for name, part in PHASE.findall(log.read_text(errors="replace"))}
        return {"seconds": seconds, "command": called} | parts


class StoredTensor(NamedTuple):
    """Place of a tensor in a safetensors file."""

    dtype: str
    shape: list[int]
    file: Path
    begin: int  # byte of the file
    size: int  # bytes


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of a folder, by name."""
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                places[name] = StoredTensor(entry["dtype"], entry["shape"], file, 8 + length + begin, end - begin)
    return places


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of tensors that two checkpoints do not have alike, to the byte."""
    maps: dict[Path, mmap.mmap] = {}
    for file in [*one.glob("*.safetensors"), *other.glob("*.safetensors")]:
        with file.open("rb") as stream:
            maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    places = stored_tensors(one), stored_tensors(other)

    def is_equal(name: str) -> bool:
        pair = [tensors.get(name) for tensors in places]
        if pair[0] is None or pair[1] is None or pair[0][:2] != pair[1][:2]:
            return False
        # numpy compares without the interpreter's lock.
        arrays = [np.frombuffer(maps[tensor.file], np.uint8, tensor.size, tensor.begin) for tensor in pair if tensor]
        return np.array_equal(arrays[0], arrays[1])

    names = sorted(places[0].keys() | places[1].keys())
    with ThreadPoolExecutor(WRITERS) as pool:
        return [name for name, equal in zip(names, pool.map(is_equal, names), strict=True) if not equal]


def measured(name: str, arguments: argparse.Namespace, disk: Path, processes: int) -> Run:
    """Return the figures of both directions."""
    source, mcore, back = paths(name, arguments.work)[0], disk / "mcore", disk / "hf"
    converter = Converter(name, arguments.work, disk, processes, arguments.timeout)

    def cold(folder: Path) -> str:
        if not arguments.warm:
            forget(folder)
        return str(folder)

    cold(source)
    figures: Run = {
        "gpus": converter.gpus,
        "bytes": size_of(source.glob("*.safetensors")),
        "copy": copied(source, disk / "copy"),
    }
    figures["to_mcore"] = converter.convert(["--model", cold(source), "--to_mcore", "true"], mcore)
    figures["bytes_mcore"] = size_of(files_of(mcore))
    figures["to_hf"] = converter.convert(["--mcore_model", cold(mcore), "--to_hf", "true"], back)
    figures["different"] = differences(source, back)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS, metavar="ROW", help="a row of rows.py")
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, required=True, help="results and logs")
    parser.add_argument("--work", type=Path, help="the checkpoint, kept between calls; left out: DIR/work")
    parser.add_argument("--disk", type=Path, help="where is written; left out: DIR")
    parser.add_argument("--warm", action="store_true", help="read from the page cache")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a number of processes, at most")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.work = (arguments.work or arguments.out / "work").resolve()
    compile_packages(os.environ.get("PYTHONPATH"))
    prepare(arguments.row, arguments.work, arguments.timeout)
    call, runs = now(), []
    for processes in arguments.processes:
        disk = (arguments.disk or arguments.out).resolve() / f"{arguments.row}-conversion"
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir(parents=True)
        run: Run = {
            "kind": "conversion", "row": arguments.row, "system": f"{processes} process{'es' * (processes > 1)}",
            "flags": "", **heading(call), "file_system": file_system(disk), "is_warm": arguments.warm, "error": None,
        }  # fmt: skip
        try:
            run |= measured(arguments.row, arguments, disk, processes)
            if run["different"]:
                run["error"] = f"{len(run['different'])} tensors differ from the source, such as {run['different'][0]}"
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            run["error"] = str(error)
        finally:
            keep_logs(disk, arguments.out / "runs" / f"{disk.name}-{processes}")
        runs = append(arguments.out, run)
    print(markdown(runs))
    sys.exit(any(run["error"] for run in runs[-len(arguments.processes) :]))


if __name__ == "__main__":
    main()
