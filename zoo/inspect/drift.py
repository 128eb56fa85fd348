"""Rounding errors of a model in low precision, layer by layer, against the same model in float32.

    print(zoo.inspect.drift(model, batch, "bfloat16"))

Each layer is compared twice. *Accumulated* errors are measured in a forward and backward pass that runs entirely in low
precision. *Local* errors are measured with only this layer in low precision, on the input of the float32 model, and, in
the backward pass, on its cotangent: they tell which layer rounds, where accumulated ones only tell how much of it
arrives.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Key

from zoo.layers import TokenInfo
from zoo.layers.token_info import batch_token_info
from zoo.models import Decoder, Hidden
from zoo.models.capture import refuse_edits
from zoo.models.decoder import set_dropout_keys
from zoo.models.loss import chunked_cross_entropy
from zoo.models.scoring import unstack_blocks
from zoo.parallel import Mesh, gather
from zoo.parallel.batch import place_batch
from zoo.parallel.collectives import varying
from zoo.parallel.gather import cast
from zoo.parallel.mesh import make_mesh
from zoo.parallel.place import place
from zoo.parallel.spmd import spmd
from zoo.parallel.tokens import replicate_tokens

_KINDS = ("output", "local_output", "gradient", "local_gradient")


@dataclasses.dataclass(frozen=True)
class LayerDrift:
    """Errors of one layer, in units of the last place: rms(low - exact) / rms(exact) / u, with u the unit roundoff of
    the low precision: 2^-8 in bfloat16, 2^-11 in float16. One rounding of every value gives about 0.5."""

    name: str
    """`embedding`, `layers.3`, or `norm`, the final one."""
    output: float
    """Accumulated error of the output."""
    local_output: float
    """Error of the output if only this layer runs in low precision."""
    gradient: float
    """Accumulated error of the gradient of the loss with respect to the layer's output."""
    local_gradient: float | None
    """Error of the gradient for the layer's input, from its own rounding only; None for the embedding, which has
    none."""


@dataclasses.dataclass(frozen=True)
class Drift:
    """Report of `drift`. `print(drift)` prints a table."""

    layers: tuple[LayerDrift, ...]
    dtype: str
    """The low precision."""
    loss: float
    """Mean loss in float32."""
    low_loss: float
    """Mean loss in low precision."""

    @property
    def worst_layer(self) -> str:
        """The layer with the largest local error of its output."""
        return max(self.layers, key=lambda layer: layer.local_output).name

    def curves(self) -> dict[str, list[float]]:
        """Return the errors of all layers in order, by kind: `tools.report.Curve(kind, range(len(errors)), errors)`."""
        return {kind: [value for x in self.layers if (value := getattr(x, kind)) is not None] for kind in _KINDS}

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        losses = f"loss {self.low_loss:.5f}, exactly {self.loss:.5f}"
        lines = [
            f"{self.dtype} against float32, in units of the last place: {losses}",
            f"{'':{width}}  {'output':>10}  {'alone':>10}  {'gradient':>10}  {'alone':>10}",
        ]
        for layer in self.layers:
            values = [layer.output, layer.local_output, layer.gradient, layer.local_gradient]
            words = ["" if value is None else f"{value:.3g}" for value in values]
            cells = "  ".join(f"{word:>10}" for word in words)
            lines.append(f"{layer.name:{width}}  {cells}")
        return "\n".join(lines)


def drift(
    model: Decoder,
    batch: Mapping[str, Array],
    low: str | Any = "bfloat16",
    *,
    mesh: Mesh | None = None,
    key: Key[Array, ""] | None = None,
) -> Drift:
    """Compare a model in low precision with itself in float32, on one batch, layer by layer.

    - `batch`: `tokens` and `targets`, for the loss `zoo.cross_entropy`.
    - `low`: the low precision, or another model with the same layers, such as `model` with FP8 or quantized matrices,
      cast to its compute dtype; the dtype of its hidden states then is the unit.
    - `mesh`: one device by default.
    - `key`: PRNG key of stochastic rounding, and of dropout, the same in both.

    It compiles all layers three times, and keeps all hidden states in memory: a diagnosis for few rows, not a metric. A
    router that chooses another expert for a rounded input makes a large error in its layer, which is not a rounding
    error.

    **Raises** `ValueError` for a precision that is not below float32 and for edits (`zoo.patch`);
    `NotImplementedError` where `pipe` shards the layers.
    """
    refuse_edits(model, "drift")
    if isinstance(low, Decoder):
        refuse_edits(low, "drift")
        low_model = low
    else:
        low_model = cast(model, _check_dtype(low))
    if mesh is None:
        mesh = make_mesh(devices=jax.devices()[:1])
    placed = place((cast(model, jnp.float32), low_model), mesh)
    with jax.default_matmul_precision("highest"):
        run = spmd(_measure, mesh, out=("", "", ""))
        errors, losses, probe = run(*placed, place_batch(dict(batch), mesh), key=key)
    unit = float(jnp.finfo(probe.dtype).eps) / 2
    names = ["embedding", *(f"layers.{number}" for number in range(len(errors) - 2)), "norm"]
    table = np.asarray(errors, np.float64) / unit
    layers = [LayerDrift(name, *map(float, row)) for name, row in zip(names, table, strict=True)]
    layers[0] = dataclasses.replace(layers[0], local_gradient=None)
    exact, rounded = (float(x) for x in losses)
    return Drift(tuple(layers), str(probe.dtype), exact, rounded)


