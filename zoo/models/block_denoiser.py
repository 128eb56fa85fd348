"""From a prompt and a canvas of tokens to logits of the canvas: a decoder reads the prompt causally, and the same
layers read the canvas in both directions. A step of the sampler is a function of logits."""

import dataclasses
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from zoo._checks import check_tokens, is_host_readable
from zoo.layers import AbstractFeedForward, AbstractNorm, TokenInfo
from zoo.layers.abstract import run_feed_forward
from zoo.layers.encoders.projectors import AbstractProjector
from zoo.layers.kv_cache import KeyValueCache
from zoo.layers.token_info import count_positions
from zoo.parallel import Module, all_gather, buffer, gather, implementation_option, num_shards, stacked
from zoo.parallel.module import replace_option
from zoo.parallel.tokens import replicate_tokens, shard_tokens
from zoo.shapes import HiddenStates, PaddingMask, ResidualStream, Tokens

from .decoder import Decoder, Hidden, LayerStates, UnrolledStack, find_checkable_vocab
from .hf.spec import Origin
from .segment import index_tree
from .torch_habits import explain_torch_habit, hash_for_jit

_WHOLE = 2**30
"""A window that no text fills."""
CanvasLogits = Float[Array, "batch seq vocab"]


class CanvasScale(Module):
    """A layer's `layer_scale` for the canvas."""

    scale: Float[Array, "1"] = buffer()


def make_canvas_scales(layers: int) -> CanvasScale:
    """Return a scale of 1 for each layer."""
    return eqx.filter_vmap(CanvasScale)(jnp.ones((layers, 1), jnp.float32))


class SelfConditioning(Module):
    """norm(x + ffn(norm(s))), for the embeddings x of a canvas and the expected embeddings s of its last step (Chen et
    al., arXiv:2208.04202, section 3.2)."""

    signal_norm: AbstractNorm
    ffn: AbstractFeedForward
    norm: AbstractNorm

    def __call__(self, x: ResidualStream, signal: ResidualStream) -> ResidualStream:
        fed, _ = run_feed_forward(self.ffn, self.signal_norm(signal))
        return self.norm(x + fed)


