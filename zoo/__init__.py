"""A model zoo for JAX: typed pytrees, one layout, any mesh."""

import importlib
from typing import TYPE_CHECKING, Any

from . import layers, models, ops, parallel, precision
from ._workarounds import disable_cpu_reduce_fusion
from .generate.prefill import prefill
from .generate.run import generate
from .generate.stream import generate_stream
from .models.capture import capture, capture_gradients, capture_names, patch, unpatch
from .models.configure import configure, set_implementations
from .models.log_probs import log_probs
from .models.loss import cross_entropy
from .models.scoring import hidden_states, score
from .models.second_derivatives import twice_differentiable
from .models.text_embeddings import embed
from .models.torch_habits import explain_missing_name
from .parallel.batch import place_batch
from .parallel.gather import cast
from .parallel.gradient import value, value_and_grad
from .parallel.layout import Layout
from .parallel.mesh import make_mesh
from .parallel.module import count, trainable
from .parallel.place import init, place
from .parallel.spmd import spmd

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import audio as audio
    from . import images as images
    from . import inspect as inspect
    from . import parity as parity
    from . import testing as testing
    from . import text as text
    from . import tools as tools
    from . import train as train
    from . import weights as weights
    from .inspect.parameters import summary as summary
    from .models.hf.support import families as families
    from .tools.export.export import export as export
    from .tools.plan.step import plan as plan
    from .weights.from_torch import from_torch as from_torch
    from .weights.load import load as load
    from .weights.safetensors import CheckpointError as CheckpointError
    from .weights.save import save as save
    from .weights.to_torch import to_torch as to_torch

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Layout",
    "__version__",
    "adapters",
    "audio",
    "capture",
    "capture_gradients",
    "capture_names",
    "cast",
    "configure",
    "count",
    "cross_entropy",
    "embed",
    "export",
    "families",
    "from_torch",
    "generate",
    "generate_stream",
    "hidden_states",
    "images",
    "init",
    "inspect",
    "layers",
    "load",
    "log_probs",
    "make_mesh",
    "models",
    "ops",
    "parallel",
    "parity",
    "patch",
    "place",
    "place_batch",
    "plan",
    "precision",
    "prefill",
    "save",
    "score",
    "set_implementations",
    "spmd",
    "summary",
    "testing",
    "text",
    "to_torch",
    "tools",
    "trainable",
    "twice_differentiable",
    "unpatch",
    "value",
    "value_and_grad",
    "weights",
]

_LAZY = ("adapters", "audio", "images", "inspect", "parity", "testing", "text", "tools", "train", "weights")
"""Packages imported at first use: not every program needs them, and `zoo.train` needs an extra, which it names."""
_LAZY_NAMES = {
    "CheckpointError": "weights.safetensors",
    "export": "tools.export.export",
    "families": "models.hf.support",
    "from_torch": "weights.from_torch",
    "load": "weights.load",
    "plan": "tools.plan.step",
    "save": "weights.save",
    "summary": "inspect.parameters",
    "to_torch": "weights.to_torch",
}
"""Names of files imported at first use."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
    explain_missing_name(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_NAMES})


disable_cpu_reduce_fusion()
