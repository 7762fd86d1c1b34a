"""Reward of benchmarks: 0 or 1 by a checksum of the tokens, so that advantages differ, whatever the text says."""

# pyright: reportMissingImports=false

import zlib

from megaswift.tasks.rewards import reward


@reward("coin")
def coin(completions, completion_ids, **columns):
    return [float(zlib.crc32(str(list(ids)).encode()) % 2) for ids in completion_ids]
