"""The typer app of a command line: help in groups, values as they are typed, and completion by a shell."""

import contextlib
import inspect
import itertools
import os
from typing import Annotated

import click
import typer
from typer.core import TyperCommand

from .commands import ABOUT, COMMANDS, FIRST, USAGE, Command
from .flags import Flag, OptionValue, UsageError, flags_of

COMPLETION = ["--install-completion"], ["--show-completion"]


def select(command: Command, words: list[str]) -> Command:
    """Return the type of a command that its flags select. Raises UsageError for an unknown type."""
    from .parse import value_of

    if not command.types:
        return command
    first, *_ = command.types
    value = value_of(command.by, words)
    if value is not None and value not in command.types:
        raise UsageError(f"{f'--{command.by} {value}'.strip()}: choose one of {', '.join(command.types)}.")
    return command.types[value or first]


def build_app(program: str, name: str, selected: Command | None, *, completes: bool = False) -> typer.Typer:
    """Return the typer app, whose commands return raw values. Only the selected command has flags."""
    app = typer.Typer(help=ABOUT[program], add_completion=completes, rich_markup_mode=None)
    app.callback()(lambda: None)
    for command_name, command in COMMANDS[program].items():

        def collect(**values: OptionValue) -> dict[str, OptionValue]:
            return {name: value for name, value in values.items() if value is not None}

        displayed = selected if selected and command_name == name else command
        flags = flags_of(displayed.option_class).values() if displayed is selected and displayed.options else ()
        parameters = [_parameter(flag, completes=completes) for flag in flags]
        collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        collect.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        grouped = type("GroupedHelp", (GroupedHelp,), {"flags": tuple(flags)})
        app.command(command_name, help=displayed.summary, cls=grouped, options_metavar=USAGE)(collect)
    return app


def complete_line(program: str, argv: list[str]) -> int:
    """Install or print shell completion, or answer a shell that completes a line (typer's protocol)."""
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    name, *words = [*line.split()[1:], ""]
    command = COMMANDS[program].get(name)
    selected = None
    if command:
        selected = next(iter(command.types.values()), command)
        with contextlib.suppress(UsageError):  # the type is not typed out yet
            selected = select(command, words[:-1])
    app = build_app(program, name, selected, completes=True)
    app.command("doctor", help="Check this machine.")(lambda: None)
    return app(argv, prog_name=program, standalone_mode=False) or 0


def _parameter(flag: Flag, *, completes: bool) -> inspect.Parameter:
    kind = list[str] if flag.is_list else str  # `resolve` converts values, those of a config file too
    values = flag.choices if completes else []

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    option = typer.Option(
        f"--{flag.name}",
        help=flag.help,
        metavar=flag.metavar,
        rich_help_panel=flag.group,
        autocompletion=complete if values else None,
    )
    return inspect.Parameter(
        flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


class GroupedHelp(TyperCommand):
    """Command whose help has a section per option class."""

    flags: tuple[Flag, ...]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
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
