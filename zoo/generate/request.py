"""What was asked: held against the model, and laid out so that few programs serve many requests."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from zoo.layers import AbstractMixer
from zoo.models import Decoder
from zoo.parallel import Mesh, Module

_Number = float | int

_MIN_BUCKET = 16
"""Prompts and caches hold at least so many tokens, so that short ones share a program."""


class SamplingOptions(Module):
    """How the next token is chosen. Numbers are arrays, so that other ones are no other program; what is None is."""

    temperature: Float[Array, ""] | None
    top_k: Int[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None
    penalty: Float[Array, ""] | None
    stop: Int[Array, "classes"] | None
    """The tokens that end a row, as many as a power of two: the rest are -1, which is no token."""

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
        """**Raises** `ValueError` for a stop token outside the vocabulary."""
        stop = [int(token) for token in stop_tokens]
        if outside := [token for token in stop if not 0 <= token < vocab]:
            raise ValueError(f"stop_tokens: {outside[0]} is outside the vocabulary of {vocab} tokens")
        stop += [-1] * (_round_up_to_power_of_two(len(stop), 4) - len(stop))

        def number(x, dtype=jnp.float32):
            return None if x is None else jnp.asarray(x, dtype)

        return cls(
            temperature=number(temperature or None),
            top_k=number(top_k if top_k is None else min(top_k, vocab), jnp.int32),
            top_p=number(top_p),
            min_p=number(min_p),
            penalty=number(penalty),
            stop=number(stop if len(stop_tokens) else None, jnp.int32),
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
    """**Raises** `ValueError` for the first number that is out of its range, by name."""
    if max_new_tokens < 1:
        raise ValueError(f"generate needs max_new_tokens of at least 1, not {max_new_tokens}")
    if not 0 <= temperature < math.inf or (temperature > 0 and not has_key):
        raise ValueError(f"temperature={temperature} needs to be 0, or above 0 with a key to draw with")
    drawing = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    if not temperature and (idle := [name for name, x in drawing.items() if x is not None]):
        raise ValueError(
            f"{idle[0]} says what may be drawn, and temperature=0 draws nothing: give a temperature above 0"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k keeps at least 1 token, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is above 0 and at most 1, not {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p is at least 0 and at most 1, not {min_p}")
    if penalty is not None and not 0 < penalty < math.inf:
        raise ValueError(f"repetition_penalty is above 0, 1 changing nothing, not {penalty}")


def check_prompt(tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"] | None, vocab: int) -> None:
    """What can be seen of a prompt now: its shape; and its numbers, unless it is traced or lies on other processes.

    **Raises** `ValueError` for an empty prompt, for padding that does not stand on the left alone, for a row without a
    real token, and for an id outside the vocabulary.
    """
    if 0 in tokens.shape or (mask is not None and mask.shape != tokens.shape):
        of_mask = "" if mask is None else f", mask {mask.shape}"
        raise ValueError(
            f"generate needs a prompt of at least 1 row and 1 token, and its mask: {tokens.shape}{of_mask}"
        )
    real = np.ones(tokens.shape, bool)
    if mask is not None and _is_host_readable(mask):
        real = np.asarray(jax.device_get(mask))
        if len(empty := np.flatnonzero(~real.any(1))):
            raise ValueError(f"row {empty[0]} of the prompt has no real token: mask is False all along it")
        if len(rows := np.flatnonzero((real[:, :-1] & ~real[:, 1:]).any(1))):
            raise ValueError(
                f"prompts are padded on the left: once a token of a row is real so are all after it, and in row "
                f"{rows[0]} of mask they are not"
            )
    if _is_host_readable(tokens) and (mask is None or _is_host_readable(mask)):
        ids = np.asarray(jax.device_get(tokens))[real]
        if len(outside := ids[(ids < 0) | (ids >= vocab)]):
            raise ValueError(f"the prompt holds {outside[0]}, which is outside the vocabulary of {vocab} tokens")


def check_mesh(mesh: Mesh | None) -> None:
    """**Raises** `NotImplementedError` where a token's way through the layers would lead over devices in turn."""
    for dim in () if mesh is None else ("seq", "layers"):
        if mesh is not None and (axes := mesh.axes(dim)):
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise NotImplementedError(
                f"generate does not split {dim}, and this mesh has {sizes}: decode on data, fsdp and tensor"
            )


def choose_cache_length(model: Decoder, prompt: int, new: int, length: int | None) -> int:
    """How many tokens the cache is to hold: as asked, else a power of two. Just those that are needed where the model
    was not made for so many (what it says of them, it says when the cache is made), or where its rotary embeddings
    would depend on how many there are.

    **Raises** `ValueError` for a `length` below what is needed.
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
    settled = [
        x.rope_stable_length for x in mixers if isinstance(x, AbstractMixer) and x.rope_stable_length is not None
    ]
    if rounded > min(settled, default=rounded):
        return needed
    try:
        _try_init_state(model, rounded)
    except (ValueError, NotImplementedError):
        return needed
    return rounded


@eqx.filter_jit
def _try_init_state(model: Decoder, length: int) -> None:
    """Raises where a model cannot hold so many tokens; compiled, so that it is asked once and not at every call."""
    model.init_state(1, length)


def _round_up_to_power_of_two(size: int, minimum: int = _MIN_BUCKET) -> int:
    """The smallest power of two that holds `size`, and at least `smallest`."""
    return max(minimum, 1 << (size - 1).bit_length())


def pad_prompt(
    tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"] | None, length: int, mesh: Mesh | None
) -> tuple[Int[Array, "rows bucket"], Int[Array, "rows bucket"], Int[Array, "rows"]]:
    """Tokens, positions and numbers of the rows as they are computed.

    Padded on the left to a bucket, with positions of -1: padding costs no place in a cache, whose ring drops it first.
    As many rows as the mesh divides: further ones are copies of the last, which end when it does.
    """
    (count, seq), shares = tokens.shape, 1 if mesh is None else math.prod(mesh.shape[a] for a in mesh.axes("batch"))
    real: Any = np.ones(tokens.shape, bool) if mask is None else mask
    # On the host where that is possible: no program is compiled for each length of a prompt.
    known = _is_host_readable(tokens) and (mask is None or _is_host_readable(mask))
    xp: Any = np if known else jnp
    ids, real = jax.device_get((tokens, real)) if known else (tokens, real)
    rows = np.minimum(np.arange(-(-count // shares) * shares), count - 1)
    pad = (0, 0), (min(_round_up_to_power_of_two(seq), length) - seq, 0)
    positions = xp.pad(xp.where(real, xp.cumsum(real, axis=1) - 1, -1), pad, constant_values=-1)
    prompt = xp.pad(xp.where(real, ids, 0), pad)  # padding may be any id, and an unknown one is NaN
    return jax.device_put(tuple(x.astype(np.int32) for x in (prompt[rows], positions[rows], rows)))


def _is_host_readable(x: Array) -> bool:
    """Whether the numbers of an array can be read: not under `jit`, nor where other processes hold some."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)
