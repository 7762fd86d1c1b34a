"""Checks of plugins."""

from ...tasks.options import SftOptions
from ..flags import usage_errors


def check_plugins(options: SftOptions) -> None:
    """Import the plugins. Raises UsageError for one that cannot be imported."""
    if not options.plugins.external_plugins:
        return
    from ...tasks.system.plugins import load_plugins

    with usage_errors():
        load_plugins(options.plugins.external_plugins)
