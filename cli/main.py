"""The commands `megatron` and `swift`. Run by their names, or as `torchrun ... -m megaswift.cli.main megatron sft ...`.

Knows neither torch nor transformers: `megatron --help` answers at once. Imports what a command needs where it is run.
"""

import contextlib
import importlib
import inspect
import itertools
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from ..tasks.run.interrupt import EXIT_INTERRUPTED, finish
from ..tasks.system import console
from ..tasks.system.exit_guard import guarded_exit
from .flags import Flag, UsageError, flags_of, nearest, show


@dataclass(frozen=True)
class Command:
    summary: str
    options: str = ""  # the class in tasks/options; none, and no types: this version does not have the command
    task: str = ""  # the module in tasks/ whose `run(options, sources)` does it
    by: str = ""  # the flag that is read before the rest, and chooses one of `types`
    types: Mapping[str, "Command"] = field(default_factory=dict)  # the first: where it is left out

    @property
    def kinds(self) -> "Mapping[str, Command]":
        """Its types, or itself; nothing where this version does not have it."""
        return {"": self} if self.options else self.types


TASKS = {
    "causal_lm": Command("Supervised fine-tuning, on conversations.", "CausalLmOptions", "supervised.sft"),
    "seq_cls": Command("Classification and regression, by a head.", "SeqClsOptions", "supervised.heads"),
    "embedding": Command("Vectors of texts, by which they are found.", "EmbeddingOptions", "supervised.heads"),
    "reranker": Command("Scores of documents for a query, by a head.", "RerankerOptions", "supervised.heads"),
    "generative_reranker": Command(
        "Scores of documents for a query, by the odds of a yes and a no token.",
        "GenerativeRerankerOptions",
        "supervised.heads",
    ),
}
PREFERENCES = {
    "dpo": Command("DPO and its kin: a policy learns from pairs of answers.", "DpoOptions", "preference.preference"),
    "kto": Command(
        "KTO: a policy learns from single answers, each desirable or not.", "KtoOptions", "preference.preference"
    ),
    "rm": Command("A reward model learns from pairs of answers.", "RmOptions", "preference.preference"),
    "grpo": Command("GRPO: a policy learns from the rewards of what it generates.", "GrpoOptions", "rl.grpo"),
    "gkd": Command(
        "GKD: a student learns a teacher's distributions, also on what it generates.", "GkdOptions", "distillation.gkd"
    ),
}
COMMANDS = {
    "megatron": {
        "pt": Command("Continued pre-training, on plain text.", "PtOptions", "supervised.sft"),
        "sft": Command("Supervised fine-tuning; classifiers, embeddings, rerankers.", by="task_type", types=TASKS),
        "rlhf": Command("Learn from preferences and rewards.", by="rlhf_type", types=PREFERENCES),
        "export": Command(
            "Convert checkpoints, in any layout of processes.", "MegatronExportOptions", "convert.export"
        ),
    },
    "swift": {
        "infer": Command("Talk to a model, or let it answer a dataset.", "InferOptions", "infer"),
        "export": Command("Convert checkpoints to megatron-core's format and back.", "ExportOptions", "convert.export"),
        "rollout": Command("Serve a model to a training that generates.", "RolloutOptions", "rollout.serve"),
    },
}
ALSO = "--version prints the version, `doctor` reports what this machine has and lacks."
ABOUT = {
    "megatron": f"Train Hugging Face checkpoints with megatron-core, from a laptop's CPU to many GPUs. {ALSO}",
    "swift": f"Use and convert what was trained. {ALSO}",
}
USAGE = "[CONFIG.yaml] [--flag value ...]"
# What most runs set: help shows these before the rest.
FIRST = (
    "rlhf_type", "task_type", "model", "adapters", "dataset", "val_dataset", "output_dir", "max_length", "packing",
    "tuner_type", "lora_rank", "lr", "num_train_epochs", "train_iters", "global_batch_size", "micro_batch_size",
    "tensor_model_parallel_size", "resume_from_checkpoint", "reward_funcs", "teacher_model", "to_mcore", "to_hf",
    "stream", "dry_run",
)  # fmt: skip


