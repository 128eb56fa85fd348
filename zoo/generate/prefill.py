"""Read a text into KV caches and recurrent states: piece by piece, from the beginning or after a prefix."""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zoo._checks import is_host_readable
from zoo.layers import AbstractMixer, TokenInfo
from zoo.layers.kv_cache import set_rope_length
from zoo.models import Decoder
from zoo.models.decoder import LayerStates
from zoo.parallel import Mesh, Module, leaves, reduce, shard
from zoo.parallel.batch import find_batch_axis
from zoo.parallel.collectives import current_mesh, while_loop
from zoo.parallel.spmd import OutputDims, SpmdProgram, run_jitted

from . import request
from .buckets import Prompt, choose_cache_length, choose_piece, choose_rows, count_pieces_at_once, pad_prompt

_Tree = TypeVar("_Tree")
_Progress = tuple[Int[Array, ""], LayerStates]
"""The column of the next token of a prompt, and the states before it."""


class Prefix(Module):
    """A text that has been read: the states of all layers after each row's tokens except the last, which is read with
    the tokens that follow.

    `zoo.prefill` returns one, and `zoo.generate(..., details=True)` one of prompt and new tokens. It is never changed,
    so that any number of calls can go on after it.
    """

    states: LayerStates
    """One state per layer: KV caches or recurrent states."""
    text: Int[Array, "batch text"]
    """Token ids of each row, in the order of their positions; -1 after the last."""

    rows: int = eqx.field(static=True)
    """Number of rows; the arrays may have more, which are padding."""
    length: int = eqx.field(static=True)
    """Capacity of the KV caches, for the prefix and what follows."""
    rope_length: int = eqx.field(static=True, default=0)
    """Sequence length for RoPE that depends on it; 0 for the number of tokens so far."""
    followed: Float[Array, "batch embed"] | None = None
    """After a prompt with images: the hidden state, after the final norm, of the token that follows, which has been
    read with all others."""

    @property
    def lengths(self) -> Int[Array, "batch"]:
        """Number of tokens of each row."""
        return count_tokens(self.text)[: self.rows]


def prefill(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    length: int | None = None,
    mask: Bool[Array, "batch seq"] | None = None,
    prefix: Prefix | None = None,
    mesh: Mesh | None = None,
) -> Prefix:
    """Read tokens; return a prefix for `zoo.generate`, which then reads only the tokens that follow.

    - `length`: capacity of the KV caches, for these tokens and all that follow. By default the number of these tokens,
      rounded up to a bucket. If given, it is also the length for RoPE scaling that depends on the sequence length.
    - `mask`: padding mask, True or 1 for real tokens; padding is on the left.
    - `prefix`: a prefix to read after, of as many rows, or of one row for all of them.
    - `mesh`: the mesh of the model.

    **Raises** `ValueError` for tokens, a mask or a length that `zoo.generate` would refuse, and for a prefix of another
    number of rows or without room for the tokens; `TypeError` for a model that is not a decoder;
    `NotImplementedError` for a mesh that shards layers, and after a prefix for LongRoPE without a `length`.
    """
    request.check_decoder(model)
    request.check_prompt(tokens, mask, model.embedding.table_shape[0])
    request.check_mesh(mesh, model)
    mesh = drop_sequence_parallelism(mesh)
    slots, rope_length = choose_capacity(model, tokens, 0, length, prefix)
    rows = choose_rows(model, len(tokens), mesh)
    prompt = pad_after(prefix, tokens, mask, rows, slots, mesh, rope_length)
    states, text = run_jitted(on_mesh(_read_prefix, mesh), (model,), (prompt, slots, prefix))
    return Prefix(states, text, len(tokens), slots, rope_length)


def _read_prefix(
    model: Decoder, prompt: Prompt, length: int, prefix: Prefix | None
) -> tuple[LayerStates, Int[Array, "batch text"]]:
    prompt, states, before = follow_prefix(prompt, prefix)
    count = reduce(prompt.last_position.max() + 1, over="batch", by=lax.pmax)
    rope_length = jnp.where(prompt.rope_length > 0, prompt.rope_length, count)
    return read_prompt(model, prompt, length, rope_length, states), write_text(prompt, length, before)


