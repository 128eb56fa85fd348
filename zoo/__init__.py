"""A model zoo for JAX: typed pytrees, one layout, any mesh."""

from . import adapters, inspect, layers, models, ops, parallel, weights
from ._workarounds import disable_cpu_reduce_fusion
from .generate import generate
from .models import cross_entropy, hidden_states, score
from .models.hf.families import families
from .parallel import Layout, cast, count, init, make_mesh, place, place_batch, spmd, trainable, value, value_and_grad
from .weights import CheckpointError, from_torch, load, save

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Layout",
    "__version__",
    "adapters",
    "cast",
    "count",
    "cross_entropy",
    "families",
    "from_torch",
    "generate",
    "hidden_states",
    "init",
    "inspect",
    "layers",
    "load",
    "make_mesh",
    "models",
    "ops",
    "parallel",
    "place",
    "place_batch",
    "save",
    "score",
    "spmd",
    "trainable",
    "value",
    "value_and_grad",
    "weights",
]

disable_cpu_reduce_fusion()
