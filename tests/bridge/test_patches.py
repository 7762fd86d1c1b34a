"""Each mend of megatron-core is still needed: a test fails once the installed version no longer has the fault."""

import subprocess
import sys

import pytest

WITHOUT = """
from megaswift.bridge import runtime
runtime.enable()
import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
{mend}
checkpoint = CheckpointWithoutOutput()
print(checkpoint.fp8)
"""


def asks_for_fp8(mend: str) -> str:
    done = subprocess.run([sys.executable, "-c", WITHOUT.format(mend=mend)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_recompute_without_fp8():
    assert asks_for_fp8("") == "True", (
        "megatron-core has mended it: take _recompute_without_fp8 out of bridge/patches.py"
    )
    assert asks_for_fp8("from megaswift.bridge import patches; patches.mend()") == "False"
