"""Search for the mesh on which a training step is fastest: all meshes by estimate, the most promising ones by trace."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from zoo._terminal import format_count
from zoo.inspect.program import count_device_bytes
from zoo.models import ImageText
from zoo.models.parameter_paths import list_parameter_paths
from zoo.parallel import Mesh
from zoo.parallel.chips import CHIPS
from zoo.parallel.layout import Layout
from zoo.parallel.mesh import format_sizes, is_array_or_shape, make_mesh
from zoo.parallel.module import trainable
from zoo.parallel.topology import Topology

from .ahead import find_overlap
from .estimate import estimate_step
from .options import TrainingOptions
from .rollouts import plan_sampling
from .step import MARGIN, Plan, plan
from .training import count_model_flops, make_training_step, split_into_stages

_log = logging.getLogger("zoo")
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
_ERROR = 1.15
"""Estimated peaks may be this much too high: only beyond it does a mesh rank behind those that fit."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Sizes of a mesh, and the plan on it."""

    sizes: Mapping[str, int]
    plan: Plan

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sort key: meshes that fit with a margin, then those that barely fit; among equals, by the time of a step in
        which products, memory and collectives take turns."""
        return not self.plan.fits, not self.plan.fits_with_margin, self.plan.sequential


def plan_training(
    make_model: Callable[..., Any],
    sizes: Mapping[str, int],
    topology: Topology,
    options: TrainingOptions,
    layout: Layout | None = None,
    *,
    model_flops: int | None = None,
) -> Plan:
    """Plan the training step of `make_training_step` on a mesh of these sizes, and the sampling between steps."""
    mesh = make_stand_in_mesh(sizes, topology, layout)
    step, args = make_training_step(make_model, mesh, options)
    if model_flops is None:
        flops = count_model_flops(make_model, options)
    else:
        flops = model_flops
    planned = plan(step, *args, on=topology, model_flops=flops)
    rewritten = None
    if options.lora is not None:  # products read the frozen base
        _, model, opt_state = args
        rewritten = sum(count_device_bytes(x) for x in jax.tree.leaves((trainable(model), opt_state)))
    return dataclasses.replace(
        planned,
        options=options,
        rewritten=rewritten,
        sampler=plan_sampling(make_model, mesh, options),
        overlap=find_overlap(planned, args[1], mesh),
    )


def make_stand_in_mesh(sizes: Mapping[str, int], topology: Topology, layout: Layout | None = None) -> Mesh:
    """Return a mesh in which one CPU device stands in for each device of the topology.

    **Raises** `ValueError` if the sizes do not multiply to the number of its devices.
    """
    devices = jax.devices("cpu")[:1] * topology.devices
    named: dict[str, int] = {"data": 1, **sizes}
    return make_mesh(**named, devices=devices, layout=layout)  # pyright: ignore[reportArgumentType]


def search_meshes(
    make_model: Callable[..., Any],
    topology: Topology,
    options: TrainingOptions,
    layout: Layout | None = None,
    *,
    limit: int = 12,
    progress: Callable[[str], object] | None = None,
) -> list[Candidate]:
    """Return the plans on the most promising meshes of a topology, the best first.

    Axes are powers of two, except for the remaining devices along `data` or `fsdp`; `tensor` stays within a host or 16
    devices; rows, tokens, experts and layers must divide. All of these meshes are estimated (`estimate_step`), and the
    best `limit` traced, which takes seconds each; `progress` is called with a line before each. **Raises** `ValueError`
    if none can be built, and for LoRA, whose frozen base the estimate does not know.
    """
    if options.lora is not None:
        raise ValueError("the search estimates training of all parameters: plan LoRA on a mesh that you name")
    kept = rank_meshes(make_model, topology, options, layout)[:limit]
    planned = list(_iterate_candidates(make_model, kept, topology, options, layout, progress))
    found = [candidate for candidate in planned if isinstance(candidate, Candidate)]
    if not found:
        raise _make_no_mesh_error(topology, str(planned[0]))
    return sorted(found, key=lambda candidate: candidate.rank)


def rank_meshes(
    make_model: Callable[..., Any], topology: Topology, options: TrainingOptions, layout: Layout | None = None
) -> list[dict[str, int]]:
    """Return the sizes of the meshes that divide a step, the best by estimate first; on none are parameters, gradients
    and moments larger than the memory. **Raises** `ValueError` if there are none."""
    model = eqx.filter_eval_shape(lambda key: make_model(key=key), jax.random.key(0))
    if isinstance(model, ImageText):
        layers = 1  # no stages: a tower comes before the layers
    else:
        layers = sum(1 for _ in model.stack.iter_blocks())
    memory = CHIPS[topology.kind].memory
    ranked = []
    reason = _explain_rows(options)
    is_too_large = False
    for sizes in iterate_sizes(topology, options, _count_experts(model), layers):
        mesh = make_stand_in_mesh(sizes, topology, layout)
        try:
            estimate = estimate_step(split_into_stages(model, mesh), mesh, topology, options)
        except ValueError as error:
            _log.info("left out %s: %s", sizes, error)
            reason = str(error)
            continue
        if estimate.at_rest < memory:
            ranked.append((estimate.peak > _ERROR * (1 - MARGIN) * memory, estimate.seconds, sizes))
        else:
            is_too_large = True
    if not ranked:
        if is_too_large:
            reason = "parameters, gradients and moments fit on no mesh of it"
        raise _make_no_mesh_error(topology, reason)
    ranked = sorted(ranked, key=lambda row: row[:2])
    return [sizes for _, _, sizes in ranked]


def _make_no_mesh_error(topology: Topology, reason: str) -> ValueError:
    return ValueError(f"no mesh of {topology} takes this training step: {reason}")


def _explain_rows(options: TrainingOptions) -> str:
    rows = format_count(options.rows, "row")
    batches = "one batch" if options.microbatches == 1 else f"{options.microbatches} micro-batches"
    return f"{rows} and {batches} divide evenly over no mesh of it"


def suggest_mesh(
    make_model: Callable[..., Any],
    topology: Topology,
    options: TrainingOptions,
    layout: Layout | None = None,
    *,
    progress: Callable[[str], object] | None = None,
) -> Candidate:
    """Return the plan on the first simple mesh that fits with a margin: all devices along `data`, all along `fsdp`,
    then either with `tensor` 2, 4 and so on.

    If none fits with the margin, it returns the first that fits, and otherwise the best of `search_meshes`, or for LoRA
    the plan of the smallest peak. **Raises** `ValueError` if no mesh can be built.
    """
    if options.lora is None:
        meshes = rank_meshes(make_model, topology, options, layout)
    else:  # estimates are of the training of all parameters
        meshes = list(iterate_sizes(topology, options))
    simple = [
        sizes
        for sizes in meshes
        if max(sizes["pipe"], sizes["expert"], sizes["context"]) == 1 and 1 in (sizes["data"], sizes["fsdp"])
    ]
    simple = sorted(simple, key=lambda sizes: (sizes["tensor"], sizes["fsdp"]))
    built = []
    reason = _explain_rows(options)
    for candidate in _iterate_candidates(make_model, simple, topology, options, layout, progress):
        if isinstance(candidate, str):
            reason = candidate
            continue
        if candidate.plan.fits_with_margin:
            return candidate
        built.append(candidate)
    fitting = [candidate for candidate in built if candidate.plan.fits]
    if fitting:
        return fitting[0]
    if options.lora is not None:
        if not built:
            raise _make_no_mesh_error(topology, reason)
        return min(built, key=lambda candidate: candidate.plan.peak)
    return search_meshes(make_model, topology, options, layout, progress=progress)[0]


def _iterate_candidates(
    make_model: Callable[..., Any],
    meshes: Sequence[Mapping[str, int]],
    topology: Topology,
    options: TrainingOptions,
    layout: Layout | None,
    progress: Callable[[str], object] | None,
) -> Iterator[Candidate | str]:
    """Yield the plan on each mesh, or the reason why it cannot be built."""
    flops = None
    for number, sizes in enumerate(meshes, start=1):
        if progress is not None:
            progress(f"mesh {number} of {len(meshes)}: {format_sizes(sizes)}")
        if flops is None:
            flops = count_model_flops(make_model, options)
        try:
            yield Candidate(sizes, plan_training(make_model, sizes, topology, options, layout, model_flops=flops))
        except (ValueError, NotImplementedError) as error:
            _log.info("left out %s: %s", sizes, error)
            yield f"{sizes}: {error}"


def iterate_sizes(
    topology: Topology, options: TrainingOptions, experts: int = 1, layers: int = 1
) -> Iterator[dict[str, int]]:
    """Yield sizes of axes whose product is the number of devices, and that share out rows, tokens, experts, layers."""
    count = topology.devices
    powers = [2**n for n in range(count.bit_length()) if count % 2**n == 0]
    for tensor in (n for n in powers if n <= min(topology.domain, 16)):
        for pipe in (n for n in powers if n == 1 or (n <= layers // 2 and options.microbatches >= n)):
            for expert in (n for n in powers if experts % n == 0 and (n == 1 or experts > 1)):
                for context in (n for n in powers if options.seq // n >= 1024 or n == 1):
                    inner = tensor * pipe * expert * context
                    rest, remainder = divmod(count, inner)
                    if remainder or not rest or options.rows % (rest * expert * options.microbatches):
                        continue
                    for fsdp in (n for n in powers if rest % n == 0):
                        sizes = {"pipe": pipe, "data": rest // fsdp, "fsdp": fsdp}
                        yield sizes | {"expert": expert, "context": context, "tensor": tensor}


def _count_experts(model: Any) -> int:
    """Return the number of experts that `expert` may share out, by the dims of parameters: 1 for a dense model."""
    arrays = jax.tree.leaves(eqx.filter(model, is_array_or_shape))
    pairs = zip(list_parameter_paths(model), arrays, strict=True)
    sizes = [size for path, x in pairs for dim, size in zip(path.dims, x.shape, strict=False) if dim.name == "experts"]
    return max(sizes, default=1)
