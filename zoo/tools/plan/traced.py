"""Trace a step without compiling it, and report its memory, FLOPs and collectives per device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from zoo.inspect import lowering
from zoo.inspect.program import count_device_bytes, name_arguments
from zoo.ops.platform import Platform
from zoo.parallel.mesh import is_array_or_shape

from .peak import Peak, find_peak
from .work import DeviceWork, count_aval_bytes, count_work


@dataclasses.dataclass(frozen=True)
class TracedProgram:
    """Report of `trace_program`, of one device."""

    name: str
    shape: dict[str, int]
    """Sizes of the mesh axes."""
    arguments: dict[str, int]
    """Bytes of each array argument, by its name: `model.stack.segments.0.blocks.0.mixer.query.weight`."""
    gradients: int
    """Bytes of the results of `shard_map`: of `zoo.value_and_grad`, the loss and the gradients."""
    live: Peak
    """Estimate of the arrays besides the arguments when they take most memory (`zoo.tools.plan.peak`)."""
    work: DeviceWork

    @property
    def temporaries(self) -> int:
        """Bytes of arrays besides the arguments at the peak, gradients included."""
        return self.live.bytes

    @property
    def peak(self) -> int:
        """Estimate of the peak memory, in bytes."""
        return sum(self.arguments.values()) + self.temporaries


def trace_program(step: Callable, *args: Any, platform: Platform | None = None) -> TracedProgram:
    """Trace `step(*args)`, a jitted function or one that is jitted here. Nothing is compiled, so that a model of any
    size on a mesh of any size takes seconds.

    - `args`: arrays or `jax.ShapeDtypeStruct`s, with shardings over one mesh. Its devices may stand in for others: one
      CPU device, repeated for every place of the mesh, will do.
    - `platform`: the platform for which operations choose their implementations, if the devices stand in for it.

    FLOPs are counted for the products in the jaxpr, and so for implementations without kernels: causal attention takes
    5/8 of all pairs of tokens. Bytes of main memory are counted for the platform's own implementations: a kernel reads
    its operands and writes its results.
    """
    if not hasattr(step, "lower"):
        step = eqx.filter_jit(step)
    leaves = [x for x in jax.tree.leaves(args) if is_array_or_shape(x)]
    closed, call = lowering.trace(step, args, {}, leaves, platform)
    names = name_arguments(step, closed.jaxpr, args, {})
    shape = _find_shape(leaves)
    specs = [getattr(getattr(x, "sharding", None), "spec", None) for x in leaves]
    work = count_work(closed.jaxpr, shape, dict(zip(closed.jaxpr.invars, specs, strict=False)))
    if platform not in (None, "cpu"):
        shown = lowering.trace(step, args, {}, leaves, "cpu")[0]
        counted = count_work(shown.jaxpr, shape, dict(zip(shown.jaxpr.invars, specs, strict=False)))
        work = dataclasses.replace(counted, product_bytes=work.product_bytes)
    sizes = [0] * len(call.invars)
    for number, x in enumerate(call.invars):
        if id(x) in names:
            sizes[number] = count_device_bytes(names[id(x)][1])
    body = call.params["jaxpr"]
    return TracedProgram(
        name=lowering.get_step_name(step),
        shape=shape,
        arguments={name: count_device_bytes(x) for name, x in names.values()},
        gradients=_count_shard_map_results(body),
        live=find_peak(body, sizes, in_place=any(call.params["donated_invars"])),
        work=work,
    )


def _find_shape(leaves: list[Any]) -> dict[str, int]:
    meshes = [x.sharding.mesh for x in leaves if isinstance(getattr(x, "sharding", None), jax.sharding.NamedSharding)]
    if not meshes:
        return {}
    return dict(meshes[0].shape)


def _count_shard_map_results(jaxpr: Any) -> int:
    """Count the bytes per device of the results of a step's `shard_map`s."""
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "shard_map":
            inner = equation.params["jaxpr"]
            total += sum(map(count_aval_bytes, getattr(inner, "jaxpr", inner).outvars))
        elif equation.primitive.name == "jit":
            total += _count_shard_map_results(equation.params["jaxpr"])
    return total
