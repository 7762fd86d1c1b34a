"""torchrun with changes for training runs:

- SIGTERM, SIGUSR1 and SIGHUP are forwarded, and the processes may take as long to save as the sender allows. A second
  SIGTERM ends them at once. (torch's agent gives them 30 s, and does not handle SIGUSR1.)
- If one process fails, SIGUSR2 ends the others, so that they release their servers. On SIGTERM they would try to save
  without the failed process, and SIGINT means Ctrl-C. If a process detects a hang, SIGKILL ends the hanging ones.
- The store of a single-node run is a file that only its user can open. torch's store listens on every address of the
  machine, without a password.
- A failed process prints its own error, and its exit code becomes the run's. A run that saved and stopped, or has
  invalid options, is not restarted.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from torch.distributed import HashStore, PrefixStore, run  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, static_tcp_rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher

from ..bridge.options import STORE
from ..tasks.distributed.signals import EXIT_STOPPED, REPEAT_SECONDS, is_ignored
from ..tasks.distributed.watchdog import EXIT_HANGS
from ..tasks.run.interrupt import OTHER_FAILED
from ..tasks.run.resume import launched_run_dir
from ..tasks.system import console

EXIT_USAGE = 2
HANG_GRACE = 2.0  # seconds for the other processes to end after one reports a hang


class Agent(LocalElasticAgent):
    """Agent that starts and monitors the processes of this node."""

    signalled: signal.Signals | None = None  # last forwarded signal
    terminated: float | None = None  # time of the first SIGTERM

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if not is_ignored(number):
                signal.signal(number, self._forward)
        ids = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if Agent.signalled:  # arrived during the start
            self._send(Agent.signalled)
        return ids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        _report(f"note: restarting all processes (restarts left: {self._remaining_restarts})")
        super()._restart_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {process.poll() for process in self._processes()}
        if Agent.signalled or codes & {EXIT_STOPPED, EXIT_USAGE}:
            self._remaining_restarts = 0
        if codes == {EXIT_STOPPED, None}:  # all have saved, and the remaining ones are about to end
            return RunResult(state=WorkerState.HEALTHY)
        if EXIT_HANGS in codes:
            self._end_hanging()
        return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _end_hanging(self) -> None:
        deadline = time.monotonic() + HANG_GRACE
        while None in [process.poll() for process in self._processes()] and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in self._processes():
            if process.poll() is None:
                process.kill()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        now, Agent.signalled = time.monotonic(), signal.Signals(number)
        if number == signal.SIGTERM:
            if Agent.terminated is not None and now - Agent.terminated > REPEAT_SECONDS:
                self._shutdown(signal.SIGKILL)
                raise processes.SignalException("second SIGTERM", signal.SIGTERM)
            Agent.terminated = Agent.terminated or now
        self._send(Agent.signalled)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes():  # not to their data loader workers, which are needed until the save
            process.send_signal(number)

    def _processes(self) -> list[subprocess.Popen]:
        context = self._pcontext
        return [h.proc for h in context.subprocess_handlers.values()] if context else []  # pyright: ignore[reportAttributeAccessIssue]


def _exit_code(error: ChildFailedError) -> int:
    """Return the exit code of the first failed process, and print the signal that ended it, if any."""
    for code in (EXIT_STOPPED, EXIT_HANGS):  # codes of the run as a whole
        if any(failure.exitcode == code for failure in error.failures.values()):
            return code
    rank, failure = error.get_first_failure()
    if failure.exitcode > 0:
        return failure.exitcode
    ended = signal.Signals(-failure.exitcode)
    if ended != Agent.signalled:
        memory = ". The machine may be out of memory." if ended == signal.SIGKILL else ""
        _report(f"error: rank {rank} (process {failure.pid}) was ended by {ended.name}{memory}")
    return 128 + ended


class LocalRendezvous(StaticTCPRendezvous):
    """Rendezvous of a run on one node, with an in-memory store instead of a port."""

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = self._store or HashStore()
        store = PrefixStore(self.run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))


def rendezvous(address: str, port: int, rank: int, nodes: int, run_id: str, timeout: int) -> StaticTCPRendezvous:
    """Return torchrun's static rendezvous; without a port for a single node."""
    kind = LocalRendezvous if nodes == 1 else StaticTCPRendezvous
    return kind(address, port, rank, nodes, run_id, timeout)


def _report(text: str) -> None:
    with contextlib.suppress(OSError):
        print(console.color_label(text, sys.stderr), file=sys.stderr, flush=True)
    if folder := launched_run_dir():
        console.append(console.log_file(folder), text)


if __name__ == "__main__":
    console.prepare_streams()
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    static_tcp_rendezvous.StaticTCPRendezvous = rendezvous
    launcher.LocalElasticAgent = Agent  # pyright: ignore[reportPrivateImportUsage]
    processes._get_default_signal = lambda: OTHER_FAILED  # sent to the other processes after a failure
    folder = tempfile.TemporaryDirectory(prefix="megaswift-")  # its mode is 0700
    if "--nnodes=1" in sys.argv:
        os.environ[STORE] = str(Path(folder.name) / "store")
    try:
        run.main(["--signals_to_handle=SIGINT,SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        sys.exit(_exit_code(error))
    except processes.SignalException as error:
        sys.exit(128 + signal.Signals(error.sigval).value)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all processes have ended
