"""Launcher of a run's processes. Imports no torch.

For several processes, or one with restarts, torchrun replaces this process (exec), so that signals and exit code are
torchrun's. A single process runs the task itself. Under the user's torchrun, it starts no process.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..bridge.options import ParallelOptions
from ..tasks.run.resume import OUTPUT, STARTED
from ..tasks.system import console
from ..templates.plural import plural
from .flags import UsageError, show

HIDDEN = "MEGASWIFT_HIDDEN_WORDS"  # command-line words with tokens or keys, as JSON
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # variables that torchrun sets
MAX_PER_NODE = 1024
DRIVER_SHARE = 0.01  # share of a GPU's memory that its driver keeps: 0.4 to 0.7 % of an H200 and an H100


@dataclass(frozen=True)
class Processes:
    """Processes of a run, from NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and MAX_RESTARTS."""

    per_node: int
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None  # None: a free port
    max_restarts: int = 0  # restarts by torchrun after a failure

    @property
    def world(self) -> int:
        return self.per_node * self.nodes

    @classmethod
    def of_environment(cls, gpus: int, *, uses_ray: bool = False) -> "Processes":
        """Read the environment. NPROC_PER_NODE defaults to the number of visible GPUs, or 1. Raises UsageError.

        uses_ray: Ray chooses the first node, its address and its port
        """
        if under_torchrun():
            local = _number("LOCAL_WORLD_SIZE", _number("WORLD_SIZE", 1))
            return cls(local, max(1, _number("WORLD_SIZE", 1) // local))
        nodes = _number("NNODES", 1, minimum=1)
        node_rank = _number("NODE_RANK", 0)
        if uses_ray and "NODE_RANK" in os.environ:
            raise UsageError(f"NODE_RANK={node_rank}: --use_ray true starts all nodes by itself. Unset it.")
        if node_rank >= nodes:
            raise UsageError(f"NODE_RANK={node_rank}: not below NNODES={nodes}. Set 0 to {nodes - 1}.")
        if nodes > 1 and "MASTER_ADDR" not in os.environ and not uses_ray:
            raise UsageError(f"NNODES={nodes} needs MASTER_ADDR. Set it to the address of the node with NODE_RANK=0.")
        port = _number("MASTER_PORT", 29500 if nodes > 1 and not uses_ray else 0)
        if port > 65535:
            raise UsageError(f"MASTER_PORT={port}: not a port. Set 1 to 65535.")
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        per_node = _number("NPROC_PER_NODE", max(1, gpus), minimum=1, maximum=MAX_PER_NODE)
        restarts = _number("MAX_RESTARTS", 0)
        return cls(per_node, nodes, node_rank, address, port or None, restarts)


def _number(name: str, default: int, minimum: int = 0, maximum: int = 999_999_999) -> int:
    text = os.environ.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
        raise UsageError(f"{name}={text}: invalid. Set a whole number of at least {minimum}.")
    if int(text) > maximum:
        raise UsageError(f"{name}={text}: too large. Set at most {maximum}.")
    return int(text)


def under_torchrun() -> bool:
    return all(name in os.environ for name in TORCHRUN)


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs visible to a new process, without torch."""
    return len(visible_gpu_names())


def visible_gpu_names() -> list[str]:
    """Return the names of these GPUs as CUDA_VISIBLE_DEVICES has them: indices, UUIDs or MIG slices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return []
    installed = len([entry for entry in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", entry.name)])
    if not installed and shutil.which("nvidia-smi"):  # WSL has no such devices
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        installed = listing.stdout.count("GPU ") if listing.returncode == 0 else 0
    if not installed or visible is None:
        return [str(index) for index in range(installed)]
    names = [name.strip() for name in visible.split(",")]
    return [name for name in names if not name.isdigit() or int(name) < installed]  # not digits: MIG slices, UUIDs


def gpu_model(gpu: str) -> tuple[str, float] | None:
    """Return the model of a visible GPU and the bytes that a process sees, without CUDA; None if they are unknown."""
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        name, mebibytes = listing.stdout.splitlines()[0].rsplit(",", 1)
        return name.strip(), int(mebibytes) * 2**20 * (1 - DRIVER_SHARE)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def unseen_gpus(gpus: int) -> list[str]:
    """Return a note if CUDA_VISIBLE_DEVICES names GPUs on a machine without GPUs."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if gpus or not names or names.startswith("-"):
        return []
    return [f"CUDA_VISIBLE_DEVICES={names}: this machine has no such NVIDIA GPU. The run uses the CPU."]


def torchrun_command(processes: Processes, argv: list[str]) -> list[str]:
    """Return the torchrun command for `argv`: program, command and flags."""
    port = processes.master_port or _free_port()
    return [
        sys.executable,
        *("-P", "-m", "megaswift.cli.torchrun"),
        f"--nproc_per_node={processes.per_node}",
        f"--nnodes={processes.nodes}",
        f"--node_rank={processes.node_rank}",
        f"--master_addr={processes.master_addr}",
        f"--master_port={port}",
        *([f"--max_restarts={processes.max_restarts}"] if processes.max_restarts else []),
        *("-m", "megaswift.cli.main", *argv),
    ]


