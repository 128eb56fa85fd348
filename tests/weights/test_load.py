"""Numbers that cannot be loaded: not finite, too large for the dtype, or tied weights that differ."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow

from .damage import LLAMA, NORM, QUERY, alter_tensors, bits_of


def test_load_compares_tied_weights(make, tmp_path, attempt):
    zoo.save(make("llama", LLAMA | {"tie_word_embeddings": True}), tmp_path / "tied")
    model = zoo.load(tmp_path / "tied")
    copy = lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"].copy()})
    both = alter_tensors(tmp_path / "tied", tmp_path / "both", copy)
    assert bits_of(zoo.load(both)) == bits_of(model), "a tied head that is in the file as well"

    def other(arrays):
        copy(arrays)
        arrays["lm_head.weight"][3, 2] += 1

    message = attempt("tied, and not equal", alter_tensors(tmp_path / "tied", tmp_path / "both", other))
    assert "lm_head.weight is not model.embed_tokens.weight" in message


@pytest.mark.parametrize("dtype", mark_slow(["float32", "float16", "bfloat16", "float64"], but=["float32", "bfloat16"]))
def test_load_refuses_non_finite_numbers(checkpoint, tmp_path, attempt, dtype):
    for value, name in itertools.product((np.nan, np.inf, -np.inf), (QUERY, NORM, "model.embed_tokens.weight")):

        def spoil(arrays, value=value, name=name):
            for key in arrays:
                arrays[key] = arrays[key].astype(jnp.dtype(dtype))
            arrays[name].reshape(-1)[5] = value

        message = attempt(f"{value} in {name}", alter_tensors(checkpoint, tmp_path / "t", spoil), allocates=True)
        assert name in message and "not finite" in message


def test_load_refuses_overflow_in_dtype(checkpoint, tmp_path, attempt):
    for held, asked, value in (
        ("float32", jnp.float16, 1e6),
        ("float32", jnp.float16, -7e4),
        ("bfloat16", jnp.float16, 1e30),
        ("float64", jnp.float32, 1e300),
        ("float64", None, -1e300),
        ("float64", jnp.bfloat16, 1e39),
        ("float32", jnp.bfloat16, 3.4028e38),
    ):

        def spoil(arrays, held=held, value=value):
            for key in arrays:
                arrays[key] = arrays[key].astype(jnp.dtype(held))
            arrays[NORM][5] = value

        directory = alter_tensors(checkpoint, tmp_path / "t", spoil)
        message = attempt(f"{value} to {asked}", directory, allocates=True, dtype=asked)
        assert NORM in message and "too large for" in message


def test_load_refuses_non_floating_dtype(checkpoint):
    """Such a dtype would truncate the parameters."""
    for dtype in (jnp.int32, jnp.int8, bool, jnp.complex64):
        with pytest.raises((ValueError, TypeError), match=jnp.dtype(dtype).name):
            zoo.load(checkpoint, dtype=dtype)
