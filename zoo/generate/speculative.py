"""Speculative decoding: a draft proposes tokens, and the model reads all of them in one call.

With p the distribution that the model would draw a token from, and q the draft's that it did draw x from, x is
accepted with probability

    min(1, p(x) / q(x))

and otherwise replaced by a draw from max(p - q, 0), normalized, which ends the round. After the last accepted proposal
one more token is drawn from p. So each token follows p exactly, and greedy tokens are those of ordinary decoding.
Source: Leviathan et al., arXiv:2211.17192, section 2.3 and appendix A.1; Chen et al., arXiv:2302.01318, algorithm 2.

p is the distribution after penalties, temperature and truncation; q after temperature and truncation. Prompt lookup is
a draft with q(x) = 1: the tokens that followed the latest n-gram where it first occurred in the text (Saxena, "Prompt
Lookup Decoding", 2023). A rejected token is forgotten: each row's write pointer goes back to the last accepted token.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import TokenInfo
from zoo.layers.attention.key_blocks import BlockCache
from zoo.layers.kv_cache import IndexedLatentCache, add_slots, drops_oldest, forget, is_cache
from zoo.layers.rotary import find_length_dependent_scaling
from zoo.models import Decoder
from zoo.models.decoder import LayerStates
from zoo.ops.sampling import apply_temperature, filter_logits, sample_tokens
from zoo.parallel import Module, all_gather, scan
from zoo.parallel.collectives import while_loop

from .buckets import Prompt
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
)
from .prefill import Prefix, follow_prefix, list_mixers, read_prompt, repeat_prompt, repeat_rows
from .request import DecodeOptions

Draft = Decoder | Literal["prompt"]
"""A model that proposes tokens, or "prompt" to look them up in the text so far."""
_LONGEST_NGRAM = 3
_ACCEPT = 1
_PROPOSE = 2
"""Numbers folded into a token's PRNG key for the acceptance and for the draft; the key itself is for the draw."""


class _Proposals(Module):
    """Tokens that a draft proposes, with the distributions that they were drawn from."""

    tokens: Int[Array, "batch drafted"]
    """-1 for none, and then none follows."""
    log_probs: Float[Array, "batch drafted vocab"] | None
    """None for a draft that is certain of each token."""


def check_draft(model: Decoder, draft: Any, prefix: Prefix | None, length: int | None) -> None:
    """Check that `draft` can propose tokens to `model`, and that both can forget what is rejected.

    **Raises** `TypeError` for anything but a decoder or "prompt"; `ValueError` for a draft of another vocabulary;
    `NotImplementedError` for recurrent states, for RoPE that depends on the sequence length unless `length` is given,
    for a draft model after a prefix, and for windows after a prefix.
    """
    if isinstance(draft, str):
        if draft != "prompt":
            raise TypeError(f'draft is a Decoder, or "prompt" to look tokens up in the text, not {draft!r}')
        models = [("the model", model)]
    elif isinstance(draft, Decoder):
        models = [("the model", model), ("the draft", draft)]
        sizes = [each.embedding.table_shape[0] for _, each in models]
        if sizes[0] != sizes[1]:
            raise ValueError(f"draft: its vocabulary has {sizes[1]} tokens, and the model's {sizes[0]}")
        if prefix is not None:
            raise NotImplementedError('draft: a draft model has not read the prefix; draft="prompt" goes on after one')
    else:
        raise TypeError(f'draft is a Decoder, or "prompt" to look tokens up in the text, not {type(draft).__name__}')
    for name, each in models:
        mixers = list_mixers(each)
        for number, state in enumerate(jax.eval_shape(lambda each=each: each.stack.init_state(1, 8))):
            if recurrent := _find_recurrent_state(state):
                raise NotImplementedError(
                    f"draft: layer {number} of {name} has a recurrent state, {recurrent}, which cannot forget a token "
                    "that is rejected: decode without a draft"
                )
        scaled = any(find_length_dependent_scaling(getattr(mixer, "rotary", None)) for mixer in mixers)
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


def _find_recurrent_state(state: Any) -> str | None:
    """Return the class of the first state that is not a KV cache; None if all are."""
    is_state = lambda x: isinstance(x, Module) and not isinstance(x, IndexedLatentCache)
    states = jax.tree.leaves(state, is_leaf=is_state)
    recurrent = [x for x in states if not (is_cache(x) or isinstance(x, BlockCache))]
    return type(recurrent[0]).__name__.lstrip("_") if recurrent else None


