"""Parent of a run's torchrun and of the rollout servers that it needs: they end together.

- The trainer's end is the run's: its exit code is the command's, and the servers are ended.
- A server that ends before is an error: its last lines are shown, and the trainer is ended.
- SIGINT, SIGTERM, SIGUSR1 and SIGHUP go on to torchrun, as if it had replaced this process.
- If this process is killed, a guard kills the sessions of the trainer and the servers, with what they have started.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..tasks.rollout.addresses import STARTED_SERVERS, StartedServers
from ..tasks.run.resume import OUTPUT, STARTED, launched_run_dir
from ..tasks.system import console
from ..templates.plural import plural
from .guard import Guard, kill_session
from .launch import Processes, check_port, end_with_parent, torchrun_launch
from .rollout_servers import HOST, RolloutServer, free_ports

POLL = 0.1  # seconds
SERVER_PATIENCE = 10.0  # seconds for a server to end after SIGTERM
NOTICE_PATIENCE = 5.0  # seconds for the trainer to notice by itself that a server is lost
TRAINER_PATIENCE = 20.0  # seconds for the trainer to end after SIGINT, as it frees its servers
TAIL = 15  # lines of a server's log in an error
EXCEPTION = re.compile(r"\b(?:\w+\.)*\w*(?:Error|Exception): .+")
AFTERMATH = "Engine core initialization failed"  # vLLM's error after that of its engine, which its log has before
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def run_with_servers(
    processes: Processes,
    argv: list[str],
    settings: Mapping[str, str],
    servers: Sequence[RolloutServer],
    hub_token: str | None,
    *,
    output: Path,
) -> int:
    """Start servers and training, wait for the end of both, and return the exit code.

    output: parent of the run's folder, which gets the servers' logs
    Raises UsageError if MASTER_PORT cannot be used.
    """
    check_port(processes)
    key = secrets.token_urlsafe(24)  # a new one: nobody else is to use this run's servers
    with contextlib.ExitStack() as reserved, Supervisor(output) as supervisor:
        ports = free_ports(len(servers), reserved)
        addresses = StartedServers([f"http://{HOST}:{port}" for port in ports], key)
        print(
            f"Starting {plural(processes.per_node, 'process')} and {plural(len(servers), 'rollout server')}",
            file=sys.stderr,
            flush=True,
        )
        for server, port in zip(servers, ports, strict=True):
            supervisor.start_server(server, server.command(port), os.environ | server.variables(key, hub_token))
        command, variables = torchrun_launch(processes, argv, settings, output=output)
        os.environ |= {name: variables[name] for name in (STARTED, OUTPUT)}  # `launched_run_dir` reads them
        trainer_environment = os.environ | settings | variables | {STARTED_SERVERS: json.dumps(addresses)}
        return supervisor.supervise(command, trainer_environment)


@dataclass
class StartedServer:
    """A rollout server's process, and the file with its output."""

    server: RolloutServer
    process: subprocess.Popen
    log: Path

    def failure(self) -> str:
        """Return the error for a server that has ended by itself."""
        return server_failure(self.server.name, self.process.returncode, self.log)


def _prepare_server() -> None:
    """Prepare the process of a server before its program starts."""
    end_with_parent()
    for number in (signal.SIGUSR1, signal.SIGHUP):  # schedulers send them to all processes, and mean the trainer
        signal.signal(number, signal.SIG_IGN)


def server_failure(name: str, code: int, log: Path) -> str:
    """Return the error for a server that has ended by itself, with the end of its log."""
    end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    with contextlib.suppress(OSError):
        if lines := console.visible_text(log.read_text(errors="replace")).strip().splitlines():
            cause = _cause(lines)
            because = f" after {cause}" if cause else ""
            return "\n  ".join([f"error: {name} {end}{because}. The end of {log}:", *lines[-TAIL:]])
    return f"error: {name} {end}, without a word"


