"""Commands `megatron` and `swift`, also run as `torchrun ... -m megaswift.cli.main megatron sft ...`.

Imports neither torch nor transformers, so that `megatron --help` is fast: a command's task is imported when it runs.
"""

import contextlib
import importlib
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from ..bridge.imports import without_collection
from ..bridge.option_groups import flag_values
from ..tasks.run.interrupt import EXIT_INTERRUPTED, finish
from ..tasks.system import console
from ..tasks.system.exit_guard import guarded_exit
from .app import COMPLETION, build_app, complete_line, select
from .commands import COMMANDS, Command
from .flags import OptionValue, UsageError, flags_of, nearest, show

if TYPE_CHECKING:
    from .dialects.run import ForeignConfig

type Sources = dict[str, str]  # source of each option's value
type Options = Any  # instance of the command's option class


def megatron() -> NoReturn:
    _exit(main("megatron", sys.argv[1:]), at_once=True)


def swift() -> NoReturn:
    _exit(main("swift", sys.argv[1:]), at_once=sys.argv[1:2] == ["export"])


def main(program: str, argv: list[str]) -> int:
    """Run a command line. Return its exit code: 2 for invalid options, 1 if the task fails."""
    # Before the imports, during which another process may fail. The second: launch.HIDDEN, of a server, too.
    if os.environ.keys() & {"TORCHELASTIC_RUN_ID", "MEGASWIFT_HIDDEN_WORDS"}:
        from .launch import end_with_torchrun, hidden_words

        end_with_torchrun()
        argv = [*argv, *hidden_words()]
    console.prepare_streams()
    try:
        return _guarded(program, argv)
    finally:
        console.stop_copy()


def _guarded(program: str, argv: list[str]) -> int:
    """Run a command line, and print its error."""
    try:
        return _main(program, argv)
    except UsageError as error:
        _print_error(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, RuntimeError) and "gloo/transport" in str(error):
            _print_error("error: another rank exited. See its error, or torchrun's, above.")
            return 1
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
            _print_error(
                f"error: a data loader worker exited ({str(error).rstrip('. ')}). If the host is out of memory, set a "
                "lower --dataloader_num_workers, then resume the run."
            )
            return 1
        if not _is_for_users(error) or os.environ.get("MEGASWIFT_TRACEBACK"):
            sys.excepthook(type(error), error, error.__traceback__)  # so that console.log contains it
            return 1
        _print_error(f"error: {error}")
        return 1
    finally:
        finish()


def _main(program: str, argv: list[str]) -> int:
    if argv == ["--version"]:
        from importlib.metadata import version

        print(f"{program} (megaswift {version('megaswift')})")
        return 0
    if argv[:1] in COMPLETION or f"_{program.upper()}_COMPLETE" in os.environ:
        return complete_line(program, argv)
    if argv[:1] == ["doctor"]:
        from .doctor import main as report

        return report(argv[1:])
    commands = COMMANDS[program]
    wants_help = not argv or "--help" in argv or "-h" in argv
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    if name not in commands and not (wants_help and not name):
        close = nearest(name, commands)
        hint = f" The nearest is {close}." if close else ""
        raise UsageError(f"{program} {argv[0]}: no such command.{hint} Use one of {', '.join(commands)}.")
    if wants_help:
        words = [word for word in argv[1:] if word not in ("--help", "-h")]
        selected = select(commands[name], words) if name else None
        words = [name, "--help"] if name else ["--help"]
        return build_app(program, name, selected)(words, prog_name=program, standalone_mode=False)
    if name == "tune":
        return _run_tune(argv)
    is_training = program == "megatron" and name not in ("plan", "report")
    start = _run_export if name == "export" else _run_training if is_training else _run_in_process
    argv = _expanded(program, argv)
    config = _read_foreign(argv)
    options, sources, notes = read_options(program, argv, config)
    if config:
        if name == "convert":
            print(config.as_yaml(), end="")
            return 0
        config.set_processes()
        notes = [config.summary(), *config.translation.notes, *notes]
    return start(_selected(program, argv, config), options, sources, notes, [program, *argv])


def _run_tune(argv: list[str]) -> int:
    """Run `megatron tune`, whose words are its own and those of the run. argv: command and flags"""
    from .tune import run, split_tune_words

    tune_words, run_words = split_tune_words(argv[1:])
    tune, _, _ = read_options("megatron", ["tune", *tune_words])
    earlier = set(os.environ)
    options, sources, notes = read_options("megatron", [tune.command, *run_words])
    _print_notes(notes)
    variables = {name: value for name, value in os.environ.items() if name not in earlier}  # set by the config file
    return run(tune, options, sources, variables)


