"""Log-mel features of audio, as Whisper reads them, by NumPy."""

from functools import cache

import numpy as np
from jaxtyping import Float, Shaped

SAMPLING_RATE = 16_000
_WINDOW = 400
_HOP = 160


def log_mel_features(
    samples: Shaped[np.ndarray, "samples"], *, sampling_rate: int, bands: int = 80, seconds: int = 30
) -> Float[np.ndarray, "bands frames"]:
    """Compute Whisper's features of a window of audio (Radford et al., arXiv:2212.04356, section 2.2):

        x = log10 of the power in each mel band
        features = (max(x, max of all x - 8) + 4) / 4

    with Hann windows of 400 samples, 160 apart, which are 100 frames a second. Audio is padded with silence to the
    window. The transform is computed in float64.

    - `samples`: one channel, from -1 to 1. `sampling_rate`: of the samples, in Hz: 16,000.
    - `bands`: 80, or 128 from large-v3 on. `seconds`: length of the window.

    **Raises** `TypeError` for samples that are not floating point; `ValueError` for another rate, for several channels,
    and for audio longer than the window, which would be cut.
    """
    samples = np.asarray(samples)
    if not np.issubdtype(samples.dtype, np.floating):
        raise TypeError(f"samples: expected floating point, from -1 to 1, got {samples.dtype}: divide int16 by 32768")
    if samples.ndim != 1:
        raise ValueError(f"samples: expected one channel, an array of one dim, got {samples.shape}: average channels")
    if sampling_rate != SAMPLING_RATE:
        raise ValueError(f"sampling_rate={sampling_rate}: the model reads {SAMPLING_RATE} Hz: resample the audio")
    size = seconds * SAMPLING_RATE
    if len(samples) > size:
        raise ValueError(
            f"{len(samples) / SAMPLING_RATE:.1f} s of audio are longer than the window of {seconds} s: cut them into "
            "windows"
        )
    padded = np.pad(samples.astype(np.float64), (0, size - len(samples)))
    padded = np.pad(padded, _WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP][:-1]  # the last is dropped
    hann = np.hanning(_WINDOW + 1)[:-1]
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    mel = np.log10(np.maximum(power @ _mel_filters(bands), 1e-10)).T
    return ((np.maximum(mel, mel.max() - 8) + 4) / 4).astype(np.float32)


@cache
def _mel_filters(bands: int) -> Float[np.ndarray, "frequencies bands"]:
    """Return triangular filters between `bands` + 2 frequencies that are equally far apart on Slaney's mel scale, up to
    8,000 Hz, each of area 1."""
    frequencies = np.linspace(0, SAMPLING_RATE / 2, _WINDOW // 2 + 1)
    edges = _mel_to_hertz(np.linspace(0, _hertz_to_mel(SAMPLING_RATE / 2), bands + 2))
    widths = np.diff(edges)
    slopes = edges - frequencies[:, None]
    triangles = np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:])
    return np.maximum(triangles, 0) * (2 / (edges[2:] - edges[:-2]))


_LINEAR_TO = 1000.0
"""Hz up to which Slaney's mel scale is linear: 3 mel for 200 Hz."""


def _hertz_to_mel(hertz: float) -> float:
    return 3 * _LINEAR_TO / 200 + 27 * np.log(hertz / _LINEAR_TO) / np.log(6.4)


def _mel_to_hertz(mel: Float[np.ndarray, "edges"]) -> Float[np.ndarray, "edges"]:
    logarithmic = _LINEAR_TO * np.exp(np.log(6.4) / 27 * (mel - 3 * _LINEAR_TO / 200))
    return np.where(mel < 3 * _LINEAR_TO / 200, 200 * mel / 3, logarithmic)
