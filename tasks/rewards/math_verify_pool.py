"""Answer verification by math-verify in a pool of processes.

Computer algebra on a policy's text has no bounds: `\\boxed{9^{9^{9^9}}}` holds Python's GIL for hours, and can exhaust
memory. So the kernel limits each worker's CPU time and memory. An answer beyond a limit counts as wrong. Run as a
module, this file is a worker: it reads [solution, text] as JSON lines, and writes `true`, `false`, or `null` for an
unreadable solution.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Sequence

from ..system.readable import readable
from .worker_process import WorkerProcess

SECONDS = 2.0  # CPU time for one answer
BYTES = 8 << 30  # address space
MAX_WORKERS = 8  # per process
PAIRS_PER_WORKER = 16  # pairs that justify starting another worker
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

Pair = tuple[str, str]  # solution, text


class MathVerifyPool:
    """Pool of worker processes, which start on first use and end with this process."""

    def __init__(self) -> None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._max_workers = min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) // local_world_size))
        self._idle: list[_Worker] = []

    def __call__(self, pairs: Sequence[Pair]) -> list[bool | None]:
        """Return for each pair whether the text's answer equals the solution; None for an unreadable solution.

        Raises RuntimeError if a worker does not start.
        """
        results: list[bool | None] = [False] * len(pairs)
        count = min(self._max_workers, -(-len(pairs) // PAIRS_PER_WORKER))
        workers = [self._idle.pop() if self._idle else _Worker() for _ in range(count)]
        queue = iter(enumerate(pairs))
        busy = {}  # worker -> index of its pair
        try:
            for worker in workers:
                busy |= _ask_next(worker, queue)
            while busy:
                for worker in readable(list(busy)):
                    i = busy.pop(worker)
                    try:
                        results[i] = worker.receive()
                    except EOFError:
                        workers[workers.index(worker)] = worker = _Worker()
                    busy |= _ask_next(worker, queue)
        finally:
            for worker in busy:  # after an error their results are not read
                worker.kill()
            self._idle += [worker for worker in workers if worker not in busy]
        return results


def _ask_next(worker: "_Worker", queue: Iterator[tuple[int, Pair]]) -> dict["_Worker", int]:
    for i, pair in queue:
        worker.write(pair)
        return {worker: i}
    return {}


class _Worker(WorkerProcess):
    def __init__(self) -> None:
        super().__init__(__name__)
        if not self.read_line():
            raise RuntimeError("a worker of math-verify did not start. See its error above")


def check(solution: str, text: str) -> bool | None:
    """Return whether the text's answer equals the solution; None for an unreadable solution.

    Only the last <answer> of each counts, if any. In the text, the last \\boxed counts (adjacent ones form a set), else
    the last LaTeX expression or plain number.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    settings = {"extraction_mode": "first_match", "parsing_timeout": None}
    gold = parse(_last_answer(solution), **settings)
    if not gold:
        return None
    extraction_configs = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
    return bool(verify(gold, parse(_last_answer(text), extraction_configs, **settings), timeout_seconds=None))


def _last_answer(text: str) -> str:
    return [text, *ANSWER.findall(text)][-1]


def main() -> None:
    import logging

    import math_verify  # noqa: F401  takes half a second: import it before the first time limit

    logging.disable()  # it warns of running without its own time limit
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process, even within a single multiplication
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            result = check(*json.loads(line))
        except Exception:  # of any kind: answers that cannot be compared are not equal
            result = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
