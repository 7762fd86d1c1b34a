"""Audios in the bodies of /generate and /top_log_probs, as the server reads them.

Runs send `samples`, float32 in base64 at the model's rate (request_bodies.py). In its place other clients may give
`data`, a WAV file in base64, a `url`, or a `path` on the server. No other format is read: FFmpeg reads some that name
other files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...templates.formats.schemas import UnusableRow
from ...templates.json_types import Json
from ...templates.media.audios import read_audio
from ...templates.media.processor import MediaPlan, VisionProcessor
from .fields import Fields, invalid_request
from .image_bodies import check_bytes, sent_source
from .request_audio import RequestAudio

SAMPLE = np.dtype("<f4")
LARGEST = 1e3  # magnitude of a sample; a full scale is 1


class SentAudio(NamedTuple):
    """Audio of a body, and its size for the model."""

    audio: RequestAudio
    plan: MediaPlan


class AudioReader:
    """Reader of the audios of bodies, for a model that takes audios. Its methods raise RequestError.

    allowed_folder: folder whose files clients may name; None: none. most: audios of a prompt; None: any number
    """

    def __init__(self, vision: VisionProcessor, allowed_folder: Path | None, most: int | None = None):
        assert vision.audio is not None
        self.vision, self.most, self._processor = vision, most, vision.audio
        self._folder = allowed_folder and allowed_folder.resolve()

    def read(self, items: Sequence[Json]) -> list[SentAudio]:
        """Return decoded audios."""
        audios: list[SentAudio] = []
        size = 0
        for number, item in enumerate(items):
            part = f"audio {number}"
            try:
                samples = self._samples(Fields(item, ("samples", "data", "url", "path"), part))
                plan = self.vision.plan_audio(self._processor.frames_of(len(samples)))
            except UnusableRow as error:
                raise invalid_request(f"{part}: {error}") from None
            size += samples.nbytes
            check_bytes(size, "audios")
            audios.append(SentAudio(RequestAudio(plan, self.vision, lambda samples=samples: samples), plan))
        return audios

    def _samples(self, fields: Fields) -> np.ndarray:
        """Return the samples of an audio at the model's rate: float32 [samples]."""
        name, source = sent_source(fields, ("samples", "data", "url", "path"), self._folder)
        if name != "samples":
            return read_audio(source, self._processor.rate, is_wave=True)
        assert isinstance(source, bytes)
        if len(source) % SAMPLE.itemsize:
            raise fields.invalid_request("samples is no float32: its bytes are no multiple of 4")
        samples = np.frombuffer(source, SAMPLE).astype(np.float32)
        if not (np.abs(samples) <= LARGEST).all():  # neither are NaN and infinity
            raise fields.invalid_request(f"samples has values that are not between -{LARGEST:g} and {LARGEST:g}")
        return samples
