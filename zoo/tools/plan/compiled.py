"""Compile a planned training step with the compiler of its devices, which this machine need not have."""

from collections.abc import Callable, Mapping
from typing import Any

from zoo.inspect import compiled
from zoo.inspect.program import CompiledProgram
from zoo.parallel import imagined
from zoo.parallel.layout import Layout
from zoo.parallel.mesh import make_mesh
from zoo.parallel.topology import Topology

from .options import TrainingOptions
from .training import make_training_step


def compile_training(
    make_model: Callable[..., Any],
    sizes: Mapping[str, int],
    topology: Topology,
    options: TrainingOptions,
    layout: Layout | None = None,
) -> CompiledProgram:
    """Compile the training step of `make_training_step` for a topology. It takes minutes, and a core.

    **Raises** `MissingExtraError` without the compiler (`aot-tpu`, `aot-cuda`), and `ValueError` for a GPU whose
    description for XLA is missing here.
    """
    named: dict[str, Any] = {"data": 1, **sizes}
    mesh = make_mesh(**named, devices=imagined(str(topology)), layout=layout)
    step, args = make_training_step(make_model, mesh, options)
    return compiled(step, *args)
