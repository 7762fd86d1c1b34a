"""Features of images and videos in the language model: in place of embeddings, and added behind its first layers."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


@dataclass(frozen=True)
class MediaFeatures:
    """Features of the visual tokens that this rank holds, for a micro batch. See model/vision_encoder.py.

    positions: [tokens] int64, indices into the hidden states [sequence * batch] of this rank. levels: [tokens,
    hidden_size] by level. Level 0 replaces embeddings; level n is added to the output of the n-th layer of the model.
    """

    positions: Tensor
    levels: dict[int, Tensor]

    def replace_embeddings(self, embeddings: Tensor) -> Tensor:
        """embeddings [sequence, batch, hidden_size] -> the same shape."""
        flat = embeddings.flatten(0, 1)
        return flat.index_copy(0, self.positions, self.levels[0].to(flat.dtype)).view(embeddings.shape)

    def add_to(self, hidden_states: Tensor, level: int) -> Tensor:
        """hidden_states [sequence, batch, hidden_size] -> the same shape."""
        flat = hidden_states.flatten(0, 1)
        output = flat.index_add(0, self.positions, self.levels[level].to(flat.dtype)).view(hidden_states.shape)
        # The pipeline schedule frees the data of a stage's output, which must not be a view.
        return make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)


class DeepStackLayer(TransformerLayer):
    """Layer that adds features to its output: DeepStack, https://arxiv.org/abs/2406.04334."""

    def forward(self, *args, **kwargs):
        hidden_states, context = super().forward(*args, **kwargs)
        media: MediaFeatures | None = kwargs["packed_seq_params"].media
        if media is not None:
            assert isinstance(hidden_states, Tensor)
            hidden_states = media.add_to(hidden_states, self.layer_number)
        return hidden_states, context
