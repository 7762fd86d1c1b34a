"""`megatron sft` and `megatron pt`: next-token training of language models."""

from ...bridge.model.model import Model
from ...bridge.option_groups import group_of
from ...templates.batching.dataloader import Batches
from ..options import SftOptions
from ..options.groups import TokenLossOptions
from ..run.context import Run
from ..train.objective import Objective, sft
from ..train.setup import train
from .channel_loss import with_channels


def run(options: SftOptions, sources: dict[str, str]) -> int:
    """Run the task and return its exit code. sources: where each option's value came from, for args.json."""
    return train(options, sources, make_sft)


def make_sft(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective, and notes for the log."""
    is_dynamic = (group_of(run.options, TokenLossOptions) or TokenLossOptions()).enable_dft_loss
    objective = sft(model, is_dynamic=is_dynamic)
    if not run.options.data.enable_channel_loss:
        return objective, []
    datasets = [data for data in (train, val) if data]
    channels = sorted(set().union(*(data.channels() for data in datasets)))
    if not channels:
        raise ValueError("--enable_channel_loss true: no row has a column `channel`. Add it, or remove the flag")
    for data in datasets:
        data.number_channels(channels)
    return with_channels(objective, channels, is_dynamic=is_dynamic), [f"channels: {', '.join(channels)}"]
