"""`megatron report FOLDER [FOLDER ...]`: a run, or a comparison of runs, as one HTML file.

megatron report megatron_output/qwen3-8b                  # its newest run: report.html beside logging.jsonl
megatron report v0-20260131-235959 v1-20260201-080000     # compared: comparison.html in the first one's folder
"""

import sys
from collections.abc import Callable
from pathlib import Path

from ..options import ReportOptions
from ..run.run_dir import run_dirs
from ..system.console import color_label, file_size
from .log_rows import LOG
from .page import write_page

REPORT, COMPARISON = "report.html", "comparison.html"
RUN_FILES = (LOG, "args.json")


def run(options: ReportOptions, sources: dict[str, str]) -> int:
    """Write the page, print its path, and return the exit code."""
    folders = [run_folder(name) for name in options.runs]
    file = page_path(options, folders)
    try:
        write_page(folders, file)
    except OSError as error:
        raise ValueError(f"--report_path {file}: cannot be written ({error.strerror}). Set another path.") from error
    print(f"{file} ({file_size(file.stat().st_size)})")
    return 0


def run_folder(name: str) -> Path:
    """Return a run's folder: the one named, or the newest in a folder of runs.

    Raises ValueError where there is none.
    """
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise ValueError(f"--runs {name}: no such folder. Set the folder of a run.")
    for candidate in reversed(run_dirs(folder)):
        if any((candidate / file).is_file() for file in RUN_FILES):
            return candidate
    raise ValueError(f"--runs {name}: it has no {LOG}. Set the folder of a run, v0-..., or the one that has it.")


def page_path(options: ReportOptions, folders: list[Path]) -> Path:
    """Return the file to write."""
    if options.report_path:
        return Path(options.report_path).expanduser().absolute()
    return folders[0] / (REPORT if len(folders) == 1 else COMPARISON)


def write_report(folder: Path, note: Callable[[str], None]) -> None:
    """Write a run's report.html at its end, and say where it is. A failure is a warning."""
    try:
        write_page([folder], folder / REPORT)
        note(f"Report: {folder / REPORT}")
    except Exception as error:  # whatever is wrong with a page, the run goes on
        note(color_label(f"warning: {REPORT} could not be written: {error!r}", sys.stdout))
