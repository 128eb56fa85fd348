"""Trips of the exchange between tokens and experts: every trip sends each device one box of rows, and it back.

Rows are sorted by expert, so by device, too. A box has room for a fixed number of rows; there are as many trips as the
fullest box of all devices needs, a number that no shape depends on. One small all-to-all tells each device how many
rows of which expert will come from where, so that rows travel without the numbers of their experts.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from zoo.ops.custom_vjps import as_one_equation, evaluate, refuse_reverse_over_reverse
from zoo.ops.moe.dispatch import sort_by_expert
from zoo.ops.moe.grouped_matmul import find_row_experts, grouped_matmul_implementation
from zoo.ops.varying import align_varying

_Rows = Float[Array, "rows embed"]
_Slots = Float[Array, "slots embed"]
"""Boxes of all devices, one after the other."""


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """Static arguments of both passes."""

    axes: tuple[str, ...]
    """Mesh axes that shard the experts."""
    room: int
    """Rows that fit into a box."""
    waiting: tuple[str, ...]
    """Mesh axes whose devices all run the same number of trips, so that none waits in a trip that others skip."""
    static: PyTree
    """The experts without their arrays."""
    implementation: str
    make_trips: Callable[..., "Trips"]
    """`Trips`, or `RaggedTrips`."""

    def apply(self, arrays: PyTree, x: _Slots, sizes: Int[Array, "experts"]) -> _Slots:
        """Apply the experts of this device."""
        with grouped_matmul_implementation(self.implementation):
            return eqx.combine(arrays, self.static).grouped(x, sizes)

    def trade(self, x: Array) -> Array:
        """Send the first n-th of `x` to the first device, and so on; return the received parts, in order of devices."""
        return lax.all_to_all(x, self.axes, 0, 0, tiled=True)


class Trips:
    """Boxes of every trip: which rows are in which, by the numbers of rows that chose each expert."""

    def __init__(self, exchange: Exchange, rows: int, sizes: Int[Array, "experts"]):
        self.exchange = exchange
        self.shards = lax.axis_size(exchange.axes)
        self.room = exchange.room
        by_device = sizes.reshape(self.shards, -1)
        self.counts = by_device.sum(1)
        """Rows for each device."""
        self.starts = jnp.cumsum(self.counts) - self.counts
        self.arriving = exchange.trade(by_device)
        """Rows that each device sends here, by expert."""
        self.owners = find_row_experts(self.counts, rows)
        """The device of each row."""
        self.places = jnp.where(self.owners < self.shards, jnp.arange(rows) - self.starts[self.owners], -1)
        """The place of each row among those for its device; -1 for a row of no expert, which no trip writes."""
        fullest = -(-self.counts.max() // self.room)
        self.count = lax.pmax(fullest, exchange.waiting)
        """Number of trips."""

    def send(self, x: _Rows, index: Int[Array, ""]) -> _Slots:
        """Send the boxes of a trip; return the received boxes."""
        within = index * self.room + jnp.arange(self.room)
        is_row = within < self.counts[:, None]
        boxes = x[jnp.where(is_row, self.starts[:, None] + within, 0)]
        return self.exchange.trade(jnp.where(is_row[..., None], boxes, 0).reshape(-1, x.shape[1]))

    def send_back(self, into: _Rows, boxes: _Slots, index: Int[Array, ""]) -> _Rows:
        """Send the received boxes of a trip back, and write their rows to the original places."""
        home = self.return_boxes(boxes, index)
        slots = self.owners * self.room + self.places % self.room
        return jnp.where((self.places // self.room == index)[:, None], home[slots], into)

    def return_boxes(self, boxes: _Slots, index: Int[Array, ""]) -> _Slots:
        """Send the boxes of a trip to where they came from."""
        return self.exchange.trade(boxes)

    def sort(self, index: Int[Array, ""]) -> tuple[Int[Array, "slots"], Int[Array, "slots"], Int[Array, "experts"]]:
        """Return the order by expert of a trip's rows that have come, its inverse, and the rows of each expert."""
        within = index * self.room + jnp.arange(self.room)
        ends = jnp.cumsum(self.arriving, axis=1)
        expert = (ends[:, None] <= within[:, None]).sum(-1)  # beyond the last where a box is empty
        held = self.arriving.shape[1]
        order = sort_by_expert(expert.reshape(-1, 1), held + 1)
        return order.assignments, order.row_indices[:, 0], order.group_sizes[:held]


