"""Prefill and decode programs: a loop over pieces of the prompt, then one over new tokens."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import TokenInfo
from zoo.layers.kv_cache import set_rope_length
from zoo.models import Decoder, Stack
from zoo.models.capture import Capture, make_zeros
from zoo.models.decoder import AbstractStack, Hidden, LayerStates
from zoo.models.stack import swap_stack
from zoo.ops.sampling import (
    apply_temperature,
    filter_logits,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
    sample_tokens,
)
from zoo.parallel import Mesh, Module, all_gather, reduce
from zoo.parallel.activation import Activation
from zoo.parallel.collectives import current_mesh, while_loop
from zoo.parallel.place import place

from .buckets import Prompt, choose_piece
from .prefill import Prefix, find_rope_switches, follow_prefix, read_prompt, repeat_prompt, repeat_rows, write_text
from .request import DecodedText, DecodeOptions


class RowProgress(Module):
    """Progress of rows that do not keep step: each has its own number of new tokens, and its own end."""

    new: Int[Array, "batch"]
    """Number of new tokens."""
    most: Int[Array, "batch"]
    """Maximum number of new tokens."""
    temperature: Float[Array, "batch"]


class DecodeState(Module):
    """Loop state of decoding. It is donated to each call, so that a step writes one slot of each KV cache in place."""

    states: LayerStates
    """One state per layer: KV caches or recurrent states."""
    tokens: Int[Array, "batch new"]
    """New tokens; -1 in slots that are not generated."""
    newest: Int[Array, "batch"]
    """Latest token of each row; -1 in rows that have ended."""
    positions: Int[Array, "batch"]
    """Position of the latest token in its row."""
    done: Bool[Array, "batch"]
    """True for rows that have ended with a stop token."""
    seen: Bool[Array, "batch classes"]
    """Token ids in the prompt and the new tokens, for the repetition penalty."""
    keys: Key[Array, "batch"]
    """One PRNG key per row, unused by greedy decoding."""

    longest: Int[Array, ""]
    """Number of tokens of the longest prompt, over all devices."""
    rope_length: Int[Array, ""]
    """Sequence length for RoPE that depends on it; 0 for the number of tokens so far."""
    step: Int[Array, ""]
    """Number of new tokens."""
    running: Bool[Array, ""]
    """True until every row on every device has ended; with `progress`, until the next row has."""

    # Only for options that need them:
    text: Int[Array, "batch text"] | None = None
    """Tokens of the prompt and new ones, by position; -1 after the latest."""
    counts: Int[Array, "batch classes"] | None = None
    """Number of times that each token id is among the new tokens, for the presence and frequency penalties."""
    log_probs: Float[Array, "batch new"] | None = None
    """Log-probability of each new token under softmax(logits)."""
    sampling_log_probs: Float[Array, "batch new"] | None = None
    """Log-probability of each new token under the distribution that it was drawn from."""
    progress: RowProgress | None = None
    """For rows that do not keep step."""
    values: dict[str, Activation] | None = None
    """Captured values, by name: those of the call that each new token was drawn from."""

    @property
    def new_counts(self) -> Int[Array, ""] | Int[Array, "batch"]:
        """Number of new tokens: of all rows, or with `progress` of each."""
        return self.step if self.progress is None else self.progress.new


class NextTokens(Module):
    """A token for each row, -1 for logits that are not finite, with its log-probabilities if they are asked for."""

    tokens: Int[Array, "batch"]
    log_probs: Float[Array, "batch"] | None
    """Under softmax(logits)."""
    sampling_log_probs: Float[Array, "batch"] | None
    """Under the distribution that the token was drawn from."""


def complete(
    model: Decoder,
    unstacked: Decoder,
    options: DecodeOptions,
    key: Key[Array, ""],
    prompt: Prompt,
    until: Int[Array, ""],
    length: int,
    prefix: Prefix | None = None,
    samples: int = 1,
    rereads: bool = False,
) -> DecodeState | Int[Array, "batch new"]:
    """Prefill with `model` and decode with the same layers unstacked, in one program; return the new tokens, or the
    state after them if the options ask for details.

    `rereads`: read all tokens so far again where LongRoPE switches to other frequencies. The loop then has one phase
    per set of frequencies.
    """
    if not rereads:
        state = begin(model, options, key, prompt, length, prefix, samples)
        state = decode_until(unstacked, options, state, until)
        return state if options.details else state.tokens
    switches = find_rope_switches(model)
    prompt = repeat_prompt(prompt, samples)

    def run_phase(state: DecodeState) -> DecodeState:
        state = refill(model, prompt, state, length)
        end = functools.reduce(jnp.minimum, [_next_switch(state, switch) for switch in switches], until)
        return dataclasses.replace(decode_until(unstacked, options, state, end), states=())

    state = start(options, key, prompt, length)
    state = while_loop(lambda state: (state.step < until) & state.running, run_phase, state)
    return state if options.details else state.tokens


def begin(
    model: Decoder,
    options: DecodeOptions,
    key: Key[Array, ""],
    prompt: Prompt,
    length: int,
    prefix: Prefix | None = None,
    samples: int = 1,
) -> DecodeState:
    """Run the prompt except its last token through the model, piece by piece; return the state before decoding, with
    `samples` rows for each of the prompt."""
    prompt, states, before = follow_prefix(prompt, prefix)
    repeated = repeat_prompt(prompt, samples)
    before = repeat_rows(before, samples)
    state = start(options, key, repeated, length, before)
    states = read_prompt(model, prompt, length, find_rope_length(state), states)
    state = dataclasses.replace(state, states=repeat_rows(states, samples))
    if prefix is not None and prefix.followed is not None:
        logits = model.logits(jnp.repeat(prefix.followed, samples, axis=0))
        state = append(state, choose(state, logits.astype(jnp.float32), options), options)
    if not options.capture:
        return state

    def lengthen(value: Activation) -> tuple[int, ...]:
        axis = find_new_axis(value)
        return (*value.shape[:axis], length, *value.shape[axis + 1 :])

    values = make_zeros(lambda state: run_model(model, state, options)[2], (state,), lengthen)
    return dataclasses.replace(state, values=values)


def read_on(
    model: Decoder,
    options: DecodeOptions,
    key: Key[Array, ""],
    state: DecodeState,
    prompt: Prompt,
    dropped: Int[Array, ""],
    length: int,
) -> DecodeState:
    """Run a prompt except its last token through the model, behind the tokens that `state` has read; return the state
    before decoding goes on. The positions of the prompt go on, too. `dropped` is the latest token of `state` if the
    text no longer has it, else -1."""
    next_state = start(options, key, prompt, length, state.text)
    states = read_prompt(model, prompt, length, find_rope_length(next_state), state.states)
    seen = (next_state.seen | state.seen) & (jnp.arange(state.seen.shape[1]) != dropped)
    return dataclasses.replace(next_state, states=states, seen=seen)


def refill(model: Decoder, prompt: Prompt, state: DecodeState, length: int) -> DecodeState:
    """Recompute the states from the prompt and all new tokens except the latest, as one text."""
    count = state.longest + state.step
    tokens = jnp.concatenate([prompt.tokens, prompt.last[:, None], jnp.maximum(state.tokens, 0)], axis=1)
    new_positions = prompt.last_position[:, None] + jnp.arange(1 + length)
    positions = jnp.concatenate([prompt.positions, new_positions], axis=1)
    positions = jnp.where(state.done[:, None], -1, positions)
    room = prompt.tokens.shape[1]
    size = choose_piece(length, current_mesh())
    take = lambda x: lax.dynamic_slice_in_dim(x, state.step, room, axis=1)
    text = dataclasses.replace(
        prompt, tokens=take(tokens), positions=take(positions), pieces=(count - 1 + size - 1) // size
    )
    return dataclasses.replace(state, states=read_prompt(model, text, length, find_rope_length(state)))


def start(
    options: DecodeOptions,
    key: Key[Array, ""],
    prompt: Prompt,
    length: int,
    before: Int[Array, "batch text"] | None = None,
) -> DecodeState:
    """Return the state before decoding, without states of layers. `before` is the text of a prefix."""
    empty = jnp.broadcast_to(jnp.full_like(prompt.last, -1)[:, None], (len(prompt.last), length))
    done = prompt.rows < 0
    seen = _mark_tokens(len(options.is_stop), prompt.tokens, prompt.positions, prompt.last)
    if before is not None:
        seen |= _mark_tokens(len(options.is_stop), before, before, prompt.last)
    scores = jnp.zeros_like(empty, jnp.float32) if options.details else None
    return DecodeState(
        states=(),
        tokens=empty,
        newest=prompt.last,
        positions=prompt.last_position,
        done=done,
        seen=seen,
        keys=jax.vmap(jax.random.fold_in, (None, 0))(key, prompt.rows),
        longest=reduce(prompt.last_position.max() + 1, over="batch", by=lax.pmax),
        rope_length=prompt.rope_length,
        step=jnp.int32(0),
        running=jnp.array(True),
        text=write_text(prompt, length, before) if options.needs_text else None,
        counts=jnp.zeros_like(seen, jnp.int32) if options.presence_penalty is not None else None,
        log_probs=scores,
        sampling_log_probs=scores,
    )


def find_rope_length(state: DecodeState) -> Int[Array, ""]:
    """Return the sequence length for RoPE of the latest token."""
    return jnp.where(state.rope_length > 0, state.rope_length, state.longest + state.step)


def _next_switch(state: DecodeState, switch: int) -> Int[Array, ""]:
    """Return the number of new tokens at which the longest row first has more than `switch` tokens. It is the largest
    integer if the row has more already, or if the length for RoPE is given."""
    step = switch + 1 - state.longest
    return jnp.where((step > state.step) & (state.rope_length == 0), step, jnp.iinfo(jnp.int32).max)


def decode_until(model: Decoder, options: DecodeOptions, state: DecodeState, until: Int[Array, ""]) -> DecodeState:
    """Decode until there are `until` new tokens or every row has ended. Rows that have ended are passed as padding."""

    def step(state: DecodeState) -> DecodeState:
        hidden, states, values = run_model(model, state, options)
        if state.values is not None:
            kept = {name: _write_value(state.values[name], value, state.step) for name, value in values.items()}
            state = dataclasses.replace(state, values=kept)
        state = dataclasses.replace(state, states=states or ())
        logits = model.logits(hidden.x[:, 0])
        return append(state, choose(state, logits.astype(jnp.float32), options), options)

    return lax.while_loop(lambda state: (state.step < until) & state.running, step, state)


def run_model(
    model: Decoder, state: DecodeState, options: DecodeOptions
) -> tuple[Hidden, LayerStates | None, dict[str, Activation]]:
    """Run the latest token of each row through the layers; return also the values that are captured."""
    positions = jnp.where(state.done, -1, state.positions)
    tokens = jnp.maximum(state.newest, 0)
    states = set_rope_length(state.states, find_rope_length(state))
    args = tokens[:, None], TokenInfo(positions[:, None]), states
    if not options.capture:
        return *model.hidden(*args), {}
    (hidden, states), values = Capture(model.hidden, options.capture).run(*args)
    return hidden, states, values


def find_new_axis(value: Activation) -> int:
    """Return the dim of new tokens of a captured value. **Raises** `ValueError` for a value without tokens."""
    axes = [axis for axis, dim in enumerate(value.array_dims) if dim in ("seq", "tokens")]
    if not axes:
        raise ValueError(f"a value with the dims {' '.join(value.array_dims)} has no tokens to generate it for")
    return axes[0]


def _write_value(column: Activation, value: Activation, step: Int[Array, ""]) -> Activation:
    axis = find_new_axis(column)
    array = lax.dynamic_update_slice_in_dim(column.array, value.array, step, axis)
    return Activation(array, column.array_dims)


def append(state: DecodeState, choice: NextTokens, options: DecodeOptions) -> DecodeState:
    """Append a token per row to the state. A row without one, since its logits are not finite, ends."""
    newest = jnp.where(state.done, -1, choice.tokens)
    done = (newest < 0) | options.is_stop[newest]
    is_newest = jnp.arange(state.seen.shape[1]) == newest[:, None]
    write = lambda column, x: lax.dynamic_update_slice_in_dim(column, x[:, None], state.step, axis=1)
    tokens = write(state.tokens, newest)
    score = lambda column, x: None if column is None else write(column, jnp.where(newest < 0, 0, x))
    text = state.text
    if text is not None:
        places = jnp.where(newest < 0, text.shape[1], state.positions + 1)  # out of range, and dropped
        text = text.at[jnp.arange(len(newest)), places].set(newest, mode="drop")
    positions = state.positions + 1
    progress = state.progress
    if progress is not None:
        positions = state.positions + (newest >= 0)
        progress = dataclasses.replace(progress, new=progress.new + (newest >= 0))
        done |= progress.new >= progress.most
    if options.stop_sequences is not None:
        assert text is not None
        new = state.step + 1 if progress is None else progress.new
        done |= _ends_with(text, positions, jnp.minimum(new, positions + 1), options.stop_sequences)
    return dataclasses.replace(
        state,
        tokens=tokens,
        newest=newest,
        positions=positions,
        done=done,
        seen=state.seen | is_newest,
        step=state.step + 1,
        running=_find_running(state.done, done, is_paced=progress is not None),
        text=text,
        counts=None if state.counts is None else state.counts + is_newest,
        log_probs=score(state.log_probs, choice.log_probs),
        sampling_log_probs=score(state.sampling_log_probs, choice.sampling_log_probs),
        progress=progress,
    )


def _find_running(before: Bool[Array, "batch"], done: Bool[Array, "batch"], *, is_paced: bool) -> Bool[Array, ""]:
    """Return True if some row on some device has not ended, and with `is_paced` none has ended in this step."""
    if not is_paced:
        return is_any(~done)
    return is_any(~done) & ~is_any(done & ~before)


def is_any(rows: Bool[Array, "batch"]) -> Bool[Array, ""]:
    """Return True if one of the rows is True, on some device."""
    return reduce(rows.any().astype(jnp.int32), over="batch", by=lax.pmax) > 0


def _ends_with(
    text: Int[Array, "batch text"],
    last: Int[Array, "batch"],
    new: Int[Array, ""] | Int[Array, "batch"],
    sequences: Int[Array, "stops text"],
) -> Bool[Array, "batch"]:
    """Return True for rows with a sequence at the end of their `new` latest tokens, at positions up to `last`.
    Sequences are padded with -1 on the left."""
    places = last[:, None] + jnp.arange(1 - sequences.shape[1], 1)
    is_new = places > (last - new)[:, None]
    tail = jnp.where(is_new, jnp.take_along_axis(text, jnp.maximum(places, 0), axis=1), -2)
    return ((tail[:, None] == sequences) | (sequences < 0)).all(axis=2).any(axis=1)


def choose(state: DecodeState, logits: Float[Array, "batch vocab"], options: DecodeOptions) -> NextTokens:
    """Return a token per row, -1 for logits that are NaN or without a finite maximum. `logits` may be sharded over the
    vocabulary."""
    logits = all_gather(logits, "vocab", axis=1)
    is_finite = jnp.isfinite(logits.max(axis=1))
    adjusted = adjust_logits(state, logits, options)
    keys = step_keys(state)
    temperature = options.temperature
    is_sampled = temperature > 0
    if state.progress is not None:
        temperature = state.progress.temperature[:, None]
        is_sampled = (temperature > 0).any()
    tokens, scores = lax.cond(is_sampled, _draw_token, _choose_likeliest, adjusted, keys, temperature, options)
    tokens = jnp.where(is_finite, tokens, -1)
    if not options.details:
        return NextTokens(tokens, None, None)
    return NextTokens(tokens, pick(jax.nn.log_softmax(logits), tokens), scores)


def adjust_logits(
    state: DecodeState, logits: Float[Array, "batch vocab"], options: DecodeOptions
) -> Float[Array, "batch vocab"]:
    """Apply the penalties, then the function of one's own."""
    vocab = logits.shape[1]  # without virtual tokens, which an embedding may have
    logits = penalize_repetition(logits, state.seen[:, :vocab], options.repetition_penalty)
    if state.counts is not None:
        assert options.presence_penalty is not None
        assert options.frequency_penalty is not None
        logits = penalize_presence(logits, state.counts[:, :vocab], options.presence_penalty)
        logits = penalize_frequency(logits, state.counts[:, :vocab], options.frequency_penalty)
    if options.adjust is None:
        return logits
    assert state.text is not None
    lengths = state.positions + 1
    return options.adjust(logits, DecodedText(state.text, lengths, lengths - state.new_counts))


