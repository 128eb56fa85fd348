"""Embedding of audio: log-mel features through two convolutions, and fixed positions."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from zoo.ops.activations import gelu
from zoo.parallel import Module, buffer

from ..linear import truncated_normal


class FrameConvolution(Module):
    """Convolution over frames, a multiple of `stride` apart, with a padding of half the kernel on each side:
    PyTorch's `Conv1d`."""

    weight: Float[Array, "embed channels conv"]
    bias: Float[Array, "embed"]

    stride: int = eqx.field(static=True)

    def __init__(self, channels: int, embed: int, kernel: int, *, stride: int = 1, key: Key[Array, ""]):
        self.weight = truncated_normal(key, (embed, channels, kernel), (channels * kernel) ** -0.5)
        self.bias = jnp.zeros(embed, jnp.float32)
        self.stride = stride

    def __call__(self, x: Float[Array, "batch frames channels"]) -> Float[Array, "batch _ embed"]:
        pad = self.weight.shape[2] // 2
        dims = ("NHC", "OIH", "NHC")
        x = x.astype(self.weight.dtype)
        y = lax.conv_general_dilated(x, self.weight, (self.stride,), [(pad, pad)], dimension_numbers=dims)
        return y + self.bias


class AudioEmbedding(Module):
    """Hidden states of log-mel features: gelu(conv2(gelu(conv1(x)))) + sinusoids, one for two frames (Whisper, Radford
    et al., arXiv:2212.04356, section 2.2).

    The table of sinusoids is not trained. Files have it, and models are saved with theirs.
    """

    first: FrameConvolution
    second: FrameConvolution
    positions: Float[Array, "positions embed"] = buffer()

    def __init__(self, bands: int, embed: int, positions: int, *, key: Key[Array, ""]):
        """- `bands`: of the log-mel features.
        - `positions`: of hidden states, half as many as frames."""
        first_key, second_key = jax.random.split(key)
        self.first = FrameConvolution(bands, embed, 3, key=first_key)
        self.second = FrameConvolution(embed, embed, 3, stride=2, key=second_key)
        half = embed // 2
        frequencies = 10_000.0 ** (-jnp.arange(half) / (half - 1))
        angles = jnp.arange(positions)[:, None] * frequencies
        self.positions = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1).astype(jnp.float32)

    @property
    def bands(self) -> int:
        """Number of bands of the features."""
        return self.first.weight.shape[1]

    @property
    def num_frames(self) -> int:
        """Number of frames of the features: of the whole window."""
        return 2 * self.positions.shape[0]

    def __call__(self, features: Float[Array, "batch bands frames"]) -> Float[Array, "batch seq embed"]:
        x = gelu(self.first(features.swapaxes(1, 2)))
        x = gelu(self.second(x))
        return x + self.positions.astype(x.dtype)
