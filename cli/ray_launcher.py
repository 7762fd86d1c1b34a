"""Start of a run on a Ray cluster (--use_ray true): Ray places the processes, and does nothing else.

Each node of the run gets an actor that starts torchrun as a user would, and each rollout server one that starts `swift
rollout`. Their output comes to this terminal. One that fails ends all; signals go to all training nodes.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..tasks.options import SftOptions
from ..tasks.rollout.addresses import STARTED_SERVERS, StartedServers
from ..tasks.run.resume import OUTPUT, STARTED
from ..templates.plural import plural
from .flags import UsageError
from .guard import Guard, kill_session
from .launch import Processes, torchrun_launch, under_torchrun
from .rollout_servers import HOST, RolloutServer, free_ports
from .supervisor import FORWARDED, SERVER_PATIENCE, TRAINER_PATIENCE, report_error, server_failure

ROOM_PATIENCE = 60.0  # seconds to wait for free CPUs and GPUs of the cluster
READ_SECONDS = 0.5  # longest wait of an actor for output
EXIT_STOPPED = 75  # as in tasks/distributed/signals.py, which imports torch: all nodes are about to end
STOP_PATIENCE = 600.0  # seconds for the other nodes to save
# Variables of the driver's machine. The others go to all processes, as if set on each node.
LOCAL_VARIABLES = (
    "PATH", "HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "USER", "LOGNAME", "_", "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
)  # fmt: skip


def check_ray() -> None:
    """Raise UsageError if Ray cannot start the run."""
    if under_torchrun():
        raise UsageError(
            "--use_ray true: torchrun has started this process, and Ray would start torchrun. Run `megatron` without "
            "torchrun, or remove the flag."
        )
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--use_ray true: Ray is not installed. Run pip install 'megaswift[ray]' on all nodes.")


def run_on_ray(
    processes: Processes,
    argv: list[str],
    settings: Mapping[str, str],
    servers: Sequence[RolloutServer],
    options: SftOptions,
    *,
    gpus: int,
    output: Path,
) -> int:
    """Start a run on the nodes of a Ray cluster, wait for its end, and return its exit code.

    gpus: number of GPUs of a node; 0: the run uses CPUs
    output: parent of the run's folder, which gets the servers' logs
    Raises UsageError if the cluster has no room for the run.
    """
    ray = importlib.import_module("ray")
    # The address is RAY_ADDRESS, else that of a cluster on this machine, else a new one is started.
    ray.init(log_to_driver=False, logging_level="ERROR")
    try:
        with RayRun(ray, bool(gpus), output) as run:
            run.place(processes, servers)
            urls_and_key = run.start_servers(servers, options.hub_token)
            run.start_nodes(processes, argv, settings, urls_and_key)
            return run.wait()
    finally:
        ray.shutdown()


class HostedProcess:
    """Ray actor: a process on its node, with what that starts."""

    def __init__(self) -> None:
        self._reserved = contextlib.ExitStack()
        self._process: subprocess.Popen | None = None

    def address(self) -> str:
        """Return the address of the node."""
        return importlib.import_module("ray").util.get_node_ip_address()

    def free_port(self, host: str) -> int:
        """Return a free port of an interface, which nobody else is given until the process ends."""
        return free_ports(1, self._reserved, host)[0]

    def store_port(self) -> int:
        """Return a free port for the store of torchrun, which takes no port that another socket has bound."""
        with contextlib.ExitStack() as reserved:
            return free_ports(1, reserved, "")[0]

    def start(self, command: list[str], variables: dict[str, str], folder: str) -> None:
        """Start a command in a folder, with the node's variables and these. Raises OSError."""
        # Ray sets it to the actor's CPUs; torchrun and PyTorch have their own defaults.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
        self._guard = Guard()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # Ray blocks SIGINT, which a new process would inherit
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._guard.add(self._process.pid)
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def read(self) -> tuple[str, int | None]:
        """Return new output, waiting for it shortly, and the exit code if the process has ended."""
        assert self._process
        assert self._process.stdout
        code = self._process.poll()
        parts = []
        if self._selector.select(0 if code is not None else READ_SECONDS):
            while part := self._read_part():
                parts.append(part)
            if part == b"":  # closed
                code = self._process.wait()
        return b"".join(parts).decode(errors="replace"), code

    def _read_part(self) -> bytes | None:
        """Return output; None if there is none now, b"" if there will be none."""
        assert self._process
        assert self._process.stdout
        try:
            return os.read(self._process.stdout.fileno(), 65536)
        except BlockingIOError:
            return None

    def send(self, number: int) -> None:
        """Signal the process. Do nothing if it has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, number: int, patience: float) -> str:
        """Signal the process, wait for its end, kill what is left of its session, and return its last output."""
        if self._process is None:
            return ""
        self._process.send_signal(number)
        deadline, texts = time.monotonic() + patience, []
        while self._process.poll() is None and time.monotonic() < deadline:
            texts.append(self.read()[0])  # a full pipe would keep it from ending
        kill_session(self._process.pid)
        self._process.wait()
        texts.append(self.read()[0])
        self._guard.close()
        self._reserved.close()
        return "".join(texts)


@dataclass
class Hosted:
    """An actor and its process, as the driver sees them."""

    name: str
    actor: Any
    prefix: str = ""  # begins its lines in the terminal
    log: Path | None = None  # file for its output, instead of the terminal
    code: int | None = None
    unfinished_line: str = ""

    def take(self, text: str) -> None:
        """Print output, or append it to the log."""
        if self.log is not None:
            with self.log.open("a") as stream:
                stream.write(text)
            return
        *lines, self.unfinished_line = (self.unfinished_line + text).split("\n")
        for line in lines:
            print(f"{self.prefix}{line}")
        sys.stdout.flush()


class RayRun:
    """Actors of a run, which end with the context."""

    def __init__(self, ray: Any, uses_gpus: bool, output: Path):
        self._ray, self._uses_gpus, self._output = ray, uses_gpus, output
        self._nodes: list[Hosted] = []
        self._servers: list[Hosted] = []
        self._addresses: list[str] = []  # nodes first, then servers
        self._group: Any = None
        self._received: list[int] = []  # signals, not sent on yet
        self._is_stopping = False

    def __enter__(self) -> "RayRun":
        self._former = {number: signal.signal(number, self._receive) for number in FORWARDED}
        return self

    def __exit__(self, *error: object) -> None:
        self._end(self._nodes, signal.SIGKILL, 0.0)
        self._end(self._servers, signal.SIGTERM, SERVER_PATIENCE)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def place(self, processes: Processes, servers: Sequence[RolloutServer]) -> None:
        """Reserve CPUs and GPUs, and start an actor for each node and server. Raises UsageError without room."""
        sizes = [processes.per_node] * processes.nodes + [server.size for server in servers]
        bundles = [{"CPU": size, **({"GPU": size} if self._uses_gpus else {})} for size in sizes]
        self._group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not self._ray.wait([self._group.ready()], timeout=ROOM_PATIENCE)[0]:
            kind = "GPUs" if self._uses_gpus else "CPUs"
            total = self._ray.cluster_resources().get(kind[:-1], 0)
            raise UsageError(
                f"--use_ray true: the cluster had no room within {ROOM_PATIENCE:.0f} s for "
                f"{' + '.join(map(str, sizes))} {kind}, each number on one node. It has {total:g} in all, also those "
                "in use. Set NPROC_PER_NODE and NNODES, or add nodes."
            )
        actors = [self._actor(index, size) for index, size in enumerate(sizes)]
        self._nodes = [
            Hosted(f"node {rank}", actors[rank], f"[node {rank}] " * (processes.nodes > 1))
            for rank in range(processes.nodes)
        ]
        start = time.strftime("%Y%m%d-%H%M%S")
        self._output.mkdir(parents=True, exist_ok=True)
        self._servers = [
            Hosted(server.name, actor, log=self._output / f"rollout-server-{server.number}-{start}.log")
            for server, actor in zip(servers, actors[processes.nodes :], strict=True)
        ]
        self._addresses = self._ray.get([actor.address.remote() for actor in actors])

    def start_servers(self, servers: Sequence[RolloutServer], hub_token: str | None) -> StartedServers:
        """Start the servers, and return their addresses and key."""
        key, urls = secrets.token_urlsafe(24), []
        is_one_host = len({*self._addresses}) == 1
        hosts = self._addresses[len(self._nodes) :]
        for hosted, server, address in zip(self._servers, servers, hosts, strict=True):
            host = HOST if is_one_host else address
            port = self._ray.get(hosted.actor.free_port.remote(host))
            urls.append(f"http://{host}:{port}")
            self._start(hosted, server.command(port, host), server.variables(key, hub_token))
        return StartedServers(urls, key)

    def start_nodes(
        self, processes: Processes, argv: list[str], settings: Mapping[str, str], servers: StartedServers
    ) -> None:
        """Start torchrun on each node."""
        if processes.nodes > 1:
            port = processes.master_port or self._ray.get(self._nodes[0].actor.store_port.remote())
            processes = replace(processes, master_addr=self._addresses[0], master_port=port)
        count = f", and {plural(len(servers.urls), 'rollout server')}" if servers.urls else ""
        nodes = plural(processes.nodes, "node")
        print(f"Starting {plural(processes.world, 'process')} on {nodes} of Ray{count}", file=sys.stderr, flush=True)
        command, variables = torchrun_launch(processes, argv, settings, output=self._output)
        os.environ |= {name: variables[name] for name in (STARTED, OUTPUT)}  # `report_error` reads them
        variables = {**settings, **variables}
        if servers.urls:
            variables[STARTED_SERVERS] = json.dumps(servers)
        for rank, node in enumerate(self._nodes):
            words = [f"--node_rank={rank}" if word.startswith("--node_rank=") else word for word in command]
            self._start(node, words, variables)

    def wait(self) -> int:
        """Show output and send on signals until all nodes or a server have ended. Return the run's exit code."""
        reads = {hosted.actor.read.remote(): hosted for hosted in self._nodes + self._servers}
        deadline = float("inf")
        while any(node.code is None for node in self._nodes) and time.monotonic() < deadline:
            self._send_signals()
            for read in self._ray.wait([*reads], timeout=READ_SECONDS)[0]:
                hosted = reads.pop(read)
                self._take(hosted, read)
                if hosted.code is None:
                    reads[hosted.actor.read.remote()] = hosted
            if any(node.code == EXIT_STOPPED for node in self._nodes):
                deadline = min(deadline, time.monotonic() + STOP_PATIENCE)
            elif failed := next((node for node in self._nodes if node.code), None):
                return self._fail(failed)
            elif not self._is_stopping and (lost := next((s for s in self._servers if s.code is not None), None)):
                assert lost.log
                assert lost.code is not None
                report_error(server_failure(lost.name, lost.code, lost.log))
                self._end([node for node in self._nodes if node.code is None], signal.SIGINT, TRAINER_PATIENCE)
                return 1
        return max(node.code or 0 for node in self._nodes)

    def _fail(self, failed: Hosted) -> int:
        """End the other nodes of a failed one, and return the run's exit code."""
        assert failed.code
        others = [node for node in self._nodes if node.code is None]
        if others:
            report_error(f"error: {failed.name} ended with exit code {failed.code}, and the others are ended")
            self._end(others, signal.SIGINT, TRAINER_PATIENCE)
        return failed.code if failed.code > 0 else 128 - failed.code

    def _actor(self, bundle: int, size: int) -> Any:
        """Return an actor in a bundle of the placement group."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        resources = {"num_cpus": size, **({"num_gpus": size} if self._uses_gpus else {})}
        return self._ray.remote(HostedProcess).options(scheduling_strategy=strategy, **resources).remote()

    def _start(self, hosted: Hosted, command: list[str], variables: Mapping[str, str]) -> None:
        """Start a command of this machine on a node, with that node's Python. Raises UsageError."""
        names = [name for name in os.environ if name not in LOCAL_VARIABLES and not name.startswith("RAY_")]
        shared = {name: os.environ[name] for name in names} | ({} if self._uses_gpus else {"CUDA_VISIBLE_DEVICES": ""})
        try:
            self._ray.get(hosted.actor.start.remote(command[1:], {**shared, **variables}, os.getcwd()))
        except OSError as error:
            raise UsageError(
                f"--use_ray true: {hosted.name} cannot start in {os.getcwd()} ({error.strerror}). Start the run in a "
                "folder that all nodes have."
            ) from None

    def _take(self, hosted: Hosted, read: Any) -> None:
        """Take the output that an actor has read, and its exit code."""
        try:
            text, hosted.code = self._ray.get(read)
        except self._ray.exceptions.RayError as error:
            hosted.code = 1
            report_error(f"error: {hosted.name}: Ray has lost it ({type(error).__name__})")
            return
        hosted.take(text)
        if hosted.code is not None and hosted.unfinished_line:
            hosted.take("\n")

    def _end(self, hosted: Sequence[Hosted], number: int, patience: float) -> None:
        """Signal processes, and wait for their end."""
        ends = {each.actor.end.remote(int(number), patience): each for each in hosted}
        if not ends:
            return
        for end in self._ray.wait([*ends], num_returns=len(ends), timeout=patience + SERVER_PATIENCE)[0]:
            with contextlib.suppress(self._ray.exceptions.RayError):  # its node is lost
                ends[end].take(self._ray.get(end))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def _send_signals(self) -> None:
        while self._received:
            number, self._is_stopping = self._received.pop(0), True
            for node in self._nodes:
                node.actor.send.remote(number)