def step_keys(state: DecodeState) -> Key[Array, "batch"]:
    """Return the PRNG key of each row's next token."""
    new = state.new_counts
    return jax.vmap(jax.random.fold_in, (0, 0 if new.ndim else None))(state.keys, new)


def _draw_token(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, "batch"],
    temperature: Float[Array, ""] | Float[Array, "batch 1"],
    options: DecodeOptions,
) -> tuple[Int[Array, "batch"], Float[Array, "batch"] | None]:
    filtered = apply_temperature(logits, temperature)
    filtered = filter_logits(filtered, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
    tokens = sample_tokens(filtered, keys).astype(jnp.int32)
    scores = pick(jax.nn.log_softmax(filtered), tokens) if options.details else None
    if temperature.ndim:
        is_sampled = temperature[:, 0] > 0
        tokens = jnp.where(is_sampled, tokens, logits.argmax(1).astype(jnp.int32))
        scores = None if scores is None else jnp.where(is_sampled, scores, 0)
    return tokens, scores


def _choose_likeliest(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, "batch"],
    temperature: Float[Array, ""] | Float[Array, "batch 1"],
    options: DecodeOptions,
) -> tuple[Int[Array, "batch"], Float[Array, "batch"] | None]:
    tokens = logits.argmax(1).astype(jnp.int32)
    return tokens, jnp.zeros_like(logits[:, 0]) if options.details else None


