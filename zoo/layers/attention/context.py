"""Causal attention within a sequence that may be sharded over devices, the `context` axis of a mesh.

Each of n devices holds S consecutive tokens of a row. The forms agree, and `Layout.context` chooses one. Per layer and
device, with k bytes per token of keys and values (of latents where these travel), q of queries and o of outputs, a
forward pass transfers:

    "ring"      (n - 1) S k, of which one share at a time is in memory    `ring_attention`
    "heads"     S (q + k + o), once                                       each device attends with some of the heads
    "gathered"  n S k, all in memory                                      each device attends to the keys of all

"heads" is DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509): an all-to-all turns shards of the sequence into shards
of the heads, and every implementation of attention then sees whole rows. "gathered" needs one that takes positions.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from zoo.ops.attention import AttentionMask
from zoo.ops.implementations import AUTO, Implementation, Operation
from zoo.parallel.collectives import current_mesh, shard_offset, sharded_axes
from zoo.shapes import HeadVectors, Positions, SegmentIds

from .ring import ring_attention
from .tapped import refuse_probabilities, select_attention

_Expand = Callable[[PyTree], tuple[HeadVectors, HeadVectors]]

pass_through: _Expand = jax.tree_util.Partial(lambda tokens: tokens)
"""The `expand` of tokens that are keys and values already."""


def causal_attention(
    query: HeadVectors,
    tokens: PyTree[Float[Array, "batch seq ..."]],
    segment_ids: SegmentIds | None,
    *,
    expand: _Expand = pass_through,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    decay_channels: bool = False,
    ahead: Int[Array, "batch seq"] | None = None,
    lookahead: Int[Array, "batch seq"] | None = None,
    selected: Bool[Array, "batch seq key_seq"] | None = None,
    implementation: str | Callable = AUTO,
) -> HeadVectors:
    """Attend from each token to those before it, and itself, in its segment; the sequence may be sharded.

    `ahead`: the number of later tokens that each token attends to as well, as those of its block; a window counts from
    the last of them. `lookahead`: the same, and a window counts from the token itself.

    `selected`: the keys of the whole row that each token may attend to at most. Only "gathered" computes such sparse
    attention.

    `expand` makes keys and values of `tokens`: of latents, which devices exchange in their place. It is a pytree, whose
    arrays are the parameters that it uses (`jax.tree_util.Partial`).

    **Raises** `ValueError` if the form that the layout names cannot compute this, with the reason and the forms that
    can.
    """
    options = {"window": window, "scale": scale, "soft_cap": soft_cap, "sinks": sinks, "implementation": implementation}
    options["decay_channels"] = decay_channels
    if window is None and lookahead is not None:  # nothing counts from the token itself
        ahead = lookahead
        lookahead = None
    options["ahead"] = ahead
    if lookahead is not None:
        options["lookahead"] = lookahead
    if selected is not None:
        options["selected"] = selected
    if not (axes := sharded_axes(query, "seq")):
        return _attend_causally(query, *expand(tokens), segment_ids, segment_ids, **options)
    refuse_probabilities(f"no device has them where {' x '.join(axes)} shards the sequence: leave it at 1")
    mesh = current_mesh()
    assert mesh is not None  # there are sharded axes
    if _draws(expand):  # a dropout mask is one of tokens by their places, which are known where they are
        tokens = expand(tokens)
        expand = pass_through
    kv_heads = jax.eval_shape(lambda tokens: expand(tokens)[0], tokens).shape[2]
    sizes = {axis: mesh.shape[axis] for axis in axes}
    request = _Request(sizes, kv_heads, selected is not None, implementation, lookahead is not None)
    attend = CONTEXT_ATTENTION.select(mesh.layout.context, request).function
    return attend(axes, query, tokens, segment_ids, expand=expand, **options)


def gather_keys(
    query: HeadVectors,
    tokens: PyTree[Float[Array, "batch seq ..."]],
    segment_ids: SegmentIds | None,
    *,
    implementation: str | Callable = AUTO,
) -> tuple[PyTree[Float[Array, "batch key_seq ..."]], AttentionMask]:
    """Return the keys and values of the whole row, and the causal mask of this device's queries: for attention that
    chooses among all keys.

    **Raises** `ValueError` where the sequence is sharded, unless the layout says "gathered".
    """
    if not (axes := sharded_axes(query, "seq")):
        return tokens, AttentionMask(True, None, segment_ids, segment_ids)
    refuse_probabilities(f"no device has them where {' x '.join(axes)} shards the sequence: leave it at 1")
    mesh = current_mesh()
    assert mesh is not None  # there are sharded axes
    kv_heads = jax.tree.leaves(tokens)[0].shape[2]
    sizes = {axis: mesh.shape[axis] for axis in axes}
    CONTEXT_ATTENTION.select(mesh.layout.context, _Request(sizes, kv_heads, True, implementation))
    every, every_id = _gather_tokens((tokens, segment_ids), axes)
    places = find_places(query, jax.tree.leaves(every)[0].shape[1])
    return every, AttentionMask(True, None, segment_ids, every_id, *places)


def _gathered_attention(
    axes: tuple[str, ...],
    query: HeadVectors,
    tokens: PyTree,
    segment_ids: SegmentIds | None,
    *,
    expand: _Expand,
    **options: Any,
) -> HeadVectors:
    """Attend to the keys and values of the whole sequence."""
    every, every_id = _gather_tokens((tokens, segment_ids), axes)
    key, value = expand(every)
    places = find_places(query, key.shape[1])
    return _attend_causally(query, key, value, segment_ids, every_id, *places, **options)


def find_places(query: HeadVectors, key_seq: int) -> tuple[Positions, Int[Array, "batch key_seq"]]:
    """Return the places in the row of this device's queries, and of all keys."""
    batch, seq = query.shape[:2]
    queries = jnp.arange(seq) + shard_offset(query, "seq", seq)
    queries, keys = (jnp.broadcast_to(x, (batch, len(x))) for x in (queries, jnp.arange(key_seq)))
    return queries, keys


