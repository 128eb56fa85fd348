"""Autoregressive generation: `zoo.generate`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Required, Unpack, overload

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from zoo._checks import is_host_readable, wrap_key
from zoo._keywords import check_keywords
from zoo.models import Decoder, EncoderDecoder, ImageText
from zoo.models.image_text import reads_prefix, refuse_images
from zoo.parallel import Mesh
from zoo.parallel.activation import Activation
from zoo.parallel.spmd import run_jitted

from . import request
from .buckets import choose_rows, refuse_arrays_per_row
from .decode import DecodeState, begin, complete, decode_until, find_new_axis, is_any, refill, unstack_layers
from .image_prompt import read_images
from .prefill import (
    Prefix,
    choose_capacity,
    drop_sequence_parallelism,
    find_rope_switches,
    on_mesh,
    pad_after,
    repeat_prompt,
)
from .request import DecodeOptions, Sampling, SamplingOptions
from .speculative import Draft, check_draft, choose_draft_tokens, make_draft, speculate
from .target import read_source


class Generated(NamedTuple):
    """New tokens, with what `zoo.generate(..., details=True)` returns besides."""

    tokens: Int[Array, "batch new"]
    """New tokens; -1 after a row's end."""
    log_probs: Float[Array, "batch new"]
    """Log-probability of each new token under the model, softmax(logits): before penalties, temperature and truncation.
    0 for -1."""
    sampling_log_probs: Float[Array, "batch new"]
    """Log-probability of each new token under the distribution that it was drawn from: after them. 0 for -1, and for
    greedy decoding."""
    prefix: Prefix | None
    """The text up to the last new token of each row, for the next call. None where LongRoPE reads all tokens again."""
    steps: Int[Array, ""]
    """Number of calls of the model after the prompt: of the longest row, and less than its tokens with a draft."""
    values: Mapping[str, Array | Activation]
    """Captured values by name, of the call that each new token was drawn from; along the dim of tokens the new ones.
    After a row's end they are those of padding."""


class _Options(SamplingOptions, total=False):
    """Options of `generate` besides `details`, for type checkers."""

    max_new_tokens: Required[int]
    images: Any
    mask: Bool[Array, "batch seq"] | None
    length: int | None
    prefix: Prefix | None
    samples: int
    draft: Draft | None
    draft_tokens: int | None
    mesh: Mesh | None
    callback: Callable[[Int[np.ndarray, "batch"]], object] | None
    capture: Sequence[str]
    key: Key[Array, ""] | None


@overload
def generate(
    model: Decoder | EncoderDecoder | ImageText,
    tokens: Int[Array, "batch seq"],
    *,
    details: Literal[True],
    **options: Unpack[_Options],
) -> Generated: ...


@overload
def generate(
    model: Decoder | EncoderDecoder | ImageText,
    tokens: Int[Array, "batch seq"],
    *,
    details: Literal[False] = False,
    **options: Unpack[_Options],
) -> Int[Array, "batch new"]: ...


