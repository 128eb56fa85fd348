"""The layout: annotations that name dims, a table that says which mesh axis splits them, and one `shard_map`."""

from .collectives import current_mesh, offset, reduce, scan, shares, split, vary, varying
from .gather import Remat, cast, gather, rematerialised
from .gradient import value, value_and_grad
from .layout import AXES, ZERO1, Layout, Mesh, make_mesh
from .module import Dim, Leaf, Module, buffer, count, full_precision, leaves, map_leaves, stacked, trainable
from .place import init, place, place_batch
from .spmd import spmd

__all__ = [
    "AXES",
    "ZERO1",
    "Dim",
    "Layout",
    "Leaf",
    "Mesh",
    "Module",
    "Remat",
    "buffer",
    "cast",
    "count",
    "current_mesh",
    "full_precision",
    "gather",
    "init",
    "leaves",
    "make_mesh",
    "map_leaves",
    "offset",
    "place",
    "place_batch",
    "reduce",
    "rematerialised",
    "scan",
    "shares",
    "split",
    "spmd",
    "stacked",
    "trainable",
    "value",
    "value_and_grad",
    "vary",
    "varying",
]
