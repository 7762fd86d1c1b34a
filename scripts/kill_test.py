#!/usr/bin/env python
"""Kill test: runs killed at every operation of a save, and at random moments, must resume to bitwise equal results.

It tests many layouts, prints a table, and exits with 1 if there is a fault. It takes hours on two cores; with --record
it continues where it was interrupted.

    .venv/bin/python scripts/kill_test.py                        # all cases
    .venv/bin/python scripts/kill_test.py --only "TP2 async"     # only cases whose names have these words
    .venv/bin/python scripts/kill_test.py --workers 8 --record kills.jsonl
    .venv/bin/python scripts/kill_test.py --every 5 --seconds 60 --kills 2
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.resume.harness import BEST, DROPOUT, LAYOUTS, LORA, Case, make_place
from tests.resume.sweep import Chain, random_kills, sweep


def cases(folder: Path, words: list[str]) -> list[Case]:
    selected = []
    for layout, tuner, save in itertools.product(LAYOUTS, ("full", "LoRA"), ("sync", "async")):
        flags = [LAYOUTS[layout], DROPOUT, LORA if tuner == "LoRA" else "", "--async_save true" * (save == "async")]
        flags += [BEST if (layout, tuner) == ("DP2", "full") else ""]
        name, model = f"{layout} {tuner} {save}", "qwen3_moe" if layout == "EP2" else "qwen3"
        if all(word in name.split() for word in words):
            selected.append(Case(folder, name, " ".join(flags), model))
    return selected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of the names of cases")
    parser.add_argument("--every", type=int, default=1, help="kill at each N-th operation")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most so long, all cases together")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, of two processes each")
    parser.add_argument("--record", type=Path, help="a file of what was found and done, to go on with")
    parser.add_argument("--kills", type=int, default=4, help="random kills of each case")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-test-"))
    make_place(folder)
    reports: list[Chain] = []
    end = time.monotonic() + args.seconds
    for case in cases(folder, args.only.split()):
        start = time.monotonic()
        limits = {"every": args.every, "seconds": end - start, "workers": args.workers, "record": args.record}
        reports.append(sweep(case, **limits))
        if args.kills:
            reports.append(random_kills(case, args.kills, args.seed))
        for report in reports[-1 - bool(args.kills) :]:
            print(report, f"{time.monotonic() - start:.0f} s", *report.missed, *report.faults, sep="\n  ", flush=True)
        case.reference.remove()
    print(Chain.HEAD, *reports, sep="\n")
    print(sum(r.kills for r in reports), "kills,", sum(r.resumes for r in reports), "resumed runs;", folder)
    return int(any(report.faults for report in reports))


if __name__ == "__main__":
    sys.exit(main())
