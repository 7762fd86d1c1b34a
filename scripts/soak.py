"""Soak test for leaks: 3,000 steps of sft with evaluations and saves, then 300 steps of GRPO with a server.

    python scripts/soak.py [--only sft grpo] [--folder megatron_output/soak]

Twenty times per run it reads each process's resident memory, file descriptors and threads, and the bytes in /dev/shm.
It fails if a run fails, or if the mean of the last five readings is more than 5 % above that of the five readings after
the first quarter (/dev/shm: above it at all).
"""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from learn import make_model
from learn_rl import BIN, server, write_sums

READINGS = 20
SFT = (
    "sft --model model --dataset answers.jsonl --val_dataset answers.jsonl#16 --train_iters 3000 --eval_steps 100 "
    "--save_steps 100 --save_total_limit 2 --micro_batch_size 8 --global_batch_size 16 --packing false --lr 1e-4"
)
GRPO = (
    "rlhf --rlhf_type grpo --model model --dataset questions.jsonl --external_plugins exact.py --reward_funcs exact "
    "--num_generations 8 --global_batch_size 64 --micro_batch_size 64 --max_completion_length 3 --train_iters 300 "
    "--save_steps 50 --save_total_limit 2 --lr 1e-5 --vllm_mode server --log_completions true"
)
STEPS = {"sft": 3000, "grpo": 300}
MARGIN = 0.05


def reading(pids: Iterable[int]) -> dict[str, float]:
    """Return the resident MiB, descriptors and threads of each process, and the MiB in /dev/shm."""
    values = {"/dev/shm MiB": sum(f.stat().st_size for f in Path("/dev/shm").rglob("*") if f.is_file()) / 2**20}
    for pid in pids:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        values[f"{pid} RSS MiB"] = int(status["VmRSS"].split()[0]) / 1024
        values[f"{pid} descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        values[f"{pid} threads"] = int(status["Threads"])
    return values


def steps_done(log: Path) -> int:
    return sum('"loss"' in line for line in log.read_text().splitlines()) if log.exists() else 0


def watch(folder: Path, line: str, kind: str, server_pids: tuple[int, ...] = ()) -> bool:
    """Run `megatron {line}` and print its readings. Return whether all stayed flat."""
    command = [BIN / "megatron", *line.split(), "--logging_steps", "1", "--output_dir", kind, "--add_version", "false"]
    log, readings = folder / kind / "logging.jsonl", []
    start_time = time.monotonic()
    with (folder / f"{kind}.log").open("w") as console_log:
        process = subprocess.Popen(command, cwd=folder, stdout=console_log, stderr=console_log)
        while process.poll() is None:
            if steps_done(log) >= (len(readings) + 1) * STEPS[kind] // (READINGS + 1):
                readings.append(reading((process.pid, *server_pids)))
            time.sleep(0.2)
    if process.returncode or len(readings) < READINGS:
        print(f"{kind}: exit code {process.returncode} after {len(readings)} readings: see {folder / kind}.log")
        return False
    print(f"{kind}: {STEPS[kind]:,} steps in {time.monotonic() - start_time:.0f} s")
    has_growth = False
    for name in readings[0]:
        values = [values_by_name[name] for values_by_name in readings]
        early, late = sum(values[5:10]) / 5, sum(values[-5:]) / 5
        grows = late > early * (1 if "shm" in name else 1 + MARGIN)
        has_growth |= grows
        label = name.replace(str(process.pid), "trainer").replace(str(server_pids[0]) if server_pids else "-", "server")
        print(f"  {label:24} first {values[0]:10,.1f}  early {early:10,.1f}  late {late:10,.1f}" + "  GROWS" * grows)
    return not has_growth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--folder", type=Path, default=Path("megatron_output/soak"))
    arguments = parser.parse_args()
    folder = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_model(folder / "model", ["say", "+", *map(str, range(19))])
    write_sums(folder)
    is_flat = True
    if "sft" in arguments.only:
        is_flat &= watch(folder, SFT, "sft")
    if "grpo" in arguments.only:
        with server(folder, "model", "transformers") as (port, pid):
            is_flat &= watch(folder, f"{GRPO} --vllm_server_port {port}", "grpo", (pid,))
    return 0 if is_flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
