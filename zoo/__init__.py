"""A model zoo for JAX: typed pytrees, one layout, any mesh."""

from . import layers, models, ops, parallel
from .generate import generate
from .models import cross_entropy
from .parallel import Layout, cast, count, init, make_mesh, place, place_batch, spmd, trainable, value, value_and_grad

__version__ = "0.1.0"

__all__ = [
    "Layout",
    "__version__",
    "cast",
    "count",
    "cross_entropy",
    "generate",
    "init",
    "layers",
    "make_mesh",
    "models",
    "ops",
    "parallel",
    "place",
    "place_batch",
    "spmd",
    "trainable",
    "value",
    "value_and_grad",
]
