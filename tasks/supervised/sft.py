"""`megatron sft` and `megatron pt`: train on the next token."""

from ..options import SftOptions
from ..train.objective import sft
from ..train.setup import train


def run(options: SftOptions, sources: dict[str, str]) -> int:
    """Do what the options say. `sources`: where each option's value came from, for args.json. Returns the exit code."""
    return train(options, sources, lambda run, model, *_: (sft(model), []))
