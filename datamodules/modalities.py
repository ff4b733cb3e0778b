"""Precomputed inputs beside frames: a plug-in computes an array per medium once, a verified cache keeps it.

Frames are one modality; `MelSpectrogram` is another, to show the interface: depth maps, embeddings or poses are one
class more. A modality says what identifies its result (`fingerprint`) and how to compute it (`compute`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from datamodules.common.files import write_whole
from datamodules.errors import MediaError
from datamodules.types import MediaRef
from datamodules.video.cache import VideoCache, content_identity
from datamodules.video.entry import EntryError

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

MAGIC = b"EVR1MOD1"
PREFIX = struct.Struct("<8sIQ")


class Modality(Protocol):
    """Something that can be computed from a media file ahead of training."""

    name: str
    """Short name, part of the file name."""

    def fingerprint(self) -> dict[str, Any]:
        """Every setting that changes the result; JSON values."""
        ...

    def compute(self, path: Path, ref: MediaRef) -> np.ndarray:
        """The array of one medium.

        Raises:
            MediaError: the medium holds nothing of this kind, or is damaged.
        """
        ...


class ModalityCache:
    """Loads a modality's arrays, computing and storing what is missing.

    Shares the promises of the clip cache: content and settings are part of the key, every byte is checksummed, files
    appear atomically, a damaged file is computed again.

    Args:
        clips: the clip cache: its folder, media root and way of naming media are used.
        modality: what to compute.
    """

    def __init__(self, clips: VideoCache, modality: Modality) -> None:
        self.clips = clips
        self.modality = modality

    def path(self, ref: MediaRef) -> Path:
        """The file of a medium."""
        folder = self.clips.folder
        if folder is None:
            raise ValueError("the clip cache has no folder: there is nowhere to store precomputed arrays")
        text = json.dumps([self.clips.name(ref), ref.start, ref.end, self.modality.fingerprint()], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return folder / self.modality.name / digest[:2] / f"{digest}.arr"

    def load(self, ref: MediaRef) -> np.ndarray:
        """The array of a medium.

        Raises:
            MediaError: it cannot be computed.
        """
        path, source = self.path(ref), self.clips.source(ref)
        content = content_identity(source)
        try:
            return read_array(path, content)
        except FileNotFoundError:
            pass
        except EntryError as error:
            logger.warning("computing %s again: %s", self.modality.name, error)
        array = self.modality.compute(source, ref)
        try:
            write_array(path, array, content)
        except OSError as error:
            logger.warning("cannot store %s of %s (%s)", self.modality.name, ref.path, error)
        return array


def write_array(path: Path, array: np.ndarray, content: str) -> None:
    """Store an array with the identity of its source."""
    import numpy as np
    import xxhash

    body = np.ascontiguousarray(array).tobytes()
    header = json.dumps({"dtype": array.dtype.str, "shape": array.shape, "content": content}).encode()
    checksum = xxhash.xxh3_64_intdigest(header + body)
    write_whole(path, [PREFIX.pack(MAGIC, len(header), checksum), header, body])


def read_array(path: Path, content: str) -> np.ndarray:
    """Load what `write_array` stored.

    Raises:
        EntryError: damaged, or made from another content.
        FileNotFoundError: there is none.
    """
    import numpy as np
    import xxhash

    data = path.read_bytes()
    if len(data) < PREFIX.size or data[:8] != MAGIC:
        raise EntryError(f"{path} is not a stored array")
    _, length, checksum = PREFIX.unpack_from(data)
    if xxhash.xxh3_64_intdigest(data[PREFIX.size :]) != checksum:
        raise EntryError(f"{path} is damaged")
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    if header["content"] != content:
        raise EntryError(f"{path} was made from another content of its source")
    body = np.frombuffer(data, dtype=np.dtype(header["dtype"]), offset=PREFIX.size + length)
    return body.reshape(header["shape"]).copy()


@dataclass(frozen=True)
class MelSpectrogram:
    """Log-mel energies of the audio track: float32 [frames, mels], one frame per `hop` samples.

    Example: one second at 16 kHz with hop 160 has 100 frames.
    """

    sample_rate: int = 16000
    """Audio is resampled to this rate, in Hz, and mixed to one channel."""
    window: int = 400
    """Samples per Fourier transform."""
    hop: int = 160
    """Samples between frames."""
    num_mels: int = 80
    low_hz: float = 0.0
    high_hz: float = 8000.0

    name = "mel"

    def fingerprint(self) -> dict[str, Any]:
        """All settings."""
        return asdict(self)

    def compute(self, path: Path, ref: MediaRef) -> np.ndarray:
        """Decode, resample, transform; natural logarithm of mel energies, floored at 1e-10."""
        import numpy as np

        audio = self._cut(np.concatenate(list(self._decode(path))), ref)
        if len(audio) < self.window:
            audio = np.pad(audio, (0, self.window - len(audio)))
        frames = np.lib.stride_tricks.sliding_window_view(audio, self.window)[:: self.hop]
        power = np.abs(np.fft.rfft(frames * np.hanning(self.window), axis=1)) ** 2
        return np.log(np.maximum(power @ self.filters().T, 1e-10)).astype(np.float32)

    def filters(self) -> np.ndarray:
        """float64 [mels, window // 2 + 1]: triangles between points evenly spaced on the mel scale (HTK formula)."""
        import numpy as np

        def mel(hz: float) -> float:
            return 2595.0 * math.log10(1.0 + hz / 700.0)

        points = np.linspace(mel(self.low_hz), mel(self.high_hz), self.num_mels + 2)
        edges = 700.0 * (10.0 ** (points / 2595.0) - 1.0)
        bins = np.linspace(0.0, self.sample_rate / 2, self.window // 2 + 1)
        rising = (bins[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        falling = (edges[2:, None] - bins[None]) / (edges[2:] - edges[1:-1])[:, None]
        return np.maximum(0.0, np.minimum(rising, falling))

    def _cut(self, audio: np.ndarray, ref: MediaRef) -> np.ndarray:
        start = 0 if ref.start is None else round(ref.start * self.sample_rate)
        end = len(audio) if ref.end is None else round(ref.end * self.sample_rate)
        return audio[start:end]

    def _decode(self, path: Path) -> Iterator[np.ndarray]:
        import av

        try:
            with av.open(str(path)) as container:
                if not container.streams.audio:
                    raise MediaError(path, "holds no audio track")
                resampler = av.AudioResampler(format="flt", layout="mono", rate=self.sample_rate)
                found = False
                for frame in container.decode(audio=0):
                    for part in resampler.resample(frame):
                        found = True
                        yield part.to_ndarray()[0]
                for part in resampler.resample(None):
                    found = True
                    yield part.to_ndarray()[0]
                if not found:
                    raise MediaError(path, "its audio track is empty")
        except (av.error.FFmpegError, OSError) as error:
            raise MediaError(path, f"its audio cannot be decoded ({error})") from error
