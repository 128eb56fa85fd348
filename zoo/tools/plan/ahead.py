"""Where a scan that gathers ahead (`loop="ahead"`) may hide what a scan over layers waits for.

A scan hides the gathers of a layer behind other products of the same layer. A scan that gathers ahead has the products
of a whole block to hide them, and gathers one block more in each pass. It may pay if the transfers take less time than
the products; if they take much less, the scan hides as many:

    0.2 products < transfers (1 + 1 / layers) < products

Only for GPUs: compiled for TPU v5e, products hide most gathers in the scan, and no scatter in either loop.
"""

from typing import Any

from zoo.inspect.format import format_decimal_prefix
from zoo.inspect.program import CompiledProgram
from zoo.models.parameter_paths import list_parameter_paths
from zoo.models.runners.ahead import explain_refusal
from zoo.models.stack import Stack
from zoo.parallel import Mesh

from .step import Overlap, Plan

_LEAST_SHARE = 0.2
"""Least share of the products' seconds. Compiled for 64 H100s with four rows of Llama 3 8B on each, a share of 0.15,
the scan leaves 0.022 s exposed and gathering ahead 0.024."""


def find_overlap(plan: Plan, model: Any, mesh: Mesh) -> Overlap | None:
    """Return what gathering ahead could overlap in the step of `plan`; None where it does not apply or does not pay.

    `model`: the step's model on the mesh, as arrays or shapes.
    """
    stack = getattr(model, "stack", None)
    if plan.chip.platform != "gpu" or mesh.shape["pipe"] > 1 or not isinstance(stack, Stack):
        return None
    blocks = [block for segment in stack.segments for block in segment.blocks]
    is_scan = any(segment.num_repeats > 1 for segment in stack.segments) and stack.loop in ("auto", "scan")
    if not is_scan or explain_refusal(blocks, stack.remat, stack.shared):
        return None
    gathered = {frozenset(axes) for path in list_parameter_paths(model) for _, axes in mesh.find_gather_dims(path.dims)}
    moved = [x for x in plan.transfers if x.collective.kind in ("all-gather", "reduce-scatter")]
    transfers = sum(x.seconds for x in moved if frozenset(x.collective.axes or ()) in gathered)
    products = plan.seconds["products"]
    if _LEAST_SHARE * products < transfers * (1 + 1 / stack.count_layers()) < products:
        return Overlap(transfers, products)
    return None


def compare_loops(scan: CompiledProgram, ahead: CompiledProgram) -> str:
    """Compare the exposed seconds and the peak memory of a step compiled with both loops, in a line that says which to
    take."""
    verdict = "keep the scan"
    if (ahead.exposed_seconds or 0.0) < (scan.exposed_seconds or 0.0):
        verdict = 'take zoo.configure(model, remat="full", loop="ahead")'
    return f"{_describe_exposed(ahead)} by gathering ahead, {_describe_exposed(scan)} by the scan: {verdict}"


def _describe_exposed(program: CompiledProgram) -> str:
    exposed = f"{program.exposed_seconds or 0.0:.3g} s exposed"
    if program.memory is None or program.memory.peak is None:
        return exposed
    return f"{exposed} and {format_decimal_prefix(program.memory.peak)}B at the peak"
