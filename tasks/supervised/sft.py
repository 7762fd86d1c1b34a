"""`megatron sft` and `megatron pt`: next-token training of language models."""

from ...bridge.option_groups import group_of
from ..options import SftOptions
from ..options.groups import TokenLossOptions
from ..train.objective import sft
from ..train.setup import train


def run(options: SftOptions, sources: dict[str, str]) -> int:
    """Run the task and return its exit code. sources: where each option's value came from, for args.json."""
    token_loss = group_of(options, TokenLossOptions) or TokenLossOptions()
    return train(options, sources, lambda run, model, *_: (sft(model, is_dynamic=token_loss.enable_dft_loss), []))