def _read_foreign(argv: list[str]) -> "ForeignConfig | None":
    """Return the translated config of `megatron run` or `megatron convert`, None for another command."""
    if argv[0] not in ("run", "convert"):
        return None
    from .dialects.run import read_config

    return read_config(argv[1:])


def _selected(program: str, argv: list[str], config: "ForeignConfig | None") -> Command:
    """Return the type of the command that flags or a translated config select."""
    if not config:
        return select(COMMANDS[program][argv[0]], argv[1:])
    command = COMMANDS[program][config.translation.command]
    kind = config.translation.flags.get(command.by)
    return command.types[str(kind)] if kind else select(command, config.words.flags)


def _expanded(program: str, argv: list[str]) -> list[str]:
    """Return a command line with its first word as a flag, and `--load_args true` of a training command expanded."""
    from .parse import CONFIG_FILE
    from .saved_args import expand_load_args

    flag = COMMANDS[program][argv[0]].positional
    if flag and len(argv) > 1 and not argv[1].startswith("-") and not argv[1].endswith(CONFIG_FILE):
        argv = [argv[0], f"--{flag}", *argv[1:]]
    trains = program == "megatron" and argv[0] in ("pt", "sft", "rlhf")
    return [argv[0], *expand_load_args(argv[1:])] if trains else argv


def read_options(
    program: str, argv: list[str], foreign: "ForeignConfig | None" = None
) -> tuple[Options, Sources, list[str]]:
    """Return the options of a command line (command and flags), the source of each value, and notes for the user.

    foreign: config of `megatron run`, in the place of a config file
    Raises UsageError.
    """
    from .parse import from_argv, from_config, ignores_unknown, resolve

    argv = _expanded(program, argv)
    selected = _selected(program, argv, foreign)
    if foreign:
        argv = [foreign.translation.command, *foreign.words.flags]
    name = argv[0]
    options = selected.option_class
    flags, hints = flags_of(options), _hints_for_other_flags(program, name, selected)
    lenient = ignores_unknown(argv[1:])
    typed, config = from_argv(argv[1:], flags, hints, ignores_unknown=lenient)
    try:
        from_file = from_config(config, flags, hints, ignores_unknown=lenient) if config else None
    except UsageError:
        _check_own_config(config)
        raise
    if foreign:
        from_file = foreign.parsed_flags(flags, hints)
    values = build_app(program, name, selected)([name, *_words(typed.values)], prog_name=program, standalone_mode=False)
    notes = typed.notes + (from_file.notes if from_file else [])
    resolved, sources = resolve(options, values, from_file, typed.spellings)
    if claims := (from_file.claims if from_file else {}) | typed.claims:
        from .checks.agreement import check_agreement

        notes += check_agreement(resolved, claims)
    return resolved, sources, notes


def _check_own_config(path: str | None) -> None:
    """Raise UsageError for a config file of another system."""
    from .dialects.run import find_dialect

    if path and (dialect := find_dialect(path)):
        raise UsageError(f"--config {path}: is a config of {dialect}. Run it with megatron run {path}.") from None


@guarded_exit()
def _run_training(command: Command, options: Options, sources: Sources, notes: list[str], argv: list[str]) -> int:
    from ..tasks.run.planning import ProcessLayout
    from .auto_plan import plan_run
    from .checks.common import check_lock, check_training, check_writable, output_folder
    from .launch import open_gpu, shown_command, under_torchrun, unseen_gpus
    from .training_launch import TrainingLaunch

    if not options.training.dry_run:
        console.start_copy(shown_command(argv, {}))
    launch = TrainingLaunch.of(options)
    notes += unseen_gpus(launch.gpus)
    options, words, plan_notes = plan_run(options, sources, launch)
    argv, notes = [*argv, *words], [*notes, *plan_notes]
    layout = ProcessLayout.of(options.build, launch.processes.world)
    before = flag_values(options)
    notes += check_training(options, layout, launch.gpus, launch.processes.per_node, sources)
    sources |= _derived(before, options)
    _print_notes(notes)
    launch.complete(options)
    if options.training.dry_run:
        from .dry_run import report

        print(report(argv, options, sources, layout, launch))
        return 0
    if not under_torchrun() and launch.processes.node_rank == 0:
        check_writable(options)
        check_lock(options)
    if (code := launch.start(argv, options, output_folder(options))) is not None:
        return code
    open_gpu(launch.gpus)
    return _run(command, options, sources)


