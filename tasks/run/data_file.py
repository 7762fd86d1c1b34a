"""data.json of a run folder: statistics of the prepared data."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.atomic_dir import os_error_hints

if TYPE_CHECKING:
    from ...templates.prepare import Prepared

DATA = "data.json"


def write_data_file(folder: Path, data: "Prepared") -> None:
    """Write the statistics, and the report that the terminal shows as "text"."""
    content = {**data.statistics, "text": data.report}
    with os_error_hints(folder):
        (folder / DATA).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