def _cause(lines: list[str]) -> str | None:
    """Return the last exception of a log that its end does not show; None if it shows it."""
    exceptions = ((number, EXCEPTION.search(line)) for number, line in enumerate(lines))
    causes = [(number, match[0]) for number, match in exceptions if match and AFTERMATH not in match[0]]
    if not causes or causes[-1][0] >= len(lines) - TAIL:
        return None
    return causes[-1][1].rstrip(".")


def report_error(text: str) -> None:
    """Print an error, and append it to the run's console.log."""
    with contextlib.suppress(OSError):
        print(console.color_label(text, sys.stderr), file=sys.stderr, flush=True)
    if folder := launched_run_dir():
        console.append(console.log_file(folder), text)


class Supervisor:
    """Processes of a run with servers, each in a session of its own, which end with the context."""

    def __init__(self, output: Path):
        self._output, self._time = output, time.strftime("%Y%m%d-%H%M%S")
        self._servers: list[StartedServer] = []
        self._trainer: subprocess.Popen | None = None
        self._signals: list[int] = []  # received so far
        self._are_logs_moved = False

    def __enter__(self) -> "Supervisor":
        self._guard = Guard()
        self._former = {number: signal.getsignal(number) for number in FORWARDED}
        for number, handler in self._former.items():
            if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup
                signal.signal(number, self._forward)
        return self

    def __exit__(self, *error: object) -> None:
        processes = [server.process for server in self._servers]
        if self._trainer is not None:
            self._end([self._trainer], signal.SIGKILL, 0)
        self._end(processes, signal.SIGTERM, SERVER_PATIENCE)
        self._move_logs()
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._guard.close()

    def start_server(self, server: RolloutServer, command: list[str], environment: Mapping[str, str]) -> None:
        """Start a server, whose output goes to a file in the output folder."""
        self._output.mkdir(parents=True, exist_ok=True)
        log = self._output / f"rollout-server-{server.number}-{self._time}.log"
        with log.open("ab") as stream:
            streams = {"stdout": stream, "stderr": stream, "stdin": subprocess.DEVNULL}
            process = self._start(command, environment, _prepare_server, **streams)
        self._servers.append(StartedServer(server, process, log))

    def supervise(self, command: list[str], environment: Mapping[str, str]) -> int:
        """Start the trainer, wait until it or a server ends, and return the run's exit code."""
        trainer = self._trainer = self._start(command, environment, end_with_parent)
        for number in self._signals:  # received during the start
            trainer.send_signal(number)
        while (code := trainer.poll()) is None:
            if self._lost_server() is not None and not self._signals:
                break
            self._move_logs()
            time.sleep(POLL)
        if (lost := self._lost_server()) is not None and code != 0 and not self._signals:
            report_error(lost.failure())
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainer.wait(NOTICE_PATIENCE)
            self._end([trainer], signal.SIGINT, TRAINER_PATIENCE)
            return 1
        return 128 - code if code and code < 0 else code or 0

    def _start(
        self, command: list[str], environment: Mapping[str, str], prepare: Callable[[], None], **streams: object
    ) -> subprocess.Popen:
        # A session of its own: Ctrl-C in the terminal comes once, from this process.
        process = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            preexec_fn=prepare,
            **streams,  # pyright: ignore[reportArgumentType, reportCallIssue]
        )
        self._guard.add(process.pid)
        return process

    def _end(self, processes: Sequence[subprocess.Popen], number: int, patience: float) -> None:
        """Signal processes that still run, wait for their end, and kill what is left of their sessions."""
        for process in processes:
            process.send_signal(number)  # nothing where it has ended
        deadline = time.monotonic() + patience
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            kill_session(process.pid)
            process.wait()
            self._guard.remove(process.pid)

    def _lost_server(self) -> StartedServer | None:
        return next((server for server in self._servers if server.process.poll() is not None), None)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._trainer is not None:
            self._trainer.send_signal(number)

    def _move_logs(self) -> None:
        """Move the servers' logs into the run's folder, once it exists. The servers go on writing to them."""
        if self._are_logs_moved or (folder := launched_run_dir()) is None:
            return
        self._are_logs_moved = True
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.log = server.log.rename(folder / server.log.name)
