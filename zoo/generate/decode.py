"""Prefill and decode programs: a loop over pieces of the prompt, then one over new tokens."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import TokenInfo
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

    step: Int[Array, ""]
    """Number of new tokens."""
    running: Bool[Array, ""]
    """True until every row on every device has ended."""


def complete(
    fixed: tuple[Decoder, Decoder, SamplingOptions, Key[Array, ""]], prompt: Prompt, until: Int[Array, ""], length: int
) -> Int[Array, "batch new"]:
    """Prefill with the first model and decode with the second, which has the same layers unstacked, in one program;
    return the new tokens."""
    model, unstacked, options, key = fixed
    state = prefill((model, options, key), prompt, length)
    return decode_until((unstacked, options), state, until).tokens


def prefill(fixed: tuple[Decoder, SamplingOptions, Key[Array, ""]], prompt: Prompt, length: int) -> DecodeState:
    """Run the prompt but for its last token through the model, piece by piece; return the state before decoding.

    Where the mesh shards the sequence, each device computes a share of a piece.
    """
    model, options, key = fixed
    room, size = prompt.tokens.shape[1], choose_piece(length, current_mesh())

    def step(carry):
        start, states = carry
        take = lambda x: shard(lax.dynamic_slice_in_dim(x, start, size, axis=1), "seq", axis=1)
        _, states = model.hidden(take(prompt.tokens), TokenInfo(take(prompt.positions)), states)
        return start + size, () if states is None else states

    carry = room - prompt.pieces * size, model.init_state(len(prompt.tokens), length)
    _, states = while_loop(lambda carry: carry[0] < room, step, carry)
    return DecodeState(
        states=states,
        tokens=jnp.broadcast_to(jnp.full_like(prompt.last, -1)[:, None], (len(prompt.last), length)),
        newest=prompt.last,
        positions=prompt.last_position,
        done=prompt.rows < 0,
        seen=_mark_seen_tokens(prompt, len(options.is_stop)),
        keys=jax.vmap(jax.random.fold_in, (None, 0))(key, prompt.rows),
        step=jnp.int32(0),
        running=jnp.array(True),
    )


def decode_until(fixed: tuple[Decoder, SamplingOptions], state: DecodeState, until: Int[Array, ""]) -> DecodeState:
    """Decode until there are `until` new tokens or every row has ended. Rows that have ended are passed as padding."""
    model, options = fixed

    def step(state: DecodeState) -> DecodeState:
        positions = jnp.where(state.done, -1, state.positions)
        tokens = jnp.maximum(state.newest, 0)
        hidden, states = model.hidden(tokens[:, None], TokenInfo(positions[:, None]), state.states)
        state = dataclasses.replace(state, states=() if states is None else states)
        return _append_token(state, model.logits(hidden.x[:, 0]), options)

    return lax.while_loop(lambda state: (state.step < until) & state.running, step, state)


def _append_token(state: DecodeState, logits: Float[Array, "batch vocab"], options: SamplingOptions) -> DecodeState:
    """Sample a token per row and append it to the state. `logits` may be sharded over the vocabulary."""
    newest = jnp.where(state.done, -1, _sample_token(state, logits.astype(jnp.float32), options))
    done = state.done | options.is_stop[newest]
    seen = state.seen | (jnp.arange(state.seen.shape[1]) == newest[:, None])
    return DecodeState(
        states=state.states,
        tokens=lax.dynamic_update_slice_in_dim(state.tokens, newest[:, None], state.step, axis=1),
        newest=newest,
        positions=state.positions + 1,
        done=done,
        seen=seen,
        keys=state.keys,
        step=state.step + 1,
        running=reduce((~done).any().astype(jnp.int32), over="batch", by=lax.pmax) > 0,
    )


def _sample_token(
    state: DecodeState, logits: Float[Array, "batch vocab"], options: SamplingOptions
) -> Int[Array, "batch"]:
    logits = penalize_repetition(all_gather(logits, "vocab", axis=1), state.seen, options.penalty)
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
    return lax.cond(options.temperature > 0, _draw_token, _choose_likeliest, logits, keys, options)


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
    return swap_stack(model, lambda stack: _unstack(stack, mesh) if isinstance(stack, Stack) else stack)


@eqx.filter_jit
def _unstack(stack: Stack, mesh: Mesh | None) -> AbstractStack:
    layers = stack.unstack()
    return layers if mesh is None else place(layers, mesh)
