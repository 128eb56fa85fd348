"""Rotary embeddings against the papers' formulas, pair by pair in Python, and their invariants."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.ops import rotary as ops
from zoo.ops.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rotary,
    YarnScaling,
    yarn_get_mscale,
)

apply_rotary = jax.jit(ops.apply_rotary, static_argnames="interleaved")


def expected_plain(dim, base):
    return [math.exp(-2 * pair / dim * math.log(base)) for pair in range(dim // 2)]


def expected_linear(dim, base, length, scaling):
    return [math.exp(-2 * pair / dim * math.log(base)) / scaling.factor for pair in range(dim // 2)]


def expected_dynamic(dim, base, length, scaling):
    length = max(length, scaling.original_length)
    stretch = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
    return expected_plain(dim, base * stretch ** (dim / (dim - 2)))


def expected_llama3(dim, base, length, scaling):
    result = []
    for frequency in expected_plain(dim, base):
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.original_length / scaling.high_frequency_factor:
            result.append(frequency)
        elif wavelength > scaling.original_length / scaling.low_frequency_factor:
            result.append(frequency / scaling.factor)
        else:
            smooth = scaling.original_length / wavelength - scaling.low_frequency_factor
            smooth /= scaling.high_frequency_factor - scaling.low_frequency_factor
            result.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return result


def expected_yarn(dim, base, length, scaling):
    pairs = np.arange(dim // 2)
    log_turns = np.log(scaling.original_length / (2 * np.pi) * np.array(expected_plain(dim, base)))
    slope, start = np.polyfit(pairs, log_turns, 1)
    low, high = ((math.log(beta) - start) / slope for beta in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = [min(max((pair - low) / (high - low), 0), 1) for pair in pairs]
    plain = expected_plain(dim, base)
    return [f / scaling.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


def expected_longrope(dim, base, length, scaling):
    factors = scaling.long_factors if length > scaling.original_length else scaling.short_factors
    return [1 / (factor / f) for factor, f in zip(factors, expected_plain(dim, base), strict=True)]


LONGROPE = LongRopeScaling(short_factors=(1.0, 1.1, 1.3, 1.6), long_factors=(1, 2, 4, 8), original_length=24, factor=4)
CASES = {
    "linear": (8, 10000, LinearScaling(4), expected_linear, 1.0),
    "dynamic": (8, 10000.0, DynamicScaling(2.0, 16), expected_dynamic, 1.0),
    "llama3": (12, 500000.0, Llama3Scaling(8.0, 1.0, 4.0, 64), expected_llama3, 1.0),
    "llama 3.1 as released": (128, 500000.0, Llama3Scaling(8, 1, 4, 8192), expected_llama3, 1.0),
    "yarn": (32, 10000.0, YarnScaling(4.0, 1024), expected_yarn, 0.1 * math.log(4) + 1),
    "gpt-oss": (16, 150000.0, YarnScaling(32.0, 4096, truncate=False), expected_yarn, 0.1 * math.log(32) + 1),
    "olmo 3": (16, 500000.0, YarnScaling(8.0, 8192, attention_factor=1.2), expected_yarn, 1.2),
    "deepseek": (8, 10000.0, YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707), expected_yarn, 1.0),
    "two mscales": (
        8,
        10000.0,
        YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.5),
        expected_yarn,
        (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1),
    ),
    "longrope": (8, 10000.0, LONGROPE, expected_longrope, math.sqrt(1 + math.log(4) / math.log(24))),
    "longrope, told": (8, 1e4, dataclasses.replace(LONGROPE, attention_factor=1.5), expected_longrope, 1.5),
}


@pytest.mark.parametrize("length", [1, 16, 24, 25, 33, 4096])
@pytest.mark.parametrize(("dim", "base", "scaling", "formula", "magnitude"), CASES.values(), ids=CASES)
def test_rope_scalings_equal_their_formulas(dim, base, scaling, formula, magnitude, length):
    frequencies, scale = scaling(dim, base, length)
    # Dynamic raises to a power in float32; all others are rounded once, if at all.
    np.testing.assert_allclose(frequencies, formula(dim, base, length, scaling), rtol=2e-6)
    assert scale == pytest.approx(magnitude, rel=1e-12)


def test_rotary_without_scaling_equals_its_formula():
    cos, sin = Rotary(8)(jnp.arange(6))
    angles = np.arange(6)[:, None] * np.array([1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


def test_yarn_of_one_pair_is_a_step():
    frequencies, _ = YarnScaling(4, 100, beta_fast=1, beta_slow=1, truncate=True)(8, 10000.0, 1)
    assert np.isfinite(frequencies).all()
    alike, _ = YarnScaling(4, 100, beta_fast=1, beta_slow=1, truncate=False)(8, 10000.0, 1)
    np.testing.assert_allclose(alike / expected_plain(8, 10000.0), [1, 1, 0.25, 0.25])


def test_yarn_get_mscale_grows_from_one():
    assert yarn_get_mscale(0.5) == yarn_get_mscale(1) == 1.0
    assert yarn_get_mscale(math.e**2, 3) == pytest.approx(1.6)


@pytest.mark.parametrize("scaling", [DynamicScaling(2.0, 16), LONGROPE], ids=["dynamic", "longrope"])
def test_rotary_length_defaults_to_the_largest_position(scaling):
    rotary = Rotary(8, scaling=scaling)
    turn = jax.jit(lambda positions, length=None: rotary(positions, length=length))
    whole = turn(jnp.arange(33))
    part = turn(jnp.arange(8), 33)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:8], b), whole, part)
    assert not np.allclose(part[1], turn(jnp.arange(8))[1])
    rows = jnp.stack([jnp.arange(8), jnp.arange(25, 33)])  # the longest row decides for all
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:8], b[0], atol=1e-6), whole, turn(rows))


def test_rotary_is_hashable_and_equal_by_value():
    for dim, base, scaling, *_ in CASES.values():
        assert hash(Rotary(dim, base, scaling=scaling)) == hash(Rotary(dim, base, scaling=scaling))
        assert Rotary(dim, base, scaling=scaling) == Rotary(dim, base, scaling=dataclasses.replace(scaling))
        assert not jax.tree.leaves(jax.tree.map(lambda x: None, scaling))


def values(shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@given(st.integers(0, 1000), st.booleans(), st.sampled_from([None, YarnScaling(4.0, 64), Llama3Scaling(8, 1, 4, 64)]))
def test_rotary_scores_depend_on_distances_alone(shift, interleaved, scaling):
    rotary = Rotary(8, interleaved=interleaved, scaling=scaling)

    def scores(positions):
        query, key = (
            apply_rotary(values((1, 6, 1, 8), i), *rotary(positions), interleaved=interleaved) for i in (0, 1)
        )
        return jnp.einsum("bqhd,bkhd->qk", query, key)

    # An angle of 1,000 radians is known to 6e-5, and a score is a sum of eight products of values below 4.
    np.testing.assert_allclose(scores(jnp.arange(6)), scores(jnp.arange(6) + shift), atol=5e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rotary_keeps_the_norm_of_pairs(interleaved):
    x = values((2, 5, 3, 8))
    y = apply_rotary(x, *Rotary(8)(jnp.arange(5)), interleaved=interleaved)
    shape = (2, 5, 3, 4, 2) if interleaved else (2, 5, 3, 2, 4)
    norms = [jnp.linalg.norm(z.reshape(shape), axis=-1 if interleaved else -2) for z in (x, y)]
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_apply_rotary_interleaved_is_a_permutation():
    x, angles = values((2, 5, 3, 8)), Rotary(8)(jnp.arange(5))
    order = np.arange(8).reshape(2, 4).T.ravel()  # 0 4 1 5 2 6 3 7
    expected = apply_rotary(x, *angles)[..., order]
    np.testing.assert_array_equal(apply_rotary(x[..., order], *angles, interleaved=True), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rotary_passes_the_rest_through(interleaved):
    x, angles = values((2, 5, 3, 10)), Rotary(4, scaling=YarnScaling(4.0, 16))(jnp.arange(5))
    y = apply_rotary(x, *angles, interleaved=interleaved)
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(y[..., :4], apply_rotary(x[..., :4], *angles, interleaved=interleaved))


def test_rotary_of_positions_per_row():
    rotary, x = Rotary(8), values((2, 5, 3, 8))
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 8, 0, 1, 2]])
    y = apply_rotary(x, *rotary(positions))
    for row in (0, 1):
        alone = apply_rotary(x[row : row + 1], *rotary(positions[row]))
        np.testing.assert_array_equal(y[row : row + 1], alone)


def test_rotary_computes_cosines_once_for_all_heads():
    step = jax.jit(lambda x: apply_rotary(x, *Rotary(8)(jnp.arange(16))))
    text = step.lower(values((2, 16, 4, 8))).compile().as_text()
    shapes = re.findall(r"f32\[([\d,]*)\]\S* (?:cosine|sine)\(", text)
    assert set(shapes) == {"16,4"}
    assert not [body for body in text.split("\n}") if "cosine(" in body and "concatenate(" in body]


def test_apply_rotary_of_bfloat16_rounds_once():
    x, angles = values((2, 5, 3, 8), dtype=jnp.bfloat16), Rotary(8)(jnp.arange(5))
    y = apply_rotary(x, *angles)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, apply_rotary(x.astype(jnp.float32), *angles).astype(jnp.bfloat16))


def test_rotary_raises_for_bad_dims():
    with pytest.raises(ValueError, match="dim is 7"):
        Rotary(7)
    with pytest.raises(ValueError, match="8 features per head"):
        apply_rotary(values((1, 2, 1, 6)), *Rotary(8)(jnp.arange(2)))
    with pytest.raises(ValueError, match="3 pairs"):
        Rotary(6, scaling=LONGROPE)(jnp.arange(2))
