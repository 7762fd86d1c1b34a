"""Plan of an audio tower's chunks: their frames, what follows the convolutions, and blocks that attend."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..mapping.architecture import Audio
from .packed_seqs import to_device
from .patch_plan import Blocks

MAX_TIMESCALE = 10000.0  # longest period of the sinusoidal positions, divided by 2 pi


@dataclass(frozen=True)
class AudioPlan:
    """Description of the spectrograms of some audios, made on the CPU once for all layers.

    A spectrogram is cut into chunks of `Audio.chunk` frames, of which the last one is padded.
    """

    frames: Tensor  # [chunks, chunk] int64: frames of the concatenated spectrograms; behind the last one: padding
    masks: list[Tensor] | None  # [chunks, time] bool: what the input of each further convolution keeps; None: all
    rows: Tensor  # [positions] int64: positions of audios among those of all chunks
    sines: Tensor  # [positions of a chunk, hidden_size] fp32
    blocks: Blocks
    cos: Tensor  # [positions, 1, head_dim / 2] fp32: a rope that rotates nothing
    sin: Tensor
    pairs: Tensor | None  # [features] int64: first position of each pair that is pooled

    @property
    def features(self) -> int:
        """Number of features of all audios."""
        return len(self.rows) if self.pairs is None else len(self.pairs)


def plan_audios(frames: list[int], audio: Audio, device: torch.device) -> AudioPlan:
    """Return the plan of audios. frames: those of each audio's spectrogram"""
    size = audio.chunk
    chunks = [[min(size, length - start) for start in range(0, length, size)] for length in frames]
    lengths = [length for audio_chunks in chunks for length in audio_chunks]
    kept = [_kept(length, len(audio_chunks), audio) for audio_chunks in chunks for length in audio_chunks]
    total = sum(frames)
    starts = torch.tensor([0, *accumulate(lengths)][:-1]).unsqueeze(1)
    index = starts + torch.arange(size)
    index[torch.arange(size) >= torch.tensor(lengths).unsqueeze(1)] = total

    most = audio.positions(size)
    positions = [[audio.positions(length) for length in audio_chunks] for audio_chunks in chunks]
    is_valid = torch.arange(most) < torch.tensor([count for counts in positions for count in counts]).unsqueeze(1)
    blocks = [
        sum(counts[first : first + audio.block_chunks])
        for counts in positions
        for first in range(0, len(counts), audio.block_chunks)
    ]
    ends = list(accumulate(map(sum, positions)))
    pairs = None
    if audio.pools:
        firsts = [torch.arange(begin, end - 1, 2) for begin, end in zip([0, *ends], ends, strict=False)]
        pairs = to_device(torch.cat(firsts), device)
    half = torch.zeros(ends[-1], 1, audio.hidden_size // audio.num_heads // 2, device=device)
    return AudioPlan(
        frames=to_device(index, device),
        masks=None if min(kept) >= size else [to_device(mask, device) for mask in _masks(kept, audio)],
        rows=to_device(is_valid.flatten().nonzero().squeeze(1), device),
        sines=_sines(most, audio.hidden_size).to(device),
        blocks=Blocks(blocks, to_device(torch.tensor([0, *accumulate(blocks)], dtype=torch.int32), device)),
        cos=half + 1,
        sin=half,
        pairs=pairs,
    )


def _kept(length: int, chunks: int, audio: Audio) -> int:
    """Return the frames of a chunk that are no zeros to the further convolutions."""
    is_masked = audio.masks == "always" or (audio.masks == "short" and chunks == 1)
    return length if is_masked else audio.chunk


def _masks(kept: list[int], audio: Audio) -> list[Tensor]:
    masks, lengths, size = [], torch.tensor(kept), audio.chunk
    if audio.channels is None:  # the first of two convolutions keeps the time
        return [torch.arange(size) < lengths.unsqueeze(1)]
    for _ in range(audio.halvings - 1):
        lengths, size = (lengths + 1) // 2, (size + 1) // 2
        masks.append(torch.arange(size) < lengths.unsqueeze(1))
    return masks


def _sines(length: int, size: int) -> Tensor:
    """Return sinusoidal positions, as Whisper's: [length, size] fp32."""
    step = torch.tensor(MAX_TIMESCALE, dtype=torch.float64).log().item() / (size // 2 - 1)
    angles = torch.arange(length).unsqueeze(1) * torch.exp(-step * torch.arange(size // 2).float())
    return torch.cat((angles.sin(), angles.cos()), dim=1)
