"""Records the terminal sessions of a page: runs its commands in a pseudo-terminal and writes what they showed.

python scripts/record.py docs/first-run.md

A session is a block of ```console; its commands follow `$ `, and what is typed into them follows `<<< `. They run one
after another in an empty folder, in which `scripts` is this one. Text that a progress bar has overwritten is left out.
"""

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND, PROMPT = "$ ", "<<< "
SIZE = 40, 110  # lines and columns of the terminal
HOME = "/home/me/first"  # in the place of the folder's path
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def record(page: str) -> str:
    """Return the page with its sessions recorded anew."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "scripts").symlink_to(SCRIPTS)
        os.environ["HF_HOME"] = str(Path(folder) / "cache")

        def session(block: re.Match[str]) -> str:
            shown = "".join(
                f"{COMMAND}{command}\n{run(command, typed, folder)}" for command, typed in _commands(block[1])
            )
            return f"```console\n{shown.replace(folder, HOME)}```"

        return BLOCK.sub(session, page)


def _commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a session with the lines that are typed into it."""
    for part in re.split(rf"^{re.escape(COMMAND)}", block, flags=re.MULTILINE)[1:]:
        command, *lines = part.replace("\\\n", "\\\0").splitlines()
        yield command.replace("\0", "\n"), [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]


def run(command: str, typed: list[str], folder: str) -> str:
    """Return what a command shows on a terminal. Raises RuntimeError if it fails otherwise than by an error message."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvp("bash", ["bash", "-c", command])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
    shown, lines = b"", list(typed)
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # its last process has ended
            break
        shown += part
        if lines and shown.endswith(PROMPT.encode()):
            os.write(terminal, f"{lines.pop(0)}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(terminal)
    text = rendered(shown.decode(errors="replace"))
    if code not in (0, 2):
        raise RuntimeError(f"{command}: exit code {code}\n{text}")
    return text


def rendered(shown: str) -> str:
    """Return what is left of a terminal's output where lines have been overwritten."""
    lines = []
    for line in ESCAPE.sub("", shown).removesuffix("\r\n").split("\n"):
        cells = ""
        for part in line.rstrip("\r").split("\r"):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(record(file.read_text(encoding="utf-8")), encoding="utf-8")