@check_keywords
def generate(
    model: Decoder | EncoderDecoder | ImageText,
    tokens: Int[Array, "batch seq"],
    *,
    max_new_tokens: int,
    images: Any = None,
    mask: Bool[Array, "batch seq"] | None = None,
    length: int | None = None,
    prefix: Prefix | None = None,
    samples: int = 1,
    draft: Draft | None = None,
    draft_tokens: int | None = None,
    mesh: Mesh | None = None,
    callback: Callable[[Int[np.ndarray, "batch"]], object] | None = None,
    details: bool = False,
    capture: Sequence[str] = (),
    key: Key[Array, ""] | None = None,
    **options: Unpack[SamplingOptions],
) -> Int[Array, "batch new"] | Generated:
    """Generate `max_new_tokens` tokens per row after a prompt; return the new tokens only.

    For an `EncoderDecoder`, `tokens` and `mask` are a source, padded on either side, or what else its encoder reads,
    and the new tokens are its target, after `model.start`.

    - `images`: the images of the prompt, for an `ImageText`, as the model takes them. They are read once.
    - `mask`: padding mask, True or 1 for real tokens. Prompts of different lengths are padded on the left.
    - `temperature`: 0 is greedy decoding; otherwise tokens are sampled from softmax(logits / temperature) with `key`.
      Each row has its own PRNG key, so samples depend neither on the mesh nor on other rows.
    - `top_k`, `top_p`, `min_p`: truncation of the sampled distribution, in this order; see
      `zoo.ops.sampling.filter_logits`.
    - `repetition_penalty`: applies to tokens of the prompt and new tokens; see `zoo.ops.sampling.penalize_repetition`.
    - `presence_penalty`, `frequency_penalty`: subtracted from the logits of new tokens, once, and once for each time
      that the token is among them. Tokens of the prompt do not count, nor those of earlier calls.
    - `logits`: a function `(logits, text) -> logits` of float32 logits "batch vocab", after the penalties and before
      the temperature, and of the text so far, a `DecodedText`. It is traced into the program, once for
      each function: define it once, not in every call. On a mesh it gets the rows of one device, with the full
      vocabulary.
    - `stop_tokens`: a row ends with the first of these, which is included. The rest of the row is -1.
    - `stop_sequences`: a row also ends with the last token of any of these sequences, if all of them are new tokens.
    - `length`: capacity of the KV caches, prompt and new tokens. By default their sum, rounded up to a bucket as far as
      the model supports that length. If given, it is also the length for RoPE scaling that depends on the sequence
      length (`DynamicScaling`, `LongRopeScaling`), from the first token on.
    - `prefix`: a text that has been read, by `zoo.prefill` or an earlier call with `details`, which the prompt follows:
      of as many rows as the prompt, or of one row for all of them. It has the caches' length.
    - `samples`: continuations per prompt, which is read once. The result has `samples` rows for each: those of prompt i
      begin with row i * samples. They are the rows that repeated prompts would give.
    - `draft`: a smaller model of the same vocabulary that proposes `draft_tokens` tokens at a time, which this one then
      reads in one call, "prompt" to look them up in the text, or "mtp" for the predictors of this model
      (`zoo.generate.speculative`). Greedy tokens are those without a draft, and sampled ones have the same
      distribution, though they are others. By default 4 tokens, with "mtp" as many as the predictors predict.
    - `details`: return a `Generated`, with log-probabilities and the prefix for a next call.
    - `capture`: names of values to return in its `values`, as `zoo.capture` knows them; with `details`.
    - `mesh`: the mesh of the model. Rows are sharded over its batch axes, heads and vocabulary over `tensor`. With
      `context` each device holds a share of the slots of every KV cache, reads a share of each piece of the prompt,
      and attends to its slots for all (`zoo.layers.attention.cached`); recurrent states are replicated.
    - `callback`: called with the latest token of each row as soon as it is computed, -1 for rows that have ended. If it
      returns a boolean array of the rows, those that are True end there.

    Prefill runs the prompt through the scanned layers in at most four pieces, or in pieces of 256 tokens; into a cache
    for over 2,048 it reads eight of them at once. Decoding runs unstacked layers, each with its own KV cache or
    recurrent state, in one `while_loop` that ends when every row has.

    Without a `length`, RoPE scaling that depends on the sequence length uses the number of tokens so far, of the
    longest row for all rows, as transformers does. When that exceeds the `original_length` of `LongRopeScaling`, all
    tokens so far are read again with the long factors. `DynamicScaling` rotates each new token for the length so far,
    and keys in the caches stay as they are.

    `generate` may be called under `jit`. Elsewhere it returns when the tokens are computed, and blocks once per token
    with a callback.

    A call compiles one program per number of rows and cache length, with a callback two, whatever the numbers that are
    passed as options, the prompt's length and `max_new_tokens`. Presence or frequency penalties, `logits`,
    `stop_sequences`, `prefix`, `samples`, `draft`, `details` and `capture` make other programs. Both numbers are
    rounded up to buckets: rows per shard of the batch to 1, 4, 8, 12, 16, 24, 32, ... (with `samples` not at all),
    cache lengths to 128, 192, 256, 384, 512, ... So at most twice as many rows are computed, a cache of over 128 slots
    has at most half more than needed, and the prompt is padded to whole pieces. Layers are unstacked at every call, a
    copy: for many short calls pass `swap_stack(model, Stack.unstack)`.

    **Raises** `ValueError` for a prompt that is not "batch seq" or is empty, padding on the right, a row without a real
    token, a prompt id or stop token outside the vocabulary, an option out of its range, a temperature above 0 without a
    key, truncation options with temperature 0, a `length` below prompt and new tokens or besides a prefix, a prefix of
    other rows or without room, a prefix or a draft besides a source, a draft of another vocabulary, more tokens than
    learned positions, and a callback under `jit` or with a draft; after decoding, for a row of logits that are not
    finite. Under `jit`, and where other processes hold rows, the rest of such a row is -1 instead. **Raises**
    `TypeError` for a model that is neither a decoder nor an encoder-decoder, for a prompt, `max_new_tokens`, `top_k`,
    `samples` or `draft_tokens` that does not consist of integers, for stop tokens or sequences that do not, and for a
    function of logits that cannot be hashed; `NotImplementedError` for a mesh that shards layers, for a draft model
    with recurrent states or RoPE that depends on the length (see `zoo.generate.speculative`), and after a prefix for
    LongRoPE without a length.
    """
    sampling = Sampling(**options)
    request.check_temperature(sampling.temperature, key)
    request.check_count("max_new_tokens", max_new_tokens)
    request.check_count("samples", samples)
    request.check_mesh(mesh, model)
    if not isinstance(model, ImageText):
        refuse_images(model, images)
    mesh = drop_sequence_parallelism(mesh)
    if isinstance(model, EncoderDecoder):
        request.refuse_beside_source(prefix, draft)
        reading = {"new": max_new_tokens, "length": length, "samples": samples}
        tokens, prefix = read_source(model, tokens, mask, mesh=mesh, **reading)
        model = model.decoder
        mask = None
        length = None
    elif isinstance(model, ImageText):
        model.check_images(tokens if mask is None else np.where(mask, tokens, -1), images)
        if images is not None or reads_prefix(model):
            request.refuse_beside_images(prefix, draft, capture)
            reading = {"new": max_new_tokens, "length": length, "samples": samples}
            tokens, prefix = read_images(model, tokens, images, mask, mesh=mesh, **reading)
            mask = None
            length = None
        model = model.decoder
    else:
        request.check_decoder(model)
    vocab, _ = model.embedding.table_shape
    if samples > 1:
        advice = "repeat the prompts instead, and select an adapter for each copy"
        refuse_arrays_per_row(model, f"samples={samples}", advice)
    if draft_tokens is not None:
        request.check_count("draft_tokens", draft_tokens)
    names = _check_capture(capture, details=details)
    request.check_prompt(tokens, mask, vocab)
    _check_callback(callback, draft, (model, tokens, mask, prefix, key))
    if draft is not None:
        check_draft(model, draft, prefix, length)
    drafted = choose_draft_tokens(model, draft, draft_tokens)
    recorded = {"details": details, "keeps_text": draft is not None, "capture": names}
    decoding = DecodeOptions.of(sampling, vocab, mesh, **recorded)
    slots, rope_length = choose_capacity(model, tokens, max_new_tokens, length, prefix)
    rows = choose_rows(model, len(tokens), mesh, samples)
    prompt = pad_after(prefix, tokens, mask, rows, slots, mesh, rope_length)
    until = jax.device_put(np.int32(max_new_tokens))
    key = wrap_key(key) if sampling.temperature else jax.random.key(0)  # a greedy call has the same program

    unstacked = unstack_layers(model, mesh)
    rereads = bool(find_rope_switches(model)) and not rope_length
    if names and (rereads or draft is not None):
        reason = "a draft is read several tokens at a time" if draft is not None else "LongRoPE reads the text again"
        raise NotImplementedError(f"capture={list(names)}: {reason}, so that values are not those of one token each")
    count = len(tokens) * samples
    ended = None
    result: Any  # the state with details or a callback, and else the new tokens
    if draft is not None:
        fixed = model, unstacked, make_draft(draft, mesh), decoding, key
        result = run_jitted(on_mesh(speculate, mesh), fixed, (prompt, until, slots, drafted, prefix, samples))
    elif callback is None:
        args = prompt, until, slots, prefix, samples, rereads
        result = run_jitted(on_mesh(complete, mesh), (model, unstacked, decoding, key), args)
    else:
        result = run_jitted(on_mesh(begin, mesh), (model, decoding, key), (prompt, slots, prefix, samples))
        repeated = run_jitted(on_mesh(repeat_prompt, mesh), (), (prompt, samples)) if rereads else prompt

        def read_again(state: DecodeState) -> DecodeState:
            text = dataclasses.replace(state, states=())  # the caches are freed before there are new ones
            return run_jitted(on_mesh(refill, mesh), (model,), (repeated, text, slots))

        switches = find_rope_switches(model) if rereads else ()
        switches = [switch + 1 - int(result.longest) for switch in switches]
        before = dict.fromkeys(switches, read_again)
        fixed = unstacked, decoding
        result, ended = _decode_with_callback(callback, mesh, fixed, result, count, max_new_tokens, before)
    cut = functools.partial(_cut, rows=count, count=max_new_tokens)
    new = cut(result.tokens if details or callback is not None else result)
    _check_finite(new, sampling, ended)
    if not details:
        return new
    prefix = None if rereads else Prefix(result.states, result.text, len(new), slots, rope_length)
    values = {name: _cut_value(value, count, max_new_tokens, mesh) for name, value in (result.values or {}).items()}
    scores = cut(result.log_probs), cut(result.sampling_log_probs)
    return Generated(new, *scores, prefix, result.step, values)


