"""Terminal output: safe streams, colours, and a copy in the run folder, console.log.

    prepare_streams()            # in each process, before anything is printed
    start_copy("megatron sft")   # in each process of a run: output is buffered from here on
    open_log(run_folder)         # the buffer and further output go to console.log
    stop_copy()

The copy is made in Python's streams, so it lacks the output of C++ libraries (NCCL). This module imports no torch.
"""

import contextlib
import io
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

LOG = "console.log"
EARLY_TEXT = "MEGASWIFT_CONSOLE"  # environment variable with the output of the launcher
EARLY_LIMIT = 100_000  # characters: an environment variable holds 131,071 bytes
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLORS = {"error": "1;31", "warning": "33", "note": "33"}
GREEN = "32"
_INSTALLED = {"site-packages", "dist-packages"}
UPDATE_INTERVAL = 0.5  # seconds between updates of a line on a terminal
UPDATE_WIDTH = len(" ... 100%, 99999 s")


def prepare_streams() -> None:
    """Make streams replace unencodable characters, and disable libraries' progress bars outside a terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")  # transformers reads the hub's variable
    elif not columns(sys.stderr):
        for name, count in (("TQDM_NCOLS", "80"), ("TQDM_NROWS", "24")):  # otherwise tqdm draws blank lines
            os.environ.setdefault(name, count)


def columns(stream: TextIO) -> int:
    """Return the width of a terminal in characters; 0 if unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def color_label(text: str, stream: TextIO) -> str:
    """Return `error: ...`, `warning: ...` or `note: ...` with a coloured label if the stream shows colours."""
    label, colon, _ = text.partition(":")
    return colorize(label + colon, COLORS[label], stream) + text[len(label) + 1 :] if label in COLORS else text


