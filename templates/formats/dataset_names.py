"""Names of data files, and of files of text, as far as a name and the disk tell. Free of torch: the command line
looks at them, too."""

from pathlib import Path

LINES = (".jsonl", ".json", ".csv", ".tsv", ".txt")  # kinds of text
EXTENSIONS = (*LINES, ".parquet", ".arrow", *(f"{kind}.gz" for kind in LINES))
TEXT_FILES = (".txt", ".md", ".jinja", ".j2", ".prompt")  # of a system prompt


def extension(path: Path) -> str:
    """Return what a file's name ends in, in lower case: `.jsonl`, `.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def expanded(name: str) -> Path:
    """Return the path of a name, with the home folder for `~`, and as it is where there is no such home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False


def split_count(name: str) -> tuple[str, int | None]:
    """`name#500` -> (name, 500). Raises ValueError where what follows # is no number of rows."""
    path, hash_sign, count = name.rpartition("#")
    if not hash_sign or _exists(Path(name)):
        return name, None
    if not count.isdecimal() or int(count) == 0:
        raise ValueError(f"{name}: after # a number of rows is expected, as in {path}#500")
    return path, int(count)


def check_there(name: str) -> None:
    """Raise ValueError for a name, without its `#rows`, that is a file's or folder's and not a hub's, and cannot be
    read: nothing has it, or a pipe or a device does."""
    if not name:
        raise ValueError("has an empty name. Set a file, a folder or a hub id")
    path = expanded(name)
    if not _exists(path):
        if extension(path) in EXTENSIONS or name.startswith(("/", ".", "~")):
            raise ValueError(f"{name}: there is no such file or folder (seen from {Path.cwd()})")
    elif not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"{name}: is not a regular file, but a pipe or a device, and rows are read more than once. "
            "Write it to a file first, as in `zcat rows.gz > rows.jsonl` (.jsonl.gz is read as it is)"
        )


def text_of(flag: str, value: str | None) -> str | None:
    """Return the text of a flag that takes a text or a file of it.

    A value names a file where it ends as one of TEXT_FILES, or begins as a path of one that is there.
    Raises ValueError where there is no such file, or it holds no text.
    """
    if not value or "\n" in value or "\0" in value:
        return value
    path = expanded(value)
    try:
        is_file, is_path = path.is_file(), path.exists()
    except OSError:  # a text that is too long for a name
        return value
    if extension(path) not in TEXT_FILES and not (is_file and value.startswith(("/", "./", "../", "~/"))):
        return value
    if not is_file:
        problem = "is not a regular file" if is_path else f"there is no such file (seen from {Path.cwd()})"
        raise ValueError(f"{flag} {value}: {problem}. Fix the path, or end the text otherwise where it is none.")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{flag} {value}: cannot be read ({error.strerror}). Fix its permissions.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {value}: is not UTF-8 ({error.reason}). Save it as UTF-8.") from error
    if not text:
        raise ValueError(f"{flag} {value}: the file is empty. Write the text into it, or unset {flag}.")
    return text
