"""Autoregressive generation: `zoo.generate`."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Key

from zoo._checks import is_host_readable, wrap_key
from zoo.models import Decoder
from zoo.parallel import Mesh, place
from zoo.parallel.spmd import OutputDims, SpmdProgram, run_jitted

from . import request
from .buckets import choose_cache_length, choose_rows, pad_prompt
from .decode import DecodeState, complete, decode_until, find_rope_switches, prefill, refill, unstack_layers

_Number = float | int


def generate(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    max_new_tokens: int,
    mask: Bool[Array, "batch seq"] | None = None,
    temperature: _Number = 0.0,
    top_k: int | None = None,
    top_p: _Number | None = None,
    min_p: _Number | None = None,
    repetition_penalty: _Number | None = None,
    stop_tokens: Sequence[int] = (),
    length: int | None = None,
    mesh: Mesh | None = None,
    callback: Callable[[Int[np.ndarray, "batch"]], object] | None = None,
    key: Key[Array, ""] | None = None,
) -> Int[Array, "batch new"]:
    """Generate `max_new_tokens` tokens per row after a prompt; return the new tokens only.

    - `mask`: padding mask, True or 1 for real tokens. Prompts of different lengths are padded on the left.
    - `temperature`: 0 is greedy decoding; otherwise tokens are sampled from softmax(logits / temperature) with `key`.
      Each row has its own PRNG key, so samples depend neither on the mesh nor on other rows.
    - `top_k`, `top_p`, `min_p`: truncation of the sampled distribution, in this order; see
      `zoo.ops.sampling.filter_logits`.
    - `repetition_penalty`: applies to tokens of the prompt and new tokens; see `zoo.ops.sampling.penalize_repetition`.
    - `stop_tokens`: a row ends with the first of these, which is included. The rest of the row is -1.
    - `length`: capacity of the KV caches, prompt and new tokens. By default their sum, rounded up to a bucket as far as
      the model supports that length. If given, it is also the length for RoPE scaling that depends on the sequence
      length (`DynamicScaling`, `LongRopeScaling`), from the first token on.
    - `mesh`: the mesh of the model. Rows are sharded over its batch axes, heads and vocabulary over `tensor`. With
      `context` each device holds a share of the slots of every KV cache, reads a share of each piece of the prompt,
      and attends to its slots for all (`zoo.layers.attention.cached`); recurrent states are replicated.
    - `callback`: called with the latest token of each row as soon as it is computed, -1 for rows that have ended.

    Prefill runs the prompt through the scanned layers in at most four pieces, or in pieces of 256 tokens. Decoding runs
    unstacked layers, each with its own KV cache or recurrent state, in one `while_loop` that ends when every row has.

    Without a `length`, RoPE scaling that depends on the sequence length uses the number of tokens so far, of the
    longest row for all rows, as transformers does. When that exceeds the `original_length` of `LongRopeScaling`, all
    tokens so far are read again with the long factors. `DynamicScaling` rotates each new token for the length so far,
    and keys in the caches stay as they are.

    `generate` may be called under `jit`. Elsewhere it returns when the tokens are computed, and blocks once per token
    with a callback.

    A call compiles one program per number of rows and cache length, with a callback two, whatever the options, the
    prompt's length and `max_new_tokens`. Both numbers are rounded up to buckets: rows per shard of the batch to 1, 4,
    8, 12, 16, 24, 32, ..., cache lengths to 128, 192, 256, 384, 512, ... So at most twice as many rows are computed, a
    cache of over 128 slots has at most half more than needed, and the prompt is padded to whole pieces. Layers are
    unstacked at every call, a copy: for many short calls pass `swap_stack(model, Stack.unstack)`.

    **Raises** `ValueError` for a prompt that is not "batch seq" or is empty, padding on the right, a row without a real
    token, a prompt id or stop token outside the vocabulary, an option out of its range, a temperature above 0 without a
    key, truncation options with temperature 0, a `length` below prompt and new tokens, more tokens than learned
    positions, and a callback under `jit`; after decoding, for a row of logits that are not finite. Under `jit`, and
    where other processes hold rows, the rest of such a row is -1 instead. **Raises** `TypeError` for a model that is
    not a decoder, for a prompt, `max_new_tokens` or `top_k` that does not consist of integers, and for stop tokens that
    are not a sequence of integers; `NotImplementedError` for a mesh that shards layers.
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"text is generated by a Decoder, not by {type(model).__name__}")
    vocab, _ = model.embedding.table_shape
    request.check_sampling_options(
        max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, key is not None
    )
    request.check_prompt(tokens, mask, vocab)
    request.check_mesh(mesh)
    if mesh is not None:
        mesh = mesh.without_sequence_parallelism
    if callback is not None and any(isinstance(x, Tracer) for x in jax.tree.leaves((model, tokens, mask, key))):
        raise ValueError("a callback needs tokens as they come, and under jit there are none yet: call generate bare")
    stop_tokens = _read_stop_tokens(stop_tokens)
    options = request.SamplingOptions.from_arguments(
        temperature, top_k, top_p, min_p, repetition_penalty, stop_tokens, vocab
    )
    if mesh is not None:
        options = place(options, mesh)  # once, not at every step
    slots = choose_cache_length(model, tokens.shape[1], max_new_tokens, length)
    prompt = pad_prompt(tokens, mask, choose_rows(model, len(tokens), mesh), slots, mesh, length or 0)
    until = jax.device_put(np.int32(max_new_tokens))
    is_sampled = temperature and key is not None
    key = wrap_key(key) if is_sampled else jax.random.key(0)  # a greedy call has the same program

    unstacked = unstack_layers(model, mesh)
    if callback is None:
        fixed = model, unstacked, options, key
        new = run_jitted(on_mesh(complete, mesh), (fixed,), (prompt, until, slots))
    else:
        state = run_jitted(on_mesh(prefill, mesh), ((model, options, key),), (prompt, slots))

        def read_again(state: DecodeState) -> DecodeState:
            text = dataclasses.replace(state, states=())  # the caches are freed before there are new ones
            return run_jitted(on_mesh(refill, mesh), (model,), (prompt, text, slots))

        switches = find_rope_switches(model) if length is None else ()
        switches = [switch + 1 - int(state.longest) for switch in switches]
        fixed = unstacked, options
        state = _decode_with_callback(
            callback, mesh, fixed, state, len(tokens), max_new_tokens, dict.fromkeys(switches, read_again)
        )
        new = state.tokens
    new = _cut(new, len(tokens), max_new_tokens)
    _check_finite(new, stop_tokens)
    return new


