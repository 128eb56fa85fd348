"""Speculative decoding: a draft proposes tokens, and the model reads all of them in one call.

With p the distribution that the model would draw a token from, and q the draft's that it did draw x from, x is
accepted with probability

    min(1, p(x) / q(x))

and otherwise replaced by a draw from max(p - q, 0), normalized, which ends the round. After the last accepted proposal
one more token is drawn from p. So each token follows p exactly, and greedy tokens are those of ordinary decoding.
Source: Leviathan et al., arXiv:2211.17192, section 2.3 and appendix A.1; Chen et al., arXiv:2302.01318, algorithm 2.

p is the distribution after penalties, temperature and truncation; q after temperature and truncation. Prompt lookup is
a draft with q(x) = 1: the tokens that followed the latest n-gram where it first occurred in the text (Saxena, "Prompt
Lookup Decoding", 2023). A rejected token is forgotten: each row's write pointer goes back to the last accepted token,
and of a recurrent state the copy at that token is kept (`zoo.generate.branches`).
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import TokenInfo
from zoo.layers.kv_cache import add_slots, drops_oldest
from zoo.layers.rotary import find_length_dependent_scaling
from zoo.models import Decoder
from zoo.models.decoder import AbstractStack, LayerStates, UnrolledStack
from zoo.models.predictors import count_depths
from zoo.models.stack import swap_stack
from zoo.ops.sampling import sample_tokens
from zoo.parallel import Mesh, all_gather, scan
from zoo.parallel.collectives import while_loop

from .branches import branch_blocks, find_recurrent_state, keep
from .buckets import Prompt, refuse_arrays_per_row
from .decode import (
    DecodeState,
    NextTokens,
    RowProgress,
    adjust_logits,
    append,
    find_rope_length,
    is_any,
    pick,
    start,
    step_keys,
    unstack_layers,
)
from .drafts import (
    AbstractDraft,
    ModelDraft,
    PromptDraft,
    Proposals,
    ReadTokens,
    find_latest,
    fold_keys,
    log_distribution,
)
from .predicted import PredictorDraft
from .prefill import Prefix, follow_prefix, list_mixers, read_prompt, repeat_prompt, repeat_rows
from .request import DecodeOptions

Draft = Decoder | Literal["prompt", "mtp"]
"""A model that proposes tokens, "prompt" to look them up in the text so far, or "mtp" for the model's predictors."""
_ACCEPT = 1
"""Number folded into a token's PRNG key for the acceptance; the key itself is for the draw."""
_DRAFTED = 4
_KINDS = 'draft is a Decoder, "prompt" to look tokens up in the text, or "mtp" for the predictors of the model'


def make_draft(draft: Draft, mesh: Mesh | None) -> AbstractDraft:
    """Make the draft that a call names."""
    if isinstance(draft, Decoder):
        return ModelDraft(draft, unstack_layers(draft, mesh))
    return PromptDraft() if draft == "prompt" else PredictorDraft()


def choose_draft_tokens(model: Decoder, draft: Draft | None, draft_tokens: int | None) -> int:
    """Return the number of tokens that a draft proposes at a time: 4 by default, and as many as the predictors of the
    model predict. **Raises** `ValueError` for more than these."""
    if draft != "mtp":
        return _DRAFTED if draft_tokens is None else draft_tokens
    depths = count_depths(model)
    if draft_tokens is not None and draft_tokens > depths:
        raise ValueError(
            f"draft_tokens={draft_tokens}: the predictors of the model predict {depths} tokens after the next one; "
            "zoo.models.repeat_predictor(model, depths) uses the last one again"
        )
    return depths if draft_tokens is None else draft_tokens


