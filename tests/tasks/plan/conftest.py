import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def bench():
    """Modules of scripts/bench."""
    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    try:
        import plan_check
        import published
        import published_configs
        import rows
    finally:
        sys.path.pop(0)
    return SimpleNamespace(plan_check=plan_check, published=published, configs=published_configs, rows=rows)


@pytest.fixture(scope="session")
def rows(bench):
    """Rows of the benchmark (scripts/bench/rows.py)."""
    return bench.rows


@pytest.fixture(scope="session")
def measured():
    """Runs of docs/results.json by row, system and, if there are any, flags."""
    results = json.loads((ROOT / "docs" / "results.json").read_text())
    return {(run["row"], run["system"], *([run["flags"]] if run["flags"] else [])): run for run in results}
