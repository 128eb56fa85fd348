"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): modules after the last layer that predict
further tokens, from the hidden states of the trunk and the tokens in between."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Shaped

from zoo._checks import wrap_key
from zoo.layers import AbstractLinear, AbstractNorm, Linear, TokenInfo
from zoo.layers.abstract import check_sequence_sharding
from zoo.layers.moe.routing import RoutingSums
from zoo.parallel import Dim, Module, all_gather, gather, implementation_option, num_shards, reduce, shard, vary
from zoo.parallel.collectives import is_pipelined, varying
from zoo.parallel.module import replace_option
from zoo.parallel.remat import rematerialize
from zoo.parallel.tokens import merge_copies, replicate_tokens, shard_tokens
from zoo.shapes import HiddenStates, ResidualStream, SegmentIds, Tokens

from .decoder import AbstractBlock, Decoder, Hidden, LayerStates, UnrolledStack, find_shared_modules, run_block
from .segment import index_tree
from .stack import Stack

_Model = TypeVar("_Model", bound=Decoder)
_SumLosses = Callable[[Array, Array, Array], Float[Array, ""]]
"""A function `(hidden states, targets, weights) -> sum` of weighted losses of the tokens of this device."""
_FIRST_NUMBER = 2**31
"""Number of the first module where PRNG keys are folded. No layer's number is as large."""