def _run_export(command: Command, options: Options, sources: Sources, notes: list[str], argv: list[str]) -> int:
    from ..tasks.run.planning import ProcessLayout, build_options
    from .checks.export import check_export, check_export_layout, gpus_needed
    from .launch import Processes, environment, start, visible_gpus

    gpus = visible_gpus()
    before = flag_values(options)
    config, export_notes = check_export(options)
    notes += export_notes
    sources |= _derived(before, options)
    if argv[0] == "megatron":
        processes = Processes.of_environment(gpus)
        layout = build_options(options)
        check_export_layout(options, ProcessLayout.of(layout, processes.world), config, gpus, processes.per_node)
        _print_notes(notes)
        start(processes, argv, environment(layout, processes, gpus))
    else:  # one process, or `megatron export` on as many GPUs as hold the model
        stages, flags, reason = gpus_needed(options, config, gpus)
        _print_notes([*notes, *([reason] if reason else [])])
        start(Processes(stages), ["megatron", *argv[1:], *flags] if flags else argv, {})
    return _run(command, options, sources)


def _run_in_process(command: Command, options: Options, sources: Sources, notes: list[str], argv: list[str]) -> int:
    from .checks.common import check_infer, check_recipe, check_report, check_rollout
    from .checks.plan import check_plan

    checks = {
        "infer": check_infer,
        "rollout": check_rollout,
        "prepare": check_recipe,
        "plan": check_plan,
        "report": check_report,
    }
    check = checks[argv[1]]
    _print_notes([*notes, *check(options)])
    return _run(command, options, sources)


def _derived(before: dict[str, Any], options: Options) -> dict[str, str]:
    """Return the source of each option that the checks have changed."""
    return {name: "derived" for name, value in flag_values(options).items() if before[name] != value}


def _run(command: Command, options: Options, sources: Sources) -> int:
    with without_collection():
        task = importlib.import_module(f"..tasks.{command.task}", __package__)
    return task.run(options, sources) or 0


def _hints_for_other_flags(program: str, name: str, selected: Command) -> dict[str, str]:
    """Return the flags of other types and commands, each with the rest of its error message.

    Types of the same command take precedence, then commands of the same name.
    """
    command, hints = COMMANDS[program][name], {}
    for flag, kinds in _kinds_of_flags(command).items():
        current = next((kind for kind, other in command.types.items() if other is selected), "")
        hints[flag] = f"only for --{command.by} {'|'.join(kinds)}, not {current}. Remove it."
    commands = [(other_program, other) for other_program in COMMANDS for other in COMMANDS[other_program]]
    # pt last, because other training commands are more common.
    for other_program, other in sorted(commands, key=lambda pair: (pair[1] != name, pair[1] == "pt")):
        command, fix = COMMANDS[other_program][other], "Remove it." if other != name else "Use that, or remove it."
        for flag, kinds in _kinds_of_flags(command).items():
            only = f" --{command.by} {'|'.join(kinds)}" if len(kinds) < len(command.kinds) else ""
            hints.setdefault(flag, f"a flag of `{other_program} {other}{only}`, not of this command. {fix}")
    return hints


def _kinds_of_flags(command: Command) -> dict[str, list[str]]:
    """Return the flags of a command, each with the command's types that have it."""
    kinds_of: dict[str, list[str]] = {}
    for kind, member in command.kinds.items():
        for flag in flags_of(member.option_class):
            kinds_of.setdefault(flag, []).append(kind)
    return kinds_of


def _words(values: dict[str, OptionValue]) -> list[str]:
    """Return --flag=value for each value, the form that typer reads."""
    return [
        f"--{name}={show(item)}"
        for name, value in values.items()
        for item in (value if isinstance(value, list) else [value])
    ]


def _print_notes(notes: list[str]) -> None:
    from .launch import STARTED

    if not os.environ.get(STARTED) and os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(console.color_label(f"note: {note}", sys.stderr), file=sys.stderr)


def _exit(code: int, *, at_once: bool = False) -> NoReturn:
    """Exit; `at_once`: skip cleanup, which could wait for other processes of the group. All files are written."""
    if at_once:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader of the pipe has exited
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _print_error(message: str) -> None:
    """Print an error. If all ranks of a node fail, torchrun ends ranks other than local rank 0 before they print."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(2)
    print(console.color_label(message, sys.stderr), file=sys.stderr, flush=True)


def _is_for_users(error: Exception) -> bool:
    """Return whether an error needs no traceback: raised by megaswift for the user, or by the OS about a file.

    MEGASWIFT_TRACEBACK=1 prints the traceback anyway.
    """
    if isinstance(error, OSError) and error.filename:
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_raised_here = str(frame.f_globals.get("__name__")).startswith("megaswift.")
    return is_raised_here and isinstance(error, ValueError | OSError | ImportError | RuntimeError)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"Usage: torchrun ... -m megaswift.cli.main {'|'.join(COMMANDS)} COMMAND --flag value ...")
    _exit(main(sys.argv[1], sys.argv[2:]), at_once="megatron" in sys.argv[1:2] or "export" in sys.argv[2:3])
