"""torchrun without its own account of a failed process, which has told why itself; the exit code is that process's."""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        ended = signal.Signals(-failure.exitcode)  # this one could not tell
        memory = ": is the machine short of memory?" if ended == signal.SIGKILL else ""
        print(f"error: rank {rank} (process {failure.pid}) was ended by {ended.name}{memory}", file=sys.stderr)
        sys.exit(128 + ended)
    except SignalException as error:
        sys.exit(128 + signal.Signals(error.sigval).value)
