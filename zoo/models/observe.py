"""Observed models: the largest output and gradient of each layer, and the largest logit, returned by a training step.

    model = zoo.models.observe(model)
    loss, grads, seen = zoo.value_and_grad(loss_fn, mesh, observe=True)(model, batch)
    zoo.models.tabulate_observations(seen)       # {"layers.0": (12.5, 0.03), ..., "logits": (21.0, None)}
    zoo.models.find_first_nonfinite(seen)        # "the gradient of layers.3", or None

Values are maxima of magnitudes over all tokens, devices and micro-batches; infinity stands for any that is not finite.
They are results of the step: nothing waits for the device until the host reads them.
"""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from zoo.layers import TokenInfo
from zoo.parallel import vary
from zoo.parallel.collectives import current_mesh, varying
from zoo.parallel.fields import observed, wrapped
from zoo.parallel.module import replace_option

from .decoder import AbstractBlock, Decoder, Hidden
from .encoders.text import Encoder
from .parameter_paths import format_path, iterate_indices, list_parameters
from .segment import Segment
from .stack import Stack, swap_stack

_Model = TypeVar("_Model")


class ObservedBlock(AbstractBlock):
    """A block whose largest output and largest gradient of the output are observed. It computes what the block does."""

    block: AbstractBlock = wrapped()
    maxima: Float[Array, "2"] = observed()

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.block.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        hidden, state = self.block(hidden, info, state)
        return dataclasses.replace(hidden, x=_observe(hidden.x, self.maxima)), state


def observe(model: _Model) -> _Model:
    """Return a decoder whose layers and logits are observed, in `value_and_grad(..., observe=True)`.

    Parameters, their paths and results stay as they are. Each layer reads its output once more, and its gradient; the
    largest logit takes one more product with the unembedding. `unobserve` undoes it: checkpoint files have no place for
    statistics. On a mesh, observe the model before it is placed.

    **Raises** `ValueError` if the model is not a `Decoder` with its layers in a `Stack`, or is already observed.
    """
    if not isinstance(model, Decoder):
        raise ValueError(f"{type(model).__name__} is not a Decoder, so it has no layers and logits to observe")
    if model.logit_maximum is not None:
        raise ValueError("the model is observed already")

    def observe_segment(segment: Segment) -> Segment:
        arrays = jax.tree.leaves(eqx.filter(segment.blocks, _is_array))
        shape = arrays[0].shape[: len(segment.layers)] if arrays else (segment.num_repeats,)
        blocks = tuple(_wrap(block, shape) for block in segment.blocks)
        return type(segment)(blocks, segment.num_repeats, segment.layers)

    def observe_stack(stack: Any) -> Stack:
        if not isinstance(stack, Stack):
            raise ValueError(f"the layers are in {type(stack).__name__}: swap in a Stack before")
        return replace_option(stack, "segments", tuple(map(observe_segment, stack.segments)))

    model = swap_stack(model, observe_stack)
    return eqx.tree_at(lambda model: model.logit_maximum, model, jnp.zeros(1, jnp.float32), is_leaf=lambda x: x is None)


def unobserve(model: _Model) -> _Model:
    """Return a model without the statistics of `observe`."""
    is_observed = lambda x: isinstance(x, ObservedBlock)
    model = jax.tree.map(lambda x: x.block if is_observed(x) else x, model, is_leaf=is_observed)
    return eqx.tree_at(lambda model: model.logit_maximum, model, None, is_leaf=lambda x: x is None)


def tabulate_observations(observations: PyTree) -> dict[str, tuple[float, float | None]]:
    """Return the largest output and gradient of each layer, in order, and the largest logit, by name.

    `observations` come from `value_and_grad(..., observe=True)`. The call waits for the device.
    """
    table: dict[str, tuple[float, float | None]] = {}
    for path, x in list_parameters(jax.device_get(observations)):
        if path.name == "logit_maximum":
            table["logits"] = (float(x[0]), None)
        elif path.name.endswith(".maxima"):
            for index, numbers in iterate_indices(path.ranges):
                output, gradient = x[index]
                table[format_path(path.name, numbers).removesuffix(".maxima")] = float(output), float(gradient)
    number = lambda name: int(name.rpartition(".")[2]) if name != "logits" else len(table)
    return dict(sorted(table.items(), key=lambda item: number(item[0])))


