"""Collectives of a training step, read off the traced program: over which axes, by which module, how many bytes.

The step is traced in shapes. Each collective of its jaxpr has the name scopes of the modules that called it, so that
nothing here knows any model.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jaxtyping import PyTree

from zoo.layers import TokenInfo
from zoo.models import Decoder, Hidden, Stack
from zoo.models.configure import configure
from zoo.models.decoder import AbstractBlock
from zoo.models.encoders.heads import MaskedLMHead
from zoo.models.encoders.image import ImageEncoder
from zoo.models.encoders.text import Encoder
from zoo.models.loss import cross_entropy
from zoo.models.parameter_paths import to_snake_case
from zoo.models.stack import is_stack
from zoo.parallel import Mesh
from zoo.parallel.fields import wrapped
from zoo.parallel.gradient import value_and_grad
from zoo.parallel.module import replace_option
from zoo.parallel.rounds import split_rounds

_COLLECTIVES = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    "ppermute": "permute",
}
"""Name of the collective of each primitive of JAX."""
_LABEL = "drawn-layer-"
_WRAPPER = re.compile(r"^(\w+)\((.*)\)$")
_CALLS = frozenset("jit pjit shard_map rematted_computation checkpoint remat custom_vjp_call while body logits".split())
"""Scopes that are not modules: calls of JAX, and of the loss around the head."""


class TracedMove(NamedTuple):
    """A collective of the program, with the modules that called it."""

    collective: str
    """all-reduce, all-gather, reduce-scatter, all-to-all or permute."""
    axes: tuple[str, ...]
    layer: int | None
    """Label of the layer that called it, None outside of the layers."""
    modules: tuple[str, ...]
    """Names of the modules from the layer, or the model, down to the caller: `("attention", "out")`."""
    backward: bool
    in_model: bool
    """False for moves of the loss, or of sums over the finished gradients."""
    differentiated: bool
    """False for moves after the backward pass."""
    size: int
    """Elements of the larger of operand and result."""
    bytes: int
    """Bytes per device and execution, of the larger of operand and result."""
    times: int
    """Executions in a step; loops without a known number of iterations count once."""


class TracedStep(NamedTuple):
    """Result of `trace_step`."""

    moves: list[TracedMove]
    """Collectives in the order of the program."""
    calls: list[tuple[int | None, str]]
    """Label of the layer and name of each module that it, or the model, calls itself, in the order of the calls."""


class _LabeledBlock(AbstractBlock):
    """A block whose collectives have a label in their name scopes."""

    block: AbstractBlock = wrapped()

    label: int = eqx.field(static=True)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        with jax.named_scope(f"{_LABEL}{self.label}"):
            return self.block(hidden, info, state)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.block.init_state(batch, length, dtype)


def trace_step(
    model: PyTree,
    mesh: Mesh,
    label_block: Callable[[AbstractBlock], int],
    *,
    loss_fn: Callable | None = None,
    batch: Mapping[str, Any] | None = None,
    seq_len: int = 1024,
) -> TracedStep:
    """Trace the loss and gradient of a batch for their collectives, and for the order in which modules run. On one
    device nothing is traced.

    - `model`: in shapes, with its layers in one round.
    - `label_block`: returns the number of the kind of layer that a stacked block belongs to.
    - `loss_fn`, `batch`: as for `zoo.value_and_grad`. Default: a loss that the model is made for, on one row per device
      and micro-batch, of `seq_len` tokens or as many as the model has positions for.

    **Raises** as `zoo.value_and_grad` does for a mesh on which the model does not train; `TypeError` for a model of an
    unknown kind without `loss_fn` and `batch`.
    """
    if mesh.devices.size == 1:
        return TracedStep([], [])
    if (loss_fn is None) != (batch is None):
        raise ValueError("loss_fn and batch belong together: pass both, or neither")
    microbatches = count_microbatches(mesh)
    if loss_fn is None or batch is None:
        loss_fn = _choose_loss(model)
        batch = _make_batch(model, mesh, microbatches, seq_len)

    def label_stack(x: Any) -> Any:
        if not is_stack(x):
            return x
        return _label_stack(x, label_block)

    labeled = jax.tree.map(label_stack, model, is_leaf=is_stack)
    labeled = split_rounds(labeled, mesh.layout.rounds)
    step = value_and_grad(loss_fn, mesh, microbatches=microbatches)
    jaxpr = eqx.filter_make_jaxpr(lambda model, batch: step(model, batch))(labeled, dict(batch))[0]
    found = [(equation, _read_place(scopes), times) for equation, scopes, times in _iterate(jaxpr.jaxpr, (), 1)]
    moves = [_read_move(*each) for each in found if each[0].primitive.name in _COLLECTIVES]
    moves = [move._replace(axes=tuple(axis for axis in move.axes if mesh.shape[axis] > 1)) for move in moves]
    forward = [place for _, place, _ in found if place.modules and place.transforms and not place.backward]
    # The last operation of each: the first ones, such as constants, may have been moved out of the loop over layers.
    last = {(place.layer, place.modules[0]): index for index, place in enumerate(forward)}
    return TracedStep([move for move in moves if move.axes], sorted(last, key=lambda call: last[call]))


def _label_stack(stack: Any, label_block: Callable[[AbstractBlock], int]) -> Any:
    if not isinstance(stack, Stack):
        return stack

    def label(segment: Any) -> Any:
        blocks = tuple(_LabeledBlock(block, label_block(block)) for block in segment.blocks)
        return type(segment)(blocks, segment.num_repeats, segment.layers)

    return configure(replace_option(stack, "segments", tuple(map(label, stack.segments))), loop="scan")


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
    do."""
    patches = model.embedding.patches
    positions = model.embedding.positions
    grid = (16, 16) if positions is None else positions.grid
    height, width = (count * size for count, size in zip(grid, patches.patch_size, strict=True))
    return patches.weight.shape[1], height, width