def _check_dtype(dtype: Any) -> Any:
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        raise ValueError(f"the low precision is bfloat16 or float16, or a model, not {dtype.name}")
    return dtype


def _measure(
    exact: Decoder, low: Decoder, batch: Mapping[str, Array], key: Key[Array, "batch"] | None = None
) -> tuple[Float[Array, "layers 4"], Float[Array, "2"], Array]:
    """Return the relative errors of each layer, both mean losses, and a value in the low precision."""
    forward, loss, exact_passes = _run(exact, batch, key)
    low_forward, low_loss, low_passes = _run(low, batch, key)
    backward = _backpropagate(exact_passes)
    low_backward = _backpropagate(low_passes)
    steps = _list_steps(low, batch_token_info(batch, key).mask_padding())
    rows = [[_compare(low_forward[0], forward[0])] * 2 + [_compare(low_backward[0], backward[0]), jnp.zeros(())]]
    for number, step in enumerate(steps):
        output, pull_back = jax.vjp(step, forward[number].astype(low_forward[number].dtype))
        (gradient,) = pull_back(backward[number + 1].astype(output.dtype))
        errors = [_compare(low_forward[number + 1], forward[number + 1]), _compare(output, forward[number + 1])]
        errors += [_compare(low_backward[number + 1], backward[number + 1]), _compare(gradient, backward[number])]
        rows.append(errors)
    count = jnp.maximum(_sum(_read_weights(batch)), 1e-30)
    table = jnp.stack([jnp.stack(row) for row in rows])
    return table, jnp.stack([_sum(loss), _sum(low_loss)]) / count, jnp.zeros((), low_forward[1].dtype)


def _list_steps(model: Decoder, info: TokenInfo) -> list[Callable[[Array], Array]]:
    """Return the layers and the final norm as functions of the hidden states."""

    def run_block(block: Any, number: int, x: Array) -> Array:
        layer_info = info.fold_keys(number)
        hidden, _ = set_dropout_keys(gather(block), layer_info)(Hidden(x), layer_info)
        return hidden.x

    blocks = [partial(run_block, block, number) for number, block in enumerate(unstack_blocks(model))]
    return [*blocks, lambda x: gather(model.norm)(x)]


def _run(
    model: Decoder, batch: Mapping[str, Array], key: Key[Array, "batch"] | None
) -> tuple[list[Array], Array, list[Callable]]:
    """Return the hidden states, the loss summed over the tokens of this device, and the backward passes in order."""
    info = batch_token_info(batch, key).mask_padding()
    x = model.embed(batch["tokens"], info).x
    states = [x]
    passes = []
    for step in _list_steps(model, info):
        x, pull_back = jax.vjp(step, x)
        states.append(x)
        passes.append(pull_back)
    targets = batch["targets"].reshape(-1)
    weights = _read_weights(batch).reshape(-1)

    def loss_of(x: Array) -> Array:
        rows = replicate_tokens(x)
        rows = rows.reshape(-1, rows.shape[-1])
        return chunked_cross_entropy(model.gather_unembedding(), rows, targets, weights, 0.0, 1024)

    loss, pull_back = jax.vjp(loss_of, x)
    return states, loss, [*passes, lambda: pull_back(jnp.ones_like(loss))]


def _read_weights(batch: Mapping[str, Array]) -> Array:
    """Return the loss weight of each token, as `zoo.cross_entropy` reads it."""
    weights = batch.get("weights", jnp.ones_like(batch["targets"])).astype(jnp.float32)
    return jnp.where(batch["targets"] < 0, 0, weights)


def _backpropagate(passes: list[Callable]) -> list[Array]:
    """Return the gradient of the loss with respect to each of the hidden states."""
    *layers, loss = passes
    gradients = list(loss())
    for pull_back in reversed(layers):
        gradients.append(*pull_back(gradients[-1]))
    return gradients[::-1]


def _compare(x: Array, reference: Array) -> Float[Array, ""]:
    """Return rms(x - reference) / rms(reference) over all devices."""
    reference = reference.astype(jnp.float32)
    error = _sum(jnp.square(x.astype(jnp.float32) - reference))
    return jnp.sqrt(error / jnp.maximum(_sum(jnp.square(reference)), jnp.finfo(jnp.float32).tiny))


def _sum(x: Array) -> Float[Array, ""]:
    """Sum over all values of all devices."""
    total = x.sum()
    axes = tuple(sorted(varying(total)))
    if not axes:
        return total
    return lax.psum(total, axes)
