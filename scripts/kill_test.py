#!/usr/bin/env python
"""Kills runs at every operation of a save, and at random moments, in many layouts; each goes on, and ends bit for bit
as a run that was never killed. Prints a table; the exit code is 1 where there is a fault. Hours on two cores.

    .venv/bin/python scripts/kill_test.py                        # all cases
    .venv/bin/python scripts/kill_test.py --only "TP2 async"     # those whose name has these words
    .venv/bin/python scripts/kill_test.py --every 5 --seconds 60 --kills 2
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.resume.harness import BEST, DROPOUT, LAYOUTS, LORA, Case, Chain, make_place, random_kills, sweep

# Each operation of these is killed at; of the others each third one.
ALL = ("DP2 full sync", "TP2 full async", "EP2 LoRA sync", "PP2 LoRA async")


def cases(place: Path, words: list[str]) -> list[Case]:
    found = []
    for layout, tuner, save in itertools.product(LAYOUTS, ("full", "LoRA"), ("sync", "async")):
        flags = [LAYOUTS[layout], DROPOUT, LORA if tuner == "LoRA" else "", "--async_save true" * (save == "async")]
        flags += [BEST if (layout, tuner) == ("DP2", "full") else ""]
        name, model = f"{layout} {tuner} {save}", "qwen3_moe" if layout == "EP2" else "qwen3"
        if all(word in name.split() for word in words):
            found.append(Case(place, name, " ".join(flags), model))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of the names of cases")
    parser.add_argument("--every", type=int, help="kill at each N-th operation; left out: at all, or each third")
    parser.add_argument("--first", type=int, default=0, help="the operation to begin with, by its number")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most so long for each sweep")
    parser.add_argument("--kills", type=int, default=4, help="random kills of each case")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="kill-test-"))
    make_place(place)
    reports: list[Chain] = []
    for case in cases(place, args.only.split()):
        begun, every = time.monotonic(), args.every or (1 if case.name in ALL else 3)
        reports.append(sweep(case, first=args.first, every=every, seconds=args.seconds))
        if args.kills:
            reports.append(random_kills(case, args.kills, args.seed))
        for report in reports[-1 - bool(args.kills) :]:
            print(report, f"{time.monotonic() - begun:.0f} s", *report.missed, *report.faults, sep="\n  ", flush=True)
        case.reference.remove()
    print(Chain.HEAD, *reports, sep="\n")
    print(sum(r.kills for r in reports), "kills,", sum(r.resumes for r in reports), "resumed runs;", place)
    return int(any(report.faults for report in reports))


if __name__ == "__main__":
    sys.exit(main())
