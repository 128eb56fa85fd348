"""Rotary position embedding (RoPE), and its scaling methods for contexts longer than in training.

RoPE (Su et al., arXiv 2104.09864, section 3.2.2) rotates pairs of features of queries and keys by an angle proportional
to the position, so that their dot product depends only on the distance:

    frequency_i = base ** (-2 i / dim)          i = 0 .. dim / 2 - 1, one for each pair
    angle_i     = position * frequency_i
    (a, b)     -> (a cos - b sin, b cos + a sin)

`Rotary` holds the frequencies; calling it with positions returns cos and sin, and `apply_rotary` rotates by them:

    cos, sin = rotary(positions)
    query, key = (apply_rotary(x, cos, sin, interleaved=rotary.interleaved) for x in (query, key))

A `RopeScaling` changes the frequencies and may multiply cos and sin by a magnitude, which sharpens the softmax. All are
frozen dataclasses of plain numbers: static fields of a layer, not trainable. Values match Hugging Face's transformers 5
(`modeling_rope_utils`) up to the rounding of frequencies, which are computed in float64.
"""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

_Number = int | float  # a config file writes 8 and 8.0 alike
_Length = int | Int[Array, ""]
_Frequencies = Float[np.ndarray, "pairs"] | Float[Array, "pairs"]


def _inverse_frequencies(dim: int, base: _Number) -> Float[np.ndarray, "pairs"]:
    """Return base ** (-2 i / dim) in float64: from 1 radian per token down to almost 1 / base."""
    return base ** -(np.arange(0, dim, 2) / dim)


class RopeScaling(abc.ABC):
    """A RoPE scaling method."""

    @abc.abstractmethod
    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        """Return the frequencies for a sequence of `length` tokens, and the magnitude of cos and sin."""

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin, whatever the length."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation: positions divided by `factor` (Chen et al., arXiv 2306.15595, section 2.3)."""

    factor: _Number

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        return _inverse_frequencies(dim, base) / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK scaling: a base that grows with the length beyond `original_length`.

        stretch = factor * length / original_length - (factor - 1)
        base'   = base * stretch ** (dim / (dim - 2))

    The fastest pair keeps its frequency, the slowest is divided by exactly `stretch`. All tokens of a call use the
    frequencies of its length; `zoo.generate` takes the number of tokens so far for each new one, and its KV cache holds
    keys rotated by earlier frequencies. In transformers the length is the longest that the model object has seen, reset
    by a short call, so results depend on earlier calls: pass `length` to reproduce them. Source: bloc97 and emozilla;
    written down in YaRN, arXiv 2309.00071, sections 3.1 and 3.3.
    """

    factor: _Number
    original_length: int

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        excess = jnp.maximum(length - self.original_length, 0) / self.original_length
        exponent = np.linspace(0, 1, dim // 2, dtype=np.float32)  # of `stretch`: 2 i / (dim - 2) for pair i
        return _inverse_frequencies(dim, base).astype(np.float32) * (1 + self.factor * excess) ** -exponent, 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1 scaling: divide slow frequencies by `factor`, keep fast ones, interpolate between.

    A pair is slow if it makes fewer than `low_frequency_factor` turns within `original_length`, and fast if more than
    `high_frequency_factor`. Source: Llama 3.1, in transformers and in Meta's llama-models (`apply_scaling`).
    """

    factor: _Number
    low_frequency_factor: _Number
    high_frequency_factor: _Number
    original_length: int

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        frequencies = _inverse_frequencies(dim, base)
        turns = self.original_length * frequencies / (2 * math.pi)
        low = self.low_frequency_factor
        high = self.high_frequency_factor
        ramp = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (ramp + (1 - ramp) / self.factor), 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN: as `Llama3Scaling`, but interpolated linearly in the index of the pair, and with a magnitude.

    The last unscaled pair makes `beta_fast` turns within `original_length`, the first fully scaled one `beta_slow`;
    `truncate` rounds both outwards to integers. The magnitude is `attention_factor` if given, else
    yarn_get_mscale(factor, mscale) / yarn_get_mscale(factor, mscale_all_dim) if both are given (DeepSeek), else
    yarn_get_mscale(factor). Source: Peng et al., arXiv 2309.00071, sections 3.2 and 3.4; the paper interpolates in the
    number of turns, its code and all later ones in the index of the pair.
    """

    factor: _Number
    original_length: int
    beta_fast: _Number = 32
    beta_slow: _Number = 1
    attention_factor: _Number | None = None
    mscale: _Number | None = None
    mscale_all_dim: _Number | None = None
    truncate: bool = True

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        def pair_index(turns: _Number) -> float:
            return dim / 2 * math.log(self.original_length / (2 * math.pi * turns)) / math.log(base)

        first = pair_index(self.beta_fast)
        last = pair_index(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, dim - 1)
        width = last - first or 0.001  # as in transformers, against a division by zero
        ramp = 1 - np.clip((np.arange(dim // 2) - first) / width, 0, 1)
        return _inverse_frequencies(dim, base) * (ramp + (1 - ramp) / self.factor), self.magnitude

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return yarn_get_mscale(self.factor, self.mscale) / yarn_get_mscale(self.factor, self.mscale_all_dim)
        return yarn_get_mscale(self.factor)


def yarn_get_mscale(factor: _Number, mscale: _Number = 1) -> float:
    """Return YaRN's magnitude 0.1 mscale ln(factor) + 1, or 1 for a factor up to 1 (arXiv 2309.00071, section 3.4).

    DeepSeek multiplies its attention scale by yarn_get_mscale(factor, mscale_all_dim) ** 2.
    """
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE: frequencies divided by searched factors, one set up to `original_length` and one beyond.

    The magnitude is `attention_factor` if given, else sqrt(1 + ln(factor) / ln(original_length)), where `factor` is the
    ratio of the extended to the original length; 1 for a factor up to 1. All tokens of a call use the set for its
    length; `zoo.generate` reads all tokens again with the long set once there are more than `original_length`. Source:
    Ding et al., arXiv 2402.13753, section 3, and its code for the magnitude.

    **Raises** `ValueError`, when called, if a set does not have one factor per pair.
    """

    short_factors: tuple[_Number, ...]
    long_factors: tuple[_Number, ...]
    original_length: int
    factor: _Number
    attention_factor: _Number | None = None

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        if not len(self.short_factors) == len(self.long_factors) == dim // 2:
            raise ValueError(
                f"LongRope: {dim // 2} pairs are rotated, and there are {len(self.short_factors)} short and "
                f"{len(self.long_factors)} long factors."
            )
        short, long = (
            (_inverse_frequencies(dim, base) / np.asarray(factors)).astype(np.float32)
            for factors in (self.short_factors, self.long_factors)
        )
        return jnp.where(length > self.original_length, long, short), self.magnitude

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return 1.0