def check_port(processes: Processes) -> None:
    """Raise UsageError if this node is to listen on MASTER_PORT and cannot."""
    port = processes.master_port
    if not port or processes.node_rank:  # the first node listens
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite TIME_WAIT of an earlier run
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UsageError(
                f"MASTER_PORT={port}: cannot listen on this port ({error.strerror}). Set another port on all nodes, or "
                "unset MASTER_PORT if there is one node."
            ) from None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(options: ParallelOptions, processes: Processes, gpus: int) -> dict[str, str]:
    """Return environment variables to set for a run, except those that the user has set."""
    variables: dict[str, str] = {}
    if processes.per_node > 1:  # otherwise torchrun sets 1, with a warning of five lines
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variables["OMP_NUM_THREADS"] = "1" if gpus else str(max(1, cores // processes.per_node))
    if gpus and "PYTORCH_ALLOC_CONF" not in os.environ:
        # Sequence lengths vary by step: expandable segments let the next step reuse the memory.
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if gpus:
        # The host runs ahead of the backward pass by more than the 1,024 launches that fit by default, and so gains the
        # time that it lacks in the next forward pass.
        variables["CUDA_SCALE_LAUNCH_QUEUES"] = "4x"
    if gpus and max(options.tensor_model_parallel_size, options.context_parallel_size) > 1:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # kernels start in launch order, which overlap needs
    return {name: value for name, value in variables.items() if name not in os.environ}


def start(processes: Processes, argv: list[str], settings: Mapping[str, str], *, output: Path | None = None) -> None:
    """Start the processes of a run. Return if this process is the only one, else replace it by torchrun.

    output: parent of the run's folder, in which torchrun finds console.log
    Raises UsageError if MASTER_PORT cannot be used.
    """
    os.environ.update(settings)
    if under_torchrun():
        return
    check_port(processes)
    if processes.world == 1 and not processes.max_restarts:
        port = processes.master_port or 0  # 0: the OS chooses when it opens, so that simultaneous runs do not collide
        variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"})
        return
    command, variables = torchrun_launch(processes, argv, settings, output=output)
    print(f"Starting {plural(processes.per_node, 'process')}", file=sys.stderr, flush=True)
    os.environ |= variables | console.handover_env()  # includes the line above
    os.execv(sys.executable, command)


def torchrun_launch(
    processes: Processes, argv: list[str], settings: Mapping[str, str], *, output: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the torchrun command for `argv` without tokens and keys, and the variables to set for it."""
    words = [*_mark_secrets(argv)]
    command = torchrun_command(processes, [word for word, is_secret in words if not is_secret])
    console.record(shown_command(command, settings))
    variables = {
        STARTED: secrets.token_hex(8),
        HIDDEN: json.dumps([word for word, is_secret in words if is_secret]),
        "PYTHONSAFEPATH": "1",  # a types.py in the working folder must not shadow the module
        **console.handover_env(),
        **({OUTPUT: str(output)} if output else {}),
    }
    return command, variables


def open_gpu(gpus: int) -> None:
    """Create the CUDA context, which takes seconds, in a thread during the imports."""
    if gpus:
        threading.Thread(target=_create_context, args=(int(os.environ.get("LOCAL_RANK", "0")),), daemon=True).start()


def _create_context(number: int) -> None:
    with contextlib.suppress(OSError):  # no driver: the first use of the GPU reports it
        cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), number) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def end_with_torchrun() -> None:
    """End this process on Ctrl-C, even in a collective, and (on Linux) when torchrun is killed."""
    if not os.environ.get(STARTED):
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


def end_with_parent() -> None:
    """Have this process killed when its parent ends (on Linux), however that ends."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def shown_command(command: list[str], settings: Mapping[str, str]) -> str:
    """Return a command as typed in a shell, with tokens and keys replaced by "..."."""
    words = []
    for word, is_secret in _mark_secrets(command):
        name, equals, _ = word.partition("=")
        if is_secret and not word.startswith("--"):
            word = "..."
        elif is_secret and equals:
            word = f"{name}=..."
        words.append(word)
    return shlex.join([f"{name}={show(value)}" for name, value in settings.items()] + words)


def _mark_secrets(command: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the words of a command, each with whether it belongs to a flag for a token or a key."""
    is_value = False
    for word in command:
        name, equals, _ = word.partition("=")
        flag = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        is_flag = re.fullmatch(r"hub_token|\w*api_key", flag) is not None
        yield word, is_flag or (is_value and not flag)
        is_value = is_flag and not equals


def hidden_words() -> list[str]:
    """Return the words with tokens and keys, which `start` keeps out of commands that every user can list."""
    return json.loads(os.environ.pop(HIDDEN, "[]"))
