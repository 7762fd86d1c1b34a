"""Images, videos and audios of a micro batch, as the vision encoder takes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StoredFeatures:
    """Features of the media that this rank encodes, as far as they are stored. Tensors are on the CPU."""

    keys: Sequence[str]  # one per medium; "": never stored
    is_read: Tensor  # [media] bool
    values: Tensor  # [levels, features, bytes of a feature] uint8: of those that are read, in order


@dataclass(frozen=True)
class MediaInputs:
    """Media of a micro batch: images, then videos, then audios. Tensors are on the CPU, or pixels on the device.

    All ranks of a replica have the same values, except pixels and spectrograms, which are of the media that this rank
    encodes.
    """

    grids: Tensor  # [images and videos, 3] int64: time, height and width in patches
    frames: Tensor  # [audios] int64: of each spectrogram
    counts: Tensor  # [media] int64: features of each
    encoders: Tensor  # [media] int64: rank within the replica that encodes it
    image_pixels: Tensor  # [patches, channels * side * side] uint8
    video_pixels: Tensor  # [patches, channels * frames * side * side] uint8
    spectrograms: Tensor  # [frames, mel bins] fp32, of audios behind each other
    uses: Tensor  # [uses] int64: medium of each use in a document; a medium may have several, with all its tokens
    context_ranks: Tensor  # [visual tokens] int64: the context-parallel rank that holds it
    positions: Tensor  # [visual tokens] int64: its index in that rank's rows * local length
    rows: int  # rows of the micro batch
    local_length: int
    # [levels, features, output_size] on the device: of this rank's media, from an earlier pass; None: to be computed
    features: Tensor | None = None
    layouts: Tensor | None = None  # [images and videos, 4] int64: of tiles, as of layers/tile_features.py; None: none
    stored: StoredFeatures | None = None  # read by an encoder that has `store`
