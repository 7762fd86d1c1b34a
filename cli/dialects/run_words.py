"""Words of `megatron run` and `megatron convert`: a config file or a module, overrides, and flags of this project."""

from dataclasses import dataclass, field
from pathlib import Path

from ..flags import UsageError
from ..parse import CONFIG_FILE

USAGE = "megatron run [MODULE] FILE.yaml [key=value ...] [--flag value ...]"
# Modules of other systems that `megatron run` takes for `python3 -m`, each with the dialect of its words.
MODULES = {"verl.trainer.main_ppo": "verl", "recipe.dapo.main_dapo": "verl", "siirl.main_dag": "siirl"}
# Configs within verl, whose values are its defaults.
PACKAGED = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
HYDRA_FLAGS = {  # of a module
    **dict.fromkeys(("--config-path", "--config-dir", "-cp", "-cd"), "path"),
    **dict.fromkeys(("--config-name", "-cn"), "name"),
}


@dataclass
class RunWords:
    """Words of `megatron run`, by kind."""

    module: str | None = None  # of MODULES
    file: str | None = None
    overrides: list[str] = field(default_factory=list)  # key=value, +key=value, ~key
    flags: list[str] = field(default_factory=list)  # --flag and its values: of this project


def read_words(words: list[str]) -> RunWords:
    """Return the words of `megatron run` by kind. `--a.b value` is the override a.b=value, as Oumi takes it.

    Raises UsageError if there is neither a file nor a module.
    """
    result = RunWords()
    hydra: dict[str, str] = {}  # path and name of a module's config
    rest = list(words)
    if rest and rest[0] in MODULES:
        result.module = rest.pop(0)
    if rest and not rest[0].startswith("-") and rest[0].endswith(CONFIG_FILE) and "=" not in rest[0]:
        result.file = rest.pop(0)
    is_override = True  # words up to the first flag of this project
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        hydra_flag = HYDRA_FLAGS.get(name.replace("_", "-")) if result.module else None
        if hydra_flag or (word.startswith("--") and "." in name):
            if not equals and not rest:
                raise UsageError(f"{word}: has no value. Write {word.lstrip('-')}=VALUE.")
            value = value if equals else rest.pop(0)
            if hydra_flag:
                hydra[hydra_flag] = value
            else:
                result.overrides.append(f"{name[2:]}={value}")
            is_override = True
        elif word.startswith("--"):
            result.flags.append(word)
            is_override = bool(equals)
        elif is_override:
            result.overrides.append(word)
        else:
            result.flags.append(word)
    if "name" in hydra:
        result.file = _config_file(hydra["name"], hydra.get("path"))
    if result.module is None and result.file is None:
        modules = " or ".join(MODULES)
        raise UsageError(f"{' '.join(['megatron run', *words[:1]])}: name a config file, or {modules}. Usage: {USAGE}")
    return result


def _config_file(name: str, folder: str | None) -> str | None:
    """Return the file of --config-path and --config-name, or None for one of verl's own, whose defaults apply.

    Raises UsageError if there is no such file.
    """
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    paths = [Path(folder or ".").expanduser() / f"{stem}{end}" for end in (".yaml", ".yml")]
    file = next((path for path in paths if path.is_file()), None)
    if file is None and stem not in PACKAGED:
        raise UsageError(f"--config-name {name}: no such file as {paths[0]}. Fix it, or --config-path.")
    return str(file) if file else None
