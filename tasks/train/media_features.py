"""Media of micro batches as the vision encoder takes them, and features that several models share."""

from ...bridge.model.media_inputs import MediaInputs, StoredFeatures
from ...bridge.model.model import Model
from ...bridge.model.vision_encoder import VisionEncoder
from ...templates.batching.collator import Batch
from ..distributed.collectives import all_gather_objects


def shared_encoder(trained: Model, other: Model) -> VisionEncoder | None:
    """Return the encoder of a trained model for another in its layout, which has the same frozen tower; else None.

    The other's tower is then freed. Every rank calls this.
    """
    if not (trained.vision and other.vision) or trained.vision.trains:
        return None
    if not all(all_gather_objects(other.vision.fingerprint() == trained.vision.fingerprint())):
        return None
    other.vision.free_tower()
    return trained.vision


def share_features(encoder: VisionEncoder, batches: list[Batch]) -> None:
    """Compute the features of micro batches, for all models with this tower. The step's training pass frees them."""
    media = [batch.media for batch in batches if batch.media]
    inputs = [inputs for batch in batches if (inputs := media_inputs(batch))]
    for batch_media, features in zip(media, encoder.compute_features(inputs), strict=True):
        batch_media.features = features


def release_features(batches: list[Batch]) -> None:
    for batch in batches:
        for part in (batch, batch.mismatched):
            if part and part.media:
                part.media.features = None


def media_inputs(batch: Batch) -> MediaInputs | None:
    if batch.media is None:
        return None
    media, (rows, local_length) = batch.media, batch.tokens.shape
    return MediaInputs(
        media.grids,
        media.frames,
        media.counts,
        media.encoders,
        media.image_pixels,
        media.video_pixels,
        media.spectrograms,
        media.uses,
        media.context_ranks,
        media.positions,
        rows,
        local_length,
        media.features,
        media.layouts,
        media.cached and StoredFeatures(media.cached.keys, media.cached.is_read, media.cached.values),
    )