def colorize(text: str, color: str, stream: TextIO) -> str:
    """Return the text in a colour if the stream is a terminal that shows colours (https://no-color.org)."""
    has_colors = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{color}m{text}\x1b[0m" if has_colors else text


def file_size(count: int) -> str:
    """Format a number of bytes: 8.1 GB, 12.5 MB, 3.0 kB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


@contextlib.contextmanager
def timed(text: str) -> Iterator[Callable[[float], None]]:
    """Print `text` to stderr, then, at the end of the context, the seconds it took.

    A terminal shows the seconds meanwhile, and the share of the work that is done, once the yielded function is called
    with it.
    """
    print(f"{text} ...", end="", file=sys.stderr, flush=True)
    start, duration, share, end = time.perf_counter(), "", 0.0, threading.Event()

    def set_share(done: float) -> None:
        nonlocal share
        share = done

    def update() -> None:
        while not end.wait(UPDATE_INTERVAL):
            done = f" {share:.0%}," if share else ""
            print(f"\r{text} ...{done} {time.perf_counter() - start:.0f} s", end="", file=sys.stderr, flush=True)

    # A line that is wider than the terminal cannot be redrawn.
    updates = sys.stderr.isatty() and len(text) + UPDATE_WIDTH < columns(sys.stderr)
    thread = threading.Thread(target=update, daemon=True) if updates else None
    if thread:
        thread.start()
    try:
        yield set_share
        duration = f" {time.perf_counter() - start:.1f} s"
    finally:
        end.set()
        if thread:
            thread.join()
            duration = f"\r{text} ...{duration.ljust(UPDATE_WIDTH)}"
        print(duration, file=sys.stderr, flush=True)


class _Log:
    """Writer of console.log. It buffers text until the folder is known; file errors do not end the run."""

    def __init__(self, text: str):
        self._buffer, self._descriptor = text, None

    @property
    def buffered_text(self) -> str:
        return self._buffer[-EARLY_LIMIT:]

    def open(self, file: Path) -> None:
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                self.write(self.buffered_text)
                self._buffer = ""

    def write(self, lines: str) -> None:
        if self._descriptor is None:
            self._buffer = (self._buffer + lines)[-2 * EARLY_LIMIT :]
            return
        with contextlib.suppress(OSError):  # a full disk
            os.write(self._descriptor, lines.encode(errors="replace"))  # O_APPEND: ranks do not overwrite each other

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class _CopyingStream:
    """Stream that copies each line to the log. A closed terminal or pipe is no error."""

    def __init__(self, stream: TextIO, log: _Log):
        self.stream, self._log, self._line = stream, log, ""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
        lines, newline, unfinished = (self._line + text).rpartition("\n")
        self._line = unfinished[unfinished.rfind("\r") + 1 :]  # keeps only the last state of a progress bar
        if newline:
            self._log.write(visible_text(lines) + "\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def finish(self) -> None:
        """Copy an unterminated last line."""
        if self._line:
            self._log.write(visible_text(self._line) + "\n")
            self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _LibraryHandler(logging.Handler):
    """Handler of messages for which there is no other: those of installed packages go to the log alone."""

    def emit(self, message: logging.LogRecord) -> None:
        text = f"{message.levelname.lower()} of {message.name}: {message.getMessage()}"
        if message.name.startswith("megaswift.") and sys.stderr:
            print(message.getMessage(), file=sys.stderr)
        else:
            record(text)


_log: _Log | None = None
_replaced: tuple[Callable[..., None], logging.Handler | None] | None = None  # handlers from before `start_copy`


def visible_text(lines: str) -> str:
    """Return lines as a terminal finally shows them: without colour codes, and the last state of redrawn lines."""
    printed = (line.rstrip("\r") for line in ESCAPES.sub("", lines).split("\n"))
    return "\n".join(line[line.rfind("\r") + 1 :].rstrip() for line in printed)


def start_copy(command: str) -> None:
    """Start to buffer this process's output, after its launcher's output or the command as heading."""
    global _log, _replaced
    if _log is None:
        heading = f"--- {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n{command}\n"
        early = os.environ.pop(EARLY_TEXT, heading)
        _log = _Log(early if os.environ.get("LOCAL_RANK", "0") == "0" else "")
        sys.stdout, sys.stderr = _CopyingStream(sys.stdout, _log), _CopyingStream(sys.stderr, _log)  # type: ignore[assignment]
        _replaced = warnings.showwarning, logging.lastResort
        warnings.showwarning, logging.lastResort = _show_warning, _LibraryHandler(logging.WARNING)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
    """Print a warning; one of an installed package goes to the log alone."""
    text = f"{filename}:{lineno}: {category.__name__}: {message}"
    if _INSTALLED & {*Path(filename).parts}:
        record(text)
    else:
        print(text, file=sys.stderr)


def record(text: str) -> None:
    """Add a line to the log without printing it."""
    if _log is not None:
        _log.write(f"{text}\n")


def handover_env() -> dict[str, str]:
    """Return the environment variable that passes the buffered log to the program that replaces this process."""
    return {EARLY_TEXT: _log.buffered_text} if _log is not None and _log.buffered_text else {}


def open_log(folder: Path) -> None:
    """Append the log to the run's console.log.

    Nodes other than the first have their own files: on NFS, machines that append to one file overwrite each other.
    """
    if _log is not None:
        _log.open(log_file(folder))


def log_file(folder: Path) -> Path:
    """Return this node's console.log in a run's folder."""
    node = os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or "0"
    return folder / (LOG if node == "0" else f"console-node{node}.log")


def append(file: Path, text: str) -> None:
    """Append a line to the log of a launched run."""
    log = _Log("")
    if file.exists():
        log.open(file)
        log.write(f"{text}\n")
        log.close()


def stop_copy() -> None:
    """Restore the streams."""
    global _log
    if _log is None:
        return
    if _replaced:
        warnings.showwarning, logging.lastResort = _replaced
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _CopyingStream):
            stream.finish()
            stream.flush()
    sys.stdout, sys.stderr = (getattr(stream, "stream", stream) for stream in (sys.stdout, sys.stderr))
    _log.close()
    _log = None
