"""Whether a text's answer equals a solution, by math-verify in processes of its own.

Computer algebra is asked about whatever a policy writes: `\\boxed{9^{9^{9^9}}}` holds Python's lock for hours, and may
take all memory. A checker is a process with bounds of both: the kernel ends it where they are passed, and such an
answer is wrong. Run as a module, this file is a checker: it reads [solution, text] in JSON, a line each, and writes
`true`, `false`, or `null` where the solution cannot be read.
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
from typing import Any

SECONDS = 2.0  # of computing, for one answer
BYTES = 8 << 30  # of address space
MOST = 8  # checkers of a process
SHARE = 16  # answers for which one more checker is worth its start
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

Pair = tuple[str, str]  # solution, text


class Checkers:
    """Processes that check, which start when they are first needed and end with this one."""

    def __init__(self) -> None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._most = min(MOST, max(1, len(os.sched_getaffinity(0)) // local))
        self._idle: list[_Checker] = []

    def __call__(self, pairs: Sequence[Pair]) -> list[bool | None]:
        """Of each pair, whether the text's answer is the solution; None where the solution cannot be read.

        Raises RuntimeError where a checker does not start.
        """
        results: list[bool | None] = [False] * len(pairs)
        wanted = min(self._most, -(-len(pairs) // SHARE))
        workers = [self._idle.pop() if self._idle else _Checker() for _ in range(wanted)]
        waiting = iter(enumerate(pairs))
        busy = {}  # checker -> the pair that it has
        try:
            for worker in workers:
                busy |= _next(worker, waiting)
            while busy:
                for worker in select.select(list(busy), [], [])[0]:
                    place = busy.pop(worker)
                    try:
                        results[place] = worker.answer()
                    except EOFError:
                        workers[workers.index(worker)] = worker = _Checker()
                    busy |= _next(worker, waiting)
        finally:
            for worker in busy:  # an error: what these are about is of no use any more
                worker.end()
            self._idle += [worker for worker in workers if worker not in busy]
        return results


def _next(worker: "_Checker", waiting: Iterator[tuple[int, Pair]]) -> dict["_Checker", int]:
    for place, pair in waiting:
        worker.ask(pair)
        return {worker: place}
    return {}


class _Checker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # -P: no module comes from the working folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the run alone, which ends this by closing its pipe
        )
        self._to: Any = self._process.stdin
        self._from: Any = self._process.stdout
        if not self._from.readline():
            raise RuntimeError("a process to check answers by math-verify did not start: what it says above is why")

    def fileno(self) -> int:
        return self._from.fileno()

    def ask(self, pair: Pair) -> None:
        self._to.write(json.dumps(pair).encode() + b"\n")
        self._to.flush()

    def answer(self) -> bool | None:
        """Raises EOFError where the process has ended over it."""
        if line := self._from.readline():
            return json.loads(line)
        self.end()
        raise EOFError

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()


def check(solution: str, text: str) -> bool | None:
    """Whether the text's answer equals the solution; None where that cannot be read.

    Of either, what the last <answer> holds is meant where there is one. Of the text then: the last \\boxed (several
    side by side are a set), else LaTeX or a plain number, the last one.
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

    import math_verify  # noqa: F401  takes half a second, before any answer's time begins

    logging.disable()  # it warns that it has no bound of its own
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in the midst of one multiplication too
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            found = check(*json.loads(line))
        except Exception:  # of any kind: it is asked about anything, and what it cannot compare is not equal
            found = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
