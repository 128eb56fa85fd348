"""Memory of sampling in a run that also trains: parameters, moments, the sampler's copy, and the caches of all rows."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.generate.buckets import choose_cache_length, choose_rows
from zoo.generate.prefill import drop_sequence_parallelism
from zoo.inspect.program import count_device_bytes
from zoo.models import Decoder, ImageText
from zoo.parallel import Mesh
from zoo.parallel.gather import cast
from zoo.parallel.mesh import is_array_or_shape
from zoo.parallel.place import place
from zoo.parallel.spmd import spmd

from .options import RolloutOptions, TrainingOptions
from .training import make_trained


def count_sampling_memory(
    model: Decoder | ImageText, mesh: Mesh, rollouts: RolloutOptions, dtype: Any = "float32"
) -> dict[str, int]:
    """Count the bytes per device that `zoo.generate` holds while it samples: the `sampler`, a copy of the parameters in
    `dtype` with layers unstacked, and the `cache`, KV caches or recurrent states of all layers, as
    `Decoder.init_state` makes them for the rows and slots of a device.

    - `model`: of shapes, placed on `mesh`.
    - `rollouts`: rows are rounded up to a multiple of the devices that shard them, and the length to a bucket, as
      `zoo.generate` does (`zoo.generate.buckets`).

    **Raises** `ValueError` for more tokens than learned positions, and `NotImplementedError` for a pipeline, whose
    stages do not sample.
    """
    if mesh.shape["pipe"] > 1:
        raise NotImplementedError("the stages of a pipeline do not sample: plan rollouts with pipe=1")
    decoding = drop_sequence_parallelism(mesh)
    assert decoding is not None
    decoder = model.decoder if isinstance(model, ImageText) else model
    length = choose_cache_length(decoder, rollouts.length, 0, None)
    rows = choose_rows(model, rollouts.rows, decoding, samples=2)  # rows of several samples are not rounded further
    copy = place(eqx.filter_eval_shape(lambda model: cast(model, dtype), model), mesh)
    local = rows // decoding.count_shards("batch")
    sizes = []

    def make_states(model: Decoder) -> Any:
        states = model.init_state(local, length)
        sizes.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states)))
        return jnp.zeros(())

    sampled = copy.decoder if isinstance(copy, ImageText) else copy
    eqx.filter_eval_shape(spmd(make_states, decoding, out=""), sampled)  # shapes in there are a device's
    parameters = sum(count_device_bytes(x) for x in jax.tree.leaves(copy) if is_array_or_shape(x))
    return {"sampler": parameters, "cache": sizes[-1]}


def plan_sampling(make_model: Callable[..., Any], mesh: Mesh, options: TrainingOptions) -> dict[str, int]:
    """Return `count_sampling_memory` for the model of `make_training_step`; nothing for options without rollouts."""
    if options.rollouts is None:
        return {}
    model = eqx.filter_eval_shape(lambda key: make_trained(make_model, options, key), jax.random.key(0))
    return count_sampling_memory(place(model, mesh), mesh, options.rollouts, options.dtype)
