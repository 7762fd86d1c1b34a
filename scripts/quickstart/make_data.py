"""Generator of the quickstart's data: sums of two numbers from 10 to 99. It always writes the same files.

    python scripts/quickstart/make_data.py

No question of test.jsonl is in train.jsonl, in either order of its numbers.
"""

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

FOLDER = Path(__file__).parent
TRAIN, TEST = 4000, 200


def main() -> None:
    rng = random.Random(0)
    pairs = list(combinations_with_replacement(range(10, 100), 2))
    rng.shuffle(pairs)
    test = [rng.sample(pair, 2) for pair in pairs[:TEST]]
    train_pairs = [list(order) for pair in pairs[TEST:] for order in {pair, pair[::-1]}]
    train = rng.sample(train_pairs, TRAIN)
    for name, rows in (("train", train), ("test", test)):
        with (FOLDER / f"{name}.jsonl").open("w") as file:
            for a, b in rows:
                file.write(json.dumps({"query": f"What is {a} + {b}?", "response": str(a + b)}) + "\n")


if __name__ == "__main__":
    main()
