"""Folder of what is made once and used by later runs: tokens, facts about files, downloads."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the folder of caches, which nodes share if they share the user's hub cache."""
    if root := os.environ.get("MODELSCOPE_CACHE") or os.environ.get("HF_HOME"):
        return Path(root).expanduser() / "megaswift"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "megaswift"
