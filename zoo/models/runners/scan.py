"""The scan over the repeats of a pattern, which compiles the pattern once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from zoo.layers import TokenInfo
from zoo.parallel.collectives import current_mesh, vary_as_returned

from ..decoder import Hidden, LayerStates
from ..segment import Segment, index_tree, stack_trees, vary_arrays
from . import BindLayers, LayerNumber


def run_scan(
    segment: Segment,
    first: LayerNumber,
    hidden: Hidden,
    info: TokenInfo,
    states: LayerStates,
    *,
    bind: BindLayers,
    unroll: int = 1,
) -> tuple[Hidden, LayerStates]:
    """Scan over the repeats of a pattern, `unroll` of them in each iteration."""
    runs = bind(segment, info)
    period = len(segment.blocks)
    repeats = range(segment.local_repeats)

    def step(carry: Hidden, xs: Any) -> tuple[Hidden, Any]:
        arrays, number, states = xs
        layer = fill_carry(carry, hidden)
        routing = []
        new_states = []
        for i, run in enumerate(runs):
            layer, state = run(arrays[i], number + i, layer.drop_routing(), states[i])
            routing += layer.routing
            new_states.append(state)
        return make_carry(layer), (routing, new_states)

    numbers = first + period * jnp.arange(len(repeats))
    xs = vary_arrays(segment.blocks), numbers, [stack_trees(states[i::period]) for i in range(period)]
    carry = _start_carry(step, hidden, xs, extends=any(block.extends_hidden for block in segment.blocks))
    carry, (routing, new_states) = lax.scan(step, carry, xs, unroll=unroll)
    sums = [index_tree(router, repeat) for repeat in repeats for router in routing]
    output = dataclasses.replace(fill_carry(carry, hidden), routing=(*hidden.routing, *sums))
    return output, tuple(index_tree(state, repeat) for repeat in repeats for state in new_states)


def make_carry(hidden: Hidden) -> Hidden:
    """Return hidden states without the routing, which a scan returns for each layer, and without what layers read and
    do not change, which they read from outside of the loop: carried along, it would be saved once per layer."""
    return dataclasses.replace(hidden.drop_routing(), **dict.fromkeys(hidden.constant_fields))


def fill_carry(carry: Hidden, hidden: Hidden) -> Hidden:
    """Return a carry with the fields of `hidden` that layers do not change."""
    return dataclasses.replace(carry, **{name: getattr(hidden, name) for name in hidden.constant_fields})


def _start_carry(step: Callable, hidden: Hidden, xs: Any, *, extends: bool) -> Hidden:
    """Return the first carry, of the structure and the types of the carry that `step` returns. What blocks add to the
    hidden states begins as zeros: the first of them writes it before another reads it, and a block that reads it first
    raises while shapes are found."""

    def run_first(carry: Hidden) -> Hidden:
        return step(carry, index_tree(xs, 0))[0]

    carry = make_carry(hidden)
    if extends and type(carry) is Hidden:
        returned = eqx.filter_eval_shape(run_first, carry)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), returned)
        carry = dataclasses.replace(zeros, x=carry.x)
    if current_mesh() is None:
        return carry
    return vary_as_returned(run_first, carry)
