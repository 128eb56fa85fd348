"""The plan of a decoding step: one new token for each row, with KV caches or recurrent states of a given length."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.generate.decode import unstack_layers
from zoo.generate.prefill import drop_sequence_parallelism
from zoo.layers import TokenInfo
from zoo.models import ImageText
from zoo.parallel.batch import place_batch
from zoo.parallel.gather import cast
from zoo.parallel.layout import Layout
from zoo.parallel.place import place
from zoo.parallel.spmd import spmd
from zoo.parallel.topology import Topology

from .options import DecodingOptions
from .search import Candidate, make_stand_in_mesh
from .step import Plan, plan
from .training import quantize_base


def plan_decoding(
    make_model: Callable[..., Any],
    sizes: Mapping[str, int],
    topology: Topology,
    options: DecodingOptions,
    layout: Layout | None = None,
) -> Plan:
    """Plan a decoding step as `zoo.generate` takes it: layers unstacked, states updated in place.

    Parameters and caches are exact. The step reads all parameters, and all slots of the caches: `length` is the last
    step's, and earlier ones read less where attention skips empty slots. A prompt is not in the plan, nor are images
    that it has; the tower that reads them is in memory.

    **Raises** `NotImplementedError` for a pipeline, whose stages do not decode, and `ValueError` for rows that the mesh
    does not divide.
    """
    mesh = drop_sequence_parallelism(make_stand_in_mesh(sizes, topology, layout))
    assert mesh is not None
    if mesh.shape["pipe"] > 1:
        raise NotImplementedError("the stages of a pipeline do not decode: plan with pipe=1")

    def make(key):
        return quantize_base(cast(make_model(key=key), options.dtype), options.quantization)

    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    tower = None
    if isinstance(shapes, ImageText):
        tower = shapes.tower, shapes.projector
        shapes = shapes.decoder
    shapes = eqx.filter_eval_shape(lambda model: unstack_layers(model, None), shapes)
    states = eqx.filter_eval_shape(lambda model: model.init_state(options.rows, options.length), shapes)
    tokens = place_batch({"tokens": jax.ShapeDtypeStruct((options.rows, 1), jnp.int32)}, mesh)

    def decode(model, states, batch):
        info = TokenInfo(batch["tokens"])
        hidden, _ = model.hidden(batch["tokens"], info, states)
        return model.logits(hidden.x)

    @eqx.filter_jit(donate="all")
    def decode_step(model, states, batch, tower):
        return spmd(decode, mesh, out="batch seq vocab")(model, states, batch)

    planned = plan(decode_step, place(shapes, mesh), place(states, mesh), tokens, place(tower, mesh), on=topology)
    program = dataclasses.replace(planned.program, gradients=0)
    return dataclasses.replace(planned, program=program, options=options, rewritten=0)


def suggest_decoding_mesh(
    make_model: Callable[..., Any], topology: Topology, options: DecodingOptions, layout: Layout | None = None
) -> Candidate:
    """Return the plan on the mesh with the smallest `tensor` that fits with a margin, and all other devices along
    `data`; on the largest `tensor` if none does.

    **Raises** `ValueError` if the rows divide over no such mesh.
    """
    found = None
    for tensor in (2**n for n in range(topology.domain.bit_length()) if topology.domain % 2**n == 0):
        sizes = {"data": topology.devices // tensor, "tensor": tensor}
        try:
            found = Candidate(sizes, plan_decoding(make_model, sizes, topology, options, layout))
        except ValueError as error:
            reason = error
            continue
        if found.plan.fits_with_margin:
            break
    if found is None:
        raise ValueError(f"no mesh of {topology} decodes {options.rows:,} rows: {reason}")
    return found