def choose_capacity(
    model: Decoder, tokens: Int[Array, "batch seq"], new: int, length: int | None, prefix: Prefix | None
) -> tuple[int, int]:
    """Return the capacity of the KV caches, and the sequence length for RoPE that depends on it: 0 for the number of
    tokens so far.

    **Raises** `ValueError` for a `length` below the number of tokens, one besides a prefix, a prefix of another number
    of rows, or without room for `tokens` and `new` ones; `NotImplementedError` after a prefix for RoPE that reads the
    text again (LongRoPE).
    """
    if prefix is None:
        return choose_cache_length(model, tokens.shape[1], new, length), length or 0
    if length is not None:
        raise ValueError(f"length={length}: a prefix has its capacity, {prefix.length}. Give length to zoo.prefill")
    if prefix.rows not in (1, len(tokens)):
        raise ValueError(f"a prefix of {prefix.rows} rows is followed by as many rows of tokens, not {len(tokens)}")
    if find_rope_switches(model) and not prefix.rope_length:
        raise NotImplementedError(
            "LongRoPE reads the whole text again where it switches frequencies, so nothing goes on after a prefix. "
            "With zoo.prefill(..., length=...) it has the frequencies of that length from the first token on"
        )
    if not is_host_readable(prefix.text):
        return prefix.length, prefix.rope_length
    before = int((np.asarray(jax.device_get(prefix.text)) >= 0).sum(axis=1).max())
    needed = before + tokens.shape[1] + new
    if needed > prefix.length:
        raise ValueError(
            f"the prefix has room for {prefix.length} tokens, and {before} of its own, {tokens.shape[1]} that follow "
            f"and {new} new ones are {needed}: read it with a larger length"
        )
    return prefix.length, prefix.rope_length


def pad_after(
    prefix: Prefix | None,
    tokens: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"] | None,
    rows: int,
    length: int,
    mesh: Mesh | None,
    rope_length: int,
) -> Prompt:
    """Pad a prompt to `rows` rows, or to the rows of a prefix with as many, with room for the last token of the
    prefix."""
    if prefix is None:
        return pad_prompt(tokens, mask, rows, length, mesh, rope_length)
    if prefix.rows == len(tokens):
        rows = len(prefix.text)
    return pad_prompt(tokens, mask, rows, length, mesh, rope_length, spare=1)


