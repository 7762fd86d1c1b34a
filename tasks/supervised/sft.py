"""`megatron sft` and `megatron pt`: next-token training of language models."""

from ..options import SftOptions
from ..train.objective import sft
from ..train.setup import train


def run(options: SftOptions, sources: dict[str, str]) -> int:
    """Run the task and return its exit code. sources: where each option's value came from, for args.json."""
    return train(options, sources, lambda run, model, *_: (sft(model), []))
