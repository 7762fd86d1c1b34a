"""Tasks: training, generation, export and what they share."""

from .. import bridge as bridge  # sets up what megatron-core's import does