def find_first_nonfinite(observations: PyTree) -> str | None:
    """Name what became NaN or infinite first: the first layer with such an output, or else the last layer with such a
    gradient, where the backward pass begins; None if all values are finite."""
    table = tabulate_observations(observations)
    outputs = [name for name, (output, _) in table.items() if not np.isfinite(output)]
    gradients = [name for name, (_, gradient) in table.items() if gradient is not None and not np.isfinite(gradient)]
    if outputs:
        return f"the output of {outputs[0]}" if outputs[0] != "logits" else "the logits"
    return f"the gradient of {gradients[-1]}" if gradients else None


def observe_logits(
    total: Float[Array, ""], model: Decoder | Encoder, x: Float[Array, "tokens embed"], chunk: int
) -> Float[Array, ""]:
    """Return the loss `total`, with the largest logit of normalized hidden states `x` recorded for a model that is
    observed; `chunk` tokens at a time."""
    if model.logit_maximum is None:
        return total
    head = model.gather_unembedding()
    x = lax.stop_gradient(x)
    size = min(chunk, len(x))
    padded = jnp.pad(x, ((0, -len(x) % size), (0, 0))).reshape(-1, size, x.shape[-1])
    return _record(
        total, lax.stop_gradient(lax.map(lambda x: _find_maximum(head(x)), padded).max()), model.logit_maximum
    )


@jax.custom_vjp
def _observe(x: Float[Array, "..."], maxima: Float[Array, "2"]) -> Float[Array, "..."]:
    """Return `x`. The cotangent of `maxima` is the largest magnitude of `x` and of its gradient."""
    return x


def _observe_fwd(x: Array, maxima: Array) -> tuple[Array, tuple[Array, Array]]:
    return x, (_find_maximum(x), maxima)


def _observe_bwd(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    output, maxima = residuals
    return gradient, _share(jnp.stack([output, vary(_find_maximum(gradient), varying(output))]), maxima)


_observe.defvjp(_observe_fwd, _observe_bwd)


@jax.custom_vjp
def _record(total: Float[Array, ""], maximum: Float[Array, ""], field: Float[Array, "1"]) -> Float[Array, ""]:
    """Return `total`. The cotangent of `field` is `maximum`."""
    return total


def _record_bwd(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    maximum, field = residuals
    return gradient, jnp.zeros_like(maximum), _share(maximum[None], field)


_record.defvjp(lambda total, maximum, field: (total, (maximum, field)), _record_bwd)


def _find_maximum(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Return the largest magnitude, or infinity if a value is not finite."""
    magnitudes = jnp.abs(x.astype(jnp.float32))
    return jnp.where(jnp.isfinite(magnitudes), magnitudes, jnp.inf).max()


def _share(values: Float[Array, "values"], field: Float[Array, "values"]) -> Float[Array, "values"]:
    """Return the cotangent of an observed field: maxima over the axes along which devices hold other tokens or logits.

    `value_and_grad` takes the maximum over the axes that shard the batch and its tokens. Over any other axis along
    which the field varies, its gradient is a sum, to which one device contributes.
    """
    mesh = current_mesh()
    if mesh is None:
        return values
    token_axes = {*mesh.axes("batch"), *mesh.axes("seq")}
    if others := tuple(sorted(varying(values) - token_axes)):
        values = lax.pmax(values, others)
    for axis in sorted(varying(field) - token_axes):
        values = jnp.where(lax.axis_index(axis) == 0, values, 0)
    return vary(values, varying(field))


def _wrap(block: AbstractBlock, shape: tuple[int, ...]) -> ObservedBlock:
    """Wrap a block whose arrays are stacked with this leading `shape`."""
    make = lambda block: ObservedBlock(block, jnp.zeros(2, jnp.float32))
    for size in reversed(shape):
        make = eqx.filter_vmap(make, axis_size=size)
    return make(block)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