def check_draft(model: Decoder, draft: Any, prefix: Prefix | None, length: int | None) -> None:
    """Check that `draft` can propose tokens to `model`, and that both can forget what is rejected.

    **Raises** `TypeError` for anything but a decoder, "prompt" or "mtp"; `ValueError` for a draft of another
    vocabulary, and for "mtp" with a model without predictors; `NotImplementedError` for a draft model with recurrent
    states, for RoPE that depends on the sequence length unless `length` is given, for a draft model or predictors after
    a prefix, and for windows after a prefix.
    """
    models = [("the model", model)]
    if isinstance(draft, Decoder):
        models.append(("the draft", draft))
        sizes = [each.embedding.table_shape[0] for _, each in models]
        if sizes[0] != sizes[1]:
            raise ValueError(f"draft: its vocabulary has {sizes[1]} tokens, and the model's {sizes[0]}")
        _refuse_recurrent_draft(draft)
    elif not isinstance(draft, str) or draft not in ("prompt", "mtp"):
        given = repr(draft) if isinstance(draft, str) else type(draft).__name__
        raise TypeError(f"{_KINDS}, not {given}")
    if draft == "mtp" and not model.predictors:
        raise ValueError('draft="mtp": the model has no predictors (zoo.models.add_predictors)')
    if prefix is not None and draft != "prompt":
        reader = "the predictors of the model have" if draft == "mtp" else "a draft model has"
        raise NotImplementedError(f'draft: {reader} not read the prefix; draft="prompt" goes on after one')
    if any(map(find_recurrent_state, _eval_states(model))):
        advice = "decode without a draft, or a copy of the model for each adapter"
        refuse_arrays_per_row(model, "a draft for recurrent states", advice)
    for name, each in models:
        scaled = any(find_length_dependent_scaling(getattr(mixer, "rotary", None)) for mixer in list_mixers(each))
        if scaled and length is None and (prefix is None or not prefix.rope_length):
            raise NotImplementedError(
                f"draft: RoPE of {name} depends on the length so far, which differs between proposals: give length, "
                "which fixes it"
            )
    if prefix is not None and drops_oldest(prefix.states):
        raise NotImplementedError(
            "draft: the windows of the prefix have no room for proposals that are rejected: decode without a draft, or "
            "without a prefix"
        )


def _refuse_recurrent_draft(draft: Decoder) -> None:
    """**Raises** `NotImplementedError` for a draft model with recurrent states, of which it would need a copy after
    each of its tokens."""
    for number, state in enumerate(_eval_states(draft)):
        if recurrent := find_recurrent_state(state):
            raise NotImplementedError(
                f"draft: layer {number} of the draft has a recurrent state, {recurrent}, which cannot forget a token "
                "that is rejected: take a draft of attention layers"
            )


def _eval_states(model: Decoder) -> LayerStates:
    """Return the states of all layers in shapes."""
    return jax.eval_shape(lambda: model.stack.init_state(1, 8))


def speculate(
    model: Decoder,
    unstacked: Decoder,
    draft: AbstractDraft,
    options: DecodeOptions,
    key: Key[Array, ""],
    prompt: Prompt,
    until: Int[Array, ""],
    length: int,
    drafted: int,
    prefix: Prefix | None = None,
    samples: int = 1,
) -> DecodeState | Int[Array, "batch new"]:
    """Prefill, and decode in rounds with `drafted` proposals each; return the new tokens, or the state after them if
    the options ask for details."""
    prompt, states, before = follow_prefix(prompt, prefix)
    repeated = repeat_prompt(prompt, samples)
    state = start(options, key, repeated, length, repeat_rows(before, samples))
    rope_length = find_rope_length(state)

    def read(model: Any, states: Any) -> Any:
        if states is None:
            states = add_slots(model.init_state(len(prompt.last), length), drafted)
        return repeat_rows(read_prompt(model, prompt, length, rope_length, states), samples)

    states, draft_states = draft.read(model, read, states)
    new = jnp.zeros_like(state.positions)
    progress = RowProgress(new, new + until, new + options.temperature)
    state = dataclasses.replace(state, states=states, progress=progress)
    branched = swap_stack(unstacked, lambda stack: _branch(stack, states))

    def run_round(carry: tuple[DecodeState, Any]) -> tuple[DecodeState, Any]:
        before, draft_states = carry
        proposals, draft_states = draft.propose(unstacked, before, draft_states, options, drafted)
        block, logits, states = _read_proposals(branched, before, proposals)
        state = _verify(before, logits, proposals, options)
        count = jnp.maximum(state.positions - before.positions, 1)
        states = keep(states, count, state.positions)
        state = dataclasses.replace(state, states=states, running=is_any(~state.done))
        return state, draft.follow(unstacked, draft_states, block, count, state.positions)

    state, _ = while_loop(lambda carry: carry[0].running, run_round, (state, draft_states))
    return state if options.details else state.tokens


def _branch(stack: AbstractStack, states: LayerStates) -> AbstractStack:
    """Return unrolled layers, those with recurrent states such that they return one after each token."""
    assert isinstance(stack, UnrolledStack)
    return dataclasses.replace(stack, blocks=branch_blocks(stack.blocks, states))