class Predictor(Module):
    """Predicts one token more than the hidden states that it reads:

        y = norm(layers(W [norm_e(embedding of the token that they predict), norm_h(hidden states)]))

    `y` are the hidden states of the token after it, for the head of the model, and for the next predictor. The states
    that the first one reads come from the model, after its final norm. Embedding and head are the model's own.
    """

    hides_value = True

    embedding_norm: AbstractNorm
    state_norm: AbstractNorm
    projection: AbstractLinear
    layers: tuple[AbstractBlock, ...]
    norm: AbstractNorm

    state_first: bool = eqx.field(static=True, default=False)
    """True if the projection reads the hidden states before the embedding, as MiMo's does."""
    depths: int = implementation_option(default=1)
    """Number of tokens that the module predicts, one after another, each from its own states of the token before."""

    def __call__(
        self, x: ResidualStream, embedded: ResidualStream, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[ResidualStream, tuple[RoutingSums, ...], LayerStates | None]:
        """Return the hidden states of the next token, sums of the routers' decisions, and the updated states of the
        layers: None if `states` is None. `embedded` are the embeddings of the tokens that `x` predicts, which stand at
        the positions of `x` in `info`."""
        pair = [self.embedding_norm(embedded), self.state_norm(x)]
        if self.state_first:
            pair.reverse()
        hidden = Hidden(self.projection(jnp.concatenate(pair, axis=-1)))
        new_states = []
        for number, block in enumerate(self.layers):
            state = None if states is None else states[number]
            hidden, state = run_block(block, hidden, info.fold_keys(number), state, "rows")
            new_states.append(state)
        return self.norm(hidden.x), hidden.routing, None if states is None else tuple(new_states)


def add_predictors(model: _Model, count: int = 1, *, key: Key[Array, ""]) -> _Model:
    """Return a model with `count` more `Predictor`s, to be trained by `zoo.cross_entropy(..., predictors=0.3)`.

    The layer of each begins as a copy of the model's last layer, its norms as copies of the final norm, and its
    projection at random. Add them before the model is placed on a mesh.

    **Raises** `ValueError` for a `count` below 1; `NotImplementedError` for a last layer that reads more than the
    hidden states and its own parameters.
    """
    if count < 1:
        raise ValueError(f"count={count}: expected the number of predictors, at least 1")
    block = _take_last_layer(model)
    if find_shared_modules(block) or model.layer_inputs is not None:
        raise NotImplementedError(
            f"a predictor has a layer of its own, and the last layer of this model, {type(block).__name__}, reads what "
            "other layers share or hand on"
        )
    embed = _find_size(model)

    def make(key: Key[Array, ""]) -> Predictor:
        projection = Linear(2 * embed, embed, in_=Dim("latent"), out=Dim("embed"), key=key)
        return make_predictor(model.norm, projection, (block,))

    made = tuple(make(key) for key in jax.random.split(wrap_key(key), count))
    return dataclasses.replace(model, predictors=(*model.predictors, *_copy(made)))


def make_predictor(
    norm: AbstractNorm, projection: AbstractLinear, layers: tuple[AbstractBlock, ...], *, state_first: bool = False
) -> Predictor:
    """Make a predictor whose norms all begin as `norm`."""
    return Predictor(norm, norm, projection, layers, norm, state_first)


def repeat_predictor(model: _Model, depths: int) -> _Model:
    """Return a model whose last predictor predicts `depths` tokens, one after another, with the same parameters: how
    Qwen3.5's one module is used for several.

    **Raises** `ValueError` for a model without predictors and for `depths` below 1.
    """
    if not model.predictors:
        raise ValueError(_NO_PREDICTORS)
    if depths < 1:
        raise ValueError(f"depths={depths}: expected the number of tokens that the predictor predicts, at least 1")
    *others, last = model.predictors
    return dataclasses.replace(model, predictors=(*others, replace_option(last, "depths", depths)))


def iter_depths(model: Decoder) -> Iterator[tuple[int, Predictor]]:
    """Yield the number of the predictor of each depth, and the predictor: of the second token after a hidden state, the
    third, and so on."""
    for number, predictor in enumerate(model.predictors):
        yield from [(number, predictor)] * predictor.depths


def count_depths(model: Decoder) -> int:
    """Return the number of tokens that the predictors of a model predict after the next one."""
    return sum(predictor.depths for predictor in model.predictors)


def predict_further(
    model: Decoder, tokens: Tokens, info: TokenInfo, x: HiddenStates
) -> tuple[list[HiddenStates], tuple[RoutingSums, ...]]:
    """Return the hidden states of each depth, and sums of the routers' decisions of the predictors. `x` comes from
    `model.hidden(tokens, info)`: row i predicts token i + 1, and of depth k token i + k + 1. The last k of each
    document are meaningless, since they read tokens after its end.

    **Raises** `ValueError` for a model without predictors; `NotImplementedError` on a mesh with `pipe`.
    """
    if not model.predictors:
        raise ValueError(_NO_PREDICTORS)
    if is_pipelined("layers"):
        raise NotImplementedError(
            "predictors read the hidden states after the last layer, which a pipeline has on one stage: place the "
            "model on a mesh with pipe=1"
        )
    info = info.mask_padding()
    states = []
    routing: dict[int, Any] = {}
    for depth, (number, predictor) in enumerate(iter_depths(model), start=1):
        own_info = info.fold_keys(_FIRST_NUMBER + depth)
        embedded = model.embed(_shift(tokens, depth), own_info).x
        check_sequence_sharding(predictor, embedded)
        y, sums = _run_rematerialized(predictor, shard_tokens(x), embedded, own_info, model)
        x = replicate_tokens(y)
        states.append(x)
        if number in routing:  # the same routers, once more
            sums = jax.tree.map(jnp.add, routing[number], sums)
        routing[number] = sums
    return states, merge_copies(sum(routing.values(), ()))


def _run_rematerialized(
    predictor: Predictor, x: ResidualStream, embedded: ResidualStream, info: TokenInfo, model: Decoder
) -> tuple[ResidualStream, tuple[RoutingSums, ...]]:
    """Run a predictor in training, rematerialized as the layers of the model are."""
    arrays, static = eqx.partition(predictor, eqx.is_array)

    def run(arrays: Any, x: ResidualStream, embedded: ResidualStream, info: TokenInfo) -> tuple[Any, Any]:
        y, sums, _ = gather(eqx.combine(arrays, static))(x, embedded, info)
        return y, sums

    remat = model.stack.remat if isinstance(model.stack, Stack) else "none"
    return rematerialize(run, remat, prevent_cse=True)(arrays, x, embedded, info)


def average_further_losses(
    states: list[HiddenStates],
    info: TokenInfo,
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    sum_losses: _SumLosses,
) -> Float[Array, ""]:
    """Return the mean over depths of the mean loss of each, over all tokens of all devices: the target of depth k is
    the one k tokens later, with its weight, if it is in the same document."""
    segment_ids = info.mask_padding().segment_ids
    total = jnp.zeros((), jnp.float32)
    for depth, x in enumerate(states, start=1):
        later = _shift(weights, depth) * _mark_inside(targets, segment_ids, depth)
        losses, count = (
            reduce(reduce(sums, over="seq"), over="batch")
            for sums in (sum_losses(x, _shift(targets, depth, -1), later), later.sum())
        )
        total = total + losses / jnp.where(count > 0, count, 1)
    return total / len(states)


def _mark_inside(
    like: Int[Array, "batch seq"], segment_ids: SegmentIds | None, depth: int
) -> Float[Array, "batch seq"]:
    """Return 1 for tokens of which the one `depth` tokens later is of the same document, else 0."""
    if segment_ids is None:
        segment_ids = jnp.asarray(vary(jnp.ones_like(like), varying(like)))
    return (_shift(segment_ids, depth) == segment_ids).astype(jnp.float32)


def _shift(x: Shaped[Array, "batch seq"], depth: int, fill: int = 0) -> Shaped[Array, "batch seq"]:
    """Return the element `depth` places later in each row, `fill` after its end. A row whose tokens are sharded is
    all-gathered: integers, or weights."""
    if num_shards(x, "seq") == 1:
        return jnp.pad(x[:, depth:], ((0, 0), (0, depth)), constant_values=fill)[:, : x.shape[1]]
    whole = all_gather(x, "seq", axis=1)
    return shard(jnp.pad(whole[:, depth:], ((0, 0), (0, depth)), constant_values=fill), "seq", axis=1)


def _take_last_layer(model: Decoder) -> AbstractBlock:
    """Return the block of the last layer."""
    if isinstance(model.stack, UnrolledStack):
        return model.stack.blocks[-1]
    assert isinstance(model.stack, Stack)
    segment = model.stack.segments[-1].merge_rounds()
    return index_tree(segment.blocks[-1], segment.local_repeats - 1)


def _find_size(model: Decoder) -> int:
    """Return the number of features of the residual stream."""
    return eqx.filter_eval_shape(lambda model: model.embed(jnp.zeros((1, 1), int), TokenInfo()).x, model).shape[-1]


def _copy(tree: Any) -> Any:
    """Copy arrays: two parameters that are one array could not both be donated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True) if eqx.is_array(x) else x, tree)


_NO_PREDICTORS = (
    "predictors: the model has no modules that predict further tokens: load a checkpoint with some, or add them with "
    "zoo.models.add_predictors(model, key=key)"
)
