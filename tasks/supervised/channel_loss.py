"""Mean loss of each channel of the rows: --enable_channel_loss."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...templates.batching.collator import Batch
from ..losses.tokens import weigh_by_probability
from ..train.objective import Objective, means


class ChannelLoss:
    """Loss of an objective, with the loss of each channel among its metrics.

    is_dynamic: log the weighted loss of --enable_dft_loss
    """

    def __init__(self, objective: Objective, channels: Sequence[str], *, is_dynamic: bool):
        self._loss, self._channels, self._is_dynamic = objective.loss, channels, is_dynamic
        self._sums = [f"channel_loss/{channel}" for channel in channels]
        self._weights = [f"channel_weight/{channel}" for channel in channels]
        self.names = [*self._sums, *self._weights]

    def __call__(self, batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self._loss(batch, log_probs)
        log_probs = log_probs.detach()
        log_probs = weigh_by_probability(log_probs) if self._is_dynamic else log_probs
        weights = (batch.loss_weights / max(batch.loss_tokens, 1.0)).flatten()
        sums = weights.new_zeros(2, len(self._channels) + 1)  # the first column is of rows without a channel
        if batch.channels is not None:
            columns = batch.channels.flatten() + 1
            sums[0].index_add_(0, columns, -weights * log_probs.float().flatten())
            sums[1].index_add_(0, columns, weights)
        return loss, metrics | dict(zip(self.names, sums[:, 1:].flatten(), strict=True))

    def means(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        """Return the means of metrics, with `loss_<channel>` for channels that have a trained token."""
        others = means({name: value for name, value in sums.items() if name not in self.names}, weight)
        channels = zip(self._channels, self._sums, self._weights, strict=True)
        return others | {f"loss_{channel}": sums[a] / sums[b] for channel, a, b in channels if sums[b]}


def with_channels(objective: Objective, channels: Sequence[str], *, is_dynamic: bool) -> Objective:
    """Return an objective that also logs the loss of each channel."""
    loss = ChannelLoss(objective, channels, is_dynamic=is_dynamic)
    return replace(objective, loss=loss, names=[*objective.names, *loss.names], means=loss.means)