def megatron() -> NoReturn:
    _end(main("megatron", sys.argv[1:]), at_once=True)


def swift() -> NoReturn:
    _end(main("swift", sys.argv[1:]), at_once=sys.argv[1:2] == ["export"])


def main(program: str, argv: list[str]) -> int:
    """Do what a command line asks for. The exit code: 2 where the line is wrong, 1 where the task fails."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # at once: another process may fail while this one is importing
        from .launch import end_with_torchrun, hidden_words

        end_with_torchrun()
        argv = [*argv, *hidden_words()]
    console.prepare_streams()
    try:
        return _guarded(program, argv)
    finally:
        console.stop_copy()


def _guarded(program: str, argv: list[str]) -> int:
    """Do what a command line asks for, and print what goes wrong."""
    try:
        return _main(program, argv)
    except UsageError as error:
        _say_once(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, RuntimeError) and "gloo/transport" in str(error):
            _say_once("error: another process of the run has ended. Its error, or torchrun's, says why.")
            return 1
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
            _say_once(
                f"error: a process that reads the data has ended ({str(error).rstrip('. ')}). Is the host short of "
                "memory? Set a lower --dataloader_num_workers, then resume the run."
            )
            return 1
        if not _for_users(error) or os.environ.get("MEGASWIFT_TRACEBACK"):
            sys.excepthook(type(error), error, error.__traceback__)  # here, so that console.log has it
            return 1
        _say_once(f"error: {error}")
        return 1
    finally:
        finish()


def _main(program: str, argv: list[str]) -> int:
    if argv == ["--version"]:
        from importlib.metadata import version

        print(f"{program} (megaswift {version('megaswift')})")
        return 0
    if argv == ["doctor"]:
        from .doctor import main as report

        return report()
    commands = COMMANDS[program]
    helped = not argv or "--help" in argv or "-h" in argv
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    if name not in commands and not (helped and not name):
        close = nearest(name, commands)
        hint = f" The nearest is {close}." if close else ""
        raise UsageError(f"{program} {argv[0]}: no such command.{hint} There are {', '.join(commands)}.")
    if helped:
        words = [word for word in argv[1:] if word not in ("--help", "-h")]
        chosen = _chosen(commands[name], words) if name else None
        words = [name, "--help"] if name else ["--help"]
        return _typer(program, name, chosen)(words, prog_name=program, standalone_mode=False)
    if not commands[name].kinds:
        there = [f"{each} {other}" for each in COMMANDS for other in COMMANDS[each] if COMMANDS[each][other].kinds]
        raise UsageError(f"{program} {name}: this version does not have it. It has {', '.join(there)}.")

    start = _start_export if name == "export" else _start_training if program == "megatron" else _start_here
    return start(_chosen(commands[name], argv[1:]), *read_options(program, argv), [program, *argv])


def _chosen(command: Command, words: list[str]) -> Command:
    """The type of a command that its flags ask for. Raises UsageError for one that is not there."""
    from .parse import value_of

    if not command.types:
        return command
    first, *_ = command.types
    value = value_of(command.by, words)
    if value is not None and value not in command.types:
        raise UsageError(f"{f'--{command.by} {value}'.strip()}: choose one of {', '.join(command.types)}.")
    return command.types[value or first]


def read_options(program: str, argv: list[str]) -> tuple[Any, dict[str, str], list[str]]:
    """The options of a command line (command and flags), where each value came from, and notes for the user.

    Raises UsageError.
    """
    from .parse import from_argv, from_config, resolve

    name = argv[0]
    chosen = _chosen(COMMANDS[program][name], argv[1:])
    options = _options(chosen)
    flags, others = flags_of(options), _flags_of_others(program, name, chosen)
    typed, config = from_argv(argv[1:], flags, others)
    filed = from_config(config, flags, others) if config else None
    given = _typer(program, name, chosen)([name, *_words(typed.values)], prog_name=program, standalone_mode=False)
    notes = typed.notes + (filed.notes if filed else [])
    return *resolve(options, given, filed), notes


@guarded_exit()
def _start_training(command: Command, options: Any, sources: dict[str, str], notes: list[str], argv: list[str]) -> int:
    from ..tasks.run.planning import ProcessLayout
    from .checks.common import check_lock, check_training, check_writable, folder_of
    from .launch import (
        Processes,
        environment,
        shown_command,
        start,
        under_torchrun,
        unseen_gpus,
        visible_gpus,
        wake_gpu,
    )

    if not options.dry_run:
        console.start_copy(shown_command(argv, {}))
    gpus = visible_gpus()
    notes += unseen_gpus(gpus)
    processes = Processes.of_environment(gpus)
    layout = ProcessLayout.of(options, processes.world)
    before = dict(vars(options))
    notes += check_training(options, layout, gpus, processes.per_node, sources)
    sources |= _derived(before, options)
    _tell(notes)
    settings = environment(options, processes, gpus)
    if options.dry_run:
        from .dry_run import report

        print(report(argv, options, sources, layout, processes, settings))
        return 0
    if not under_torchrun() and processes.node_rank == 0:
        check_writable(options)
        check_lock(options)
    start(processes, argv, settings, output=folder_of(options))
    wake_gpu(gpus)
    return _run(command, options, sources)


def _start_export(command: Command, options: Any, sources: dict[str, str], notes: list[str], argv: list[str]) -> int:
    from ..tasks.run.planning import ProcessLayout, build_options
    from .checks.export import check_export, check_export_layout, gpus_needed
    from .launch import Processes, environment, start, visible_gpus

    gpus = visible_gpus()
    before = dict(vars(options))
    config, said = check_export(options)
    notes += said
    sources |= _derived(before, options)
    if argv[0] == "megatron":
        processes = Processes.of_environment(gpus)
        layout = build_options(options)
        check_export_layout(options, ProcessLayout.of(layout, processes.world), config, gpus, processes.per_node)
        _tell(notes)
        start(processes, argv, environment(layout, processes, gpus))
    else:  # one process, or where a GPU is too small `megatron export` with as many as the model needs
        stages, flags, why = gpus_needed(options, config, gpus)
        _tell([*notes, *([why] if why else [])])
        start(Processes(stages), ["megatron", *argv[1:], *flags] if flags else argv, {})
    return _run(command, options, sources)


def _start_here(command: Command, options: Any, sources: dict[str, str], notes: list[str], argv: list[str]) -> int:
    from .checks.common import check_infer, check_rollout

    _tell([*notes, *(check_infer if argv[1] == "infer" else check_rollout)(options)])
    return _run(command, options, sources)


def _derived(before: dict[str, Any], options: Any) -> dict[str, str]:
    """The source of each option that the checks have changed."""
    return {name: "derived" for name, value in before.items() if getattr(options, name) != value}


def _run(command: Command, options: Any, sources: dict[str, str]) -> int:
    return importlib.import_module(f"..tasks.{command.task}", __package__).run(options, sources) or 0


def _options(command: Command) -> Any:
    return getattr(importlib.import_module("..tasks.options", __package__), command.options)


def _flags_of_others(program: str, name: str, chosen: Command) -> dict[str, str]:
    """The flags of other types and commands, each with what is said of it: of its own command first, then of that of
    the same name, then of others."""
    here, found = COMMANDS[program][name], {}
    for flag, kinds in _kinds_of_flags(here).items():
        this = next((kind for kind, each in here.types.items() if each is chosen), "")
        found[flag] = f"for --{here.by} {'|'.join(kinds)}, not for {this}. Leave it out."
    commands = [(each, other) for each in COMMANDS for other in COMMANDS[each]]
    for each, other in sorted(commands, key=lambda one: (one[1] != name, one[1] == "pt")):  # pt is the rarer one
        command, cure = COMMANDS[each][other], "Leave it out." if other != name else "Run that, or leave it out."
        for flag, kinds in _kinds_of_flags(command).items():
            only = f" --{command.by} {'|'.join(kinds)}" if len(kinds) < len(command.kinds) else ""
            found.setdefault(flag, f"a flag of `{each} {other}{only}`, not of this command. {cure}")
    return found


def _kinds_of_flags(command: Command) -> dict[str, list[str]]:
    """The flags of a command, each with the types that have it."""
    found: dict[str, list[str]] = {}
    for kind, each in command.kinds.items():
        for flag in flags_of(_options(each)):
            found.setdefault(flag, []).append(kind)
    return found


def _words(values: dict[str, Any]) -> list[str]:
    """--flag=value for each value: the spelling that typer reads."""
    return [
        f"--{name}={show(value)}"
        for name, given in values.items()
        for value in (given if isinstance(given, list) else [given])
    ]


def _typer(program: str, name: str, chosen: Command | None) -> typer.Typer:
    """The program for typer; only the chosen command gets its flags. It returns what was given, as text."""
    app = typer.Typer(help=ABOUT[program], add_completion=False, rich_markup_mode=None)
    app.callback()(lambda: None)
    for other, command in COMMANDS[program].items():

        def given(**values: Any) -> dict[str, Any]:
            return {name: value for name, value in values.items() if value is not None}

        this = chosen if chosen and other == name else command
        flags = flags_of(_options(this)).values() if this is chosen and this.options else ()
        parameters = [_parameter(flag) for flag in flags]
        given.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        given.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        grouped = type("GroupedHelp", (_GroupedHelp,), {"flags": tuple(flags)})
        app.command(other, help=this.summary, cls=grouped, options_metavar=USAGE)(given)
    return app


def _parameter(flag: Flag) -> inspect.Parameter:
    kind = list[str] if flag.is_list else str  # the values become what they are in `resolve`, as a config file's do
    option = typer.Option(f"--{flag.name}", help=flag.help, metavar=flag.metavar, rich_help_panel=flag.group)
    return inspect.Parameter(
        flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


class _GroupedHelp(TyperCommand):
    """Help with a section for each option class."""

    flags: tuple[Flag, ...]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        formatter.width = max(formatter.width, 100)
        by_name = {flag.name: flag for flag in self.flags}
        first = [by_name[name] for name in FIRST if name in by_name]
        rest = [flag for flag in self.flags if flag.name not in FIRST]
        sections = [("Set by most runs", first)] if first else []
        sections += [(group, list(flags)) for group, flags in itertools.groupby(rest, key=lambda flag: flag.group)]
        for group, flags in sections:
            with formatter.section(group):
                formatter.write_dl([(f"--{flag.name} {flag.metavar}", _described(flag)) for flag in flags], col_max=46)
        if self.flags:
            with formatter.section("Also"):
                formatter.write_dl([("--config FILE", "Flags from a YAML or JSON file, or from a run's args.json.")])


def _described(flag: Flag) -> str:
    return f"{flag.help} [{flag.shown_default}]" if flag.shown_default else flag.help


def _tell(notes: list[str]) -> None:
    from .launch import STARTED

    if not os.environ.get(STARTED) and os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(console.labelled(f"note: {note}", sys.stderr), file=sys.stderr)


def _end(code: int, *, at_once: bool = False) -> NoReturn:
    """Exit. Processes that have process groups do so `at_once`: all that counts is on the disk, and tidying up could
    wait for long, for other processes where this one has failed, else for its own threads and data loaders."""
    if at_once:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader of the pipe has exited
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _say_once(message: str) -> None:
    """Print an error. Where all processes of a node meet it at once, the first prints it and ends, upon which torchrun
    ends the others before they print it too."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(2)
    print(console.labelled(message, sys.stderr), file=sys.stderr, flush=True)


def _for_users(error: Exception) -> bool:
    """Whether the message says all: what a line of ours raised, of a kind that the rooms use for what a user can put
    right; or what the operating system says of a file. Set MEGASWIFT_TRACEBACK=1 to see where it came from."""
    if isinstance(error, OSError) and error.filename:
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_by_us = str(frame.f_globals.get("__name__")).startswith("megaswift.")
    return raised_by_us and isinstance(error, ValueError | OSError | ImportError | RuntimeError)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"Usage: torchrun ... -m megaswift.cli.main {'|'.join(COMMANDS)} COMMAND --flag value ...")
    _end(main(sys.argv[1], sys.argv[2:]), at_once="megatron" in sys.argv[1:2] or "export" in sys.argv[2:3])