class BlockDenoiser(Module):
    """A language model that writes a text block by block, and denoises all tokens of a block at once (block diffusion;
    Arriola et al., arXiv:2503.09573; DiffusionGemma, 2026).

        states = model.init_state(rows, length)             # of prompt, canvas and all that follows
        _, states = model.read(tokens, states)              # causally
        logits = model.denoise(canvas, states)              # of the tokens at these places, not of the next ones
        logits = model.denoise(canvas, states, logits / t)  # conditioned on the last step

    A finished block joins the text: `model.read(block, states)`. Both readings share their weights, except for the
    scales of layers. In a layer with a window of w tokens, each place of the canvas sees the last w - 1 of the text,
    and all of the canvas.

    Prompts with images are not read; `tower` and `projector` are written back to files.
    """

    decoder: Decoder
    tower: Any
    projector: AbstractProjector
    self_conditioning: SelfConditioning
    canvas_scales: CanvasScale = stacked("layers")

    canvas_length: int = eqx.field(static=True)
    """Tokens of a block."""
    image_tokens: tuple[int, ...] = eqx.field(static=True, default=())
    """Token ids that stand for features of an image."""
    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model was loaded from, which `zoo.save` needs."""

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute
        __getattr__ = explain_torch_habit

    def __hash__(self) -> int:
        return hash_for_jit(self)

    def __call__(
        self, tokens: Tokens, canvas: Tokens, last: CanvasLogits | None = None, *, mask: PaddingMask | None = None
    ) -> CanvasLogits:
        """Return the logits of a canvas after a prompt. Arguments are as for `read` and `denoise`."""
        states = self.init_state(tokens.shape[0], tokens.shape[1] + canvas.shape[1])
        _, states = self.read(tokens, states, mask=mask)
        return self.denoise(canvas, states, last)

    def init_state(self, batch: int, length: int) -> LayerStates:
        """Return empty states for `batch` rows of up to `length` tokens, the tokens of the canvas among them."""
        return self.decoder.init_state(batch, length)

    def read(
        self, tokens: Tokens, states: LayerStates, *, mask: PaddingMask | None = None
    ) -> tuple[HiddenStates, LayerStates]:
        """Return the hidden states of tokens that follow those before, after the final norm, and the updated states.

        - `mask`: padding mask, True or 1 for real tokens. Padding is on the left.

        **Raises** `ValueError` as `zoo.models.Decoder`, and for more tokens than the states hold; `NotImplementedError`
        for tokens of images.
        """
        check_tokens(tokens, find_checkable_vocab(self.decoder))
        if is_host_readable(tokens) and np.isin(np.asarray(tokens), self.image_tokens).any():
            raise NotImplementedError("the prompt has tokens of images, and a BlockDenoiser reads texts only")
        if mask is None:
            mask = jnp.ones(tokens.shape, bool)
        info = TokenInfo(count_positions(mask, _count_written(states)))
        hidden, updated = self.decoder.hidden(tokens, info, states)
        assert updated is not None  # there were some
        return hidden.x, updated

    def denoise(self, canvas: Tokens, states: LayerStates, last: CanvasLogits | None = None) -> CanvasLogits:
        """Return the logits of each token of a canvas that follows the text of `states`: this device's shard of them if
        the vocabulary is sharded.

        - `last`: logits of the last step over its temperature, of this device's shard; None in the first step.

        **Raises** `ValueError` as `read`; `NotImplementedError` where the sequence is sharded.
        """
        return self.decoder.logits(self.hidden(canvas, states, last))

    def hidden(self, canvas: Tokens, states: LayerStates, last: CanvasLogits | None = None) -> HiddenStates:
        """Return the hidden states of a canvas after the final norm. Arguments are as for `denoise`."""
        check_tokens(canvas, find_checkable_vocab(self.decoder))
        places = jnp.arange(canvas.shape[1])
        first = _count_written(states)[:, None]
        later = jnp.broadcast_to(places[::-1], canvas.shape)
        info = TokenInfo(first + places, lookahead=later)
        hidden = self.decoder.embed(canvas, info)
        if num_shards(hidden.x, "seq") > 1:
            raise NotImplementedError("a canvas is read whole, and the mesh shards its tokens: take context=1")
        hidden = dataclasses.replace(hidden, x=self._condition(hidden, last))
        stack, states = self._open_windows(states, first)
        hidden, _ = stack(hidden, info, states)
        return replicate_tokens(gather(self.decoder.norm)(hidden.x))

    def _condition(self, hidden: Hidden, last: CanvasLogits | None) -> ResidualStream:
        """Return the embeddings of a canvas, conditioned on Σ p(token) E[token] of the last step."""
        signal = jnp.zeros_like(hidden.x)
        if last is not None:
            table = gather(self.decoder.embedding)
            last = last.astype(jnp.float32)
            total = jax.nn.logsumexp(all_gather(last, "vocab", 2), axis=2, keepdims=True)
            logits, transpose = jax.vjp(table.transposed, replicate_tokens(signal))
            (signal,) = transpose(jnp.exp(last - total).astype(logits.dtype))
            signal = shard_tokens(signal * table.multiplier).astype(hidden.x.dtype)
        return gather(self.self_conditioning)(hidden.x, signal)

    def _open_windows(self, states: LayerStates, first: Int[Array, "batch 1"]) -> tuple[UnrolledStack, LayerStates]:
        """Return the layers with the scales of the canvas and windows that hold all of it, and states without the
        tokens of the text that no place of it sees."""
        layers: Any = self.decoder.stack  # of `LayerInputBlock`s
        blocks = []
        kept = []
        for number, (block, state) in enumerate(zip(layers.iter_blocks(), states, strict=True)):
            mixer = block.mixer
            if mixer.window is not None:
                is_seen = state.positions > first - mixer.window
                state = dataclasses.replace(state, positions=jnp.where(is_seen, state.positions, -1))
            scale = index_tree(self.canvas_scales, number).scale
            blocks.append(dataclasses.replace(block, mixer=replace_option(mixer, "window", _WHOLE), layer_scale=scale))
            kept.append(state)
        return UnrolledStack(tuple(blocks)), tuple(kept)


def _count_written(states: LayerStates) -> Int[Array, "batch"]:
    """Return the number of tokens in each row, without padding."""
    state: KeyValueCache = states[0]
    return state.written


def compute_temperature(steps_left: int, steps: int, lowest: float, highest: float) -> float:
    """Return the temperature of a step: from `highest`, with all steps left, towards `lowest`."""
    return lowest + (highest - lowest) * steps_left / steps


def accept_tokens(
    logits: CanvasLogits, canvas: Tokens, entropy_bound: float
) -> tuple[Int[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Return the canvas with the most likely token at each accepted place, and a mask of these places.

    Places are accepted in order of entropy, as long as the entropies before a place add up to at most `entropy_bound`.
    `logits` are the step's, divided by its temperature.
    """
    entropy = jax.scipy.special.entr(jax.nn.softmax(logits.astype(jnp.float32))).sum(-1)
    order = jnp.argsort(entropy, axis=1)
    ordered = jnp.take_along_axis(entropy, order, axis=1)
    before = jnp.cumsum(ordered, axis=1) - ordered
    is_accepted = jnp.take_along_axis(before <= entropy_bound, jnp.argsort(order, axis=1), axis=1)
    return jnp.where(is_accepted, logits.argmax(-1), canvas), is_accepted


def redraw_tokens(
    canvas: Tokens, is_accepted: Bool[Array, "batch seq"], vocab: int, *, key: Key[Array, ""]
) -> Int[Array, "batch seq"]:
    """Return the canvas with random tokens at the places that were not accepted."""
    return jnp.where(is_accepted, canvas, jax.random.randint(key, canvas.shape, 0, vocab))