@dataclasses.dataclass(frozen=True)
class ProportionalScaling(RopeScaling):
    """Rotation of the first `pairs` pairs of a head, with the frequencies that they would have if all were rotated,
    divided by `factor`; the other pairs have frequency 0 (proportional RoPE; Gemma 4, 2026)."""

    pairs: int
    factor: _Number = 1

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        frequencies = _inverse_frequencies(dim, base) / self.factor
        return np.where(np.arange(dim // 2) < self.pairs, frequencies, 0.0), 1.0


@dataclasses.dataclass(frozen=True)
class ReversedRotation(RopeScaling):
    """Rotation in the other direction, (a, b) -> (a cos + b sin, b cos - a sin), with the frequencies of `scaling`, or
    unscaled ones without it (Karpathy, "nanochat", 2025). The magnitude is 1: a norm follows, which undoes any
    other."""

    scaling: RopeScaling | None = None

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        scaling = LinearScaling(1) if self.scaling is None else self.scaling
        frequencies, _ = scaling(dim, base, length)
        return -frequencies, 1.0


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (RoPE) of the first `dim` features of each head.

    `interleaved` pairs feature 2 i with 2 i + 1, as the paper does; otherwise i is paired with i + dim / 2, as most
    checkpoints do. The two differ by a permutation of the rows of the query and key projections.

    **Raises** `ValueError` for an odd or empty `dim`.
    """

    dim: int
    base: _Number = 10000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self):
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"Rotary: features are rotated in pairs, and dim is {self.dim}.")

    def __call__(
        self,
        positions: Int[Array, "*batch seq"],
        *,
        length: _Length | None = None,
    ) -> tuple[Float[Array, "*batch seq pairs"], Float[Array, "*batch seq pairs"]]:
        """Compute cos and sin of the angles of each token, in float32 and times the scaling's magnitude.

        `length` is the total sequence length, which `DynamicScaling` and `LongRopeScaling` depend on; the default is
        the largest position plus one, over all rows. Pass it if the sequence is sharded.
        """
        if length is None:
            length = jnp.max(positions) + 1
        scaling = self.scaling or LinearScaling(1)
        frequencies, magnitude = scaling(self.dim, self.base, length)
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
        # XLA's CPU backend fuses cosines into the rotation, and computes them for each head, but never a remainder.
        cos = lax.rem(jnp.cos(angles), np.float32(2))
        sin = lax.rem(jnp.sin(angles), np.float32(2))
        return cos * magnitude, sin * magnitude


@jax.named_scope("rotary")
def apply_rotary(
    x: Float[Array, "batch seq heads head_dim"],
    cos: Float[Array, "#batch seq pairs"] | Float[Array, "seq pairs"],
    sin: Float[Array, "#batch seq pairs"] | Float[Array, "seq pairs"],
    *,
    interleaved: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Apply rotary embedding to the first 2 * pairs features of each head; the rest passes through.

    Computed in float32; the result has the dtype of `x`.

    **Raises** `ValueError` if a head has fewer features.
    """
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise ValueError(f"apply_rotary: {dim} features per head are to be rotated, and there are {x.shape[-1]}.")
    cos = cos[..., None, :]
    sin = sin[..., None, :]
    to_rotate = x[..., :dim].astype(jnp.float32)
    rest = x[..., dim:]
    if interleaved:
        a = to_rotate[..., 0::2]
        b = to_rotate[..., 1::2]
    else:
        a, b = jnp.split(to_rotate, 2, axis=-1)
    rotated = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        rotated = jnp.stack(rotated, axis=-1).reshape(to_rotate.shape)
    else:
        rotated = jnp.concatenate(rotated, axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
