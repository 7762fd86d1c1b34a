"""Options of plugins. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated


@dataclass
class PluginOptions:
    """Plugins"""

    external_plugins: Annotated[
        list[str], "Python files in which rewards, schedulers, environments, tools and callbacks are registered."
    ] = field(default_factory=list)
    callbacks: Annotated[
        list[str], "Training callbacks of --external_plugins, called at steps, log lines, evaluations and checkpoints."
    ] = field(default_factory=list)
