"""torchrun, with what a run needs of it beyond torch's own:

- SIGTERM, SIGUSR1 and SIGHUP are passed on, and the processes get as long to save as whoever sent it leaves them; a
  SIGTERM that comes again ends them at once. (torch's own gives them 30 s, and does not know SIGUSR1.)
- Where one process fails, the others are ended by SIGUSR2, upon which they free their servers: SIGTERM would tell them
  to save, and they cannot without it, SIGINT that a user has pressed Ctrl-C. Where one has found that the run hangs,
  those that hang are ended by SIGKILL, which alone they obey.
- The store of a run on one node is a file that its user alone can open: torch's own listens on every address of the
  machine, and asks nobody for a password.
- No account of a failed process, which has told why itself; the exit code is that process's. A run that has saved and
  stopped, or whose command line is wrong, is not restarted.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import HashStore, PrefixStore, run  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, static_tcp_rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher

from ..bridge.options import STORE
from ..tasks.distributed.signals import AGAIN, EXIT_STOPPED, is_ignored
from ..tasks.distributed.watchdog import EXIT_HANGS
from ..tasks.run.interrupt import OTHER_FAILED
from ..tasks.run.resume import launched_run_dir
from ..tasks.system import console

EXIT_USAGE = 2
HANGING = 2.0  # seconds for the others to end, once one process has said that the run hangs


class Agent(LocalElasticAgent):
    """Starts the processes of this node and looks after them."""

    signalled: signal.Signals | None = None  # the last one that was passed on
    terminated: float | None = None  # when SIGTERM first came

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if not is_ignored(number):
                signal.signal(number, self._pass_on)
        ids = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if Agent.signalled:  # while they were started
            self._send(Agent.signalled)
        return ids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        _say(f"note: all processes are started again (restarts left: {self._remaining_restarts})")
        super()._restart_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {process.poll() for process in self._processes()}
        if Agent.signalled or codes & {EXIT_STOPPED, EXIT_USAGE}:
            self._remaining_restarts = 0
        if codes == {EXIT_STOPPED, None}:  # all have saved: the others are about to end, too
            return RunResult(state=WorkerState.HEALTHY)
        if EXIT_HANGS in codes:
            self._end_hanging()
        return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _end_hanging(self) -> None:
        deadline = time.monotonic() + HANGING
        while None in [process.poll() for process in self._processes()] and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in self._processes():
            if process.poll() is None:
                process.kill()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now, Agent.signalled = time.monotonic(), signal.Signals(number)
        if number == signal.SIGTERM:
            if Agent.terminated is not None and now - Agent.terminated > AGAIN:
                self._shutdown(signal.SIGKILL)
                raise processes.SignalException("SIGTERM came again", signal.SIGTERM)
            Agent.terminated = Agent.terminated or now
        self._send(Agent.signalled)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes():  # not its children, which read data that are still needed
            process.send_signal(number)

    def _processes(self) -> list[Any]:
        context: Any = self._pcontext
        return [handler.proc for handler in context.subprocess_handlers.values()] if context else []


def _exit_code(error: ChildFailedError) -> int:
    """That of the process which failed first. Told here where a signal has ended it."""
    for code in (EXIT_STOPPED, EXIT_HANGS):  # of all; some may already have missed the others
        if any(failure.exitcode == code for failure in error.failures.values()):
            return code
    rank, failure = error.get_first_failure()
    if failure.exitcode > 0:
        return failure.exitcode
    ended = signal.Signals(-failure.exitcode)
    if ended != Agent.signalled:
        memory = ": is the machine short of memory?" if ended == signal.SIGKILL else ""
        _say(f"error: rank {rank} (process {failure.pid}) was ended by {ended.name}{memory}")
    return 128 + ended


class LocalRendezvous(StaticTCPRendezvous):
    """Rendezvous of a run on one node, which opens no port: torchrun keeps its own store in memory."""

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = self._store or HashStore()
        store = PrefixStore(self.run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))


def rendezvous(address: str, port: int, rank: int, nodes: int, *settings: Any) -> StaticTCPRendezvous:
    """Return torchrun's static rendezvous, without a port where there is one node."""
    kind = LocalRendezvous if nodes == 1 else StaticTCPRendezvous
    return kind(address, port, rank, nodes, *settings)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(console.labelled(text, sys.stderr), file=sys.stderr, flush=True)
    if folder := launched_run_dir():
        console.append(console.log_file(folder), text)


if __name__ == "__main__":
    console.prepare_streams()
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    static_tcp_rendezvous.StaticTCPRendezvous = rendezvous
    launcher.LocalElasticAgent = Agent  # pyright: ignore[reportPrivateImportUsage]
    processes._get_default_signal = lambda: OTHER_FAILED  # for the others where one has failed
    folder = tempfile.TemporaryDirectory(prefix="megaswift-")  # its mode is 0700
    if "--nnodes=1" in sys.argv:
        os.environ[STORE] = str(Path(folder.name) / "store")
    try:
        run.main(["--signals_to_handle=SIGINT,SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        sys.exit(_exit_code(error))
    except processes.SignalException as error:
        sys.exit(128 + signal.Signals(error.sigval).value)
