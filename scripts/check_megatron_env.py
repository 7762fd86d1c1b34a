"""Launcher of cli/doctor.py that needs no installed package: python scripts/check_megatron_env.py"""

import runpy
from pathlib import Path

globals().update(runpy.run_path(str(Path(__file__).resolve().parent.parent / "cli" / "doctor.py"), run_name=__name__))
