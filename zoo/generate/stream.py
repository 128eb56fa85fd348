"""Continuous batching: requests of different lengths share rows, which are refilled as they end."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from zoo._checks import wrap_key
from zoo._keywords import check_keywords
from zoo.layers.rotary import find_length_dependent_scaling
from zoo.models import Decoder
from zoo.parallel import Mesh, leaves
from zoo.parallel.batch import find_batch_axis
from zoo.parallel.collectives import shard_offset
from zoo.parallel.spmd import run_jitted

from . import request
from .buckets import Prompt, choose_cache_length, pad_prompt, refuse_arrays_per_row
from .decode import DecodeState, RowProgress, begin, decode_until, unstack_layers
from .prefill import drop_sequence_parallelism, list_mixers, on_mesh, repeat_rows
from .request import DecodeOptions, Sampling, SharedOptions

_Number = float | int
_MOST_STEPS = 16
"""Maximum number of tokens that a row decodes before they are handed out."""


class Request(NamedTuple):
    """A prompt for `zoo.generate_stream`, with options of its own."""

    tokens: Sequence[int] | Int[np.ndarray, "seq"]
    max_new_tokens: int
    temperature: _Number = 0.0
    """0 is greedy decoding; otherwise a `key` is needed."""
    key: Key[Array, ""] | None = None


class StreamedTokens(NamedTuple):
    """New tokens of one request."""

    request: int
    """Number of the request, in the order of the iterator, from 0."""
    tokens: tuple[int, ...]
    """Tokens since the last event of this request."""
    ended: bool
    """True for the last event of the request."""
    log_probs: tuple[float, ...] | None = None
    """With `details`, the log-probability of each token under softmax(logits)."""
    sampling_log_probs: tuple[float, ...] | None = None
    """With `details`, the log-probability of each token under the distribution that it was drawn from."""


@check_keywords
def generate_stream(
    model: Decoder,
    requests: Iterable[Request],
    *,
    rows: int,
    length: int,
    details: bool = False,
    mesh: Mesh | None = None,
    **options: Unpack[SharedOptions],
) -> Iterator[StreamedTokens]:
    """Generate from requests, `rows` of them at a time; yield their new tokens as they come.

    A row that ends is refilled with the next request, which is taken from the iterator only then. A request gets the
    tokens that `zoo.generate` gives it in a batch of one row, with its own temperature and key, whatever the other
    rows do. All shapes are fixed: after the first requests nothing compiles.

    - `requests`: prompts with their maximum number of new tokens, temperature and key.
    - `length`: capacity of each row, of prompt and new tokens.
    - `details`: yield log-probabilities, too.
    - The other options are those of `zoo.generate`, for all requests. Truncation applies to those that are sampled.

    A prompt is read in a row of its own and then moved to the row that is free. Rows are decoded up to 16 tokens at a
    time, or until the next row ends.

    **Raises** as `zoo.generate` does, where a request is at fault when it is taken; `NotImplementedError` for RoPE that
    depends on the sequence length, which would differ between rows.
    """
    request.check_decoder(model)
    request.check_count("rows", rows)
    if rows > 1:
        advice = "zoo.generate takes it, or a stream of each adapter, which adapters.set_strength switches on"
        refuse_arrays_per_row(
            model, f"generate_stream with rows={rows} gives a row to one request after another", advice
        )
    request.check_count("length", length)
    request.check_mesh(mesh, model)
    sampling = Sampling(temperature=1.0, **options)  # truncation is for the requests that are sampled
    choose_cache_length(model, 0, 0, length)
    if any(find_length_dependent_scaling(getattr(mixer, "rotary", None)) for mixer in list_mixers(model)):
        raise NotImplementedError("generate_stream: RoPE of this model depends on the length, which differs by row")
    vocab, _ = model.embedding.table_shape
    mesh = drop_sequence_parallelism(mesh)
    return _Pool(model, DecodeOptions.of(sampling, vocab, mesh, details=details), rows, length, mesh).run(requests)


@dataclasses.dataclass
class _Row:
    """The request that a row holds."""

    request: int
    most: int
    """Maximum number of new tokens."""
    count: int = 0
    """Number of new tokens so far."""


class _Pool:
    """Rows of a batch, and the requests that they hold."""

    def __init__(self, model: Decoder, options: DecodeOptions, rows: int, length: int, mesh: Mesh | None):
        self._mesh = mesh
        self._length = length
        shards = 1 if mesh is None else mesh.count_shards("batch")
        self._shards = shards
        self._repeats = -(-rows // shards)
        self._options = options
        self._model = model
        self._unstacked = unstack_layers(model, mesh)
        self._vocab, _ = model.embedding.table_shape
        self._rows: list[_Row | None] = [None] * rows
        self._state: DecodeState | None = None

    def run(self, requests: Iterable[Request]) -> Iterator[StreamedTokens]:
        """Yield the tokens of all requests."""
        waiting = enumerate(requests)
        while True:
            for number, row in enumerate(self._rows):
                if row is None and (following := next(waiting, None)) is not None:
                    self._admit(number, *following)
            if not any(self._rows):
                return
            yield from self._decode()

    def _admit(self, row: int, number: int, asked: Request) -> None:
        """Read the prompt of a request, and put it into a row."""
        tokens = np.asarray(asked.tokens, np.int32)[None]
        try:
            request.check_count("max_new_tokens", asked.max_new_tokens)
            request.check_temperature(asked.temperature, asked.key)
            request.check_prompt(tokens, None, self._vocab)
            choose_cache_length(self._model, tokens.shape[1], asked.max_new_tokens, self._length)
        except (TypeError, ValueError) as error:
            raise type(error)(f"request {number}: {error}") from None
        key = jax.random.key(0) if asked.key is None else wrap_key(asked.key)
        prompt = pad_prompt(tokens, None, self._shards, self._length, self._mesh)
        prompt = dataclasses.replace(prompt, rows=jax.device_put(np.zeros(self._shards, np.int32)))
        limits = jax.device_put((np.float32(asked.temperature), np.int32(asked.max_new_tokens)))
        args = prompt, self._length, *limits
        one = run_jitted(on_mesh(_read_one, self._mesh), (self._model, self._options, key), args)
        if self._state is None:
            self._state = run_jitted(on_mesh(_open, self._mesh), (), (one, self._repeats))
        args = self._state, one, jax.device_put(np.int32(row))
        self._state = run_jitted(on_mesh(_insert, self._mesh), (), args, donate=True)
        self._rows[row] = _Row(number, asked.max_new_tokens)

    def _decode(self) -> Iterator[StreamedTokens]:
        """Decode until a row ends, and yield the new tokens of each."""
        until = jax.device_put(np.int32(_MOST_STEPS))
        fixed = self._unstacked, self._options
        state = run_jitted(on_mesh(_decode_on, self._mesh), fixed, (self._state, until), donate=True)
        self._state = state
        scores = state.log_probs, state.sampling_log_probs
        step, tokens, done, *scores = jax.device_get((state.step, state.tokens, state.done, *scores))
        for number, row in enumerate(self._rows):
            if row is None:
                continue
            count = int((tokens[number] >= 0).sum())
            row.count += count
            new = tuple(tokens[number, :count].tolist())
            ended = bool(done[number])
            if ended:
                self._rows[number] = None
            details = [None if x is None else tuple(x[number, :count].tolist()) for x in scores]
            if ended and count < step:  # the row has taken a step without a token
                raise ValueError(request.describe_non_finite(f"logits of request {row.request}", row.count))
            yield StreamedTokens(row.request, new, ended, *details)


def _read_one(
    model: Decoder,
    options: DecodeOptions,
    key: Key[Array, ""],
    prompt: Prompt,
    length: int,
    temperature: Float[Array, ""],
    most: Int[Array, ""],
) -> DecodeState:
    """Return the state of one row on every device, after its prompt."""
    state = begin(model, options, key, prompt, length)
    new = jnp.zeros_like(state.positions)
    return dataclasses.replace(_clear(state), progress=RowProgress(new, new + most, new + temperature))


def _open(one: DecodeState, repeats: int) -> DecodeState:
    """Return a state of rows that have ended."""
    state = jax.tree.map(jnp.copy, repeat_rows(one, repeats))  # no buffer is that of `one`: each is donated
    return dataclasses.replace(state, done=jnp.ones_like(state.done))


def _insert(state: DecodeState, one: DecodeState, row: Int[Array, ""]) -> DecodeState:
    """Replace a row, on the device that has it."""
    arrays, treedef = jax.tree.flatten(state)
    inserted = []
    for leaf, x, new in zip(leaves(state), arrays, jax.tree.leaves(one), strict=True):
        axis = find_batch_axis(leaf, x)
        if axis is not None:
            size = x.shape[axis]
            local = row - shard_offset(x, "batch", size)
            local = jnp.where((local >= 0) & (local < size), local, size)  # out of range, and dropped
            index = (slice(None),) * axis
            x = x.at[(*index, local)].set(new[(*index, 0)], mode="drop")
        inserted.append(x)
    return jax.tree.unflatten(treedef, inserted)


def _decode_on(model: Decoder, options: DecodeOptions, state: DecodeState, until: Int[Array, ""]) -> DecodeState:
    """Decode until a row ends, or `until` new tokens."""
    return decode_until(model, options, _clear(state), until)


def _clear(state: DecodeState) -> DecodeState:
    """Return the state with room for the next tokens."""
    empty = jnp.broadcast_to(jnp.full_like(state.newest, -1)[:, None], (len(state.newest), _MOST_STEPS))
    scores = None if state.log_probs is None else jnp.zeros_like(empty, jnp.float32)
    return dataclasses.replace(
        state,
        tokens=empty,
        log_probs=scores,
        sampling_log_probs=scores,
        step=jnp.int32(0),
        running=jnp.array(True),
    )
