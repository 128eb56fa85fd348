"""A trainable state from which every text begins: a prefix of keys and values for attention, a matrix for a recurrence.

It is prefix tuning (Li & Liang, arXiv:2101.00190, section 4), a cartridge (Eyuboglu et al., arXiv:2506.06266, section
3) and RWKV's state tuning in one: a layer computes what it computes while decoding, after a state that is trained.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo._checks import is_host_readable, wrap_key
from zoo._keywords import check_keywords
from zoo.layers import TokenInfo
from zoo.layers.attention.compressed import CompressedCache
from zoo.layers.attention.key_blocks import BlockCache
from zoo.layers.embedding import AbstractPositionEmbedding
from zoo.layers.kv_cache import IndexedLatentCache, KeyValueCache, is_cache
from zoo.layers.rotary import find_length_dependent_scaling
from zoo.models import Decoder
from zoo.models.decoder import AbstractBlock, Hidden
from zoo.models.parameter_paths import IndexRanges, map_modules
from zoo.models.targets import vmap_stacked
from zoo.ops.recurrence.chunks import find_segment_starts
from zoo.parallel import Dim, Module, buffer, leaves, num_shards
from zoo.parallel.collectives import sharded_axes
from zoo.parallel.fields import adapter_parameter, wrapped
from zoo.shapes import Positions, SegmentIds

from ..merged_layers import require_unmerged

_Model = TypeVar("_Model")
LayerValues = list[tuple[Array, tuple[Dim, ...]]]
"""Arrays of one layer's state, without rows, and their dims: keys and values are "prompt kv_heads head_dim"."""


class StateArray(Module):
    """One trainable array of a layer's state, without rows. A prefix may have tokens in front that are not trained."""

    array: Float[Array, "..."] = adapter_parameter(full_precision=True, no_weight_decay=True)
    frozen: Float[Array, "..."] | None = buffer()

    array_dims: tuple[Dim, ...] = eqx.field(static=True)

    @property
    def frozen_dims(self) -> tuple[Dim, ...]:
        return self.array_dims

    @property
    def value(self) -> Float[Array, "..."]:
        return self.array if self.frozen is None else jnp.concatenate([self.frozen, self.array])


