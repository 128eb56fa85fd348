"""Expert parallelism: tokens meet the experts that they chose on other devices, along the `expert` axis of a mesh.

Each of n devices holds experts / n experts and t tokens, which chose `top` experts each: t top rows, sorted by expert
and so by device. The forms agree, no token is dropped under any load, and `Layout.expert` chooses one. Per layer and
device a forward pass sends, in vectors of a token:

    "boxes"       2 (n - 1) ceil(SLACK t top / n) a trip     all-to-all of boxes of rows, there and back
    "gathered"    2 (n - 1) t                                all-gather of tokens, reduce-scatter of sums
    "ragged"      2 t top, less rows that stay               ragged all-to-all of rows, there and back

A box has room for a balanced load and some slack. What does not fit follows in another trip, as many as the fullest
box of all devices needs: one if loads are balanced to SLACK, and n / SLACK, rounded up, if all tokens of a device
choose experts of one other (`exchange_trips.py`). So memory is bounded, whatever the load. "ragged" has the same trips
and sends no empty room, where XLA has the collective: on TPUs and GPUs, opt-in until measured. The backward pass sends
the rows again, with their gradients, and computes the experts again, trip by trip.

All-to-all for experts: Lepikhin et al., arXiv:2006.16668, section 3.3.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.ops.implementations import Implementation, Operation, refuse_other_platforms
from zoo.ops.moe.dispatch import combine, dispatch, sort_by_expert
from zoo.ops.moe.grouped_matmul import grouped_matmul_implementation
from zoo.ops.varying import align_varying, varying
from zoo.parallel.collectives import current_mesh

from ..abstract import AbstractFeedForward
from .exchange_trips import Exchange, RaggedTrips, Trips, apply_on_devices

SLACK = 1.25
"""Room of a box as a multiple of a balanced load."""


def mix_experts(
    experts: AbstractFeedForward,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top"],
    chosen: Int[Array, "tokens top"],
    num_experts: int,
    implementation: str,
    *,
    has_others: bool = False,
) -> Float[Array, "tokens embed"]:
    """Sum the weighted outputs of the experts that each token chose, by the form that the layout names.

    - `experts`: the experts on this device, of `num_experts`.
    - `implementation`: of the grouped matmuls.
    - `has_others`: a choice may be `num_experts`, with the weight 0. It adds nothing, and is sent nowhere.

    The result is a partial sum over "mlp", as in `AbstractFeedForward.grouped`.
    """
    axes = find_expert_axes()
    if not axes:
        return _apply_local(experts, x, weights, chosen, num_experts, implementation, has_others=has_others)
    mesh = current_mesh()
    assert mesh is not None  # there are axes
    shards = lax.axis_size(axes)
    shards_tokens = varying(x).issuperset(axes)
    request = _Request(len(x), chosen.shape[1], num_experts // shards, shards, axes, shards_tokens, has_others)
    mix = EXPERT_EXCHANGE.select(mesh.layout.expert, request).function
    return mix(request, experts, x, weights, chosen, implementation)


def find_expert_axes() -> tuple[str, ...]:
    """Return the mesh axes that shard experts."""
    mesh = current_mesh()
    if mesh is None:
        return ()
    return mesh.axes("experts")


@dataclasses.dataclass(frozen=True)
class _Request:
    """A call of experts that several devices hold."""

    tokens: int
    """Tokens on this device."""
    top: int
    held: int
    """Experts on each device."""
    shards: int
    axes: tuple[str, ...]
    """Mesh axes that shard the experts."""
    shards_tokens: bool
    """Whether these axes shard the tokens, too."""
    has_others: bool
    """Whether a choice may be no expert's, as in `mix_experts`."""

    @property
    def room(self) -> int:
        """Rows that fit into a box."""
        return math.ceil(SLACK * self.tokens * self.top / self.shards)


def _apply_local(
    experts: AbstractFeedForward,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top"],
    chosen: Int[Array, "tokens top"],
    held: int,
    implementation: str,
    *,
    has_others: bool = False,
) -> Float[Array, "tokens embed"]:
    """Sort tokens by expert, apply the `held` experts of this device with grouped matmuls, and combine.

    `has_others`: a choice may be `held`, which stands for another device's expert and adds nothing.
    """
    order = sort_by_expert(chosen, held + has_others)
    with grouped_matmul_implementation(implementation):
        rows = experts.grouped(dispatch(x, order), order.group_sizes[:held])
    return combine(rows, weights, order)


