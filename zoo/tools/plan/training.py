"""The training step whose costs `zoo plan` estimates: AdamW with clipping, as the recipes write it, in shapes."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo._optional import require_installed
from zoo.adapters import lora, quantize
from zoo.adapters.quantize import PackedFormat
from zoo.models import split_ends
from zoo.models.configure import configure
from zoo.models.image_text import reads_prefix
from zoo.models.loss import cross_entropy
from zoo.parallel import Mesh, Schedule
from zoo.parallel.batch import place_batch
from zoo.parallel.gather import cast
from zoo.parallel.gradient import value, value_and_grad
from zoo.parallel.mesh import make_mesh
from zoo.parallel.module import trainable
from zoo.parallel.place import place

from .options import TrainingOptions
from .traced import trace_program


def make_training_step(
    make_model: Callable[..., Any], mesh: Mesh, options: TrainingOptions
) -> tuple[Callable, tuple[Any, Any, Any]]:
    """Return a jitted step, and the shapes of its arguments: batch, model and optimizer state.

    `make_model(key=)` is called in shapes, so that any size will do. Layers that the stages of a pipeline do not divide
    become ends. **Raises** `MissingExtraError` without optax, and `ValueError` for sizes that do not fit the mesh.
    """
    require_installed("optax", extra="train")
    import optax

    model = eqx.filter_eval_shape(lambda key: make_trained(make_model, options, key), jax.random.key(0))
    model = split_into_stages(model, mesh)
    loop = None if options.loop == "auto" else options.loop
    model = place(configure(model, remat=options.remat, loop=loop), mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
    opt_state = place(jax.eval_shape(optimizer.init, trainable(model)), mesh.optimizer)
    batch = place_batch(_make_batch(model, options.rows, options.seq), mesh)
    schedule = options.schedule if mesh.shape["pipe"] > 1 else Schedule("gpipe")

    def loss_fn(model, batch):
        return cross_entropy(cast(model, options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, model, opt_state):
        gradient = value_and_grad(loss_fn, mesh, microbatches=options.microbatches, schedule=schedule)
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, trainable(model))
        return place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    return train_step, (batch, model, opt_state)


def _make_batch(model: Any, rows: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of texts."""
    names = ("tokens", "targets", "spans") if reads_prefix(model) else ("tokens", "targets")
    return dict.fromkeys(names, jax.ShapeDtypeStruct((rows, seq), jnp.int32))


def make_trained(make_model: Callable[..., Any], options: TrainingOptions, key: Any) -> Any:
    """Make the model that a step trains: `make_model(key=key)`, or adapters on it as a frozen base."""
    model = make_model(key=key)
    if options.lora is None:
        return model
    base = quantize_base(cast(model, options.dtype), options.quantization)
    return lora(base, targets="all-linear", rank=options.lora, key=key)


def split_into_stages(model: Any, mesh: Mesh) -> Any:
    """Make ends of the layers that the stages of a pipeline do not divide."""
    return split_ends(model, mesh.num_stages) if mesh.num_stages > 1 else model


def quantize_base(model: Any, quantization: PackedFormat | None) -> Any:
    """Quantize the linear layers of a model, if a format is given."""
    if quantization is None:
        return model
    return quantize(model, quantization)


def count_model_flops(make_model: Callable[..., Any], options: TrainingOptions) -> int | None:
    """Count the FLOPs of a step over all devices that the model itself takes: three times the FLOPs of the forward pass
    of all rows, on one device that recomputes nothing. None for LoRA, which takes no gradient of the base."""
    if options.lora is not None:
        return None
    mesh = make_mesh(data=1, devices=jax.devices("cpu")[:1])
    model = place(eqx.filter_eval_shape(lambda key: make_model(key=key), jax.random.key(0)), mesh)
    batch = place_batch(_make_batch(model, 1, options.seq), mesh)
    loss = eqx.filter_jit(value(lambda model, batch: cross_entropy(cast(model, options.dtype), batch), mesh))
    return 3 * options.rows * trace_program(loss, model, batch, platform="cpu").work.total_flops