def _heads_attention(
    axes: tuple[str, ...],
    query: HeadVectors,
    tokens: PyTree,
    segment_ids: SegmentIds | None,
    *,
    expand: _Expand,
    sinks: Float[Array, "heads"] | None,
    ahead: Int[Array, "batch seq"] | None,
    lookahead: Int[Array, "batch seq"] | None = None,
    **options: Any,
) -> HeadVectors:
    """Attend with some of the heads, within the whole sequence."""
    exchange = lambda x, split, join: lax.all_to_all(x, axes, split, join, tiled=True)
    query, key, value = (exchange(x, 2, 1) for x in (query, *expand(tokens)))
    if sinks is not None:
        heads = query.shape[2]
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axes) * heads, heads)
    every_id, *further = _gather_tokens((segment_ids, ahead, lookahead), axes)
    options = {**options, "sinks": sinks, **dict(zip(("ahead", "lookahead"), further, strict=True))}
    return exchange(_attend_causally(query, key, value, every_id, every_id, **options), 1, 2)


def _attend_causally(
    query: HeadVectors,
    key: Float[Array, "batch key_seq kv_heads _"],
    value: Float[Array, "batch key_seq kv_heads _"],
    query_segments: SegmentIds | None,
    key_segments: Int[Array, "batch key_seq"] | None,
    query_positions: Positions | None = None,
    key_positions: Int[Array, "batch key_seq"] | None = None,
    *,
    window: int | None,
    ahead: Int[Array, "batch seq"] | None = None,
    lookahead: Int[Array, "batch seq"] | None = None,
    selected: Bool[Array, "batch seq key_seq"] | None = None,
    **options: Any,
) -> HeadVectors:
    """Attend with a causal mask; positions default to the order in the arrays."""
    if ahead is not None or lookahead is not None:
        key_positions = jnp.broadcast_to(jnp.arange(key.shape[1]), key.shape[:2])
        query_positions = key_positions if query_positions is None else query_positions
        query_positions = query_positions if ahead is None else query_positions + ahead
    places = query_segments, key_segments, query_positions, key_positions
    mask = AttentionMask(True, window, *places, selected, lookahead=lookahead)
    return select_attention()(query, key, value, mask, **options)


def _gather_tokens(tree: PyTree[Array], axes: tuple[str, ...]) -> PyTree[Array]:
    """All-gather the tokens of a sequence. The gradient is a reduce-scatter."""
    return jax.tree.map(lambda x: lax.all_gather(x, axes, axis=1, tiled=True), tree)


def _draws(expand: _Expand) -> bool:
    """Return True if there are PRNG keys among the parameters, as in an adapter with dropout."""
    arrays = (x for x in jax.tree.leaves(expand) if isinstance(x, jax.Array))
    return any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays)


@dataclasses.dataclass(frozen=True)
class _Request:
    """A call of attention within a sharded sequence."""

    sizes: dict[str, int]
    """Size of each axis that shards the sequence."""
    kv_heads: int
    """KV heads on this device."""
    has_selection: bool
    """True if each token has a selection of keys."""
    implementation: str | Callable
    looks_ahead: bool = False
    """True if tokens attend to later ones, and a window counts from each token."""


def _find_ring_obstacle(request: _Request) -> str | None:
    if request.looks_ahead:
        return "tokens attend to later ones, whatever their window, and it compares a token's place and window only"
    if request.has_selection:
        return "tokens select keys from more than one share"
    name = request.implementation
    if name in (AUTO, "blockwise"):
        return None
    if not isinstance(name, str):
        name = getattr(name, "__name__", type(name).__name__)
    return f"it attends to a share of the keys by 'blockwise', and the layer names {name!r}"


def _find_heads_obstacle(request: _Request) -> str | None:
    if request.has_selection:
        return "a device has the selected keys of its own tokens, and would need the selected keys of all tokens"
    if request.kv_heads % math.prod(request.sizes.values()) == 0:
        return None
    sizes = " x ".join(f"{axis}={size}" for axis, size in request.sizes.items())
    return (
        f"the {request.kv_heads} KV heads of a device do not divide evenly over {sizes}: a model has to have a "
        f"multiple of {' x '.join(request.sizes)} x tensor"
    )


CONTEXT_ATTENTION = Operation[_Request](
    "context attention",
    (
        Implementation("ring", ring_attention, _find_ring_obstacle),
        Implementation("heads", _heads_attention, _find_heads_obstacle),
        Implementation("gathered", _gathered_attention),
    ),
)
"""Forms of attention within a sharded sequence, of which `Layout.context` names one."""
