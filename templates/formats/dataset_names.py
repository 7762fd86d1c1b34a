"""Names of datasets and text files, resolved from the name and the disk. Imports no torch, for the command line."""

import re
from dataclasses import dataclass
from pathlib import Path

TEXT_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt")  # text formats
EXTENSIONS = (*TEXT_FORMATS, ".parquet", ".arrow", *(f"{kind}.gz" for kind in TEXT_FORMATS))
TEXT_FILES = (".txt", ".md", ".jinja", ".j2", ".prompt")  # extensions of a system prompt's file


def extension(path: Path) -> str:
    """Return the extension of a file in lower case: `.jsonl`, `.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def expand_user(name: str) -> Path:
    """Return the path of a name, with `~` expanded if that home folder exists."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long
        return False


def split_count(name: str) -> tuple[str, int | None]:
    """Split `name#500` into (name, 500). Raises ValueError if the part after # is not a number of rows."""
    path, hash_sign, count = name.rpartition("#")
    if not hash_sign or _exists(Path(name)):
        return name, None
    if not count.isdecimal() or int(count) == 0:
        raise ValueError(f"{name}: a number of rows must follow #. Set one, as in {path}#500.")
    return path, int(count)


@dataclass(frozen=True)
class DatasetName:
    """A name in --dataset, `[hf::|ms::]LOCATION[:subset[/subset]][@split[:rows]][#rows]`, in parts.

    text: the name without the number of rows
    location: path, or hub id
    rows: number of rows to take; None: all
    """

    text: str
    location: str
    hub: str = ""
    subsets: tuple[str, ...] = ()
    split: str | None = None
    rows: int | None = None

    @classmethod
    def parse(cls, name: str) -> "DatasetName":
        """Parse a name. What is a file or folder is never divided. Raises ValueError for a wrong number of rows."""
        text, rows = split_count(name)
        if text[-1:] in ("@", ":") and not _exists(expand_user(text)):
            part = "split" if text[-1] == "@" else "subset"
            raise ValueError(f"{name}: the name of a {part} must follow {text[-1]}. Set one, or remove {text[-1]}.")
        location, split = text, None
        if not _exists(Path(text)) and (
            found := re.fullmatch(r"(?P<location>.+)@(?P<split>[\w.-]+)(:(?P<rows>\d+))?", text)
        ):
            location, split = found["location"], found["split"]
            text = f"{location}@{split}"
            if found["rows"]:
                if rows is not None:
                    raise ValueError(f"{name}: has two numbers of rows. Keep one of {found['rows']} and {rows}.")
                rows = int(found["rows"])
                if not rows:
                    raise ValueError(f"{name}: takes no row. Set a number above 0 behind the split.")
        hub, subsets = "", ""
        if not _exists(expand_user(location)):
            hub, _, location = location.rpartition("::")
            path, _, behind = location.rpartition(":")
            if path:
                location, subsets = path, behind
        return cls(text, location, hub, tuple(filter(None, subsets.split("/"))), split, rows)

    @property
    def is_local(self) -> bool:
        return _exists(expand_user(self.location))


def check_dataset(name: str) -> None:
    """Raise ValueError for a name that cannot be parsed, or of a missing file or folder, or of a pipe."""
    check_exists(DatasetName.parse(name).location)


def check_exists(name: str) -> None:
    """Raise ValueError if a name (without `#rows`) is of a missing file or folder, or of a pipe."""
    if not name:
        raise ValueError("has an empty name. Set a file, a folder or a hub id.")
    path = expand_user(name)
    if not _exists(path):
        if extension(path) in EXTENSIONS or name.startswith(("/", ".", "~")):
            raise ValueError(f"{name}: no such file or folder (in {Path.cwd()}). Fix the path.")
    elif not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"{name}: is a pipe or a device, and rows are read more than once. "
            "Write it to a file first, as in `zcat rows.gz > rows.jsonl` (.jsonl.gz is read as it is)."
        )


def resolve_text(flag: str, value: str | None) -> str | None:
    """Return the text of a flag that takes either a text or the name of a text file.

    A value names a file if it ends in one of TEXT_FILES, or is the path of an existing file.
    Raises ValueError if the file does not exist or holds no text.
    """
    if not value or "\n" in value or "\0" in value:
        return value
    path = expand_user(value)
    try:
        is_file, is_path = path.is_file(), path.exists()
    except OSError:  # a text that is too long for a file name
        return value
    if extension(path) not in TEXT_FILES and not (is_file and value.startswith(("/", "./", "../", "~/"))):
        return value
    if not is_file:
        problem = "is not a regular file" if is_path else f"no such file (in {Path.cwd()})"
        raise ValueError(f"{flag} {value}: {problem}. Fix the path; for a text, change its end.")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{flag} {value}: cannot be read ({error.strerror}). Fix its permissions.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {value}: is not UTF-8 ({error.reason}). Save it as UTF-8.") from error
    if not text:
        raise ValueError(f"{flag} {value}: the file is empty. Write the text to it, or unset {flag}.")
    return text
