"""Drafts by the predictors of a model: multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

The predictor of depth k reads token t together with its input of token t - 1: the hidden states of the model, or for
k > 1 the output of depth k - 1. Its output there predicts token t + 1, from the states of token t - k. So all depths
read the same tokens as the model, one after another, and each keeps the states of its layers and its next input.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.layers import TokenInfo
from zoo.models import Decoder
from zoo.models.decoder import Hidden, LayerStates
from zoo.models.predictors import Predictor, iter_depths
from zoo.parallel import Module, all_gather, gather
from zoo.shapes import HiddenStates, Positions, Tokens

from .branches import branch_blocks, keep
from .decode import DecodeState
from .drafts import AbstractDraft, Proposals, ReadPrompt, ReadTokens, count_wanted, draw_proposal, find_latest
from .request import DecodeOptions


class PredictorStates(Module):
    """States of the predictors, up to the token before the latest of each row."""

    inputs: Float[Array, "batch depths embed"]
    """Input of each depth with the next token."""
    layers: tuple[LayerStates, ...]
    """States of the layers of each depth."""


class PredictorDraft(AbstractDraft):
    """Proposes a token per depth: each predictor reads the proposals of the depths before it."""

    def read(self, model: Decoder, read_prompt: ReadPrompt, states: LayerStates | None) -> tuple[LayerStates, Any]:
        assert states is None, "check_draft refuses a prefix"
        return read_prompt(_Joined(model), None)

    def propose(
        self, model: Decoder, state: DecodeState, states: PredictorStates, options: DecodeOptions, drafted: int
    ) -> tuple[Proposals, PredictorStates]:
        """The proposals are provisional: the states stay as they are."""
        wanted = count_wanted(state, drafted)
        tokens = find_latest(state)[:, None]
        outputs = states.inputs[:, :0]
        distributions = []
        for depth, (_, predictor) in enumerate(iter_depths(model), start=1):
            if depth > drafted:
                break
            is_read = (tokens >= 0) & ~state.done[:, None]
            positions = jnp.where(is_read, state.positions[:, None] + jnp.arange(depth), -1)
            inputs = jnp.concatenate([states.inputs[:, depth - 1 : depth], outputs], axis=1)
            outputs, _ = _run_predictor(model, predictor, depth, inputs, tokens, positions, states.layers[depth - 1])
            # The first token of a text has none before it, from whose states it could be predicted.
            is_wanted = (depth <= wanted) & (state.positions > 0) & is_read[:, -1]
            token, log_q = draw_proposal(model, outputs[:, -1], state, options, depth - 1, is_wanted)
            tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
            distributions.append(log_q)
        return Proposals(tokens[:, 1:], jnp.stack(distributions, axis=1)), states

    def follow(
        self,
        model: Decoder,
        states: PredictorStates,
        block: ReadTokens,
        count: Int[Array, "batch"],
        positions: Int[Array, "batch"],
    ) -> PredictorStates:
        inputs, layers = _read_block(model, states, block, branched=True)
        last = (count - 1)[:, None, None]
        latest = [jnp.take_along_axis(x, last, axis=1) for x in inputs]
        kept = [keep(own, count, jnp.maximum(positions - depth, 0)) for depth, own in enumerate(layers, start=1)]
        return PredictorStates(jnp.concatenate(latest, axis=1), tuple(kept))


class _Joined(Module):
    """A model and its predictors, which read a prompt together."""

    model: Decoder

    def init_state(self, batch: int, length: int) -> tuple[LayerStates, PredictorStates]:
        states = self.model.init_state(batch, length)
        x = self.model.embed(jnp.zeros((batch, 1), int), TokenInfo(jnp.zeros((batch, 1), int))).x
        depths = [gather(predictor) for _, predictor in iter_depths(self.model)]
        layers = [tuple(block.init_state(batch, length, x.dtype) for block in predictor.layers) for predictor in depths]
        return states, PredictorStates(jnp.zeros((batch, len(depths), x.shape[-1]), x.dtype), tuple(layers))

    def hidden(
        self, tokens: Tokens, info: TokenInfo, states: tuple[LayerStates, PredictorStates]
    ) -> tuple[Hidden, tuple[LayerStates, PredictorStates]]:
        own, draft = states
        assert info.positions is not None
        hidden, own = self.model.hidden(tokens, info, own)
        tokens, positions, x = (all_gather(x, "seq", axis=1) for x in (tokens, info.positions, hidden.x))
        inputs, layers = _read_block(self.model, draft, ReadTokens(tokens, positions, x))
        draft = PredictorStates(jnp.stack([x[:, -1] for x in inputs], axis=1), tuple(layers))
        return hidden, (own or (), draft)


def _read_block(
    model: Decoder, states: PredictorStates, block: ReadTokens, *, branched: bool = False
) -> tuple[list[HiddenStates], list[LayerStates]]:
    """Let all depths read a block; return the input that each has for the token after each of the block's, and the
    states of its layers, if `branched` those after each token where they are recurrent."""
    x = block.x
    inputs = []
    layers = []
    for depth, (_, predictor) in enumerate(iter_depths(model), start=1):
        inputs.append(x)
        own = states.layers[depth - 1]
        if branched:
            predictor = dataclasses.replace(predictor, layers=branch_blocks(predictor.layers, own))
        before = jnp.concatenate([states.inputs[:, depth - 1 : depth], x[:, :-1]], axis=1)
        x, own = _run_predictor(model, predictor, depth, before, block.tokens, block.positions, own)
        layers.append(own)
    return inputs, layers


def _run_predictor(
    model: Decoder,
    predictor: Predictor,
    depth: int,
    inputs: HiddenStates,
    tokens: Tokens,
    positions: Positions,
    states: LayerStates,
) -> tuple[HiddenStates, LayerStates]:
    """Run the predictor of a depth on tokens at these positions, and its inputs of the tokens before them."""
    info = TokenInfo(jnp.maximum(jnp.where(positions < 0, -1, positions - depth), -1))
    embedded = model.embed(jnp.maximum(tokens, 0), info).x
    x, _, states = gather(predictor)(inputs, embedded, info, states)
    return x, states or ()
