"""Patches of megatron-core are still needed: a test fails once the installed version no longer has the fault."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_lock_of_a_killed_build_is_removed(is_in_use, tmp_path, monkeypatch):
    """One of a build that goes on is waited for."""
    from megaswift.bridge import patches

    patches.apply_patches()
    from megatron.core.tensor_parallel import random
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)  # torch before 2.14
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = Path(cpp_extension._get_build_directory("share_storage_ext", verbose=False)) / "lock"
    lock.touch()
    if not is_in_use:
        os.utime(lock, (0, 0))
    monkeypatch.setattr(patches, "LONGEST_BUILD", 1 if is_in_use else 100)
    seen = []

    def load_inline(**_):
        seen.append(lock.exists())
        return SimpleNamespace(share_storage="function")

    monkeypatch.setattr(random, "load_inline", load_inline)
    monkeypatch.setattr(random, "_share_storage_ext", None)
    begin = time.time()
    assert random._get_share_storage() == "function"
    assert random._get_share_storage() == "function"
    assert seen == [False]
    assert not is_in_use or time.time() - begin > 0.9


def test_a_lock_whose_file_stays_is_not_waited_for(tmp_path, monkeypatch):
    from megaswift.bridge import patches

    patches.apply_patches()
    from megatron.core.tensor_parallel import random
    from torch.utils import cpp_extension

    assert hasattr(cpp_extension, "FileBaton") != hasattr(cpp_extension, "FileLock")
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)  # torch 2.14 and later
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = Path(cpp_extension._get_build_directory("share_storage_ext", verbose=False)) / "lock"
    lock.touch()
    monkeypatch.setattr(patches, "LONGEST_BUILD", 10)
    monkeypatch.setattr(random, "load_inline", lambda **_: SimpleNamespace(share_storage="function"))
    monkeypatch.setattr(random, "_share_storage_ext", None)
    begin = time.time()
    assert random._get_share_storage() == "function"
    assert time.time() - begin < 5
    assert lock.exists()
