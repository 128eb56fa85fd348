"""Ring attention: keys and values travel around the devices that share a sequence, and no device ever holds them all.

Liu et al., arXiv:2310.01889. Each of n devices has the queries of S tokens. In step h it attends to the keys of the
device h places before, by blockwise attention, and sends them on to the next device meanwhile. Outputs o and
log-sum-exps L of two sets of keys merge:

    L = logaddexp(L1, L2),    o = exp(L1 - L) o1 + exp(L2 - L) o2

Sinks of score z join at the end: o sigmoid(L - z). The backward pass keeps o and L, sends keys and values around once
more, and with them the sums of their gradients in float32, which the last step sends home. Per device and layer, with k
bytes per token of what travels and g of its gradient:

    forward    (n - 1) S k
    backward   (n - 1) S k + n S g

Causality would let the first devices wait for the last. A row is therefore dealt out in zigzag (Brandon et al.,
arXiv:2311.09431, balance the same work by stripes): of its 2n pieces device i takes i and 2n - 1 - i, inside of this
function only. That moves queries, keys, values and outputs once. Sequences with a window w stay as they are, as do
shards of an odd number of tokens; keys then travel ceil((w - 1) / S) steps, not n - 1, unless tokens attend to later
ones of their block.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.blockwise import blockwise_attention_gradients, blockwise_attention_with_lse
from zoo.ops.attention.mask import MASK_VALUE
from zoo.ops.custom_vjps import evaluate, refuse_forward_mode, refuse_reverse_over_reverse
from zoo.ops.varying import align_varying
from zoo.shapes import HeadVectors, SegmentIds

_Partial = tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch seq heads"]]
"""Outputs and log-sum-exps over some of the keys, in float32."""

_NO_KEYS = MASK_VALUE / 2
"""Log-sum-exp over no keys, as in blockwise attention."""


def ring_attention(
    axes: tuple[str, ...],
    query: HeadVectors,
    tokens: PyTree[Float[Array, "batch seq ..."]],
    segment_ids: SegmentIds | None,
    *,
    expand: Callable[[PyTree], tuple[HeadVectors, HeadVectors]],
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None,
    decay_channels: bool,
    ahead: Int[Array, "batch seq"] | None,
    implementation: Any = None,
) -> HeadVectors:
    """Compute causal attention within a sequence that is sharded over `axes`, as `causal_attention` describes."""
    shards = lax.axis_size(axes)
    seq = query.shape[1]
    steps = shards - 1
    if window is not None and ahead is None:
        steps = min(steps, -(-(window - 1) // seq))
    is_zigzag = window is None and seq % 2 == 0
    if is_zigzag:
        query, tokens, segment_ids, ahead = _deal((query, tokens, segment_ids, ahead), axes)
    arrays, static = eqx.partition(expand, eqx.is_array)
    query, tokens, arrays = refuse_forward_mode((query, tokens, arrays), "ring attention")
    value = jax.eval_shape(lambda tokens: expand(tokens)[1], tokens)
    scores = {"scale": scale, "soft_cap": soft_cap, "decay_channels": decay_channels}
    ring = _Ring(axes, shards, steps, is_zigzag, window, scores, static, value.dtype)
    shape = query.shape[:3]
    nothing = jnp.zeros((*shape, value.shape[-1]), jnp.float32), jnp.full(shape, _NO_KEYS, jnp.float32)
    marks = _Marks(segment_ids, ahead)
    operands = align_varying(query, tokens, arrays, marks, lax.axis_index(axes), nothing)
    output, lse = _go_around(ring, *operands)
    if sinks is not None:
        output = (output * jax.nn.sigmoid(lse - sinks.astype(jnp.float32))[..., None]).astype(output.dtype)
    if is_zigzag:
        output = _deal(output, axes, back=True)
    return output


class _Marks(NamedTuple):
    """What the mask knows of the tokens of this device, besides their places in the row."""

    segments: SegmentIds | None
    ahead: Int[Array, "batch seq"] | None
    """Later tokens that each attends to as well."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Ring:
    """Static arguments of both passes."""

    axes: tuple[str, ...]
    shards: int
    steps: int
    """Times that keys are sent on."""
    is_zigzag: bool
    window: int | None
    scores: dict[str, Any]
    """Options `scale`, `soft_cap` and `decay_channels` of blockwise attention."""
    static: Any
    """`expand` without its arrays."""
    dtype: Any
    """Dtype of values."""

    def expand(self, arrays: PyTree, tokens: PyTree) -> tuple[HeadVectors, HeadVectors]:
        return eqx.combine(arrays, self.static)(tokens)

    def send(self, tree: PyTree[Array], by: int = 1) -> PyTree[Array]:
        """Send arrays to the device `by` places after this one."""
        pairs = [(index, (index + by) % self.shards) for index in range(self.shards)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), tree)

    def make_mask(
        self, index: Int[Array, ""], step: Int[Array, ""], marks: _Marks, travels: PyTree[Array]
    ) -> AttentionMask:
        """Return the mask of this device's queries and the keys that have come in a step."""
        tokens, key_segments = travels
        batch, seq = jax.tree.leaves(tokens)[0].shape[:2]
        owners = index, (index - step) % self.shards
        places, key_places = (jnp.broadcast_to(self._find_positions(owner, seq), (batch, seq)) for owner in owners)
        if marks.ahead is not None:
            places = places + marks.ahead
        return AttentionMask(True, self.window, marks.segments, key_segments, places, key_places)

    def _find_positions(self, owner: Int[Array, ""], seq: int) -> Int[Array, "seq"]:
        """Return the places in the row of the tokens that a device has."""
        place = jnp.arange(seq)
        if not self.is_zigzag:
            return owner * seq + place
        size = seq // 2
        last = 2 * self.shards - 1
        even = jnp.where(owner % 2 == 0, owner, last - owner)  # see `_deal`
        return jnp.where(place < size, even, last - even) * size + place % size


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _go_around(
    ring: _Ring,
    query: HeadVectors,
    tokens: PyTree,
    arrays: PyTree,
    marks: _Marks,
    index: Int[Array, ""],
    nothing: _Partial,
) -> _Partial:
    """Return outputs and log-sum-exps of operands that vary over the same mesh axes, starting from `nothing`."""
    return _go_around_fwd(ring, query, tokens, arrays, marks, index, nothing)[0]