def _check_capture(capture: Sequence[str], *, details: bool) -> tuple[str, ...]:
    """Return names of values. **Raises** `TypeError` for anything but a sequence of names, and `ValueError` for names
    without `details`, which returns the values."""
    if isinstance(capture, str) or not all(isinstance(name, str) for name in capture):
        raise TypeError(f"capture is a sequence of names, such as ('layers.2',), not {capture!r}")
    if capture and not details:
        raise ValueError(f"capture={list(capture)}: values are returned with details=True")
    return tuple(dict.fromkeys(capture))


def _check_callback(callback: Callable | None, draft: Draft | None, arguments: tuple) -> None:
    """**Raises** `ValueError` for a callback under `jit`, and for one with a draft."""
    if callback is None:
        return
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
        raise ValueError("a callback needs tokens as they come, and under jit there are none yet: call generate bare")
    if draft is not None:
        raise ValueError("a callback gets one token of each row at a time, and with a draft they come several at once")


def _check_finite(new: Int[Array, "batch new"], sampling: Sampling, ended: Bool[np.ndarray, "batch"] | None) -> None:
    """**Raises** `ValueError` for a row that has ended without a stop, if the tokens can be read: its logits were not
    finite. `ended` are the rows that a callback has ended."""
    if not is_host_readable(new):
        return
    tokens = np.asarray(jax.device_get(new))
    stops = [*((token,) for token in sampling.stop_tokens), *sampling.stop_sequences]
    for row, count in enumerate((tokens >= 0).sum(axis=1).tolist()):
        text = tuple(tokens[row, :count].tolist())
        if count == tokens.shape[1] or any(text[-len(stop) :] == stop for stop in stops):
            continue
        if ended is None or not ended[row]:
            raise ValueError(request.describe_non_finite(f"logits of row {row}", count))


