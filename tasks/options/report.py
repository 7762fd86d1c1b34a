"""Options of `megatron report`. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated

MAX_RUNS = 6  # most runs of a comparison: each has a colour


@dataclass
class ReportOptions:
    """megatron report"""

    runs: Annotated[
        list[str],
        "Folders of runs, also without the flag: `megatron report A B`. Several are compared. An --output_dir stands "
        "for its newest run.",
    ] = field(default_factory=list)
    report_path: Annotated[
        str | None,
        "HTML file to write. Default: report.html in the run's folder; of several, comparison.html in the first's.",
    ] = None
