"""`--load_args true`: the options of a checkpoint's args.json, as if it were the --config file."""

from pathlib import Path

from .flags import UsageError, show
from .legacy_flags import canonical
from .parse import split_words

FOLDERS = "resume_from_checkpoint", "mcore_adapter", "mcore_model", "adapters", "model"  # flags with a checkpoint


def expand_load_args(words: list[str]) -> list[str]:
    """Return flags with `--load_args true` replaced by `--config` of the checkpoint's args.json, where they have it.

    Raises UsageError if no checkpoint that the flags name has one.
    """
    pairs, config = split_words(words)
    requests = [show(values).lower() for name, values in pairs if name == "load_args"]
    if wrong := [value for value in requests if value not in ("", "true", "false")]:
        raise UsageError(f"--load_args {wrong[0]}: true or false is needed.")
    if not requests or requests[-1] == "false":
        return words
    if config:
        raise UsageError(f"--load_args true cannot be used with --config {config}. Remove one of them.")
    named = {canonical(name, values)[0]: values for name, values in pairs}
    folders = [Path(str(value)).expanduser() for name in FOLDERS for value in named.get(name, [])]
    file = next((folder / "args.json" for folder in folders if (folder / "args.json").is_file()), None)
    if file is None:
        raise UsageError(
            "--load_args true: no checkpoint that has an args.json is set. Set --resume_from_checkpoint to its folder, "
            "or remove it."
        )
    kept = [
        word
        for name, values in pairs
        if name != "load_args"
        for word in ([f"--{name}", *values] if len(values) != 1 else [f"--{name}={values[0]}"])
    ]
    return ["--config", str(file), *kept]
