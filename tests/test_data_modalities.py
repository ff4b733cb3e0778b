"""Precomputed inputs beside frames: mel spectrograms through the same kind of cache."""

from __future__ import annotations

import wave

import numpy as np
import pytest
from data_media import numbered_frames, write_video

from datamodules.errors import MediaError
from datamodules.modalities import MelSpectrogram, ModalityCache
from datamodules.types import MediaRef
from datamodules.video.cache import VideoCache


def write_tone(path, hertz, seconds=1.0, rate=16000):
    wave_form = np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((wave_form * 20000).astype("<i2").tobytes())
    return path


def test_a_tone_lies_in_its_mel_band(tmp_path):
    mel = MelSpectrogram()
    for hertz in (440.0, 1000.0, 3000.0):
        energies = mel.compute(write_tone(tmp_path / "tone.wav", hertz), MediaRef("tone.wav"))
        # (16000 - 400) / 160 + 1 frames
        assert energies.shape == (98, 80)
        band = np.argmax(mel.filters()[:, round(hertz / 40)])  # bins are 16000 / 400 = 40 Hz apart
        assert set(energies.argmax(axis=1)) == {band}


def test_other_rates_and_parts(tmp_path):
    write_tone(tmp_path / "cd.wav", 1000.0, seconds=2.0, rate=44100)
    mel = MelSpectrogram()
    whole = mel.compute(tmp_path / "cd.wav", MediaRef("cd.wav"))
    part = mel.compute(tmp_path / "cd.wav", MediaRef("cd.wav", start=0.5, end=1.0))
    assert abs(len(whole) - 198) <= 1
    assert part.shape == (48, 80)
    np.testing.assert_allclose(part[5:-5], whole[55:93], atol=1.0)


def test_arrays_are_cached_verified_and_follow_the_source(tmp_path):
    write_tone(tmp_path / "a.wav", 440.0)
    calls = []

    class Counting(MelSpectrogram):
        def compute(self, path, ref):
            calls.append(path)
            return super().compute(path, ref)

    cache = ModalityCache(VideoCache(tmp_path / "cache", tmp_path), Counting())
    ref = MediaRef("a.wav")
    first = cache.load(ref)
    np.testing.assert_array_equal(cache.load(ref), first)
    assert len(calls) == 1
    data = bytearray(cache.path(ref).read_bytes())
    data[-5] ^= 1
    cache.path(ref).write_bytes(data)
    np.testing.assert_array_equal(cache.load(ref), first)
    assert len(calls) == 2
    write_tone(tmp_path / "a.wav", 880.0)
    assert not np.array_equal(cache.load(ref), first)
    assert cache.path(ref) != ModalityCache(cache.clips, Counting(hop=200)).path(ref)


def test_real_audio_track_and_silent_video(shared_data, tmp_path):
    mel = MelSpectrogram()
    energies = mel.compute(shared_data / "videos" / "0F7LW.mp4", MediaRef("0F7LW.mp4"))
    assert abs(len(energies) - 3065) < 10  # 30.65 s
    assert np.isfinite(energies).all()
    silent = write_video(tmp_path / "silent.mp4", numbered_frames(8))
    with pytest.raises(MediaError, match="holds no audio track"):
        mel.compute(silent, MediaRef("silent.mp4"))
    (tmp_path / "bad.mp4").write_bytes(b"\0" * 1000)
    with pytest.raises(MediaError, match="audio cannot be decoded"):
        mel.compute(tmp_path / "bad.mp4", MediaRef("bad.mp4"))