def _read_stop_tokens(stop_tokens: Sequence[int]) -> list[int]:
    """Return stop tokens as a list. **Raises** `TypeError` for anything but a sequence of integers."""
    try:
        return [operator.index(token) for token in stop_tokens]
    except TypeError:
        raise TypeError(f"stop_tokens is a sequence of token ids, such as (7,), not {stop_tokens!r}") from None


def _check_finite(new: Int[Array, "batch new"], stop_tokens: Sequence[int]) -> None:
    """**Raises** `ValueError` for a row that has ended without a stop token, if the tokens can be read: its logits were
    not finite."""
    if not is_host_readable(new):
        return
    tokens = np.asarray(jax.device_get(new))
    counts = (tokens >= 0).sum(axis=1)
    for row, count in enumerate(counts.tolist()):
        if count < tokens.shape[1] and (count == 0 or tokens[row, count - 1] not in stop_tokens):
            raise ValueError(
                f"logits of row {row} are not finite after {count} new tokens: look for NaN in the model's parameters "
                "(zoo.inspect), or compute in another dtype"
            )


def on_mesh(program: Callable, mesh: Mesh | None) -> Callable:
    """Return a program of tokens for the devices of a mesh; without one, the program itself."""
    if mesh is None:
        return program
    return SpmdProgram(program, mesh, 1, OutputDims.from_tree("batch seq"))


def _cut(new: Int[Array, "rows seq"], rows: int, count: int) -> Int[Array, "batch new"]:
    """Cut off the padding: on the host if possible, since a slice is another program for each shape."""
    if not is_host_readable(new):
        return new[:rows, :count]
    return jax.device_put(np.asarray(jax.device_get(new))[:rows, :count])


def _decode_with_callback(
    callback: Callable,
    mesh: Mesh | None,
    fixed: tuple[Decoder, request.SamplingOptions],
    state: DecodeState,
    rows: int,
    max_new_tokens: int,
    before: Mapping[int, Callable[[DecodeState], DecodeState]],
) -> DecodeState:
    """Run the decode program for one token at a time and pass each to `callback`. `before` maps a number of new tokens
    to a function of the state that is called before the next one."""
    for count in range(1, max_new_tokens + 1):
        if count > 1 and count - 1 in before:
            state = before[count - 1](state)
        args = state, jax.device_put(np.int32(count))
        state = run_jitted(on_mesh(decode_until, mesh), (fixed,), args, donate=True)
        newest, running = jax.device_get((state.newest, state.running))
        callback(np.array(newest[:rows]))
        if not running:
            break
    return state
