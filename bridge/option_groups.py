"""Option classes composed of groups, in which each field is one flag. Imports no torch.

    @dataclass
    class SftOptions:
        schedule: ScheduleOptions = group(ScheduleOptions)

    options = compose(SftOptions, lr=1e-4)
    options.schedule.lr == flag_values(options)["lr"]

Flag names are unique within a command. tasks/options has the option classes of the commands.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def group[T](option_class: Callable[..., T], **defaults: object) -> T:
    """Declare a group of options as a field of a dataclass; `defaults` override those of its class."""
    return dataclasses.field(default_factory=functools.partial(option_class, **defaults))


@functools.cache
def flag_paths(options: type) -> dict[str, str | None]:
    """Return the group of each flag of an option class, by flag name; None for fields of the class itself."""
    return {name: group_name for group_name, name in _flag_groups(options)}


def _flag_groups(options: type) -> Iterator[tuple[str | None, str]]:
    types = get_type_hints(options)
    for field in dataclasses.fields(options):
        if dataclasses.is_dataclass(types[field.name]):
            yield from ((field.name, group_field.name) for group_field in dataclasses.fields(types[field.name]))
        else:
            yield None, field.name


def group_of[T](options: object, option_class: type[T]) -> T | None:
    """Return the group of this type, or None if the options have none."""
    return next((value for value in vars(options).values() if isinstance(value, option_class)), None)


def flag_values(options: object) -> dict[str, Any]:
    """Return the value of each flag by name."""
    return {name: flag_value(options, name) for name in flag_paths(type(options))}


def flag_value(options: object, name: str, *default: object) -> Any:
    """Return the value of one flag. If the options lack it: return `default`, or raise KeyError without a default."""
    paths = flag_paths(type(options))
    if default and name not in paths:
        return default[0]
    group_name = paths[name]
    return getattr(getattr(options, group_name) if group_name else options, name)


def compose[T](options: type[T], **flags: object) -> T:
    """Return an instance of an option class with these flag values. Raises KeyError for an unknown name."""
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
    """Return a copy of the options with these flags changed."""
    return compose(type(options), **flag_values(options) | flags)
