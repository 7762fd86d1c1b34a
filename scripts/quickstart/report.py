"""Report of the quickstart: answers before and after training, and commands to try next.

    python scripts/quickstart/report.py FOLDER CHECKPOINT

It exits with 1 unless at most 20% of the answers were right before training, and at least 90% after.
"""

import json
import sys
from pathlib import Path

ROWS_SHOWN = 8


def main(folder: Path, checkpoint: Path) -> int:
    before, after = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").open(encoding="utf-8")] for name in ("before", "after")
    )
    print(f"\n  {'question':<20}{'before':<24}{'after':<10}expected")
    for old, new in list(zip(before, after, strict=True))[:ROWS_SHOWN]:
        question = new["messages"][0]["content"]
        print(f"  {question:<20}{one_line(old['response'], 20):<24}{one_line(new['response'], 8):<10}{new['labels']}")
    shares = [sum(row["response"] == row["labels"] for row in rows) / len(rows) for rows in (before, after)]
    print(
        f"\n  right before: {shares[0]:.1%}   right after: {shares[1]:.1%}   of {len(after)} questions not trained on\n"
    )
    if shares[0] > 0.2 or shares[1] < 0.9:
        print("The quickstart FAILED: at most 20% should be right before, and at least 90% after.")
        return 1
    run = checkpoint.parent
    print(f"The loss curve:      {run / 'images' / 'loss.png'}")
    print(f"The log in numbers:  {run / 'logging.jsonl'}   (or: .venv/bin/tensorboard --logdir {run / 'runs'})")
    print(f"Talk to the model (in {Path.cwd()}):")
    print(f"  .venv/bin/swift infer --model {checkpoint} --stream true")
    print("  (it was taught single questions: `clear` between two of them)")
    print("Train on data of your own, in JSONL with `messages`, or `query` and `response`:")
    print("  .venv/bin/megatron sft --help")
    print("The README shows each task on one screen; docs/ has the rest.")
    return 0


def one_line(text: str, width: int) -> str:
    """Return text on one line of at most `width` characters, with unprintable characters escaped."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return line if len(line) <= width else line[: width - 3] + "..."


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
