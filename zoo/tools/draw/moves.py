"""Collectives of a training step, read off the traced program: over which axes, by which module, how many bytes."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jaxtyping import PyTree

from zoo.inspect.scopes import Scope, read_scope
from zoo.layers.encoders.patches import ImageEmbedding
from zoo.models import Decoder
from zoo.models.encoders.heads import MaskedLMHead
from zoo.models.encoders.image import ImageEncoder
from zoo.models.encoders.text import Encoder
from zoo.models.loss import cross_entropy
from zoo.models.parameter_paths import to_snake_case
from zoo.parallel import Mesh
from zoo.parallel.gradient import value_and_grad
from zoo.parallel.rounds import split_rounds

_COLLECTIVES = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    "ppermute": "permute",
}
"""Name of the collective of each primitive of JAX."""
_PHASES = ("forward", "recomputed", "backward", "update")
_MOST_NAMES = 3
"""Names of modules that are listed; of more, their number."""


class Move(NamedTuple):
    """Collectives of one kind, by one part of a layer or of the model, in one phase of a training step."""

    in_layers: bool
    phase: str
    """"forward", "recomputed" or "backward", or "update" for moves after the backward pass."""
    collective: str
    """all-reduce, all-gather, reduce-scatter, all-to-all or permute."""
    axes: tuple[str, ...]
    subject: str
    """Results of modules, `attention: query, key, value`, or parameters, hidden states, gradients."""
    count: int
    """Executions on a device in a step; loops without a known number of iterations count once."""
    bytes: int
    """Bytes per device in a step: of each execution the larger of operand and result."""


def trace_moves(
    model: PyTree,
    mesh: Mesh,
    *,
    loss_fn: Callable | None = None,
    batch: Mapping[str, Any] | None = None,
    seq_len: int = 1024,
) -> list[Move]:
    """Trace the loss and gradient of a batch for their collectives. On one device nothing is traced.

    - `model`: in shapes, with its layers in one round.
    - `loss_fn`, `batch`: as for `zoo.value_and_grad`. Default: a loss that the model is made for, on one row per device
      and micro-batch, of `seq_len` tokens or as many as the model has positions for.

    **Raises** as `zoo.value_and_grad` does for a mesh on which the model does not train; `TypeError` for a model of an
    unknown kind without `loss_fn` and `batch`.
    """
    if mesh.devices.size == 1:
        return []
    if (loss_fn is None) != (batch is None):
        raise ValueError("loss_fn and batch belong together: pass both, or neither")
    microbatches = count_microbatches(mesh)
    if loss_fn is None or batch is None:
        loss_fn = _choose_loss(model)
        batch = _make_batch(model, mesh, microbatches, seq_len)
    step = value_and_grad(loss_fn, mesh, microbatches=microbatches)
    split = split_rounds(model, mesh.layout.rounds)
    jaxpr = eqx.filter_make_jaxpr(lambda model, batch: step(model, batch))(split, dict(batch))[0]
    found: dict[tuple[bool, str, str, tuple[str, ...], str], list[tuple[str, int, int]]] = {}
    for equation, scopes, times in _iterate(jaxpr.jaxpr, (), 1):
        collective = _COLLECTIVES.get(equation.primitive.name)
        axes = tuple(axis for axis in _find_axes(equation) if mesh.shape[axis] > 1)
        if collective is None or not axes:
            continue
        avals = [x.aval for x in (*equation.invars, *equation.outvars)]
        size = max(aval.size * aval.dtype.itemsize for aval in avals)
        in_layers, phase, part, inner = _find_place(read_scope("/".join((*scopes, "collective"))))
        found.setdefault((in_layers, phase, collective, axes, part), []).append((inner, times, times * size))
    moves = []
    for (in_layers, phase, collective, axes, part), items in found.items():
        subject = _join_names(part, [inner for inner, _, _ in items if inner])
        count = sum(times for _, times, _ in items)
        moves.append(Move(in_layers, phase, collective, axes, subject, count, sum(size for *_, size in items)))
    return sorted(moves, key=lambda move: _PHASES.index(move.phase))


def _find_axes(equation: Any) -> tuple[str, ...]:
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    if isinstance(axes, str):
        return (axes,)
    return tuple(axis for axis in axes or () if isinstance(axis, str))


def _find_place(scope: Scope) -> tuple[bool, str, str, str]:
    """Return True for a place in the layers, the phase, the part of the layer or of the model, and the names in it."""
    words = scope.modules.split("/") if scope.modules else []
    # What no pass of differentiation has touched was taken out of the loop over a pipeline's ticks.
    in_layers = "stack" in words or bool(words and not scope.phase)
    if "stack" in words:
        words = words[words.index("stack") + 1 :]
    # Of a class, `mixer.Attention`, the parameters have the name in snake case; `Decoder` and `Block` name no part.
    names = [to_snake_case(word.rpartition(".")[2]) for word in words if word[0].islower()]
    phase = scope.phase or ("forward" if scope.modules else "update")
    if "gather" in names:
        return in_layers, phase, "parameters", ""
    if names:
        return in_layers, phase, names[0], ".".join(names[1:])
    if in_layers:
        return in_layers, phase, "hidden states", ""
    return in_layers, phase, "loss" if scope.phase else "gradients", ""


def _join_names(part: str, names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    if len(unique) > _MOST_NAMES:
        return f"{part}: {len(unique)} modules"
    return ": ".join(filter(None, (part, ", ".join(unique))))


def _iterate(jaxpr: Any, scopes: tuple[str, ...], times: int) -> Iterator[tuple[Any, tuple[str, ...], int]]:
    """Yield the equations of a jaxpr and its inner jaxprs, their name scopes, and how often a device runs each."""
    for equation in jaxpr.eqns:
        own = str(equation.source_info.name_stack)
        here = (*scopes, own) if own else scopes
        yield equation, here, times
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            yield from _iterate(inner, here, times * repeats)


def _choose_loss(model: Any) -> Callable:
    """Return a loss that uses all outputs of a model."""
    if isinstance(model, Decoder) or (isinstance(model, Encoder) and isinstance(model.head, MaskedLMHead)):
        return lambda model, batch: cross_entropy(model, batch)
    if not isinstance(model, Encoder | ImageEncoder):
        raise TypeError(
            f"{type(model).__name__} is not a Decoder, Encoder or ImageEncoder, so its loss is unknown: pass loss_fn "
            "and batch, as to zoo.value_and_grad"
        )

    def sum_outputs(model: Any, batch: Mapping[str, Any]) -> Any:
        (inputs,) = batch.values()
        outputs = [x.astype(jnp.float32) for x in jax.tree.leaves(model(inputs))]
        return sum(jnp.sum(x * x) for x in outputs), jnp.float32(len(inputs))

    return sum_outputs


def _make_batch(model: Any, mesh: Mesh, microbatches: int, seq_len: int) -> dict[str, Any]:
    """Return the shapes of a batch: one row per device that shards the batch, and micro-batch."""
    rows = mesh.count_shards("batch") * microbatches
    if isinstance(model, ImageEncoder):
        return {"images": jax.ShapeDtypeStruct((rows, *find_image_shape(model)), jnp.float32)}
    tokens = jax.ShapeDtypeStruct((rows, choose_seq_len(model, mesh, seq_len)), jnp.int32)
    is_lm = isinstance(model, Decoder) or isinstance(model.head, MaskedLMHead)
    if not is_lm:
        return {"tokens": tokens}
    return {"tokens": tokens, "targets": tokens}


def count_microbatches(mesh: Mesh) -> int:
    """Return the number of micro-batches of the step that is drawn: four per stage of a pipeline."""
    stages = mesh.shape["pipe"]
    return 4 * stages if stages > 1 else 1


def choose_seq_len(model: Any, mesh: Mesh, seq_len: int) -> int:
    """Return a number of tokens per row that the mesh divides and the model has positions for, near `seq_len`."""
    parts = 2 * math.prod(mesh.shape[axis] for axis in {*mesh.axes("seq"), *mesh.axes("tokens")})  # zigzag: two each
    positions = getattr(model, "position_embedding", None)
    if positions is not None:
        seq_len = min(seq_len, positions.length)
    return max(seq_len // parts, 1) * parts


def find_image_shape(model: ImageEncoder) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a model was made for; 16 x 16 patches if any size will
    do. **Raises** `TypeError` for a model of `PatchedImages`."""
    if not isinstance(model.embedding, ImageEmbedding):
        raise TypeError("the model reads PatchedImages: pass loss_fn and batch, as to zoo.value_and_grad")
    patches = model.embedding.patches
    positions = model.embedding.positions
    grid = (16, 16) if positions is None else positions.grid
    height, width = (count * size for count, size in zip(grid, patches.patch_size, strict=True))
    return patches.weight.shape[1], height, width
