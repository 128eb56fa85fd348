"""Rotary position embedding, and the ways to stretch it beyond the length that a model was trained on.

RoPE (Su et al., arXiv 2104.09864, section 3.2.2) turns each pair of a query's and a key's values by an angle that grows
with the position, so that their product depends on the distance alone:

    frequency_i = base ** (-2 i / dim)          i = 0 .. dim / 2 - 1, one for each pair
    angle_i     = position * frequency_i
    (a, b)     -> (a cos - b sin, b cos + a sin)

`Rotary` says which frequencies; calling it with positions gives cos and sin, and `apply_rotary` turns with them:

    cos, sin = rotary(positions)
    query, key = (apply_rotary(x, cos, sin, interleaved=rotary.interleaved) for x in (query, key))

A `Scaling` changes the frequencies and may multiply cos and sin by a magnitude, which sharpens the softmax. All of them
are frozen values of plain numbers: static fields of a layer, nothing that training could move. The numbers are those of
Hugging Face's transformers 5 (`modeling_rope_utils`), but for the rounding of frequencies, which are made in float64.
"""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_Number = int | float  # a config file writes 8 and 8.0 alike
_Length = int | Int[Array, ""]
_Frequencies = Float[np.ndarray, "pairs"] | Float[Array, "pairs"]


def _inverse_frequencies(dim: int, base: _Number) -> Float[np.ndarray, "pairs"]:
    """base ** (-2 i / dim), in float64: from 1 radian a token down to almost 1 / base."""
    return base ** -(np.arange(0, dim, 2) / dim)