def _cut(new: Shaped[Array, "rows seq"], rows: int, count: int) -> Shaped[Array, "batch new"]:
    """Cut off the padding: on the host if possible, since a slice is another program for each shape."""
    if not is_host_readable(new):
        return new[:rows, :count]
    return jax.device_put(np.asarray(jax.device_get(new))[:rows, :count])


def _cut_value(value: Activation, rows: int, count: int, mesh: Mesh | None) -> Array | Activation:
    """Cut the padding off the rows and the new tokens of a captured value."""
    array = value.array
    if "batch" in value.array_dims:
        array = lax.slice_in_dim(array, 0, rows, axis=value.array_dims.index("batch"))
    array = lax.slice_in_dim(array, 0, count, axis=find_new_axis(value))
    if mesh is None:
        return array
    return Activation(array, value.array_dims)


def _decode_with_callback(
    callback: Callable,
    mesh: Mesh | None,
    fixed: tuple[Decoder, DecodeOptions],
    state: DecodeState,
    rows: int,
    max_new_tokens: int,
    before: Mapping[int, Callable[[DecodeState], DecodeState]],
) -> tuple[DecodeState, Bool[np.ndarray, "batch"]]:
    """Decode one token at a time, and pass it to a callback, until there are `max_new_tokens` or every row has ended;
    return the state, and the rows that the callback has ended. `before` has a function of the state to call before the
    token after a number of new ones."""
    ended = np.zeros(rows, bool)
    padding = np.ones(len(state.done) - rows, bool)
    for count in range(1, max_new_tokens + 1):
        if count > 1 and count - 1 in before:
            state = before[count - 1](state)
        args = state, jax.device_put(np.int32(count))
        state = run_jitted(on_mesh(decode_until, mesh), fixed, args, donate=True)
        newest, running = jax.device_get((state.newest, state.running))
        ending = _read_ended_rows(callback(np.array(newest[:rows])), rows)
        if (ending & ~ended).any():
            ended |= ending
            args = state, np.concatenate([ended, padding])
            state = run_jitted(on_mesh(_end, mesh), (), args, donate=True)
        if not running or ended.all():
            break
    return state, ended


def _read_ended_rows(answer: Any, rows: int) -> Bool[np.ndarray, "batch"]:
    """Return the rows that a callback ends. **Raises** `TypeError` for anything but None or a boolean array of rows."""
    if answer is None:
        return np.zeros(rows, bool)
    ended = np.asarray(answer)
    if ended.shape != (rows,) or ended.dtype != bool:
        raise TypeError(
            f"a callback returns None, or booleans for its {rows} rows, not {ended.dtype}{list(ended.shape)}"
        )
    return ended


def _end(state: DecodeState, ended: Bool[Array, "batch"]) -> DecodeState:
    done = state.done | ended
    return dataclasses.replace(state, done=done, running=is_any(~done))