class StateBlock(AbstractBlock):
    """A frozen layer that begins every text from a trainable state of `length` tokens, at positions 0 to length - 1.
    Real tokens follow. Trained keys are attended to as they are: no RoPE is applied to them.

    Outside of the layer, positions and caches count real tokens only.
    """

    base: AbstractBlock = wrapped()
    values: tuple[StateArray, ...]

    length: int = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    @property
    def extends_hidden(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.extends_hidden

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `ValueError` for packed documents: inside programs, which cannot read segment ids, a row with
        several is NaN. `NotImplementedError` where `context` shards the sequence in training."""
        if state is not None:
            info = dataclasses.replace(info, positions=_shift(info.positions, self.length))
            hidden, state = self.base(hidden, info, _renumber(state, self.length))
            return hidden, _renumber(state, -self.length)
        if sharded_axes(hidden.x, "seq"):
            raise NotImplementedError(f"the state {self.adapter_name!r} is not trained over context: leave it at 1")
        rows = hidden.x.shape[0]
        tokens = hidden.x.shape[1] * num_shards(hidden.x, "tokens")
        positions = info.positions
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens), (rows, tokens))
        if info.segment_ids is not None:
            hidden = self._refuse_packed(hidden, info.segment_ids)
            positions = _place_padding(positions, info.segment_ids)
        info = dataclasses.replace(info, positions=_shift(positions, self.length), segment_ids=None)
        empty = self.base.init_state(rows, self.length + tokens, hidden.x.dtype)
        return self.base(hidden, info, self._fill(empty))[0], None

    def _refuse_packed(self, hidden: Hidden, segment_ids: SegmentIds) -> Hidden:
        if is_host_readable(segment_ids):
            if any(len({*row} - {0}) > 1 for row in jax.device_get(segment_ids).tolist()):
                raise ValueError(f"a row begins once from {self.adapter_name!r}: give each document a row of its own")
            return hidden
        is_start = find_segment_starts(segment_ids).at[:, 0].set(True) & (segment_ids != 0)
        is_packed = is_start.sum(axis=1) > 1
        return dataclasses.replace(hidden, x=jnp.where(is_packed[:, None, None], jnp.nan, hidden.x))

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """Return the trained state, with room for `length` tokens after it."""
        return _renumber(self._fill(self.base.init_state(batch, self.length + length, dtype)), -self.length)

    def _fill(self, empty: Any) -> Any:
        """Write the trained state into each row of an empty one."""
        values = iter([x.value for x in self.values])

        def fill(node: Any) -> Any:
            if not is_cache(node):
                return jnp.broadcast_to(next(values), node.shape).astype(node.dtype)
            written = [next(values) for _ in range(2 if isinstance(node, KeyValueCache) else 1)]
            rows = len(node.positions)
            return node.write(*(jnp.broadcast_to(x, (rows, *x.shape)) for x in (*written, jnp.arange(self.length))))

        return jax.tree.map(fill, empty, is_leaf=is_cache)


class ShiftedPositions(AbstractPositionEmbedding):
    """The position embedding of a model with a trained state: real tokens stand after its `shift` tokens."""

    base: AbstractPositionEmbedding = wrapped()

    shift: int = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    @property
    def length(self) -> float:
        return self.base.length - self.shift

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        return self.base(_shift(positions, self.shift))


def _shift(positions: Any, shift: int) -> Any:
    """Add `shift` to the positions of real tokens."""
    return None if positions is None else jnp.where(positions < 0, positions, positions + shift)


def _place_padding(positions: Positions, segment_ids: SegmentIds) -> Positions:
    """Give padding before a text position -1. Padding after it counts on: no real token sees it, and the state after
    it is not used."""
    index = jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape)
    is_real = segment_ids != 0
    last, last_index = (lax.cummax(jnp.where(is_real, x, -1), axis=1) for x in (positions, index))
    return jnp.where(last_index < 0, -1, last + index - last_index)


def _renumber(states: Any, shift: int) -> Any:
    """Count the tokens of a prefix in caches, or with a negative `shift` only real tokens. Token i of the prefix is
    then at position -2 - i: whoever forgets real tokens (`zoo.layers.kv_cache.forget`) keeps it."""

    def renumber(node: Any) -> Any:
        if not is_cache(node):
            return node
        is_prefix = (node.positions < -1) if shift > 0 else (0 <= node.positions) & (node.positions < -shift)
        positions = jnp.where(is_prefix, -2 - node.positions, _shift(node.positions, shift))
        return dataclasses.replace(node, positions=positions, written=node.written + shift)

    return jax.tree.map(renumber, states, is_leaf=is_cache)


@check_keywords
def state(
    model: _Model,
    length: int,
    *,
    text: Int[Array, "text"] | None = None,
    frozen: int = 0,
    adapter_name: str = "state",
    key: Key[Array, ""],
) -> _Model:
    """Train the state from which every text begins, and freeze the model.

    Each layer has `length` keys and values, or latents, or the state of its recurrence: matrices, convolution states,
    token shifts. Real tokens follow at position `length`, in training and in `zoo.generate` and `zoo.prefill`.

    - `text`: ids of `length` tokens. The model begins as it is after reading them. By default keys and values are
      random, with standard deviation 0.02, and recurrences begin from their empty state.
    - `frozen`: number of the first keys and values that are not trained. One keeps the place that every token attends
      to (arXiv:2506.06266, section 3.2).
    - `adapter_name`: the name that the state's parameter paths contain.

    **Raises** `ValueError` for a length below 1 or beyond a window, a `text` of another length, a second state, and
    RoPE that depends on the length of a text; `NotImplementedError` for a layer that chooses the tokens that it reads;
    `TypeError` for a model that is not a decoder.
    """
    require_unmerged(model)
    if length < 1 or (text is not None and np.shape(text) != (length,)) or not 0 <= frozen < length:
        raise ValueError(f"length={length}: expected 1 or more, a text of as many tokens, and fewer frozen ones")
    return add_state(model, make_initial_values(model, length, text, wrap_key(key)), length, frozen, adapter_name)


def add_state(model: _Model, layers: list[LayerValues], length: int, frozen: int, adapter_name: str) -> _Model:
    """Wrap each layer, with the initial values of its state."""

    def wrap(name: str, ranges: IndexRanges, block: AbstractBlock) -> AbstractBlock:
        if not ranges:  # a block that several layers share: each of them has a state
            return block
        own = [layers[number] for number in ranges[0]]
        stacked = [jnp.stack([x for x, _ in column]) for column in zip(*own, strict=True)]

        def make(block: AbstractBlock, arrays: list[Array]) -> StateBlock:
            values = []
            for x, (_, dims) in zip(arrays, own[0], strict=True):
                first = frozen if dims[0].name == "prompt" else 0
                values.append(StateArray(x[first:], x[:first] if first else None, dims))
            return StateBlock(block, tuple(values), length, adapter_name)

        return vmap_stacked(make, ranges)(block, stacked) if stacked else make(block, [])

    model = map_modules(wrap, model, lambda node: isinstance(node, AbstractBlock))
    is_positions = lambda node: isinstance(node, AbstractPositionEmbedding)
    shift = lambda node: ShiftedPositions(node, length, adapter_name) if is_positions(node) else node
    return jax.tree.map(shift, model, is_leaf=is_positions)


def make_initial_values(model: Any, length: int, text: Any, key: Key[Array, ""]) -> list[LayerValues]:
    """Return the initial state of each layer. **Raises** as `state` does."""
    if list_state_names(model):
        raise ValueError("the model has a trained state already: take it off with adapters.remove")
    model = getattr(model, "decoder", model)
    if not isinstance(model, Decoder):
        raise TypeError(f"a state is trained for a Decoder, not for {type(model).__name__}")
    has_rotary = lambda node: hasattr(node, "rotary")
    mixers = [node for node in jax.tree.leaves(model.stack, is_leaf=has_rotary) if has_rotary(node)]
    if any(find_length_dependent_scaling(mixer.rotary) for mixer in mixers):
        raise ValueError("RoPE depends on the length of a text, which a trained state does not have")
    states = model.init_state(1, length)
    if text is not None:
        run = eqx.filter_jit(lambda model, *args: model.hidden(*args)[1])
        states = run(model, jnp.asarray(text)[None], TokenInfo(jnp.arange(length)[None]), states)
    layers = []
    for number, layer in enumerate(states):
        values = list(_list_state_arrays(number, layer, length))
        layer_key = jax.random.fold_in(key, number)
        if text is None:
            values = [(_begin(x, dims, jax.random.fold_in(layer_key, i)), dims) for i, (x, dims) in enumerate(values)]
        layers.append([(x.astype(jnp.float32), dims) for x, dims in values])
    return layers


def _begin(empty: Array, dims: tuple[Dim, ...], key: Key[Array, ""]) -> Array:
    if dims[0].name == "prompt":
        return 0.02 * jax.random.normal(key, empty.shape, jnp.float32)
    return jnp.where(jnp.abs(empty) > 1e30, 0, empty)  # the maximum of nothing, which no step would move


def _list_state_arrays(number: int, state: Any, length: int) -> Iterator[tuple[Array, tuple[Dim, ...]]]:
    """Yield the arrays of one layer's state of one row, and their dims."""
    is_cached = lambda node: is_cache(node) or isinstance(node, BlockCache | CompressedCache | IndexedLatentCache)
    described = iter(leaves(state))
    for node in jax.tree.leaves(state, is_leaf=is_cached):
        (leaf, *_) = [next(described) for _ in jax.tree.leaves(node)]
        if is_cache(node) and node.positions.shape[1] < length:
            raise ValueError(f"layer {number} has a window of {node.positions.shape[1]} tokens, fewer than {length}")
        if isinstance(node, KeyValueCache):
            for x, name in (node.key, "head_dim"), (node.value, "value_dim"):
                yield x[0].swapaxes(0, 1)[:length], (Dim("prompt"), Dim("kv_heads"), Dim(name))
        elif is_cache(node):
            yield node.features[0, :length], (Dim("prompt"), Dim("features"))
        elif is_cached(node) or not jnp.issubdtype(node.dtype, jnp.floating):
            raise NotImplementedError(
                f"layer {number} keeps ids of tokens, or chooses the tokens that it reads: no state is trained for it"
            )
        else:
            yield node[0], (leaf.dims or ())[1:]


def is_state(node: Any) -> bool:
    """Return True for a layer or a position embedding of a model with a trained state."""
    return isinstance(node, StateBlock | ShiftedPositions)


def list_state_names(model: Any) -> list[str]:
    """List the names of a model's trained states, one per layer."""
    return [node.adapter_name for node in jax.tree.leaves(model, is_leaf=is_state) if is_state(node)]


def remove_state(model: _Model, adapter_name: str | None = None) -> _Model:
    """Return the model without its trained state of this name, or of any."""
    is_removed = lambda node: is_state(node) and adapter_name in (None, node.adapter_name)
    return jax.tree.map(lambda node: node.base if is_removed(node) else node, model, is_leaf=is_state)
