"""`megatron run` and `megatron convert`: the config of another system as a command of this one."""

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ...templates.plural import plural
from ..flags import Flag, OptionValue, UsageError
from ..launch import under_torchrun
from ..parse import ParsedFlags, split_words
from .keys import Keys, Tree, read_tree
from .run_words import MODULES, RunWords, read_words
from .translation import Dialect, Translation, check, translate

# Dialect -> module and name in it.
DIALECTS = {
    "verl": ("verl", "VERL"),
    "siirl": ("verl", "SIIRL"),
    "trinity": ("trinity", "TRINITY"),
    "roll": ("roll", "ROLL"),
    "oumi": ("oumi", "OUMI"),
}
ROLL_ROLES = ("actor_train", "sft_train", "student", "student_train")


def find_dialect(path: str) -> str | None:
    """Return the dialect of a config file, or None where it is of this project or cannot be read."""
    try:
        return recognise(read_tree(path, [])[0], path)
    except UsageError:
        return None


def recognise(tree: Tree, file: str) -> str | None:
    """Return the dialect of a config by its root keys, or None for a config of this project.

    Raises UsageError if none or several fit.
    """
    buffer = "buffer" in tree and ("explorer" in tree or "cluster" in tree)
    training = tree.get("training")
    fits = {
        "verl": "actor_rollout_ref" in tree,
        "trinity": buffer,
        "roll": any(isinstance(tree.get(name), Mapping) and "strategy_args" in tree[name] for name in ROLL_ROLES),
        "oumi": isinstance(training, Mapping) and "trainer_type" in training,
    }
    names = [name for name, fit in fits.items() if fit]
    if len(names) > 1:
        raise UsageError(f"{file}: has the keys of {' and '.join(names)}. Remove those of all but one.")
    if names:
        return names[0]
    nested = [name for name, value in tree.items() if isinstance(value, Mapping) and name not in ("ENV", "options")]
    if not nested or "options" in tree:
        return None
    raise UsageError(
        f"{file}: not a config of a known system. It has neither actor_rollout_ref (verl, siiRL), nor buffer with "
        f"explorer or cluster (Trinity-RFT), nor strategy_args in one of {', '.join(ROLL_ROLES)} (ROLL), nor "
        f"training.trainer_type (Oumi), and is no flat table of flags, because {nested[0]} is a table."
    )


@dataclass
class ForeignConfig:
    """Config of another system, translated."""

    words: RunWords
    translation: Translation

    def parsed_flags(self, flags: Mapping[str, Flag], hints: Mapping[str, str]) -> ParsedFlags:
        """Return the flags as if they were of a config file. Raises UsageError for a flag of another command."""
        for name in self.translation.flags:
            if name not in flags:
                hint = hints.get(name, "no such flag.")
                raise UsageError(f"{self.translation.sources[name]}: is --{name} here: {hint}")
        return ParsedFlags({**self.translation.flags}, {**self.translation.sources})

    def set_processes(self) -> None:
        """Set NPROC_PER_NODE to the processes that the config asks for.

        Raises UsageError if the environment asks for another number of processes or nodes.
        """
        total, nodes, file = self.translation.processes, self.translation.nodes, self.translation.file
        if total is None:
            return
        if under_torchrun():
            if os.environ["WORLD_SIZE"] != str(total):
                raise UsageError(
                    f"{file}: asks for {total} training processes, but torchrun started "
                    f"{os.environ['WORLD_SIZE']}. Start {total}, or override the config's number of GPUs."
                )
            return
        if os.environ.get("NNODES", "1") != str(nodes):
            raise UsageError(
                f"{file}: asks for {plural(nodes, 'node')}, but NNODES={os.environ.get('NNODES', '1')}. Set "
                f"NNODES={nodes}, and NODE_RANK and MASTER_ADDR on each node, or override the config's number of nodes."
            )
        per_node = os.environ.setdefault("NPROC_PER_NODE", str(total // nodes))
        if per_node != str(total // nodes):
            raise UsageError(
                f"{file}: asks for {total // nodes} training processes on each node, but NPROC_PER_NODE={per_node}. "
                "Unset it, or override the config's number of GPUs."
            )

    def summary(self) -> str:
        """Return one line: how many keys became what."""
        translation = self.translation
        return (
            f"{translation.file} is a {translation.dialect} config: {plural(len(translation.flags), 'flag')}, "
            f"{plural(len(translation.needless), 'key')} without effect here, {len(translation.notes)} noted"
        )

    def as_yaml(self) -> str:
        """Return a config file of this project, with the source of each flag as a comment."""
        import yaml

        translation = self.translation
        flags: dict[str, tuple[OptionValue, str]] = {
            name: (value, translation.sources[name]) for name, value in translation.flags.items()
        }
        for name, values in split_words(self.words.flags)[0]:
            value: OptionValue = [*values] if len(values) > 1 else values[0] if values else True
            flags[name] = value, "command line"
        lines = [
            f"# {translation.dialect} config {translation.file}, translated: megatron {translation.command} THIS_FILE",
            *(f"# noted: {note}" for note in translation.notes),
        ]
        if translation.processes is not None:
            lines += ["ENV:", f"  NPROC_PER_NODE: {translation.processes // translation.nodes}"]
            if translation.nodes > 1:
                lines.append(f"  NNODES: {translation.nodes}  # on each node, with NODE_RANK and MASTER_ADDR")
        for name, (value, source) in flags.items():
            text = yaml.safe_dump(
                {name: value}, default_flow_style=True, width=sys.maxsize, allow_unicode=True, sort_keys=False
            )
            lines.append(f"{text.strip()[1:-1]}  # {' '.join(source.split())}")
        lines += [f"# without effect: {key} ({why})" for key, why in translation.needless.items()]
        return "\n".join(lines) + "\n"


def read_config(argv: list[str]) -> ForeignConfig:
    """Return the config that the words of `megatron run` name, translated.

    Raises UsageError with every refused key.
    """
    words = read_words(argv)
    translation = translate_words(words)
    check(translation)
    return ForeignConfig(words, translation)


def translate_words(words: RunWords) -> Translation:
    """Return the translation of a config, with the keys that are refused.

    Raises UsageError for a config that cannot be read, or is of no known system.
    """
    tree, problems = read_tree(words.file, words.overrides)
    name = MODULES[words.module] if words.module else recognise(tree, words.file or "")
    if name == "verl" and not words.module:
        from .verl import system_of

        name = system_of(tree, words.file or "")
    if name is None:
        if not tree:
            raise UsageError(f"{words.file}: is empty. Fix the path.")
        raise UsageError(
            f"{words.file}: a config of this project. Run it with megatron rlhf {words.file}, or pt or sft."
        )
    keys = Keys(tree, words.file or "command line", frozenset(_key(word) for word in words.overrides))
    translation = translate(load_dialect(name), keys)
    translation.refused[:0] = problems
    typed_flags = {word.partition("=")[0].removeprefix("--") for word in words.flags if word.startswith("--")}
    translation.refused += [text for flag, text in translation.needed_flags.items() if flag not in typed_flags]
    return translation


def load_dialect(name: str) -> Dialect:
    module, attribute = DIALECTS[name]
    return getattr(importlib.import_module(f".{module}", __package__), attribute)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
