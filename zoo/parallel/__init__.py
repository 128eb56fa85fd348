"""Data, ZeRO-3 (FSDP) and tensor parallelism, derived from annotated dims, one layout table and one `shard_map`."""

from typing import Any

from zoo._processes import initialize

from .batch import place_batch, reader
from .collectives import (
    all_gather,
    current_mesh,
    num_shards,
    reduce,
    scan,
    shard,
    shard_offset,
    sharded_axes,
    vary,
    varying,
)
from .gather import cast, gather
from .gradient import value, value_and_grad
from .imagined import imagined
from .layout import AXES, SEQUENCE, ZERO1, ZERO2, ZERO3, Layout
from .mesh import Mesh, make_mesh
from .module import (
    Dim,
    Leaf,
    Module,
    adapter_parameter,
    buffer,
    count,
    find_operations,
    full_precision,
    implementation_option,
    leaves,
    map_leaves,
    named_by_class,
    no_weight_decay,
    observed,
    replace_option,
    stacked,
    trainable,
    wrapped,
)
from .place import init, place
from .remat import Remat, RematPolicy, SaveNames, rematerialize
from .rounds import merge_rounds
from .schedule import Schedule
from .spmd import spmd
from .trainable_copy import TrainableCopy, materialize

__all__ = [
    "AXES",
    "SEQUENCE",
    "ZERO1",
    "ZERO2",
    "ZERO3",
    "Dim",
    "Layout",
    "Leaf",
    "Mesh",
    "Module",
    "Remat",
    "RematPolicy",
    "SaveNames",
    "Schedule",
    "TrainableCopy",
    "adapter_parameter",
    "all_gather",
    "buffer",
    "cast",
    "count",
    "current_mesh",
    "find_operations",
    "full_precision",
    "gather",
    "imagined",
    "implementation_option",
    "init",
    "initialize",
    "leaves",
    "make_mesh",
    "map_leaves",
    "materialize",
    "merge_rounds",
    "named_by_class",
    "no_weight_decay",
    "num_shards",
    "observed",
    "place",
    "place_batch",
    "reader",
    "reduce",
    "rematerialize",
    "replace_option",
    "scan",
    "shard",
    "shard_offset",
    "sharded_axes",
    "spmd",
    "stacked",
    "trainable",
    "value",
    "value_and_grad",
    "vary",
    "varying",
    "wrapped",
]

_MOVED = {"array_fields": "zoo.parallel.module.array_fields"}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        # Not an AttributeError: `from zoo.parallel import name` would drop its words.
        raise ImportError(f"zoo.parallel.{name} has moved to {_MOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
