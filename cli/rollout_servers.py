"""Rollout servers of --rollout_num_gpus: their GPUs, commands and environment. Imports no torch."""

import importlib.util
import json
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass, fields

from ..bridge.option_groups import flag_value, group_of
from ..bridge.options import ModelOptions
from ..tasks.options import GkdOptions, GrpoOptions
from ..tasks.options.rollout import EngineOptions, VllmOptions
from ..tasks.rollout.addresses import started_servers
from ..tasks.rollout.keys import VARIABLE
from ..templates.plural import plural
from .flags import UsageError, show
from .launch import HIDDEN, under_torchrun

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Placement:
    """GPUs of this machine: of the training processes, and of each rollout server. Empty lists: a CPU."""

    training: list[str]
    servers: list[list[str]]

    @classmethod
    def of(cls, options: object, gpus: list[str], *, uses_ray: bool = False) -> "Placement":
        """Give the last --rollout_num_gpus to servers. Raises UsageError.

        gpus: names of the visible GPUs, as CUDA_VISIBLE_DEVICES has them
        uses_ray: Ray chooses the servers' GPUs; on a run of several nodes, beside those of training
        """
        engine = group_of(options, EngineOptions)
        if engine is None or not engine.rollout_num_gpus or started_servers():
            return cls(gpus, [])  # servers run: this process sees only the GPUs of training
        count, size = engine.rollout_num_gpus, engine.vllm_tensor_parallel_size
        flag = f"--rollout_num_gpus {count}"
        if under_torchrun():
            raise UsageError(
                f"{flag}: torchrun has started this process, and the command starts servers before it starts torchrun. "
                "Run `megatron` without torchrun, or start `swift rollout` and set --vllm_server_base_url."
            )
        nodes = os.environ.get("NNODES") or "1"
        if uses_ray and nodes != "1":
            return cls(gpus, [[] for _ in range(0, count, size)])
        if nodes != "1":
            raise UsageError(
                f"{flag}: starts servers for a run on one node, and NNODES is {nodes}. Start `swift rollout` on the "
                "nodes that serve and set --vllm_server_base_url (docs/many-nodes.md), or set --use_ray true."
            )
        if gpus and count >= len(gpus):
            raise UsageError(
                f"{flag}: leaves none of the {plural(len(gpus), 'visible GPU')} for training. Set at most "
                f"{len(gpus) - 1}, or show more with CUDA_VISIBLE_DEVICES."
            )
        first = len(gpus) - count
        groups = [gpus[first + start : first + start + size] for start in range(0, count, size)]
        if not gpus or uses_ray:
            groups = [[] for _ in groups]
        return cls(gpus[:first] if gpus else [], groups)


@dataclass(frozen=True)
class RolloutServer:
    """A `swift rollout` to start."""

    number: int  # from 1
    size: int  # its GPUs, or processes on a CPU
    gpus: list[str]  # empty: on a CPU, or chosen by Ray
    flags: list[str]  # flags of `swift rollout`, but for host and port

    @property
    def name(self) -> str:
        gpus = f" ({'GPU' if len(self.gpus) == 1 else 'GPUs'} {', '.join(self.gpus)})" if self.gpus else ""
        return f"rollout server {self.number}{gpus}"

    def command(self, port: int, host: str = HOST) -> list[str]:
        """Return the command of the process."""
        program = [sys.executable, "-P", "-m", "megaswift.cli.main", "swift"]
        return [*program, *self.words(port, host)]

    def words(self, port: int, host: str = HOST) -> list[str]:
        """Return the words of `swift`."""
        return ["rollout", *self.flags, "--host", host, "--port", str(port)]

    def settings(self) -> dict[str, str]:
        """Return the variables that place the server."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    def variables(self, api_key: str, hub_token: str | None) -> dict[str, str]:
        """Return the variables to set for the process."""
        secrets = {HIDDEN: json.dumps(["--hub_token", hub_token])} if hub_token else {}
        return secrets | self.settings() | {VARIABLE: api_key, "PYTHONSAFEPATH": "1"}


def plan_servers(options: GrpoOptions | GkdOptions, placement: Placement) -> list[RolloutServer]:
    """Return the servers of a run, whose options have passed the checks."""
    flags = server_flags(options)
    size = options.engine.vllm_tensor_parallel_size
    return [RolloutServer(number, size, gpus, flags) for number, gpus in enumerate(placement.servers, 1)]


def server_flags(options: GrpoOptions | GkdOptions) -> list[str]:
    """Return the flags of `swift rollout` that serve this run: of the model, and of vLLM."""
    engine = options.engine
    values = {
        field.name: flag_value(options, field.name)
        for kind in (ModelOptions, VllmOptions)
        for field in fields(kind)
        if field.name != "hub_token" and flag_value(options, field.name) != _default(kind, field.name)
    }
    if engine.use_vllm is not None:
        values["infer_backend"] = "vllm" if engine.use_vllm else "transformers"
    if engine.vllm_gpu_memory_utilization is not None:
        values["vllm_gpu_memory_utilization"] = engine.vllm_gpu_memory_utilization
    if engine.vllm_enable_lora:
        values["vllm_max_lora_rank"] = max(engine.vllm_max_lora_rank or 0, options.lora.lora_rank)
    is_vllm = importlib.util.find_spec("vllm") is not None if engine.use_vllm is None else engine.use_vllm
    if is_vllm and flag_value(options, "router_replay_mode", None) == "R3":  # transformers always returns experts
        values["vllm_enable_return_routed_experts"] = True
    return [word for name, value in values.items() for word in (f"--{name}", show(value))]


def _default(kind: type, name: str) -> object:
    return getattr(kind(), name)


def free_ports(count: int, reserved: ExitStack, host: str = HOST) -> list[int]:
    """Return free ports of an interface, which nobody else is given before `reserved` is closed.

    Linux lets a server listen on a port that another socket has bound, if both allow that and only one listens.
    """
    sockets = [reserved.enter_context(socket.socket()) for _ in range(count)]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind((host, 0))
    ports = [each.getsockname()[1] for each in sockets]
    if sys.platform != "linux":
        reserved.close()
    return ports
