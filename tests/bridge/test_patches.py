"""Patches of megatron-core are still needed: a test fails once the installed version no longer has the fault."""

import subprocess
import sys

import pytest

WITHOUT = """
from megaswift.bridge import runtime
runtime.enable()
import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
{patch}
checkpoint = CheckpointWithoutOutput()
print(checkpoint.fp8)
"""


def asks_for_fp8(patch: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(patch=patch)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_recompute_without_fp8():
    assert asks_for_fp8("") == "True", (
        "megatron-core has fixed it: remove _fix_recompute_without_fp8 from bridge/patches.py"
    )
    assert asks_for_fp8("from megaswift.bridge import patches; patches.apply_patches()") == "False"