def _read_proposals(
    model: Decoder, state: DecodeState, proposals: Proposals
) -> tuple[ReadTokens, Float[Array, "batch proposed vocab"], LayerStates]:
    """Read each row's latest token and the proposals after it; return what was read, the logits, and the states after
    all of them."""
    tokens = jnp.concatenate([find_latest(state)[:, None], proposals.tokens], axis=1)
    is_read = (tokens >= 0) & ~state.done[:, None]
    positions = jnp.where(is_read, state.positions[:, None] + jnp.arange(tokens.shape[1]), -1)
    hidden, states = model.hidden(jnp.maximum(tokens, 0), TokenInfo(positions), state.states)
    logits = model.logits(hidden.x).astype(jnp.float32)
    return ReadTokens(tokens, positions, hidden.x), all_gather(logits, "vocab", axis=2), states or ()


def _verify(
    state: DecodeState,
    logits: Float[Array, "batch proposed vocab"],
    proposals: Proposals,
    options: DecodeOptions,
) -> DecodeState:
    """Accept proposals of each row up to the first rejection, and append them and one more token."""
    width = logits.shape[1]
    none = jnp.full_like(proposals.tokens[:, :1], -1)
    log_q = proposals.log_probs
    if log_q is not None:
        log_q = jnp.concatenate([log_q, log_q[:, :1]], axis=1)  # of no proposal: never read
    columns = logits, jnp.concatenate([proposals.tokens, none], axis=1), log_q
    columns = jax.tree.map(lambda x: x.swapaxes(0, 1), columns)
    empty = jnp.broadcast_to(none, (len(none), width))
    scores = None if state.log_probs is None else jnp.zeros_like(empty, jnp.float32)
    block = dataclasses.replace(
        state, tokens=empty, log_probs=scores, sampling_log_probs=scores, step=jnp.int32(0), states=()
    )

    def step(carry, column):
        block, is_paused = carry
        logits, proposal, log_q = column
        choice, is_accepted = _accept_or_draw(block, logits, proposal, log_q, options)
        is_active = ~block.done & ~is_paused
        after = append(dataclasses.replace(block, done=~is_active), choice, options)
        done = jnp.where(is_active, after.done, block.done)
        return (dataclasses.replace(after, done=done), is_paused | ~is_accepted), None

    (block, _), _ = scan(step, (block, state.done), columns)
    return _insert(state, block)


def _accept_or_draw(
    state: DecodeState,
    logits: Float[Array, "batch vocab"],
    proposal: Int[Array, "batch"],
    log_q: Float[Array, "batch vocab"] | None,
    options: DecodeOptions,
) -> tuple[NextTokens, Bool[Array, "batch"]]:
    """Return the proposal where it is accepted, and else a draw from the rest of the distribution."""
    log_p = log_distribution(adjust_logits(state, logits, options), options)
    p = jnp.exp(log_p)
    is_proposal = jnp.arange(p.shape[1]) == proposal[:, None]
    q = is_proposal.astype(p.dtype) if log_q is None else jnp.exp(log_q)
    keys = step_keys(state)
    chance = jax.vmap(jax.random.uniform)(fold_keys(keys, _ACCEPT))
    is_accepted = (proposal >= 0) & (chance * pick(q, proposal) < pick(p, proposal))
    rest = jnp.maximum(p - q, 0)
    is_whole = (proposal < 0) | (rest.sum(axis=1) <= 0)  # p = q up to rounding: nothing is rejected
    log_rest = jnp.where(is_whole[:, None], log_p, jnp.log(rest))
    drawn = sample_tokens(log_rest, keys).astype(jnp.int32)
    tokens = jnp.where(is_accepted, proposal, drawn)
    tokens = jnp.where(jnp.isfinite(logits.max(axis=1)), tokens, -1)
    if not options.details:
        return NextTokens(tokens, None, None), is_accepted
    return NextTokens(tokens, pick(jax.nn.log_softmax(logits), tokens), pick(log_p, tokens)), is_accepted


def _insert(state: DecodeState, block: DecodeState) -> DecodeState:
    """Put the tokens of a round behind the new tokens of each row."""
    assert state.progress is not None
    assert block.progress is not None
    count = (block.tokens >= 0).sum(axis=1)
    column = jnp.arange(block.tokens.shape[1])
    places = state.progress.new[:, None] + column
    places = jnp.where(column < count[:, None], places, state.tokens.shape[1])  # out of range, and dropped
    rows = jnp.arange(len(count))[:, None]

    def write(x, new):
        return None if x is None else x.at[rows, places].set(new, mode="drop")

    return dataclasses.replace(
        block,
        states=state.states,
        tokens=write(state.tokens, block.tokens),
        log_probs=write(state.log_probs, block.log_probs),
        sampling_log_probs=write(state.sampling_log_probs, block.sampling_log_probs),
        step=state.step + 1,
    )