class RaggedTrips(Trips):
    """The same boxes, of which only the rows travel."""

    def send(self, x: _Rows, index: Int[Array, ""]) -> _Slots:
        return self._trade_rows(x, self.starts + index * self.room, self.counts, self.arriving.sum(1), index)

    def return_boxes(self, boxes: _Slots, index: Int[Array, ""]) -> _Slots:
        starts = jnp.arange(self.shards) * self.room
        return self._trade_rows(boxes, starts, self.arriving.sum(1), self.counts, index)

    def _trade_rows(
        self,
        x: Float[Array, "rows embed"],
        starts: Int[Array, "shards"],
        sent: Int[Array, "shards"],
        received: Int[Array, "shards"],
        index: Int[Array, ""],
    ) -> _Slots:
        """Send each device the rows that begin at its entry of `starts`, into the box of this device there.

        `sent` and `received` are numbers of rows in all trips.
        """
        (axis,) = self.exchange.axes
        boxes, _ = align_varying(jnp.zeros((self.shards * self.room, x.shape[1]), x.dtype), x)
        in_trip = lambda count: jnp.clip(count - index * self.room, 0, self.room).astype(jnp.int32)
        place = jnp.broadcast_to(lax.axis_index(axis) * self.room, starts.shape)
        sizes = (starts, in_trip(sent), place, in_trip(received))
        offsets = align_varying(*(size.astype(jnp.int32) for size in sizes), x)[:4]
        return lax.ragged_all_to_all(x, boxes, *offsets, axis_name=axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_on_devices(exchange: Exchange, arrays: PyTree, rows: _Rows, sizes: Int[Array, "experts"]) -> _Rows:
    """Return the output of its expert for each row, of operands that vary over the same mesh axes.

    Rows are sorted by expert, `sizes[e]` of expert e of all devices. Rows after the last expert's are 0 in the result.
    """
    return _run_trips(exchange, exchange.apply, arrays, rows, sizes)


def _run_trips(exchange: Exchange, apply: Callable, arrays: PyTree, rows: _Rows, sizes: Int[Array, "experts"]) -> _Rows:
    """Send rows to their experts, `apply` these, and send the results back, trip by trip."""
    trips = exchange.make_trips(exchange, len(rows), sizes)

    def run_trip(index: Int[Array, ""], y: _Rows) -> _Rows:
        order, inverse, counts = trips.sort(index)
        found = apply(arrays, trips.send(rows, index)[order], counts)
        return trips.send_back(y, found[inverse], index)

    return lax.fori_loop(0, trips.count, run_trip, jnp.zeros_like(rows))


def _apply_on_devices_fwd(exchange: Exchange, arrays: PyTree, rows: Any, sizes: Any) -> tuple[_Rows, tuple]:
    """Return the outputs, and the operands as residuals: the arrays that a gradient is taken of, and the others."""
    trained = jax.tree.map(lambda x: x.value if x.perturbed else None, arrays)
    frozen = jax.tree.map(lambda x: None if x.perturbed else x.value, arrays)
    residuals = trained, frozen, rows.value, sizes.value
    run = partial(_run_trips, exchange, partial(evaluate, exchange.apply))
    return as_one_equation(run, eqx.combine(trained, frozen), rows.value, sizes.value), residuals


def _apply_on_devices_bwd(exchange: Exchange, residuals: tuple, gradient: Any) -> tuple:
    """Return the cotangents of the trained arrays, summed in float32 over the trips, and of the rows."""
    trained, frozen, rows, sizes = residuals
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    trips = exchange.make_trips(exchange, len(rows), sizes)

    def run_trip(index: Int[Array, ""], sums: tuple[PyTree, _Rows]) -> tuple[PyTree, _Rows]:
        order, inverse, counts = trips.sort(index)
        apply = lambda trained, x: exchange.apply(eqx.combine(trained, frozen), x, counts)
        _, pull_back = jax.vjp(apply, trained, trips.send(rows, index)[order])
        more, row_gradient = pull_back(trips.send(gradient, index)[order])
        total = jax.tree.map(lambda x, y: x + y.astype(jnp.float32), sums[0], more)
        return total, trips.send_back(sums[1], row_gradient[inverse], index)

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), trained), jnp.zeros_like(rows)
    total, row_gradient = lax.fori_loop(0, trips.count, run_trip, zeros)
    gradients = jax.tree.map(lambda x, y: x.astype(y.dtype), total, trained), row_gradient
    instead = 'take zoo.Layout(expert="gathered")'
    return *refuse_reverse_over_reverse(gradients, "the exchange of tokens and experts", instead), None


apply_on_devices.defvjp(_apply_on_devices_fwd, _apply_on_devices_bwd, symbolic_zeros=True)
