"""Prefill and decode programs: a loop over pieces of the prompt, then one over new tokens."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import AbstractMixer, TokenInfo
from zoo.layers.kv_cache import set_rope_length
from zoo.models import Decoder, Stack, swap_stack
from zoo.models.decoder import AbstractStack, LayerStates
from zoo.ops.sampling import apply_temperature, filter_logits, penalize_repetition, sample_tokens
from zoo.parallel import Mesh, Module, all_gather, current_mesh, place, reduce, shard
from zoo.parallel.collectives import while_loop

from .buckets import Prompt, choose_piece
from .request import SamplingOptions


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
    """True until every row on every device has ended."""


def complete(
    fixed: tuple[Decoder, Decoder, SamplingOptions, Key[Array, ""]], prompt: Prompt, until: Int[Array, ""], length: int
) -> Int[Array, "batch new"]:
    """Prefill with the first model and decode with the second, which has the same layers unstacked, in one program;
    return the new tokens.

    Where LongRoPE switches to other frequencies, all tokens so far are read again: the loop has one phase per set of
    frequencies.
    """
    model, unstacked, options, key = fixed
    switches = find_rope_switches(model)
    if not switches:
        state = prefill((model, options, key), prompt, length)
        return decode_until((unstacked, options), state, until).tokens

    def run_phase(state: DecodeState) -> DecodeState:
        state = refill(model, prompt, state, length)
        end = functools.reduce(jnp.minimum, [_next_switch(state, switch) for switch in switches], until)
        return dataclasses.replace(decode_until((unstacked, options), state, end), states=())

    state = _start(options, key, prompt, length)
    return while_loop(lambda state: (state.step < until) & state.running, run_phase, state).tokens


def prefill(fixed: tuple[Decoder, SamplingOptions, Key[Array, ""]], prompt: Prompt, length: int) -> DecodeState:
    """Run the prompt except its last token through the model, piece by piece; return the state before decoding."""
    model, options, key = fixed
    state = _start(options, key, prompt, length)
    return dataclasses.replace(state, states=_read_prompt(model, prompt, length, _find_rope_length(state)))


def read_on(
    fixed: tuple[Decoder, SamplingOptions, Key[Array, ""]], state: DecodeState, prompt: Prompt, length: int
) -> DecodeState:
    """Run a prompt except its last token through the model, behind the tokens that `state` has read; return the state
    before decoding goes on. The positions of the prompt go on, too."""
    model, options, key = fixed
    next_state = _start(options, key, prompt, length)
    states = _read_prompt(model, prompt, length, _find_rope_length(next_state), state.states)
    return dataclasses.replace(next_state, states=states, seen=next_state.seen | state.seen)


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
    return dataclasses.replace(state, states=_read_prompt(model, text, length, _find_rope_length(state)))


def _start(options: SamplingOptions, key: Key[Array, ""], prompt: Prompt, length: int) -> DecodeState:
    """Return the state before decoding, without states of layers."""
    return DecodeState(
        states=(),
        tokens=jnp.broadcast_to(jnp.full_like(prompt.last, -1)[:, None], (len(prompt.last), length)),
        newest=prompt.last,
        positions=prompt.last_position,
        done=prompt.rows < 0,
        seen=_mark_seen_tokens(prompt, len(options.is_stop)),
        keys=jax.vmap(jax.random.fold_in, (None, 0))(key, prompt.rows),
        longest=reduce(prompt.last_position.max() + 1, over="batch", by=lax.pmax),
        rope_length=prompt.rope_length,
        step=jnp.int32(0),
        running=jnp.array(True),
    )


def _read_prompt(
    model: Decoder, prompt: Prompt, length: int, rope_length: Int[Array, ""], states: LayerStates | None = None
) -> LayerStates:
    """Return the states after a prompt without its last token, from `states` on; by default from empty ones.

    Where the mesh shards the sequence, each device computes a share of a piece.
    """
    room = prompt.tokens.shape[1]
    size = choose_piece(length, current_mesh())

    def step(carry):
        start, states = carry
        take = lambda x: shard(lax.dynamic_slice_in_dim(x, start, size, axis=1), "seq", axis=1)
        _, states = model.hidden(take(prompt.tokens), TokenInfo(take(prompt.positions)), states)
        return start + size, states or ()

    first = model.init_state(len(prompt.tokens), length) if states is None else states
    carry = room - prompt.pieces * size, set_rope_length(first, rope_length)
    return while_loop(lambda carry: carry[0] < room, step, carry)[1]


def find_rope_switches(model: Decoder) -> tuple[int, ...]:
    """Return the lengths beyond which RoPE of some layer has other frequencies for all tokens."""
    is_mixer = lambda x: isinstance(x, AbstractMixer)
    mixers = filter(is_mixer, jax.tree.leaves(model.stack, is_leaf=is_mixer))
    return tuple(sorted({x.rope_switch_length for x in mixers if x.rope_switch_length is not None}))


def _find_rope_length(state: DecodeState) -> Int[Array, ""]:
    """Return the sequence length for RoPE of the latest token."""
    return jnp.where(state.rope_length > 0, state.rope_length, state.longest + state.step)


def _next_switch(state: DecodeState, switch: int) -> Int[Array, ""]:
    """Return the number of new tokens at which the longest row first has more than `switch` tokens. It is the largest
    integer if the row has more already, or if the length for RoPE is given."""
    step = switch + 1 - state.longest
    return jnp.where((step > state.step) & (state.rope_length == 0), step, jnp.iinfo(jnp.int32).max)


def decode_until(fixed: tuple[Decoder, SamplingOptions], state: DecodeState, until: Int[Array, ""]) -> DecodeState:
    """Decode until there are `until` new tokens or every row has ended. Rows that have ended are passed as padding."""
    model, options = fixed

    def step(state: DecodeState) -> DecodeState:
        positions = jnp.where(state.done, -1, state.positions)
        tokens = jnp.maximum(state.newest, 0)
        states = set_rope_length(state.states, _find_rope_length(state))
        hidden, states = model.hidden(tokens[:, None], TokenInfo(positions[:, None]), states)
        state = dataclasses.replace(state, states=states or ())
        return _append_token(state, model.logits(hidden.x[:, 0]), options)

    return lax.while_loop(lambda state: (state.step < until) & state.running, step, state)


def _append_token(state: DecodeState, logits: Float[Array, "batch vocab"], options: SamplingOptions) -> DecodeState:
    """Sample a token per row and append it to the state. `logits` may be sharded over the vocabulary. A row whose
    logits are not finite ends without a token."""
    newest = jnp.where(state.done, -1, _sample_token(state, logits.astype(jnp.float32), options))
    done = (newest < 0) | options.is_stop[newest]
    seen = state.seen | (jnp.arange(state.seen.shape[1]) == newest[:, None])
    return DecodeState(
        states=state.states,
        tokens=lax.dynamic_update_slice_in_dim(state.tokens, newest[:, None], state.step, axis=1),
        newest=newest,
        positions=state.positions + 1,
        done=done,
        seen=seen,
        keys=state.keys,
        longest=state.longest,
        rope_length=state.rope_length,
        step=state.step + 1,
        running=reduce((~done).any().astype(jnp.int32), over="batch", by=lax.pmax) > 0,
    )


def _sample_token(
    state: DecodeState, logits: Float[Array, "batch vocab"], options: SamplingOptions
) -> Int[Array, "batch"]:
    """Return a token per row, -1 for logits that are NaN or without a finite maximum."""
    logits = all_gather(logits, "vocab", axis=1)
    is_finite = jnp.isfinite(logits.max(axis=1))
    logits = penalize_repetition(logits, state.seen, options.penalty)
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
    tokens = lax.cond(options.temperature > 0, _draw_token, _choose_likeliest, logits, keys, options)
    return jnp.where(is_finite, tokens, -1)


def _draw_token(
    logits: Float[Array, "batch vocab"], keys: Key[Array, "batch"], options: SamplingOptions
) -> Int[Array, "batch"]:
    logits = apply_temperature(logits, options.temperature)
    logits = filter_logits(logits, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
    return sample_tokens(logits, keys).astype(jnp.int32)


def _choose_likeliest(
    logits: Float[Array, "batch vocab"], keys: Key[Array, "batch"], options: SamplingOptions
) -> Int[Array, "batch"]:
    return logits.argmax(1).astype(jnp.int32)


def _mark_seen_tokens(prompt: Prompt, vocab: int) -> Bool[Array, "batch classes"]:
    """Mark the ids that occur in the prompt."""
    rows = jnp.arange(len(prompt.last))
    ids = jnp.where(prompt.positions < 0, vocab, prompt.tokens)  # out of range, and dropped
    seen = jnp.broadcast_to((jnp.zeros_like(prompt.last) > 0)[:, None], (len(rows), vocab))
    return seen.at[rows[:, None], ids].set(True, mode="drop").at[rows, prompt.last].set(True)


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
