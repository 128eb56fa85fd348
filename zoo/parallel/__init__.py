"""The layout: annotations that name dims, a table that says which mesh axis splits them, and one `shard_map`."""

from .collectives import current_mesh, offset, reduce, scan, shares, split, vary, varying, whole
from .gather import Remat, cast, gather, rematerialised
from .gradient import value, value_and_grad
from .layout import AXES, ZERO1, Layout, Mesh, make_mesh
from .module import (
    EITHER,
    MANNER,
    STACKED,
    Dim,
    Leaf,
    Module,
    array_fields,
    buffer,
    count,
    either,
    full_precision,
    leaves,
    manner,
    map_leaves,
    stacked,
    trainable,
)
from .place import init, place, place_batch
from .spmd import spmd

__all__ = [
    "AXES",
    "EITHER",
    "MANNER",
    "STACKED",
    "ZERO1",
    "Dim",
    "Layout",
    "Leaf",
    "Mesh",
    "Module",
    "Remat",
    "array_fields",
    "buffer",
    "cast",
    "count",
    "current_mesh",
    "either",
    "full_precision",
    "gather",
    "init",
    "leaves",
    "make_mesh",
    "manner",
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
    "whole",
]
