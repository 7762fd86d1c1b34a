"""Selection of a subset's and a split's files in a local copy of a hub's dataset."""

import re
from pathlib import Path
from typing import Any

ALIASES = {"validation": ("valid", "val", "dev"), "train": ("training",), "test": ("testing",)}


def select_files(
    folder: Path,
    files: list[Path],
    subset: str | None,
    splits: tuple[str, ...],
    needs_subset: bool,
    needs_split: bool,
) -> list[Path]:
    """Return the files of a subset and of splits, as README.md lists them, or else by the names of files and folders.

    needs_subset, needs_split: whether a missing one is an error; else all files are returned.
    Raises ValueError with what there is.
    """
    by_split = _configured(folder, files, subset) if subset else {}
    if subset and not by_split:
        of_subset = [file for file in files if subset in _words(folder, file)]
        if needs_subset and not of_subset:
            raise ValueError(f"{folder}:{subset}: no file is of this subset. Fix the name, or name a file.")
        files = of_subset or files
    if not splits:
        return [file for split_files in by_split.values() for file in split_files] or files
    if by_split:
        selected = [file for split in splits for file in by_split.get(split, ())]
        files = [file for split_files in by_split.values() for file in split_files]
    else:
        selected = [file for split in splits for file in files if _is_of(split, folder, file)]
    if needs_split and not selected:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:5])
        raise ValueError(f"{folder}@{splits[0]}: no file is of this split, only {names}. Fix the name, or name a file.")
    return list(dict.fromkeys(selected)) or files


def _words(folder: Path, file: Path) -> list[str]:
    """Return the folders of a file, and its name to the first dot."""
    parts = file.relative_to(folder).parts
    return [*parts[:-1], parts[-1].split(".")[0]]


def _is_of(split: str, folder: Path, file: Path) -> bool:
    """Return whether a name on a file's path says that it is of a split: `train`, `train-00000-of-00001`, `x_train`."""
    names = "|".join(map(re.escape, (split, *ALIASES.get(split, ()))))
    pattern = re.compile(rf"(?<![a-zA-Z0-9])({names})(?![a-zA-Z]|_[a-zA-Z])")
    return any(pattern.search(word) for word in _words(folder, file))


def _configured(folder: Path, files: list[Path], subset: str) -> dict[str, list[Path]]:
    """Return the files of each split that the header of README.md names for a subset; {} without it."""
    import yaml

    card = folder / "README.md"
    if not card.is_file():
        return {}
    header = re.match(r"---\s*\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        settings: Any = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError:
        return {}
    configs = settings.get("configs") if isinstance(settings, dict) else None
    for config in configs if isinstance(configs, list) else ():
        if isinstance(config, dict) and config.get("config_name") == subset:
            data = config.get("data_files")
            entries = data if isinstance(data, list) else [{"split": "train", "path": data}]
            by_split: dict[str, list[Path]] = {}
            for entry in entries:
                if isinstance(entry, dict) and isinstance(entry.get("split"), str):
                    paths = entry["path"] if isinstance(entry.get("path"), list) else [entry.get("path")]
                    listed = {found for path in paths if isinstance(path, str) for found in folder.glob(path)}
                    by_split[entry["split"]] = [file for file in files if file in listed]
            return {split: found for split, found in by_split.items() if found}
    return {}