class RopeScaling(abc.ABC):
    """A way to stretch rotary embeddings."""

    @abc.abstractmethod
    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        """The frequencies in a sequence of `length` tokens, and the magnitude of cos and sin."""


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Positions divided by `factor` (Chen et al., Position Interpolation, arXiv 2306.15595, section 2.3)."""

    factor: _Number

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        return _inverse_frequencies(dim, base) / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK: a base that grows with the length, once that is beyond `original_length`.

        stretch = factor * length / original_length - (factor - 1)
        base'   = base * stretch ** (dim / (dim - 2))

    The fastest pair keeps its frequency and the slowest is divided by exactly `stretch`. All tokens of a call turn by
    the frequencies of its length; a cache holds keys that were turned by those of their own time. In transformers the
    length is the longest that the model object has seen, which a short call resets, so that results depend on what ran
    before: give `length` to follow it.
    Source: bloc97 and emozilla; written down in YaRN, arXiv 2309.00071, sections 3.1 and 3.3.
    """

    factor: _Number
    original_length: int

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        excess = jnp.maximum(length - self.original_length, 0) / self.original_length
        slowness = np.linspace(
            0, 1, dim // 2, dtype=np.float32
        )  # 2 i / (dim - 2), the exponent of `stretch` for pair i
        return _inverse_frequencies(dim, base).astype(np.float32) * (1 + self.factor * excess) ** -slowness, 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Slow pairs are divided by `factor`, fast ones are left, and those between are a mixture of the two.

    Slow and fast are counted in full turns within `original_length`: fewer than `low_frequency_factor`, more than
    `high_frequency_factor`. Source: Llama 3.1, in transformers and in Meta's llama-models (`apply_scaling`).
    """

    factor: _Number
    low_frequency_factor: _Number
    high_frequency_factor: _Number
    original_length: int

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        plain = _inverse_frequencies(dim, base)
        turns = self.original_length * plain / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return plain * (kept + (1 - kept) / self.factor), 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """As `Llama3`, but mixed linearly in the number of the pair, and with a magnitude.

    A pair that makes `beta_fast` turns within `original_length` is the last to be left alone, one that makes
    `beta_slow` the first to be divided by `factor`; `truncate` rounds both outwards to whole pairs. The magnitude is
    `attention_factor` where given, else the ratio of yarn_magnitude at `mscale` and at `mscale_all_dim` where both are
    given (DeepSeek), else yarn_magnitude(factor). Source: Peng et al., arXiv 2309.00071, sections 3.2 and 3.4; the
    paper mixes linearly in the number of turns, its code, and everybody since, in the number of the pair.
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
        def pair(turns: _Number) -> float:
            return dim / 2 * math.log(self.original_length / (2 * math.pi * turns)) / math.log(base)

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first or 0.001  # transformers' guard: one pair alone is a step, not a division by zero
        kept = 1 - np.clip((np.arange(dim // 2) - first) / width, 0, 1)
        return _inverse_frequencies(dim, base) * (kept + (1 - kept) / self.factor), self.magnitude

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return yarn_get_mscale(self.factor, self.mscale) / yarn_get_mscale(self.factor, self.mscale_all_dim)
        return yarn_get_mscale(self.factor)


def yarn_get_mscale(factor: _Number, mscale: _Number = 1) -> float:
    """0.1 weight ln(factor) + 1, and 1 for a factor up to 1 (arXiv 2309.00071, section 3.4).

    DeepSeek multiplies the scale of its scores by the square of yarn_magnitude(factor, mscale_all_dim).
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """Each frequency divided by a factor of its own, found by search: one set up to `original_length`, one beyond.

    `factor` is how many times longer the model may get, and gives the magnitude, at any length: `attention_factor`
    where given, else sqrt(1 + ln(factor) / ln(original_length)), and 1 for a factor up to 1. All tokens of a call turn
    by the set of its length. Source: Ding et al., arXiv 2402.13753, section 3; the magnitude is that of its code.

    **Raises** `ValueError`, when called, where a set is not one factor for each pair.
    """

    short_factors: tuple[_Number, ...]
    long_factors: tuple[_Number, ...]
    original_length: int
    factor: _Number
    attention_factor: _Number | None = None

    def __call__(self, dim: int, base: _Number, length: _Length) -> tuple[_Frequencies, float]:
        if not len(self.short_factors) == len(self.long_factors) == dim // 2:
            raise ValueError(
                f"LongRope: {dim // 2} pairs are turned, and there are {len(self.short_factors)} short and "
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
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length)) if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary embedding of the first `dim` values of each head.

    `interleaved` pairs value 2 i with 2 i + 1, as the paper does; otherwise i is paired with i + dim / 2, as most
    checkpoints do. The two differ by a permutation of the rows of the query and key projections.

    **Raises** `ValueError` for an odd or empty `dim`.
    """

    dim: int
    base: _Number = 10000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self):
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"Rotary: values turn in pairs, and dim is {self.dim}.")

    def __call__(
        self,
        positions: Int[Array, "*batch seq"],
        *,
        length: _Length | None = None,
    ) -> tuple[Float[Array, "*batch seq pairs"], Float[Array, "*batch seq pairs"]]:
        """cos and sin of each token's angles, in float32 and times the scaling's magnitude.

        `length` is that of the whole sequence, which `Dynamic` and `LongRope` depend on: by default the largest
        position plus one, over all rows. Give it where these positions are a share of the sequence.
        """
        length = jnp.max(positions) + 1 if length is None else length
        scaling = self.scaling or LinearScaling(1)
        rates, magnitude = scaling(self.dim, self.base, length)
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rates, jnp.float32)
        return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


@jax.named_scope("rotary")
def apply_rotary(
    x: Float[Array, "batch seq heads head_dim"],
    cos: Float[Array, "#batch seq pairs"] | Float[Array, "seq pairs"],
    sin: Float[Array, "#batch seq pairs"] | Float[Array, "seq pairs"],
    *,
    interleaved: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Turn the first 2 * pairs values of each head; the rest passes through.

    Computed in float32; the result has the dtype of `x`.

    **Raises** `ValueError` where a head has fewer values than that.
    """
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise ValueError(f"apply_rotary: {dim} values a head are to be turned, and there are {x.shape[-1]}.")
    cos, sin = cos[..., None, :], sin[..., None, :]
    turning, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else jnp.split(turning, 2, axis=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        turned = jnp.stack(turned, axis=-1).reshape(turning.shape)
    else:
        turned = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
