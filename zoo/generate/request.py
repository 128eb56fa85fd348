"""Check arguments of `generate`, choose the cache length, and pad prompts to buckets so that few programs compile."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from zoo._checks import check_tokens
from zoo.layers import AbstractMixer
from zoo.models import Decoder
from zoo.parallel import Mesh, Module

_Number = float | int

_MIN_BUCKET = 16
"""Minimum size of prompts and caches, so that short prompts share a program."""


class SamplingOptions(Module):
    """Options of token sampling. They are traced, so changing a value does not recompile; changing *which* are None
    does."""

    temperature: Float[Array, ""] | None
    top_k: Int[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None
    penalty: Float[Array, ""] | None
    stop: Int[Array, "classes"] | None
    """Tokens that end a row, padded with -1 to a power of two."""

    @classmethod
    def from_arguments(
        cls,
        temperature: _Number,
        top_k: int | None,
        top_p: _Number | None,
        min_p: _Number | None,
        penalty: _Number | None,
        stop_tokens: Sequence[int],
        vocab: int,
    ) -> "SamplingOptions":
        """Convert options of `generate` to arrays. **Raises** `ValueError` for a stop token outside the vocabulary."""
        stop = [int(token) for token in stop_tokens]
        if outside := [token for token in stop if not 0 <= token < vocab]:
            raise ValueError(f"stop_tokens: {outside[0]} is outside the vocabulary of {vocab} tokens")
        stop += [-1] * (_round_up_to_power_of_two(len(stop), 4) - len(stop))

        def to_array(x, dtype=jnp.float32):
            return None if x is None else jnp.asarray(x, dtype)

        return cls(
            temperature=to_array(temperature or None),
            top_k=to_array(top_k if top_k is None else min(top_k, vocab), jnp.int32),
            top_p=to_array(top_p),
            min_p=to_array(min_p),
            penalty=to_array(penalty),
            stop=to_array(stop if len(stop_tokens) else None, jnp.int32),
        )


def check_sampling_options(
    max_new_tokens: int,
    temperature: _Number,
    top_k: int | None,
    top_p: _Number | None,
    min_p: _Number | None,
    penalty: _Number | None,
    has_key: bool,
) -> None:
    """**Raises** `ValueError`, naming the option, for the first one that is out of its range."""
    if max_new_tokens < 1:
        raise ValueError(f"generate needs max_new_tokens of at least 1, not {max_new_tokens}")
    if not 0 <= temperature < math.inf or (temperature > 0 and not has_key):
        raise ValueError(f"temperature={temperature} needs to be 0, or above 0 with a key to sample with")
    truncation = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    if not temperature and (unused := [name for name, x in truncation.items() if x is not None]):
        raise ValueError(f"{unused[0]} needs sampling, and temperature=0 is greedy: give a temperature above 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k keeps at least 1 token, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is above 0 and at most 1, not {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p is at least 0 and at most 1, not {min_p}")
    if penalty is not None and not 0 < penalty < math.inf:
        raise ValueError(f"repetition_penalty is above 0, 1 changing nothing, not {penalty}")


def check_prompt(tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"] | None, vocab: int) -> None:
    """Check the shape of a prompt, and its values unless they are traced or on other processes.

    **Raises** `TypeError` for a prompt that is not of integers, and `ValueError` for one that is not "batch seq" or is
    empty, padding that is not on the left, a row without a real token, and an id outside the vocabulary.
    """
    check_tokens(tokens, name="the prompt")
    if 0 in tokens.shape or (mask is not None and mask.shape != tokens.shape):
        of_mask = "" if mask is None else f", mask {mask.shape}"
        raise ValueError(
            f"generate needs a prompt of at least 1 row and 1 token, and its mask: {tokens.shape}{of_mask}"
        )
    is_real = np.ones(tokens.shape, bool)
    if mask is not None and _is_host_readable(mask):
        is_real = np.asarray(jax.device_get(mask))
        if len(empty := np.flatnonzero(~is_real.any(1))):
            raise ValueError(f"row {empty[0]} of the prompt has no real token: mask is False everywhere")
        if len(rows := np.flatnonzero((is_real[:, :-1] & ~is_real[:, 1:]).any(1))):
            raise ValueError(
                f"prompts are padded on the left: after the first real token of a row all are real, and in row "
                f"{rows[0]} of mask they are not"
            )
    if _is_host_readable(tokens) and (mask is None or _is_host_readable(mask)):
        ids = np.asarray(jax.device_get(tokens))[is_real]
        if len(outside := ids[(ids < 0) | (ids >= vocab)]):
            raise ValueError(f"the prompt holds {outside[0]}, which is outside the vocabulary of {vocab} tokens")


def check_mesh(mesh: Mesh | None) -> None:
    """**Raises** `NotImplementedError` for a mesh that shards the sequence or the layers."""
    for dim in () if mesh is None else ("seq", "layers"):
        if mesh is not None and (axes := mesh.axes(dim)):
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise NotImplementedError(
                f"generate does not shard {dim}, and this mesh has {sizes}: decode on data, fsdp and tensor"
            )


def choose_cache_length(model: Decoder, prompt: int, new: int, length: int | None) -> int:
    """Return the capacity of the KV caches: `length` if given, otherwise prompt and new tokens rounded up to a power of
    two. Not rounded if the model does not support the rounded length or its RoPE frequencies would change with it.

    **Raises** `ValueError` for a `length` below prompt and new tokens.
    """
    needed = prompt + new
    if length is not None:
        if length < needed:
            raise ValueError(
                f"length={length} does not hold {prompt} tokens of the prompt and {new} new ones: {needed}"
            )
        return length
    rounded = _round_up_to_power_of_two(needed)
    mixers = jax.tree.leaves(model.stack, is_leaf=lambda x: isinstance(x, AbstractMixer))
    stable_lengths = [
        x.rope_stable_length for x in mixers if isinstance(x, AbstractMixer) and x.rope_stable_length is not None
    ]
    if rounded > min(stable_lengths, default=rounded):
        return needed
    try:
        _try_init_state(model, rounded)
    except (ValueError, NotImplementedError):
        return needed
    return rounded


@eqx.filter_jit
def _try_init_state(model: Decoder, length: int) -> None:
    """Raise as `init_state` does if the model does not support the length; jitted, so that it runs once per length."""
    model.init_state(1, length)


def _round_up_to_power_of_two(size: int, minimum: int = _MIN_BUCKET) -> int:
    """Return the smallest power of two that is at least `size` and `minimum`."""
    return max(minimum, 1 << (size - 1).bit_length())


def pad_prompt(
    tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"] | None, length: int, mesh: Mesh | None
) -> tuple[Int[Array, "rows bucket"], Int[Array, "rows bucket"], Int[Array, "rows"]]:
    """Pad a prompt to a bucket; return tokens, positions and row numbers.

    Tokens are padded on the left, with position -1: padding takes no slot of a KV cache, whose ring buffer drops it
    first. Rows are padded to a multiple of the batch shards with copies of the last row, which end when it does.
    """
    (count, seq), shards = tokens.shape, 1 if mesh is None else math.prod(mesh.shape[a] for a in mesh.axes("batch"))
    is_real: Any = np.ones(tokens.shape, bool) if mask is None else mask
    # With NumPy if possible, so that nothing compiles for each prompt length.
    on_host = _is_host_readable(tokens) and (mask is None or _is_host_readable(mask))
    xp: Any = np if on_host else jnp
    ids, is_real = jax.device_get((tokens, is_real)) if on_host else (tokens, is_real)
    rows = np.minimum(np.arange(-(-count // shards) * shards), count - 1)
    pad = (0, 0), (min(_round_up_to_power_of_two(seq), length) - seq, 0)
    positions = xp.pad(xp.where(is_real, xp.cumsum(is_real, axis=1) - 1, -1), pad, constant_values=-1)
    prompt = xp.pad(xp.where(is_real, ids, 0), pad)  # padding may be any id, and an unknown one is NaN
    return jax.device_put(tuple(x.astype(np.int32) for x in (prompt[rows], positions[rows], rows)))


def _is_host_readable(x: Array) -> bool:
    """Return True if the values of an array can be read: it is not traced and fully addressable by this process."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)
