"""Numbers that cannot be loaded: not finite, too large for the dtype, or tied weights that differ."""

import itertools
import shutil

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
    assert message.endswith("tied: set tie_word_embeddings to false in config.json to read both")


def test_load_takes_equal_numbers_of_two_dtypes_for_tied(make, tmp_path, attempt):
    zoo.save(zoo.cast(make("llama", LLAMA | {"tie_word_embeddings": True}), "bfloat16"), tmp_path / "tied")
    model = zoo.load(tmp_path / "tied")
    for dtype in ("float32", "float64"):

        def widen(arrays, dtype=dtype):
            arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].astype(dtype)

        assert bits_of(zoo.load(alter_tensors(tmp_path / "tied", tmp_path / dtype, widen))) == bits_of(model)

    def nearly(arrays):
        widen(arrays)
        arrays["lm_head.weight"][3, 2] += 1e-9

    message = attempt("equal if rounded", alter_tensors(tmp_path / "tied", tmp_path / "both", nearly))
    assert "lm_head.weight is not model.embed_tokens.weight" in message


def test_load_names_an_index_next_to_the_file_that_is_read(make, tmp_path, attempt, caplog):
    model = make("llama", LLAMA)
    zoo.save(model, tmp_path / "shards", shard_bytes=2_000)
    zoo.save(model, tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path / "shards")
    assert bits_of(zoo.load(tmp_path / "shards")) == bits_of(model)
    says = f"{tmp_path / 'shards' / 'model.safetensors'} is read, and not the "
    assert says in caplog.text and "files of model.safetensors.index.json next to it: delete the one" in caplog.text
    drop = lambda arrays: arrays.pop(QUERY)
    alter_tensors(tmp_path / "whole", tmp_path / "less", drop)
    shutil.copy(tmp_path / "less" / "model.safetensors", tmp_path / "shards")
    message = attempt("a stray file", tmp_path / "shards")
    assert f"{QUERY} [" in message and says in message


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
