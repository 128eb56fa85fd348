"""What runs on the device, or on each device's share: the prompt at once, then a loop over tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import TokenInfo
from zoo.models import Decoder, Stack, swap_stack
from zoo.models.stack import AbstractStack, LayerStates
from zoo.ops.sampling import apply_temperature, filter_logits, penalize_repetition, sample_tokens
from zoo.parallel import Mesh, Module, all_gather, place, reduce, shard_offset
from zoo.parallel.spmd import OutputDims, SpmdProgram, run_jitted, run_jitted_donating

from .request import SamplingOptions


class DecodeState(Module):
    """All that a step changes. Donated to the next: a token then writes one slot of each cache, in place."""

    states: LayerStates
    """Those of the layers, one each."""
    tokens: Int[Array, "batch new"]
    """What came so far, -1 where nothing did."""
    newest: Int[Array, "batch"]
    """The last of them."""
    positions: Int[Array, "batch"]
    """The place of the newest token in its row."""
    done: Bool[Array, "batch"]
    seen: Bool[Array, "batch vocab"] | None
    """Tokens of prompt and text so far, where repeats are made less likely."""
    keys: Key[Array, "batch"] | None

    step: Int[Array, ""]
    """How many tokens came."""
    running: Bool[Array, ""]
    """Whether any row, on any device, goes on."""


def prefill(
    fixed: tuple[Decoder, SamplingOptions, Key[Array, ""] | None],
    tokens: Int[Array, "batch seq"],
    positions: Int[Array, "batch seq"],
    rows: Int[Array, "batch"],
    length: int,
) -> DecodeState:
    """The state after a prompt and one new token.

    `positions` are -1 on padding; `rows` numbers the rows of the whole batch, for their keys.
    """
    model, options, key = fixed
    states = model.init_state(tokens.shape[0], length)
    stream, states = model.hidden(tokens, TokenInfo(positions), states)
    logits = model.logits(stream.x[:, -1])
    newest = positions[:, -1]
    start = DecodeState(
        # Without weak types, which a step would not give back: the next would be another program.
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
    return _append_token(start, logits, options)


def decode_until(fixed: tuple[Decoder, SamplingOptions], state: DecodeState, until: Int[Array, ""]) -> DecodeState:
    """The state once `until` tokens have come, or every row has ended. Rows that have are padding to the others."""
    model, options = fixed

    def step(state: DecodeState) -> DecodeState:
        positions = jnp.where(state.done, -1, state.positions)
        tokens = jnp.maximum(state.newest, 0)
        stream, states = model.hidden(tokens[:, None], TokenInfo(positions[:, None]), state.states)
        state = dataclasses.replace(state, states=() if states is None else states)
        return _append_token(state, model.logits(stream.x[:, 0]), options)

    return lax.while_loop(lambda state: (state.step < until) & state.running, step, state)


def _append_token(state: DecodeState, logits: Float[Array, "batch vocab"], options: SamplingOptions) -> DecodeState:
    """The state with one more token, chosen by the logits: those of a device's share of the vocabulary."""
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
    tokens: Int[Array, "batch seq"], real: Bool[Array, "batch seq"], logits: Float[Array, "batch vocab"]
) -> Bool[Array, "batch vocab"]:
    """Which ids occur, of those whose logits live here."""
    size = logits.shape[1]
    local = tokens - shard_offset(logits, "vocab", size)
    outside = ~real | (local < 0)
    rows = jnp.arange(len(tokens))[:, None]
    return jnp.zeros_like(logits, bool).at[rows, jnp.where(outside, size, local)].set(True, mode="drop")


def unstack_layers(model: Decoder, mesh: Mesh | None) -> Decoder:
    """The model with its layers taken out of their stack; as it is where they stand alone already."""
    return swap_stack(model, lambda stack: _unstack(stack, mesh) if isinstance(stack, Stack) else stack)


@eqx.filter_jit
def _unstack(stack: Stack, mesh: Mesh | None) -> AbstractStack:
    layers = stack.unstack()
    return layers if mesh is None else place(layers, mesh)


def run_program(program: Callable, mesh: Mesh | None, fixed: tuple, *args: Any, donate: bool = False) -> DecodeState:
    """`program(fixed, *args)`, compiled once a shape; with `donate` all but `fixed` give their memory to the result."""
    if mesh is None:
        return (call_program_donating if donate else call_program_keeping)((program, fixed), args)
    return (run_jitted_donating if donate else run_jitted)(
        (SpmdProgram(program, mesh, 1, OutputDims.from_tree("")), (fixed,)), args, None
    )


def _call_program(kept: tuple[Callable, tuple], args: tuple) -> DecodeState:
    program, fixed = kept
    return program(fixed, *args)


call_program_keeping = eqx.filter_jit(_call_program)
call_program_donating = eqx.filter_jit(_call_program, donate="all-except-first")
