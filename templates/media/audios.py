"""Audios from any source: their length from the file's header, and their samples as one channel at a model's rate.

WAV files of whole numbers are read by Python's standard library, others by PyAV. SciPy changes the rate. A header of
another format may be wrong by some samples: what is decoded is cut, or continued by silence, to the length in the
header, so that it has as many tokens as the data was prepared with.
"""

import math
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..formats.schemas import UnusableRow
from .sources import open_source

MOST_SECONDS = 3600
RATES = 1000, 384_000  # bounds of samples per second: filters of resampling are as long
HEADER_SECONDS = 0.5  # largest error of a header's length
WHOLE_NUMBERS = {2: "<i2", 4: "<i4"}  # NumPy's types by bytes of a sample


class AudioInfo(NamedTuple):
    """Facts from an audio's header."""

    samples: int  # samples per channel
    rate: int  # samples per second

    def resampled(self, rate: int) -> int:
        """Return the number of samples at another rate."""
        return -(-self.samples * rate // self.rate)


def audio_info(source: Any, *, allow_private: bool = False) -> AudioInfo:
    """Return the facts about an audio. Raises UnusableRow with the reason, and ValueError without PyAV.

    A WAV file that ends too early is refused too.
    """
    with open_source(source, "audio", allow_private=allow_private) as file:
        if info := _wave_info(file):
            return _checked(info)
        with _container(file) as container:
            return _checked(_container_info(container))


def read_audio(source: Any, rate: int, *, allow_private: bool = False, is_wave: bool = False) -> np.ndarray:
    """Return the mean of an audio's channels at this rate: float32 [samples]. Raises UnusableRow.

    is_wave: take WAV files of whole numbers alone
    Raises ValueError without SciPy, if its own rate is another.
    """
    with open_source(source, "audio", allow_private=allow_private) as file:
        if info := _wave_info(file):
            _checked(info)
            samples = _read_wave(file)
        elif is_wave:
            raise UnusableRow("an audio is no WAV file of whole numbers")
        else:
            with _container(file) as container:
                info = _checked(_container_info(container))
                samples = _fitted(_decode(container), info)
    return samples if info.rate == rate else _resample(samples, info.rate, rate)


def _checked(info: AudioInfo) -> AudioInfo:
    if not info.samples:
        raise UnusableRow("an audio is empty")
    if not RATES[0] <= info.rate <= RATES[1]:
        raise UnusableRow(f"an audio has {info.rate} samples per second, not {RATES[0]} to {RATES[1]}")
    if info.samples > MOST_SECONDS * info.rate:
        raise UnusableRow(f"an audio is longer than {MOST_SECONDS} seconds")
    return info


def _wave_info(file: Any) -> AudioInfo | None:
    """Return the facts about a WAV file of whole numbers; None for another format. Raises UnusableRow."""
    try:
        with wave.open(file) as reader:
            info = AudioInfo(reader.getnframes(), reader.getframerate())
            if info.samples:
                reader.setpos(info.samples - 1)
                if len(reader.readframes(1)) < reader.getnchannels() * reader.getsampwidth():
                    raise UnusableRow("an audio is damaged or truncated")
            return info if info.rate > 0 and reader.getsampwidth() in (1, 2, 3, 4) else None
    except (wave.Error, EOFError, OSError):
        return None
    finally:
        file.seek(0)


def _read_wave(file: Any) -> np.ndarray:
    """Return the mean of the channels of a WAV file, from -1 to 1: float32 [samples]."""
    with wave.open(file) as reader:
        width, channels = reader.getsampwidth(), reader.getnchannels()
        data = reader.readframes(reader.getnframes())
    if width == 1:
        values = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif width == 3:
        numbers = np.zeros((len(data) // 3, 4), np.uint8)
        numbers[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        values = numbers.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        values = np.frombuffer(data, WHOLE_NUMBERS[width]).astype(np.float32) / 2 ** (8 * width - 1)
    return _mixed(values.reshape(-1, channels))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return the mean of channels: [samples, channels] -> [samples]"""
    return values[:, 0] if values.shape[1] == 1 else values.mean(axis=1, dtype=np.float32)


@contextmanager
def _container(file: Any) -> Iterator[Any]:
    """Open a file of another format. PyAV's errors become UnusableRow."""
    try:
        import av  # pyright: ignore[reportMissingImports]
        import av.error  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            "a row has an audio that is no WAV file of whole numbers, which needs PyAV. Run pip install "
            "'megaswift[audio]', or convert it."
        ) from error
    try:
        with av.open(file) as container:
            if not container.streams.audio:
                raise UnusableRow("an audio has no stream of sound")
            yield container
    except (av.error.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, UnusableRow):
            raise
        raise UnusableRow("an audio is of no known format, or is damaged or truncated") from error


def _container_info(container: Any) -> AudioInfo:
    stream = container.streams.audio[0]
    seconds = stream.duration * stream.time_base if stream.duration and stream.time_base else None
    if seconds is None and container.duration:
        seconds = container.duration / 1_000_000  # AV_TIME_BASE
    if seconds is None or not stream.rate:
        raise UnusableRow("the header of an audio does not tell its length")
    return AudioInfo(round(seconds * stream.rate), stream.rate)


def _decode(container: Any) -> np.ndarray:
    """Return the mean of the channels: float32 [samples]."""
    import av  # pyright: ignore[reportMissingImports]

    stream = container.streams.audio[0]
    resampler = av.AudioResampler(format="fltp", rate=stream.rate)
    parts = [part for frame in container.decode(stream) for part in resampler.resample(frame)]
    parts = [_mixed(part.to_ndarray().T) for part in [*parts, *resampler.resample(None)]]
    return np.concatenate([np.empty(0, np.float32), *parts])


def _fitted(samples: np.ndarray, info: AudioInfo) -> np.ndarray:
    """Return samples of the length in the header. Raises UnusableRow if it is too wrong."""
    missing = info.samples - len(samples)
    if abs(missing) > HEADER_SECONDS * info.rate:
        raise UnusableRow("an audio is damaged or truncated, or its header has a wrong length")
    return np.pad(samples, (0, missing)) if missing > 0 else samples[: info.samples]


def _resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    try:
        from scipy.signal import resample_poly  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"a row has an audio of {rate} Hz, and the model takes {new_rate} Hz, which needs SciPy. Run pip install "
            "'megaswift[audio]', or convert it."
        ) from error
    divisor = math.gcd(rate, new_rate)
    return resample_poly(samples, new_rate // divisor, rate // divisor).astype(np.float32)
