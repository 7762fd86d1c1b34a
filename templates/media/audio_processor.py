"""Audios as an audio-language model takes them: lengths, tokens, and log-mel spectrograms.

Lengths and tokens come from headers by arithmetic, and equal those of transformers' processors. Spectrograms are those
of the checkpoint's feature extractor, which gets each audio by itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats.medium import Medium
from ..formats.schemas import UnusableRow
from .audios import audio_info, read_audio
from .families import AudioFamily

if TYPE_CHECKING:
    import torch

SILENCE = -1.5  # value of a log-mel spectrogram of zeros, as of Whisper's feature extractor


class AudioProcessor:
    """Processor of a checkpoint's audios.

    config: config.json's audio_config. Raises ValueError if the checkpoint's feature extractor cannot be read.
    """

    def __init__(self, folder: Path, family: AudioFamily, config: dict[str, Any], *, allow_private: bool):
        self._config, self._family, self._allow_private = config, family, allow_private
        self._extractor = load_extractor(folder)
        self.rate: int = self._extractor.sampling_rate
        self.mel_bins: int = self._extractor.feature_size
        self._chunk: int = 2 * config.get("n_window", family.window)

    @property
    def fingerprint(self) -> list[Any]:
        """All that determines the tokens of audios."""
        extractor = self._extractor
        longest = [extractor.n_samples] if self._family.is_padded else []
        return [self._chunk, self.rate, extractor.hop_length, extractor.n_fft, self._least, *longest]

    @property
    def _least(self) -> int:
        """Fewest samples: shorter audios are continued by silence."""
        return getattr(self._extractor, "min_length", 0)

    def frames(self, medium: Medium) -> int:
        """Return the frames of an audio's spectrogram, from its header. Raises UnusableRow with the reason."""
        return self.frames_of(audio_info(medium.source, allow_private=self._allow_private).resampled(self.rate))

    def frames_of(self, samples: int) -> int:
        """Return the frames of the spectrogram of so many samples at the model's rate. Raises UnusableRow."""
        samples = max(samples, self._least)
        if self._family.is_padded:
            return self._padded_frames(samples)
        if samples < max(self._extractor.hop_length, self._extractor.n_fft // 2 + 1):
            raise UnusableRow("an audio is shorter than a frame of its spectrogram")
        return samples // self._extractor.hop_length

    def _padded_frames(self, samples: int) -> int:
        extractor = self._extractor
        if samples > extractor.n_samples:
            seconds = extractor.n_samples / self.rate
            raise UnusableRow(f"an audio is longer than the {seconds:g} seconds that the model's processor takes")
        frames = -(-samples // extractor.hop_length)
        if not self.tokens(frames):
            raise UnusableRow("an audio is too short for a token")
        return frames

    def tokens(self, frames: int) -> int:
        """Return the tokens of a spectrogram."""
        if self._family.is_padded:
            return (frames + 1) // 2 // 2
        return frames // self._chunk * _thrice_halved(self._chunk) + _thrice_halved(frames % self._chunk)

    def spectrogram(self, medium: Medium, frames: int) -> np.ndarray:
        """Return the log-mel spectrogram of a planned audio: float32 [frames, mel bins]. Raises UnusableRow."""
        return self.spectrogram_of(self.samples(medium), frames)

    def samples(self, medium: Medium) -> np.ndarray:
        """Return the samples of an audio at the model's rate: float32 [samples]. Raises UnusableRow."""
        return read_audio(medium.source, self.rate, allow_private=self._allow_private)

    def spectrogram_of(self, samples: np.ndarray, frames: int) -> np.ndarray:
        """Return the spectrogram of samples, as `spectrogram`. Raises UnusableRow if they have other frames."""
        if self._family.is_padded:
            return self._padded_spectrogram(samples, frames)
        features = self._extractor(
            samples,
            sampling_rate=self.rate,
            padding="longest",
            truncation=False,
            return_attention_mask=True,
            return_tensors="np",
        )
        count = int(features["attention_mask"].sum())
        if count != frames:
            raise UnusableRow(f"an audio has {count} frames of its spectrogram, and its header means {frames}")
        return np.ascontiguousarray(features["input_features"][0, :, :frames].T, dtype=np.float32)

    def inputs(self, spectrograms: "Sequence[np.ndarray]") -> "dict[str, torch.Tensor]":
        """Return the inputs of transformers' model. Behind its end each spectrogram has zeros, up to a whole chunk.

        spectrograms: float32 [frames, mel bins]
        """
        import torch

        longest = -(-max(map(len, spectrograms)) // self._chunk) * self._chunk
        features = torch.zeros(len(spectrograms), self.mel_bins, longest)
        mask = torch.zeros(len(spectrograms), longest, dtype=torch.int64)
        for number, spectrogram in enumerate(spectrograms):
            features[number, :, : len(spectrogram)] = torch.from_numpy(spectrogram).T
            mask[number, : len(spectrogram)] = 1
        return {"input_features": features, self._family.mask: mask}

    def _padded_spectrogram(self, samples: np.ndarray, frames: int) -> np.ndarray:
        hop, window = self._extractor.hop_length, self._extractor.n_fft
        if -(-len(samples) // hop) != frames:
            raise UnusableRow(f"an audio has {len(samples)} samples, and its header means {frames} frames of {hop}")
        # Silence beyond the last window changes no frame of the audio.
        padded = np.pad(samples, (0, frames * hop + 2 * window - len(samples)))
        features = self._extractor(padded, sampling_rate=self.rate, padding="longest", return_tensors="np")
        return np.ascontiguousarray(features["input_features"][0, :, :frames].T, dtype=np.float32)

    def silent_samples(self, frames: int) -> np.ndarray:
        """Return samples whose spectrogram is `silence`: float32 [samples]."""
        return np.zeros(frames * self._extractor.hop_length, np.float32)

    def silence(self, frames: int) -> np.ndarray:
        """Return the spectrogram in place of an audio that cannot be decoded."""
        return np.full((frames, self.mel_bins), SILENCE, np.float32)

    def cost(self, frames: int) -> int:
        """Return the relative time to encode an audio: products of matrices, and attention within windows."""
        config = self._config
        hidden, inner = config.get("d_model", 1280), config.get("encoder_ffn_dim", 5120)
        positions = self.tokens(frames)
        window = config.get("n_window_infer", self._chunk) * positions // max(frames, 1)
        matrices = 8 * hidden * hidden + 4 * hidden * inner
        return config.get("encoder_layers", 32) * positions * (matrices + 4 * hidden * min(window, positions))


def _thrice_halved(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


def load_extractor(folder: Path) -> Any:
    """Return transformers' feature extractor of a checkpoint. Raises ValueError."""
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{folder}: its processor of audios cannot be read ({reason}). Copy preprocessor_config.json and "
            "processor_config.json, as far as the original checkpoint has them."
        ) from error
