"""Whisper's features against transformers' and against their definition; refusals."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from zoo.audio import log_mel_features

PARITY = os.environ.get("ZOO_PARITY")
needs_cases = pytest.mark.skipif(not PARITY, reason="ZOO_PARITY names no folder of cases")


@needs_cases
@pytest.mark.parametrize("case, bands, seconds", [("whisper_80", 80, 2), ("whisper_128", 128, 3)])
@pytest.mark.parametrize("name", ["sound", "short"])
def test_features_are_those_of_transformers(case, bands, seconds, name):
    """It transforms in float32, whose rounding is 1e-6 of the largest power of a frame: the logarithms of faint bands
    differ by more than those of others."""
    stored = load_file(Path(PARITY or "") / "preprocess" / case / "expected.safetensors")
    samples = stored[name][: seconds * 16_000]
    features = log_mel_features(samples, sampling_rate=16_000, bands=bands, seconds=seconds)
    wanted = stored[f"{name}.input_features"]
    assert features.shape == wanted.shape and features.dtype == np.float32
    difference = np.abs(features - wanted)
    assert difference[wanted > wanted.min() + 0.5].max() <= 1e-5
    assert difference.max() <= 6e-5 and (difference <= 1e-5).mean() > 0.98
    power = [10 ** (4 * x.astype(np.float64) - 4) for x in (features, wanted)]
    assert (np.abs(power[0] - power[1]) / power[1].max(0)).max() <= 2e-6


def test_a_tone_is_in_the_band_of_its_frequency():
    """At 1,000 Hz, where the mel scale turns from linear to logarithmic: 15 mel of 45.2, with 82 edges."""
    tone = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    features = log_mel_features(tone, sampling_rate=16_000, seconds=2)
    assert features.shape == (80, 200)
    assert features[:, 50].argmax() == round(15 / (15 + 27 * np.log(8) / np.log(6.4)) * 81) - 1
    silence = features[:, 150]
    np.testing.assert_allclose(silence, features.max() - 2, atol=1e-6)  # 8 decades below, divided by 4


def test_other_rates_and_longer_audio_are_refused():
    second = np.zeros(16_000, np.float32)
    with pytest.raises(ValueError, match="sampling_rate=44100: the model reads 16000 Hz: resample"):
        log_mel_features(second, sampling_rate=44_100)
    with pytest.raises(ValueError, match=r"31\.0 s of audio are longer than the window of 30 s"):
        log_mel_features(np.zeros(31 * 16_000), sampling_rate=16_000)
    with pytest.raises(ValueError, match="expected one channel"):
        log_mel_features(np.stack([second, second]), sampling_rate=16_000)
    with pytest.raises(TypeError, match="divide int16 by 32768"):
        log_mel_features(second.astype(np.int16), sampling_rate=16_000)
