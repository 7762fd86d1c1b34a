"""Answer verification by math-verify in a pool of processes.

Computer algebra on a policy's text is unbounded: `\\boxed{9^{9^{9^9}}}` holds Python's lock for hours, and can exhaust
memory. Each worker has limits of both, by which the kernel ends it, and the answer counts as wrong. Run as a module,
this file is a worker: it reads [solution, text] as JSON lines, and writes `true`, `false`, or `null` for an unreadable
solution.
"""

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

SECONDS = 2.0  # CPU time for one answer
BYTES = 8 << 30  # address space
MAX_WORKERS = 8  # per process
PAIRS_PER_WORKER = 16  # pairs that are worth another worker's start
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

Pair = tuple[str, str]  # solution, text


class MathVerifyPool:
    """Worker processes, started on first use, which end with this process."""

    def __init__(self) -> None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._max_workers = min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) // local))
        self._idle: list[_Worker] = []

    def __call__(self, pairs: Sequence[Pair]) -> list[bool | None]:
        """Return for each pair whether the text's answer equals the solution; None for an unreadable solution.

        Raises RuntimeError where a worker does not start.
        """
        results: list[bool | None] = [False] * len(pairs)
        count = min(self._max_workers, -(-len(pairs) // PAIRS_PER_WORKER))
        workers = [self._idle.pop() if self._idle else _Worker() for _ in range(count)]
        waiting = iter(enumerate(pairs))
        busy = {}  # worker -> index of its pair
        try:
            for worker in workers:
                busy |= _next(worker, waiting)
            while busy:
                for worker in select.select(list(busy), [], [])[0]:
                    i = busy.pop(worker)
                    try:
                        results[i] = worker.answer()
                    except EOFError:
                        workers[workers.index(worker)] = worker = _Worker()
                    busy |= _next(worker, waiting)
        finally:
            for worker in busy:  # after an error their results are not read
                worker.end()
            self._idle += [worker for worker in workers if worker not in busy]
        return results


def _next(worker: "_Worker", waiting: Iterator[tuple[int, Pair]]) -> dict["_Worker", int]:
    for i, pair in waiting:
        worker.ask(pair)
        return {worker: i}
    return {}


class _Worker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # -P: do not import from the working folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches only the run, which ends this by closing its pipe
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        if not self._stdout.readline():
            raise RuntimeError("a worker of math-verify did not start. See its error above")

    def fileno(self) -> int:
        return self._stdout.fileno()

    def ask(self, pair: Pair) -> None:
        self._stdin.write(json.dumps(pair).encode() + b"\n")
        self._stdin.flush()

    def answer(self) -> bool | None:
        """Return the result. Raises EOFError where the process has ended over it."""
        if line := self._stdout.readline():
            return json.loads(line)
        self.end()
        raise EOFError

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()


def check(solution: str, text: str) -> bool | None:
    """Return whether the text's answer equals the solution; None for an unreadable solution.

    Only the last <answer> of each counts, if any. In the text the last \\boxed counts (several side by side are a set),
    else the last LaTeX expression or plain number.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    settings = {"extraction_mode": "first_match", "parsing_timeout": None}
    gold = parse(_tagged(solution), **settings)
    if not gold:
        return None
    kinds = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
    return bool(verify(gold, parse(_tagged(text), kinds, **settings), timeout_seconds=None))


def _tagged(text: str) -> str:
    return [text, *TAGGED.findall(text)][-1]


def main() -> None:
    import logging

    import math_verify  # noqa: F401  takes half a second: import it before the first time limit

    logging.disable()  # it warns of running without its own time limit
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, even within one multiplication
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            result = check(*json.loads(line))
        except Exception:  # of any kind: what cannot be compared is not equal
            result = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