def _iterate(jaxpr: Any, scopes: tuple[str, ...], times: int) -> Iterator[tuple[Any, tuple[str, ...], int]]:
    """Yield the equations of a jaxpr and its inner jaxprs, their name scopes, and how often a device runs each."""
    for equation in jaxpr.eqns:
        here = (*scopes, *_split_scopes(str(equation.source_info.name_stack)))
        yield equation, here, times
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            yield from _iterate(inner, here, times * repeats)


@cache
def _split_scopes(name_stack: str) -> tuple[str, ...]:
    """Split at the slashes that no parentheses enclose: a scope may be `transpose(jvp(a/b))`."""
    parts = [""]
    depth = 0
    for character in name_stack:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part for part in parts if part)


class _Place(NamedTuple):
    """Place of an equation: see the fields of `TracedMove` by these names."""

    layer: int | None
    modules: tuple[str, ...]
    transforms: frozenset[str]
    in_model: bool

    @property
    def backward(self) -> bool:
        return "transpose" in self.transforms


@cache
def _read_place(scopes: tuple[str, ...]) -> _Place:
    words = []
    transforms = set()
    for scope in scopes:
        while match := _WRAPPER.match(scope):
            transforms.add(match[1])
            scope = match[2]
        words += [word for word in scope.split("/") if word and word not in _CALLS]
    layer = next((int(word.removeprefix(_LABEL)) for word in words if word.startswith(_LABEL)), None)
    in_model = bool(words)
    if layer is not None:
        words = words[words.index(f"{_LABEL}{layer}") + 2 :]  # after the label comes the field `block`
    elif words and words[0][0].isupper():
        words = words[1:]
    return _Place(layer, tuple(map(_name_module, words)), frozenset(transforms), in_model)


def _name_module(word: str) -> str:
    """Return the name of a module in a scope; of a class, `zoo.layers.Linear`, in snake case."""
    if "." not in word:
        return word
    return to_snake_case(word.rpartition(".")[2])


def _read_move(equation: Any, place: _Place, times: int) -> TracedMove:
    options = equation.params
    axes = options.get("axes", options.get("axis_name", ()))
    if isinstance(axes, str):
        axes = (axes,)
    else:
        axes = tuple(axis for axis in axes if isinstance(axis, str))
    avals = [x.aval for x in (*equation.invars, *equation.outvars)]
    largest = max(avals, key=lambda aval: aval.size * aval.dtype.itemsize)
    return TracedMove(
        collective=_COLLECTIVES[equation.primitive.name],
        axes=axes,
        layer=place.layer,
        modules=place.modules,
        backward=place.backward,
        in_model=place.in_model,
        differentiated=bool(place.transforms),
        size=largest.size,
        bytes=largest.size * largest.dtype.itemsize,
        times=times,
    )