def _mix_gathered(
    request: _Request,
    experts: AbstractFeedForward,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top"],
    chosen: Int[Array, "tokens top"],
    implementation: str,
) -> Float[Array, "tokens embed"]:
    """All-gather the tokens, apply the experts of this device to all of them, and reduce-scatter the sums.

    Piece by piece, each with as many rows as boxes would have; of several, the backward pass computes each again.
    """
    gathered = tuple(axis for axis in request.axes if axis in varying(x))
    others = tuple(axis for axis in request.axes if axis not in gathered)
    copies = lax.axis_size(gathered) if gathered else 1
    choices = min(request.top, request.held)
    first = lax.axis_index(request.axes) * request.held

    def mix(piece: tuple[Array, Array, Array]) -> Array:
        if gathered:
            piece = jax.tree.map(lambda x: lax.all_gather(x, gathered, axis=0, tiled=True), piece)
        x, weights, chosen = piece
        weights, local = _select_local(weights, chosen - first, request.held, choices)
        y = _apply_local(experts, x, weights, local, request.held, implementation, has_others=True)
        if gathered:
            y = lax.psum_scatter(y, gathered, scatter_dimension=0, tiled=True)
        if others:
            y = lax.psum(y, others)
        return y

    pieces = math.ceil(copies * len(x) * choices / (request.shards * request.room))
    if pieces == 1:
        return mix((x, weights, chosen))
    size = math.ceil(len(x) / pieces)
    padding = ((0, size * pieces - len(x)), (0, 0))
    split = lambda x: jnp.pad(x, padding).reshape(pieces, size, -1)
    return lax.map(jax.checkpoint(mix), jax.tree.map(split, (x, weights, chosen))).reshape(-1, x.shape[1])[: len(x)]


def _select_local(
    weights: Float[Array, "tokens top"], local: Int[Array, "tokens top"], held: int, choices: int
) -> tuple[Float[Array, "tokens choices"], Int[Array, "tokens choices"]]:
    """Return the first `choices` of each token among experts 0 to `held` - 1, in their order, with their weights.
    Missing choices have the expert `held` and the weight 0."""
    is_local = (local >= 0) & (local < held)
    first = jnp.argsort(~is_local, axis=1, stable=True)[:, :choices]
    take = lambda x: jnp.take_along_axis(x, first, axis=1)
    return take(jnp.where(is_local, weights, 0)), take(jnp.where(is_local, local, held))


def _mix_by_exchange(
    make_trips: type[Trips],
    request: _Request,
    experts: AbstractFeedForward,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top"],
    chosen: Int[Array, "tokens top"],
    implementation: str,
) -> Float[Array, "tokens embed"]:
    """Send each row to the device of its expert, and its output back; combine here."""
    num_experts = request.held * request.shards
    order = sort_by_expert(chosen, num_experts + request.has_others)
    arrays, static = eqx.partition(experts, eqx.is_array)
    arrays, rows, sizes = align_varying(arrays, dispatch(x, order), order.group_sizes[:num_experts])
    mesh = current_mesh()
    assert mesh is not None  # it shards experts
    waiting = tuple(axis for axis in mesh.devices.axis_names if axis in varying(rows))
    exchange = Exchange(request.axes, request.room, waiting, static, implementation, make_trips)
    return combine(apply_on_devices(exchange, arrays, rows, sizes), weights, order)


def exchange_slots(
    apply: Callable[[Float[Array, "experts batch slots embed"]], Float[Array, "experts batch slots embed"]],
    slots: Float[Array, "experts batch slots embed"],
) -> Float[Array, "experts batch slots embed"]:
    """Apply the experts of all devices to a fixed number of slots for each expert: one all-to-all there and one back.

    - `apply`: applies the experts of this device.

    **Raises** `NotImplementedError` if the axes that shard experts shard tokens only in part.
    """
    if not (axes := find_expert_axes()):
        return apply(slots)
    shared = [axis for axis in axes if axis in varying(slots)]
    if not shared:  # all devices have the same tokens
        held = len(slots) // lax.axis_size(axes)
        own = lax.dynamic_slice_in_dim(slots, lax.axis_index(axes) * held, held)
        return lax.all_gather(apply(own), axes, axis=0, tiled=True, to="invarying")
    if len(shared) < len(axes):
        raise NotImplementedError(
            f"experts with a capacity are sharded over {' x '.join(axes)}, and their tokens only over "
            f"{' x '.join(shared)}: let a layout shard both over the same axes, or leave capacity_factor out"
        )
    exchanged = apply(lax.all_to_all(slots, axes, 0, 1, tiled=True))
    return lax.all_to_all(exchanged, axes, 1, 0, tiled=True)


def _find_gathered_drawback(request: _Request) -> str | None:
    if request.tokens <= request.room:
        return None
    return f"it sends {request.tokens} vectors to each device, and boxes {request.room}"


def _find_boxes_obstacle(request: _Request) -> str | None:
    if request.shards_tokens:
        return None
    return f"{' x '.join(request.axes)} shard the experts, but not the tokens"


def _find_ragged_obstacle(request: _Request) -> str | None:
    if len(request.axes) > 1:
        return f"it runs along one mesh axis, and {' x '.join(request.axes)} shard the experts"
    return _find_boxes_obstacle(request) or refuse_other_platforms("tpu", "gpu")


EXPERT_EXCHANGE = Operation[_Request](
    "expert exchange",
    (
        Implementation("gathered", _mix_gathered, find_drawback=_find_gathered_drawback),
        Implementation("boxes", partial(_mix_by_exchange, Trips), _find_boxes_obstacle),
        Implementation(
            "ragged",
            partial(_mix_by_exchange, RaggedTrips),
            _find_ragged_obstacle,
            lambda _: "it is not measured yet",
        ),
    ),
)
"""Ways of tokens to experts on other devices, of which `Layout.expert` names one. "auto" sends the fewest bytes."""
