"""Checks of plugins."""

from collections.abc import Iterator

from ...tasks.options import SftOptions
from ..flags import show, usage_errors


def check_plugins(options: SftOptions) -> Iterator[str]:
    """Import the plugins. Raises UsageError for one that cannot be imported. Yields notes."""
    plugins = options.plugins
    if plugins.external_plugins:
        from ...tasks.system.plugins import load_plugins

        with usage_errors():
            load_plugins(plugins.external_plugins)
    if plugins.callbacks:
        from ...tasks.train.callback_registry import check_callbacks

        with usage_errors():
            check_callbacks(plugins.callbacks)
    elif plugins.external_plugins and not options.generates:
        files = show(plugins.external_plugins)
        yield f"--external_plugins {files}: nothing of it is used. Set --callbacks, or remove it."
