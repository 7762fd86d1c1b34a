"""Options by composition: a command's options are groups, and each field of a group is one flag. No torch.

    @dataclass
    class SftOptions:
        schedule: ScheduleOptions = group(ScheduleOptions)

    options = compose(SftOptions, lr=1e-4)
    options.schedule.lr == flag_values(options)["lr"]

The names of flags are unique in a command. The option classes of commands are in tasks/options.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def group[T](kind: Callable[..., T], **defaults: object) -> T:
    """Declare a group of options as a field of a dataclass; `defaults` replace those of its class."""
    return dataclasses.field(default_factory=functools.partial(kind, **defaults))


@functools.cache
def flag_paths(options: type) -> dict[str, str | None]:
    """Return the flags of an option class by name, each with the group that it is in; None: in the class itself."""
    return {name: owner for owner, name in _paths(options)}


def _paths(options: type) -> Iterator[tuple[str | None, str]]:
    kinds = get_type_hints(options)
    for field in dataclasses.fields(options):
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from ((field.name, inner.name) for inner in dataclasses.fields(kinds[field.name]))
        else:
            yield None, field.name


def group_of[T](options: object, kind: type[T]) -> T | None:
    """Return the group of this type; None where the options have none."""
    return next((value for value in vars(options).values() if isinstance(value, kind)), None)


def flag_values(options: object) -> dict[str, Any]:
    """Return the value of each flag by name."""
    return {name: flag_value(options, name) for name in flag_paths(type(options))}


def flag_value(options: object, name: str, *default: object) -> Any:
    """Return the value of one flag. A name that the options lack: `default`, or KeyError without one."""
    paths = flag_paths(type(options))
    if default and name not in paths:
        return default[0]
    owner = paths[name]
    return getattr(getattr(options, owner) if owner else options, name)


def compose[T](options: type[T], **flags: object) -> T:
    """Return an instance of an option class with these flags, by name. Raises KeyError for an unknown name."""
    paths, values = flag_paths(options), {}
    for name, value in flags.items():
        values.setdefault(paths[name], {})[name] = value
    arguments = values.pop(None, {})
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        if field.name in values:
            assert field.default_factory is not dataclasses.MISSING
            arguments[field.name] = dataclasses.replace(field.default_factory(), **values[field.name])
    return options(**arguments)


def with_flags[T](options: T, **flags: object) -> T:
    """Return a copy of options in which these flags have other values."""
    return compose(type(options), **flag_values(options) | flags)