def speculate(
    model: Decoder,
    unstacked: Decoder,
    drafts: tuple[Decoder, Decoder] | None,
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
    the options ask for details. `drafts` is the draft model before and after unstacking, None for prompt lookup."""
    prompt, states, before = follow_prefix(prompt, prefix)
    repeated = repeat_prompt(prompt, samples)
    state = start(options, key, repeated, length, repeat_rows(before, samples))
    rope_length = find_rope_length(state)

    def read(model: Decoder, states: LayerStates | None) -> LayerStates:
        if states is None:
            states = add_slots(model.init_state(len(prompt.last), length), drafted)
        return repeat_rows(read_prompt(model, prompt, length, rope_length, states), samples)

    draft_states = () if drafts is None else read(drafts[0], None)
    new = jnp.zeros_like(state.positions)
    progress = RowProgress(new, new + until, new + options.temperature)
    state = dataclasses.replace(state, states=read(model, states), progress=progress)
    draft = None if drafts is None else drafts[1]

    def run_round(carry: tuple[DecodeState, LayerStates]) -> tuple[DecodeState, LayerStates]:
        state, draft_states = carry
        if draft is None:
            proposals = _Proposals(_look_up(state, drafted), None)
        else:
            proposals, draft_states = _propose(draft, state, draft_states, options, drafted)
        logits, states = _read_proposals(unstacked, state, proposals)
        state = _verify(dataclasses.replace(state, states=states), logits, proposals, options)
        states = forget(state.states, state.positions)
        state = dataclasses.replace(state, states=states, running=is_any(~state.done))
        return state, forget(draft_states, state.positions)

    state, _ = while_loop(lambda carry: carry[0].running, run_round, (state, draft_states))
    return state if options.details else state.tokens


def _count_wanted(state: DecodeState, drafted: int) -> Int[Array, "batch"]:
    """Return the number of proposals that each row can take: the last new token needs none. -1 for an ended row."""
    assert state.progress is not None
    wanted = jnp.minimum(state.progress.most - state.progress.new - 1, drafted)
    return jnp.where(state.done, -1, wanted)


def _find_latest(state: DecodeState) -> Int[Array, "batch"]:
    assert state.text is not None
    return jnp.take_along_axis(state.text, state.positions[:, None], axis=1)[:, 0]


def _look_up(state: DecodeState, drafted: int) -> Int[Array, "batch drafted"]:
    """Return the tokens after the first place of the text where its last 3 tokens, or else 2 or 1, occur before."""
    text = state.text
    assert text is not None
    places = jnp.arange(text.shape[1])
    matched = jnp.zeros_like(text)
    matches = places < state.positions[:, None]
    for back in range(_LONGEST_NGRAM):
        wanted = jnp.take_along_axis(text, jnp.maximum(state.positions[:, None] - back, 0), axis=1)
        is_inside = (places >= back) & (state.positions[:, None] >= back)
        matches &= is_inside & (jnp.roll(text, back, axis=1) == wanted)
        matched += matches
    found = matched.argmax(axis=1)[:, None] + 1 + jnp.arange(drafted)
    tokens = jnp.take_along_axis(text, jnp.minimum(found, text.shape[1] - 1), axis=1)
    is_proposed = (matched.max(axis=1) > 0)[:, None] & (found <= state.positions[:, None])
    is_wanted = jnp.arange(drafted) < _count_wanted(state, drafted)[:, None]
    return jnp.where(is_proposed & is_wanted, tokens, -1)


def _propose(
    draft: Decoder, state: DecodeState, states: LayerStates, options: DecodeOptions, drafted: int
) -> tuple[_Proposals, LayerStates]:
    """Let a draft model decode, one token at a time; it reads its last proposal, too."""
    wanted = _count_wanted(state, drafted)
    keys = step_keys(state)

    def step(carry, number):
        token, states = carry
        positions = jnp.where(number <= wanted, state.positions + number, -1)
        hidden, states = draft.hidden(jnp.maximum(token, 0)[:, None], TokenInfo(positions[:, None]), states)
        logits = all_gather(draft.logits(hidden.x[:, 0]).astype(jnp.float32), "vocab", axis=1)
        log_q = _log_distribution(logits, options)
        drawn = sample_tokens(log_q, _fold(_fold(keys, _PROPOSE), number)).astype(jnp.int32)
        token = jnp.where(number < wanted, drawn, -1)
        return (token, states or ()), (token, log_q)

    (_, states), (tokens, log_q) = scan(step, (_find_latest(state), states), jnp.arange(drafted + 1))
    return _Proposals(tokens[:drafted].T, log_q[:drafted].swapaxes(0, 1)), states


def _read_proposals(
    model: Decoder, state: DecodeState, proposals: _Proposals
) -> tuple[Float[Array, "batch proposed vocab"], LayerStates]:
    """Return the logits of each row's latest token and the proposals after it, and the states after all of them."""
    tokens = jnp.concatenate([_find_latest(state)[:, None], proposals.tokens], axis=1)
    is_read = (tokens >= 0) & ~state.done[:, None]
    positions = jnp.where(is_read, state.positions[:, None] + jnp.arange(tokens.shape[1]), -1)
    hidden, states = model.hidden(jnp.maximum(tokens, 0), TokenInfo(positions), state.states)
    logits = model.logits(hidden.x).astype(jnp.float32)
    return all_gather(logits, "vocab", axis=2), states or ()


def _verify(
    state: DecodeState,
    logits: Float[Array, "batch proposed vocab"],
    proposals: _Proposals,
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
    log_p = _log_distribution(adjust_logits(state, logits, options), options)
    p = jnp.exp(log_p)
    is_proposal = jnp.arange(p.shape[1]) == proposal[:, None]
    q = is_proposal.astype(p.dtype) if log_q is None else jnp.exp(log_q)
    keys = step_keys(state)
    chance = jax.vmap(jax.random.uniform)(_fold(keys, _ACCEPT))
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


def _log_distribution(logits: Float[Array, "batch vocab"], options: DecodeOptions) -> Float[Array, "batch vocab"]:
    """Return the log-probabilities that tokens are drawn from; all on the likeliest for greedy decoding."""

    def sampled(logits):
        logits = apply_temperature(logits, options.temperature)
        filters = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p}
        return jax.nn.log_softmax(filter_logits(logits, **filters))

    def greedy(logits):
        is_likeliest = jnp.arange(logits.shape[1]) == logits.argmax(axis=1)[:, None]
        return jnp.where(is_likeliest, 0.0, -jnp.inf)

    return lax.cond(options.temperature > 0, sampled, greedy, logits)


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


def _fold(keys: Key[Array, "batch"], number: int | Int[Array, ""]) -> Key[Array, "batch"]:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)