def _go_around_fwd(
    ring: _Ring,
    query: HeadVectors,
    tokens: PyTree,
    arrays: PyTree,
    marks: _Marks,
    index: Int[Array, ""],
    nothing: _Partial,
) -> tuple[_Partial, tuple]:
    """Return outputs and log-sum-exps, and the residuals."""

    def attend(found: _Partial, step: Int[Array, ""], travels: PyTree) -> _Partial:
        mask = ring.make_mask(index, step, marks, travels)
        return _merge(found, evaluate(partial(attend_keys, mask), query, arrays, travels[0]))

    def attend_keys(mask: AttentionMask, query: HeadVectors, arrays: PyTree, tokens: PyTree) -> _Partial:
        key, value = ring.expand(arrays, tokens)
        return blockwise_attention_with_lse(query, key, value, mask, **ring.scores)

    def turn(carry: tuple, step: Int[Array, ""]) -> tuple[tuple, None]:
        found, travels = carry
        return (attend(found, step, travels), ring.send(travels)), None  # sent while attending: neither needs the other

    found = nothing
    travels = (tokens, marks.segments)
    if ring.steps:
        (found, travels), _ = lax.scan(turn, (found, travels), jnp.arange(ring.steps))
    output, lse = attend(found, jnp.int32(ring.steps), travels)
    output = output.astype(ring.dtype)
    return (output, lse), (query, tokens, arrays, marks, index, output, lse)


def _go_around_bwd(ring: _Ring, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple:
    """Return the cotangents of queries, of tokens, and of the parameters among `arrays`."""
    query, tokens, arrays, marks, index, output, lse = residuals
    gradient, lse_gradient = cotangents
    total = (gradient.astype(jnp.float32) * output.astype(jnp.float32)).sum(-1) - lse_gradient
    parameters, others = eqx.partition(arrays, eqx.is_inexact_array)
    add = partial(jax.tree.map, lambda x, y: x + y.astype(jnp.float32))

    def differentiate(sums: PyTree, step: Int[Array, ""], travels: PyTree, token_sums: PyTree) -> tuple[PyTree, PyTree]:
        mask = ring.make_mask(index, step, marks, travels)
        expand = lambda parameters, tokens: ring.expand(eqx.combine(parameters, others), tokens)
        (key, value), pull_back = jax.vjp(expand, parameters, travels[0])
        query_gradient, key_gradient, value_gradient = blockwise_attention_gradients(
            query, key, value, mask, gradient, lse, total, **ring.scores
        )
        found = pull_back((key_gradient.astype(key.dtype), value_gradient.astype(value.dtype)))
        return add(sums, (query_gradient, found[0])), add(token_sums, found[1])

    def turn(carry: tuple, step: Int[Array, ""]) -> tuple[tuple, None]:
        sums, travels, token_sums = carry
        sums, token_sums = differentiate(sums, step, travels, token_sums)
        return (sums, *ring.send((travels, token_sums))), None

    zeros = partial(jax.tree.map, lambda x: jnp.zeros_like(x, jnp.float32))
    carry = zeros((query, parameters)), (tokens, marks.segments), zeros(tokens)
    if ring.steps:
        carry, _ = lax.scan(turn, carry, jnp.arange(ring.steps))
    sums, travels, token_sums = carry
    sums, token_sums = differentiate(sums, jnp.int32(ring.steps), travels, token_sums)
    if ring.steps:
        token_sums = ring.send(token_sums, -ring.steps)
    query_sum, parameter_sums = sums
    like = partial(jax.tree.map, lambda x, y: x.astype(y.dtype))
    gradients = like((query_sum, token_sums, parameter_sums), (query, tokens, parameters))
    return *refuse_reverse_over_reverse(gradients, "ring attention", "take a mesh without context"), None, None, None


_go_around.defvjp(_go_around_fwd, _go_around_bwd)


def _merge(one: _Partial, other: tuple[Array, Array]) -> _Partial:
    """Merge outputs and log-sum-exps over two sets of keys."""
    lse = jnp.logaddexp(one[1], other[1])
    first, second = (output * jnp.exp(part - lse)[..., None] for output, part in (one, other))
    return first + second, lse


def _deal(tree: PyTree[Array], axes: tuple[str, ...], *, back: bool = False) -> PyTree[Array]:
    """Deal a row out in zigzag, or take it back: device i has the pieces i and 2n - 1 - i of 2n, the even one first."""
    shards = lax.axis_size(axes)
    ways = [[(i, min(2 * i + half, 2 * (shards - i) - 1 - half)) for i in range(shards)] for half in (0, 1)]
    if back:
        ways = [[(to, start) for start, to in way] for way in ways]

    def permute(half: Array, way: list[tuple[int, int]]) -> Array:
        if all(start == to for start, to in way):  # with two shards: XLA would copy it
            return half
        return lax.ppermute(half, axes, way)

    def move(x: Array) -> Array:
        return jnp.concatenate(list(map(permute, jnp.split(x, 2, axis=1), ways)), axis=1)

    return jax.tree.map(move, tree)
