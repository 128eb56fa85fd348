"""Drafts that propose tokens: by looking them up in the text, or by a smaller model."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo.layers import TokenInfo
from zoo.layers.kv_cache import forget
from zoo.models import Decoder
from zoo.models.decoder import LayerStates
from zoo.ops.sampling import apply_temperature, filter_logits, sample_tokens
from zoo.parallel import Module, all_gather, scan
from zoo.shapes import HiddenStates, Positions, Tokens

from .decode import DecodeState, step_keys
from .request import DecodeOptions

ReadPrompt = Callable[[Any, Any], Any]
"""A function `(model, states) -> states` that reads the prompt, from empty states by default."""
_LONGEST_NGRAM = 3
_PROPOSE = 2
"""Number folded into a token's PRNG key for the draft."""


class Proposals(Module):
    """Tokens that a draft proposes, with the distributions that they were drawn from."""

    tokens: Int[Array, "batch drafted"]
    """-1 for none, and then none follows."""
    log_probs: Float[Array, "batch drafted vocab"] | None
    """None for a draft that is certain of each token."""


class ReadTokens(Module):
    """The tokens that a model reads in one call: the latest of each row and the proposals after it."""

    tokens: Tokens
    positions: Positions
    """-1 for none."""
    x: HiddenStates
    """The model's hidden states after its final norm."""


class AbstractDraft(Module):
    """Proposes tokens, which a model then reads in one call. Its states are what it has read itself."""

    @abc.abstractmethod
    def read(self, model: Decoder, read_prompt: ReadPrompt, states: LayerStates | None) -> tuple[LayerStates, Any]:
        """Read the prompt; return the states of the model, which begin as `states`, and of the draft."""

    @abc.abstractmethod
    def propose(
        self, model: Decoder, state: DecodeState, states: Any, options: DecodeOptions, drafted: int
    ) -> tuple[Proposals, Any]:
        """Propose up to `drafted` tokens after the latest token of each row; return also the states."""

    def follow(
        self, model: Decoder, states: Any, block: ReadTokens, count: Int[Array, "batch"], positions: Int[Array, "batch"]
    ) -> Any:
        """Return the states after the first `count` tokens of a block, after which the latest token of each row is at
        `positions`."""
        return forget(states, positions)


class PromptDraft(AbstractDraft):
    """Proposes the tokens after the first place of the text where its last 3 tokens, or else 2 or 1, occur before."""

    def read(self, model: Decoder, read_prompt: ReadPrompt, states: LayerStates | None) -> tuple[LayerStates, Any]:
        return read_prompt(model, states), ()

    def propose(
        self, model: Decoder, state: DecodeState, states: Any, options: DecodeOptions, drafted: int
    ) -> tuple[Proposals, Any]:
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
        is_wanted = jnp.arange(drafted) < count_wanted(state, drafted)[:, None]
        return Proposals(jnp.where(is_proposed & is_wanted, tokens, -1), None), states


class ModelDraft(AbstractDraft):
    """Lets a smaller model decode, one token at a time; it reads its last proposal, too."""

    stacked: Decoder
    unstacked: Decoder
    """The same model, for decoding."""

    def read(self, model: Decoder, read_prompt: ReadPrompt, states: LayerStates | None) -> tuple[LayerStates, Any]:
        return read_prompt(model, states), read_prompt(self.stacked, None)

    def propose(
        self, model: Decoder, state: DecodeState, states: Any, options: DecodeOptions, drafted: int
    ) -> tuple[Proposals, Any]:
        wanted = count_wanted(state, drafted)

        def step(carry, number):
            token, states = carry
            positions = jnp.where(number <= wanted, state.positions + number, -1)
            info = TokenInfo(positions[:, None])
            hidden, states = self.unstacked.hidden(jnp.maximum(token, 0)[:, None], info, states)
            token, log_q = draw_proposal(self.unstacked, hidden.x[:, 0], state, options, number, number < wanted)
            return (token, states or ()), (token, log_q)

        (_, states), (tokens, log_q) = scan(step, (find_latest(state), states), jnp.arange(drafted + 1))
        return Proposals(tokens[:drafted].T, log_q[:drafted].swapaxes(0, 1)), states


def draw_proposal(
    model: Decoder,
    x: Float[Array, "batch embed"],
    state: DecodeState,
    options: DecodeOptions,
    number: int | Int[Array, ""],
    is_wanted: Array,
) -> tuple[Int[Array, "batch"], Float[Array, "batch vocab"]]:
    """Draw proposal `number` of each row from the logits of hidden states, -1 where none is wanted; return also the
    log-probabilities that it is drawn from."""
    logits = all_gather(model.logits(x).astype(jnp.float32), "vocab", axis=1)
    log_q = log_distribution(logits, options)
    keys = fold_keys(fold_keys(step_keys(state), _PROPOSE), number)
    drawn = sample_tokens(log_q, keys).astype(jnp.int32)
    return jnp.where(is_wanted, drawn, -1), log_q


def count_wanted(state: DecodeState, drafted: int) -> Int[Array, "batch"]:
    """Return the number of proposals that each row can take: the last new token needs none. -1 for an ended row."""
    assert state.progress is not None
    wanted = jnp.minimum(state.progress.most - state.progress.new - 1, drafted)
    return jnp.where(state.done, -1, wanted)


def find_latest(state: DecodeState) -> Int[Array, "batch"]:
    """Return the latest token of each row."""
    assert state.text is not None
    return jnp.take_along_axis(state.text, state.positions[:, None], axis=1)[:, 0]


def log_distribution(logits: Float[Array, "batch vocab"], options: DecodeOptions) -> Float[Array, "batch vocab"]:
    """Return the log-probabilities that tokens are drawn from; all on the likeliest for greedy decoding."""

    def sampled(logits):
        logits = apply_temperature(logits, options.temperature)
        filters = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p}
        return jax.nn.log_softmax(filter_logits(logits, **filters))

    def greedy(logits):
        is_likeliest = jnp.arange(logits.shape[1]) == logits.argmax(axis=1)[:, None]
        return jnp.where(is_likeliest, 0.0, -jnp.inf)

    return lax.cond(options.temperature > 0, sampled, greedy, logits)


def fold_keys(keys: Key[Array, "batch"], number: int | Int[Array, ""]) -> Key[Array, "batch"]:
    """Fold a number into the PRNG key of each row."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)
