"""Cost of an audio tower."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...bridge.mapping.architecture import Audio


@dataclass(frozen=True)
class AudioFlops:
    """Cost of an audio tower. Counts its matrix products, its convolutions, and attention within blocks."""

    convolutions: int  # products of weights for a chunk
    chunk: int  # frames
    positions: int  # positions per chunk
    block: int  # positions that attend to each other
    layers: int  # weights that a position is multiplied by
    merger: int  # those that a feature is multiplied by
    pair: int  # forward FLOPs of a pair of positions, over all layers
    pooled: int  # positions of a feature
    trains_layers: bool
    trains_mergers: bool

    @classmethod
    def of(cls, audio: "Audio", *, trains_layers: bool, trains_mergers: bool) -> "AudioFlops":
        hidden, time = audio.hidden_size, audio.chunk
        if audio.channels:
            frequencies, inputs, convolutions = audio.mel_bins, 1, 0
            for _ in range(audio.halvings):
                time, frequencies = (time + 1) // 2, (frequencies + 1) // 2
                convolutions += time * frequencies * 9 * inputs * audio.channels
                inputs = audio.channels
            convolutions += time * frequencies * inputs * hidden
        else:
            convolutions = time * 3 * audio.mel_bins * hidden + (time + 1) // 2 * 3 * hidden * hidden
        positions = audio.positions(audio.chunk)
        return cls(
            convolutions=convolutions,
            chunk=audio.chunk,
            positions=positions,
            block=positions * audio.block_chunks,
            layers=audio.num_layers * (4 * hidden**2 + 2 * hidden * audio.ffn_hidden_size),
            merger=hidden * audio.output_size + (hidden**2 if audio.projector_hidden else 0),
            pair=4 * hidden * audio.num_layers,
            pooled=2 if audio.pools else 1,
            trains_layers=trains_layers,
            trains_mergers=trains_mergers,
        )

    def forward(self, frames: int) -> int:
        """Return the FLOPs of a forward pass over an audio with a spectrogram of this many frames."""
        return replace(self, trains_layers=False, trains_mergers=False).training(frames)

    def training(self, frames: int) -> int:
        """Return the FLOPs of training on an audio, without recomputation. Frozen layers have no backward pass."""
        chunks, positions = -(-frames // self.chunk), -(-frames * self.positions // self.chunk)
        attention = self.pair * positions * min(self.block, positions)
        layers = 2 * (self.convolutions * chunks + self.layers * positions) + attention
        passes = 1 + self.trains_mergers + self.trains_layers
        return layers * (3 if self.trains_layers else 1) + 2 * self.merger * (positions // self.pooled) * passes
