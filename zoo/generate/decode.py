"""Prefill and decode programs: the prompt in one forward pass, then a loop over new tokens."""

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
from zoo.parallel import Mesh, Module, all_gather, place, reduce, shard_offset

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
    seen: Bool[Array, "batch vocab"] | None
    """Token ids in the prompt and the new tokens, for the repetition penalty."""
    keys: Key[Array, "batch"] | None
    """One PRNG key per row; None for greedy decoding."""

    step: Int[Array, ""]
    """Number of new tokens."""
    running: Bool[Array, ""]
    """True until every row on every device has ended."""


def prefill(
    fixed: tuple[Decoder, SamplingOptions, Key[Array, ""] | None],
    tokens: Int[Array, "batch seq"],
    positions: Int[Array, "batch seq"],
    rows: Int[Array, "batch"],
    length: int,
) -> DecodeState:
    """Run the prompt through the model and sample the first new token.

    `positions` are -1 on padding. `rows` are the row numbers in the global batch, which select the PRNG key of each
    row.
    """
    model, options, key = fixed
    states = model.init_state(tokens.shape[0], length)
    hidden, states = model.hidden(tokens, TokenInfo(positions), states)
    logits = model.logits(hidden.x[:, -1])
    newest = positions[:, -1]
    state = DecodeState(
        # Strip weak types, which a step does not return: otherwise the next step would compile again.
        states=jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype), () if states is None else states),
        tokens=jnp.broadcast_to(jnp.full_like(newest, -1)[:, None], (len(newest), length)),
        newest=newest,
        positions=newest,
        done=jnp.zeros_like(newest, bool),
        seen=None if options.penalty is None else _mark_seen_tokens(tokens, positions >= 0, logits),
        keys=None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, rows),
        step=jnp.int32(0),
        running=jnp.array(True),
    )
    return _append_token(state, logits, options)


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
    done, seen = state.done, state.seen
    if options.stop is not None:
        done |= (newest[:, None] == options.stop).any(1)
    if seen is not None:
        ids = jnp.arange(logits.shape[1]) + shard_offset(logits, "vocab", logits.shape[1])
        seen |= ids == newest[:, None]
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
    if state.seen is not None and options.penalty is not None:
        logits = penalize_repetition(logits, state.seen, options.penalty)
    logits = all_gather(logits, "vocab", axis=1)
    if state.keys is None or options.temperature is None:
        return logits.argmax(1).astype(jnp.int32)
    logits = filter_logits(
        apply_temperature(logits, options.temperature), top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
    )
    return sample_tokens(logits, jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)).astype(jnp.int32)


def _mark_seen_tokens(
    tokens: Int[Array, "batch seq"], is_real: Bool[Array, "batch seq"], logits: Float[Array, "batch vocab"]
) -> Bool[Array, "batch vocab"]:
    """Mark the ids that occur in the prompt, within this device's shard of the vocabulary."""
    size = logits.shape[1]
    local = tokens - shard_offset(logits, "vocab", size)
    is_outside = ~is_real | (local < 0)
    rows = jnp.arange(len(tokens))[:, None]
    return jnp.zeros_like(logits, bool).at[rows, jnp.where(is_outside, size, local)].set(True, mode="drop")


def unstack_layers(model: Decoder, mesh: Mesh | None) -> Decoder:
    """Unstack the parameters of scanned layers; a model of unstacked layers is returned as it is."""
    return swap_stack(model, lambda stack: _unstack(stack, mesh) if isinstance(stack, Stack) else stack)


@eqx.filter_jit
def _unstack(stack: Stack, mesh: Mesh | None) -> AbstractStack:
    layers = stack.unstack()
    return layers if mesh is None else place(layers, mesh)