def pick(values: Float[Array, "batch vocab"], tokens: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """Return the value of each row's token; of token 0 for -1."""
    return jnp.take_along_axis(values, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]


def _mark_tokens(
    vocab: int, tokens: Int[Array, "batch seq"], positions: Int[Array, "batch seq"], last: Int[Array, "batch"]
) -> Bool[Array, "batch classes"]:
    """Mark the ids of `tokens`, except at negative positions, and of `last`."""
    rows = jnp.arange(len(last))
    ids = jnp.where(positions < 0, vocab, tokens)  # out of range, and dropped
    seen = jnp.broadcast_to((jnp.zeros_like(last) > 0)[:, None], (len(rows), vocab))
    return seen.at[rows[:, None], ids].set(True, mode="drop").at[rows, last].set(True)


def unstack_layers(model: Decoder, mesh: Mesh | None) -> Decoder:
    """Unstack the parameters of scanned layers; a model of unstacked layers is returned as it is."""

    def unstack(stack: AbstractStack) -> AbstractStack:
        if isinstance(stack, Stack):
            return _unstack(stack, mesh)
        return stack

    return swap_stack(model, unstack)


@eqx.filter_jit
def _unstack(stack: Stack, mesh: Mesh | None) -> AbstractStack:
    layers = stack.unstack()
    if mesh is None:
        return layers
    return place(layers, mesh)