def follow_prefix(
    prompt: Prompt, prefix: Prefix | None
) -> tuple[Prompt, LayerStates | None, Int[Array, "batch text"] | None]:
    """Put the last token of a prefix before the prompt, and count positions on from there; return the prompt, the
    states of the prefix and its text. A row of the prefix is repeated for as many rows as the prompt has."""
    if prefix is None:
        return prompt, None, None
    prefix = repeat_rows(prefix, len(prompt.last) // len(prefix.text))
    length = count_tokens(prefix.text)
    last = jnp.maximum(jnp.take_along_axis(prefix.text, length[:, None] - 1, axis=1)[:, 0], 0)  # of a source none
    is_real = prompt.positions >= 0
    place = is_real.shape[1] - is_real.sum(axis=1) - 1
    is_place = (jnp.arange(is_real.shape[1]) == place[:, None]) & (prefix.followed is None)
    shifted = jnp.where(is_real, prompt.positions + length[:, None], -1)
    prompt = dataclasses.replace(
        prompt,
        tokens=jnp.where(is_place, last[:, None], prompt.tokens),
        positions=jnp.where(is_place, length[:, None] - 1, shifted),
        last_position=prompt.last_position + length,
    )
    return prompt, prefix.states, prefix.text


def repeat_rows(tree: _Tree, times: int) -> _Tree:
    """Repeat each row of all arrays with a dim `batch`: row i becomes rows i * times, ..., i * times + times - 1."""
    if times == 1:
        return tree
    arrays, treedef = jax.tree.flatten(tree)
    repeated = []
    for leaf, x in zip(leaves(tree), arrays, strict=True):
        axis = find_batch_axis(leaf, x)
        repeated.append(x if axis is None else jnp.repeat(x, times, axis=axis))
    return jax.tree.unflatten(treedef, repeated)


def repeat_prompt(prompt: Prompt, times: int) -> Prompt:
    """Repeat each row of a prompt; every sample has a row number, and so a PRNG key, of its own."""
    if times == 1:
        return prompt
    repeated = repeat_rows(prompt, times)
    number = jnp.tile(jnp.arange(times, dtype=jnp.int32), len(prompt.rows))
    return dataclasses.replace(repeated, rows=jnp.where(repeated.rows < 0, -1, repeated.rows * times + number))


def write_text(prompt: Prompt, length: int, before: Int[Array, "batch text"] | None = None) -> Int[Array, "batch text"]:
    """Return the tokens of each row by position, -1 after the last: of a prompt, after the text `before` it."""
    if before is None:
        before = jnp.broadcast_to(jnp.full_like(prompt.last, -1)[:, None], (len(prompt.last), length))
    rows = jnp.arange(len(prompt.last))
    places = jnp.where(prompt.positions < 0, length, prompt.positions)  # out of range, and dropped
    text = before.at[rows[:, None], places].set(prompt.tokens, mode="drop")
    return text.at[rows, prompt.last_position].set(prompt.last)


def count_tokens(text: Int[Array, "batch text"]) -> Int[Array, "batch"]:
    """Return the number of tokens of each row of a text that ends with -1."""
    return (text >= 0).sum(axis=1, dtype=jnp.int32)


def read_prompt(
    model: Decoder, prompt: Prompt, length: int, rope_length: Int[Array, ""], states: LayerStates | None = None
) -> LayerStates:
    """Return the states after a prompt without its last token, from `states` on; by default from empty ones.

    Of a long prompt several pieces are read at once: first those that are left over, one by one, then the others. Each
    read takes the weights and the whole caches through the layers, and small products are slow. Where the mesh shards
    the sequence, each device computes a share of a piece.
    """
    room = prompt.tokens.shape[1]
    size = choose_piece(length, current_mesh())
    first = model.init_state(len(prompt.tokens), length) if states is None else states
    carry = room - prompt.pieces * size, set_rope_length(first, rope_length)

    def read_until(end: int | Int[Array, ""], size: int, carry: _Progress) -> _Progress:
        def step(carry: _Progress) -> _Progress:
            start, states = carry
            take = lambda x: shard(lax.dynamic_slice_in_dim(x, start, size, axis=1), "seq", axis=1)
            _, states = model.hidden(take(prompt.tokens), TokenInfo(take(prompt.positions)), states)
            return start + size, states or ()

        return while_loop(lambda carry: carry[0] < end, step, carry)

    at_once = count_pieces_at_once(len(prompt.tokens), size)
    if at_once > 1 and room > at_once * size:
        carry = read_until(room - prompt.pieces // at_once * at_once * size, size, carry)
        size *= at_once
    return read_until(room, size, carry)[1]


def find_rope_switches(model: Decoder) -> tuple[int, ...]:
    """Return the lengths beyond which RoPE of some layer has other frequencies for all tokens."""
    return tuple(sorted({x.rope_switch_length for x in list_mixers(model) if x.rope_switch_length is not None}))


def list_mixers(model: Decoder) -> list[AbstractMixer]:
    """List the mixers of all layers; one for each scanned stack of layers."""
    is_mixer = lambda x: isinstance(x, AbstractMixer)
    return [x for x in jax.tree.leaves(model.stack, is_leaf=is_mixer) if is_mixer(x)]


def drop_sequence_parallelism(mesh: Mesh | None) -> Mesh | None:
    """Return the mesh on which tokens are decoded."""
    return None if mesh is None else mesh.without_sequence_parallelism


def on_mesh(program: Any, mesh: Mesh | None) -> Any:
    """Return a program of tokens for the devices of a mesh; without one, the program itself."""
    if mesh is None:
        return program
    return SpmdProgram(program, mesh, 1, OutputDims.from_tree("batch seq"))
