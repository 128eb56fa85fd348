"""Look inside a model: read values of a forward pass by name, edit them, and differentiate with respect to them.

    logits, seen = zoo.capture(model, "layers.*", "layers.2.attention.probabilities")(tokens)
    seen["layers.*"]                                          # layers batch tokens embed
    model = zoo.patch(model, {"layers.3": (jnp.add, vector)})

Names are parameter paths: `layers.*.attention.query` is the result of that linear layer, and
`layers.*.attention.query.input` its input. Attention also has `queries`, `keys`, `values` and `probabilities`. A star
stands for all layers, whose values come stacked; a number for one layer. What is not asked for is neither computed nor
kept, and no layer has code for it (`zoo.parallel.taps`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from zoo.parallel import Mesh, vary
from zoo.parallel.activation import Activation, Edit
from zoo.parallel.collectives import current_mesh, varying
from zoo.parallel.scope import calling_modules
from zoo.parallel.spmd import spmd
from zoo.parallel.taps import Taps, active_taps, current_taps, number_layers

from .decoder import Decoder
from .encoders.image import ImageEncoder
from .encoders.text import Encoder

_Model = TypeVar("_Model", Decoder, Encoder, ImageEncoder)
Value = Array | Activation
"""A captured value: an array, or inside a program for a mesh an `Activation`, which names the dims of the array."""


class Capture(eqx.Module):
    """A function that also returns named values of the modules that run in it: `(result, {name: value})`."""

    function: Callable

    names: tuple[str, ...] = eqx.field(static=True)

    returns_values: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Value]]:
        result, values = self.run(*args, **kwargs)
        return result, _strip(values)

    def run(self, *args: Any, edits: tuple[Edit, ...] = (), **kwargs: Any) -> tuple[Any, dict[str, Activation]]:
        """Return the result and the values with the names of their dims, with `edits` made."""
        outer = current_taps()
        if outer is not None and outer.reads:
            raise ValueError("a function that is captured captures another: ask for all names in one zoo.capture")
        depth = len(calling_modules())
        taps = Taps(self.names, depth=depth).with_edits(edits, depth)
        with active_taps(taps):
            result = self.function(*args, **kwargs)
        taps.check_reads()
        return result, {name: Activation(x, dims) for name, (x, dims) in taps.collect().items()}


def capture(function: Callable, *names: str) -> Capture:
    """Return a function that returns `(result, values)`: what `function` does, and values of its modules by name.

        logits, seen = eqx.filter_jit(zoo.capture(model, "layers.*.attention.out", "layers.2"))(tokens)
        logits, seen = zoo.spmd(zoo.capture(forward, *names), mesh, out=("batch seq vocab", ""))(model, tokens)
        (loss, seen), grads = zoo.value_and_grad(zoo.capture(loss_fn, *names), mesh, has_aux=True)(model, batch)

    - `function`: a model, or any function of models. It runs inside `jax.jit`, not the other way around.
    - `names`: see `capture_names`. `layers.*.attention` stacks the results of all layers that have attention, in order;
      `layers.2.attention` is of one layer. In place of a field, `fnmatch` patterns: `layers.*.*_norm`.

    Layers run in a plain loop, which compiles each of them. On a mesh the values are sharded as their dims say, and are
    `Activation`s: arrays with the names of their dims. A loss is not changed by what is captured in it.

    The function **raises** `ValueError` for a name without a value, with the nearest names; for one whose module runs
    several times; and for a value inside a transformation that the function applies (a `jax.vmap`, `jax.jit`, loop,
    custom gradient), from which it cannot be returned. **Raises** `NotImplementedError` for values of layers in a
    pipeline, and for values in micro-batches.
    """
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a value is a string such as 'layers.*.attention', not {name!r}")
    return Capture(function, tuple(dict.fromkeys(names)))


def capture_names(model: Callable, *args: Any, **kwargs: Any) -> dict[str, Activation]:
    """Return every name of `capture` for `model(*args, **kwargs)`, with the shape and the dims of its value. The model
    is traced, not run. Names begin below the first module that runs.

        for name, value in zoo.capture_names(model, tokens).items():
            print(name, value.array_dims, value.shape)
    """

    def list_values(*args: Any) -> dict[str, Activation]:
        taps = Taps((), lists_all=True)
        with active_taps(taps):
            model(*args, **kwargs)
        names = [number_layers(name, layers) for name, layers in taps.log.found.items()]
        taps = Taps(tuple(name for own in names for name in own))
        with active_taps(taps):
            model(*args, **kwargs)
        values = {name: Activation(x, dims) for name, (x, dims) in taps.collect().items()}
        listed: dict[str, Activation] = {}
        for stacked, *numbered in names:
            # layers by their numbers only where no array stacks them, since their values differ in shape
            own = [stacked] if stacked in values else numbered
            listed |= {name: values[name] for name in own if name in values}
        return listed

    return eqx.filter_eval_shape(list_values, *args)


def patch(model: _Model, edits: Mapping[str, Any]) -> _Model:
    """Return a model with values of its forward pass edited, by name.

        zoo.patch(model, {"layers.3": (jnp.add, vector)})                         # steer: f(x, *arrays)
        zoo.patch(model, {"layers.*.attention.out": seen["layers.*.attention.out"]})            # replace: a row a layer
        zoo.patch(model, {"layers.1.attention.probabilities": lambda p: p.at[:, 2].set(0)})     # ablate a head

    An edit is a function of the value; a tuple of a function and its further arguments; or an array to take the place
    of the value, to which it is broadcast. For `layers.*` an array has a leading dim of the layers that have the value,
    and a function runs once for each of them. Edits keep shape and dtype.

    The result is a model: `generate`, `value_and_grad`, `spmd`, `place` and `score` take it as it is. Its edits are not
    trained, and `zoo.save` refuses it, since a checkpoint has no place for them; `unpatch` removes them. On a mesh,
    arrays with rows or tokens are `Activation`s, as `capture` returns; any other is replicated. A new
    function is a new program: edits that change often pass arrays.

    **Raises** `TypeError` for a model that takes no edits. The model **raises** `ValueError` for an edit of a value
    that it does not have, or that changes its shape.
    """
    if not isinstance(model, Decoder | Encoder | ImageEncoder):
        raise TypeError(f"{type(model).__name__} takes no edits: pass a Decoder, an Encoder or an ImageEncoder")
    made = tuple(_make_edit(name, edit) for name, edit in edits.items())
    return dataclasses.replace(model, edits=(*model.edits, *made))


def unpatch(model: _Model) -> _Model:
    """Return a model without the edits of `patch`."""
    return dataclasses.replace(model, edits=())


def refuse_edits(model: Any, caller: str) -> None:
    """**Raises** `ValueError` for a model with edits, which `caller` takes apart: no edit would find its value."""
    if edits := getattr(model, "edits", ()):
        raise ValueError(
            f"{caller} takes the model apart, and an edit of {edits[0].name} acts in the whole model only: "
            "pass zoo.unpatch(model)"
        )


def _make_edit(name: str, edit: Any) -> Edit:
    if isinstance(edit, tuple) and edit:
        function, *arrays = edit
    elif callable(edit) and not isinstance(edit, Activation):
        return Edit(name, edit)
    else:
        function = _replace
        arrays = [edit]
    if not callable(function):
        raise TypeError(f"an edit is a function, (function, *arrays), or an array, and that of {name} is {edit!r}")
    return Edit(name, function, tuple(map(_name_dims, arrays)))


def _name_dims(value: Any) -> Activation:
    if isinstance(value, Activation):
        return value
    array = jnp.asarray(value)
    return Activation(array, ("features",) * array.ndim)


def _replace(x: Array, value: Array) -> Array:
    return jnp.broadcast_to(value, x.shape)


def capture_gradients(loss_fn: Callable, *names: str, mesh: Mesh | None = None) -> Callable:
    """Return a function that differentiates a loss with respect to named values.

        loss, seen, gradients = zoo.capture_gradients(loss_fn, "layers.*")(model, batch)

    - `loss_fn`: returns `total, count`, as for `zoo.value_and_grad`, or without a mesh a loss.
    - `mesh`: the mesh of the model and the batch. Values and gradients are then `Activation`s.

    `gradients[name]` has the shape of `seen[name]`: d loss / d value, with everything after it recomputed as the model
    does. **Raises** as `capture` does.
    """
    program = _Gradients(capture(loss_fn, *names).function, names, mesh)
    if mesh is None:
        return program
    return spmd(program, mesh, out=("", "", ""))


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """Program of `capture_gradients`."""

    loss_fn: Callable
    names: tuple[str, ...]
    mesh: Mesh | None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Array, dict[str, Value], dict[str, Value]]:
        run = Capture(self.loss_fn, self.names).run
        zeros = make_zeros(lambda *args: run(*args, **kwargs)[1], args)

        def loss(zeros: dict[str, Activation]) -> tuple[Array, Any]:
            edits = tuple(Edit(name, jnp.add, (zero,)) for name, zero in zeros.items())
            result, values = run(*args, edits=edits, **kwargs)
            total, count = result if isinstance(result, tuple) else (result, None)
            return total, (count, values)

        (total, (count, values)), gradients = jax.value_and_grad(loss, has_aux=True)(zeros)
        if count is None:
            return total, _strip(values), _strip(gradients)
        if self.mesh is not None:
            axes = tuple(axis for axis in self.mesh.axes("batch") + self.mesh.axes("seq"))
            total, count = (_sum(jnp.asarray(x, jnp.float32), axes) for x in (total, count))
        count = jnp.where(count == 0, 1, count)
        gradients = jax.tree.map(lambda gradient: (gradient / count).astype(gradient.dtype), gradients)
        return total / count, _strip(values), _strip(gradients)


def make_zeros(
    function: Callable, args: tuple, resize: Callable[[Activation], tuple[int, ...]] = lambda value: value.shape
) -> dict[str, Activation]:
    """Return zeros like the values that `function` returns, of the shape that `resize` gives them, varying over the
    same mesh axes."""
    axes: list[PyTree] = []

    def read(*args: Any) -> Any:
        values = function(*args)
        axes.append(jax.tree.map(varying, values))
        return values

    zeros: dict[str, Activation] = {}
    for name, value in eqx.filter_eval_shape(read, *args).items():
        array = vary(jnp.zeros(resize(value), value.dtype), axes[0][name].array)
        zeros[name] = Activation(array, value.array_dims)
    return zeros


def _sum(x: Shaped[Array, ""], axes: tuple[str, ...]) -> Shaped[Array, ""]:
    own = tuple(axis for axis in axes if axis in varying(x))
    return lax.psum(x, own) if own else x


def _strip(values: Mapping[str, Activation]) -> dict[str, Value]:
    """Return arrays in place of the values, except on a mesh, which shards results by the names of their dims."""
    has_mesh = current_mesh() is not None
    return {name: value if has_mesh else value.array for name, value in values.items()}
