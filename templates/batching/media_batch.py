"""Images, videos and audios of one micro batch, as the model needs them."""

from dataclasses import dataclass

from torch import Tensor

from .tensor_dataclass import TensorDataclass


@dataclass
class CachedFeatures(TensorDataclass):
    """Features of the media that this rank encodes, as far as the cache has them (--precompute_features)."""

    keys: list[str]  # one per medium: its features' key in the cache; "" for one that is broken
    is_read: Tensor  # [media] bool
    values: Tensor  # [levels, features, bytes of a feature] uint8: of those that are read, in order


@dataclass
class MediaBatch(TensorDataclass):
    """Images, videos and audios of a micro batch, each encoded once, by one rank of the replica.

    A replica is the ranks with the same data-parallel index (tensor, context and pipeline parallelism). All of its
    ranks hold the same values, except pixels and spectrograms, which are of the media that this rank encodes.
    Media are in the order of their first tokens in the micro batch, but all images before all videos, and these before
    all audios. A medium of several documents of a sample is one medium with several uses.
    """

    grids: Tensor  # [images and videos, 3] int64: time, height and width in patches
    frames: Tensor  # [audios] int64: frames of each spectrogram
    counts: Tensor  # [media] int64: tokens of each
    encoders: Tensor  # [media] int64: rank within the replica that encodes it
    image_pixels: Tensor  # [patches, channels * patch * patch] uint8
    video_pixels: Tensor  # [patches, channels * temporal patch * patch * patch] uint8
    spectrograms: Tensor  # [frames, mel bins] fp32: log-mel spectrograms behind each other
    uses: Tensor  # [uses] int64: medium of each use, which has all of its tokens
    # Of each token of all uses, in order: the context-parallel rank that holds it, and its index in that rank's
    # rows * local_length tokens.
    context_ranks: Tensor  # [visual tokens] int64
    positions: Tensor  # [visual tokens] int64
    # Layouts of tiles, as MediaPlan has them, [images and videos, 4] int64; zeros: of a broken image; None: none
    layouts: Tensor | None = None
    broken_media: int = 0  # media of this rank that cannot be decoded, and are replaced by grey
    cached: CachedFeatures | None = None  # None: there is no cache
    # Of this rank's media, where a step's earlier pass has computed them: [levels, features, size] on the device.
    features: Tensor | None = None
