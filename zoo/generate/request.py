"""Check the arguments of `generate`, and convert its sampling options to arrays."""

import math
from collections.abc import Sequence
from numbers import Integral

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from zoo._checks import check_mask, check_tokens, is_host_readable
from zoo.parallel import Mesh, Module

_Number = float | int


class SamplingOptions(Module):
    """Options of token sampling, all of them arrays: an option that is not set has its neutral value, so that neither
    setting nor changing one recompiles."""

    temperature: Float[Array, ""]
    """0 for greedy decoding."""
    top_k: Int[Array, ""]
    """At most the size of the vocabulary, which keeps every token."""
    top_p: Float[Array, ""]
    """1 keeps every token."""
    min_p: Float[Array, ""]
    """0 keeps every token."""
    penalty: Float[Array, ""]
    """1 changes nothing."""
    is_stop: Bool[Array, "classes"]
    """True for token ids that end a row."""

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
        is_stop = np.zeros(vocab, bool)
        is_stop[stop] = True
        kept = vocab if top_k is None else min(top_k, vocab)
        if top_p is None:
            top_p = 1
        if penalty is None:
            penalty = 1
        floats = [np.float32(x) for x in (temperature, top_p, min_p or 0, penalty)]
        # From NumPy: `jnp.asarray` would compile a program for each dtype and shape.
        arrays = jax.device_put((floats[0], np.int32(kept), *floats[1:], is_stop))
        return cls(*arrays)


def check_sampling_options(
    max_new_tokens: int,
    temperature: _Number,
    top_k: int | None,
    top_p: _Number | None,
    min_p: _Number | None,
    penalty: _Number | None,
    has_key: bool,
) -> None:
    """**Raises** `TypeError` for a `max_new_tokens` or `top_k` that is not an integer, and `ValueError` for the first
    option that is out of its range, by name."""
    for name, x in (("max_new_tokens", max_new_tokens), ("top_k", top_k)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, Integral)):
            raise TypeError(f"{name} is an integer, not {x!r}")
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
    if 0 in tokens.shape:
        raise ValueError(f"generate needs a prompt of at least 1 row and 1 token: {tokens.shape}")
    is_real = np.ones(tokens.shape, bool)
    if mask is not None:
        check_mask(mask, tokens)
    if mask is not None and is_host_readable(mask):
        is_real = np.asarray(jax.device_get(mask)).astype(bool)
        if len(empty := np.flatnonzero(~is_real.any(1))):
            raise ValueError(f"row {empty[0]} of the prompt has no real token: mask is False everywhere")
        if len(rows := np.flatnonzero((is_real[:, :-1] & ~is_real[:, 1:]).any(1))):
            raise ValueError(
                f"prompts are padded on the left: after the first real token of a row all are real, and in row "
                f"{rows[0]} of mask they are not"
            )
    if is_host_readable(tokens) and (mask is None or is_host_readable(mask)):
        ids = np.asarray(jax.device_get(tokens))[is_real]
        if len(outside := ids[(ids < 0) | (ids >= vocab)]):
            raise ValueError(f"the prompt holds {outside[0]}, which is outside the vocabulary of {vocab} tokens")


def check_mesh(mesh: Mesh | None) -> None:
    """**Raises** `NotImplementedError` for a mesh that shards the layers."""
    if mesh is not None and (axes := mesh.axes("layers")):
        sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
        raise NotImplementedError(
            f"generate does not shard layers, and this mesh has {sizes}: decode on data, fsdp, context and tensor"
        )
