"""Data, ZeRO-3 (FSDP) and tensor parallelism, derived from annotated dims, one layout table and one `shard_map`."""

from zoo._processes import initialize

from .activation import Activation
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
from .dims import Dim
from .fields import (
    adapter_parameter,
    buffer,
    full_precision,
    implementation_option,
    named_by_class,
    no_weight_decay,
    observed,
    per_use,
    stacked,
    wrapped,
)
from .gather import cast, gather
from .gradient import value, value_and_grad
from .imagined import imagined
from .layout import SEQUENCE, ZERO1, ZERO2, ZERO3, Layout
from .mesh import Mesh, make_mesh
from .module import Module, count, leaves, map_leaves, replace_option, trainable
from .place import init, place
from .printing import install_printing
from .remat import Remat, SaveNames
from .schedule import Schedule
from .spmd import spmd

install_printing(Module)

__all__ = [
    "SEQUENCE",
    "ZERO1",
    "ZERO2",
    "ZERO3",
    "Activation",
    "Dim",
    "Layout",
    "Mesh",
    "Module",
    "Remat",
    "SaveNames",
    "Schedule",
    "adapter_parameter",
    "all_gather",
    "buffer",
    "cast",
    "count",
    "current_mesh",
    "full_precision",
    "gather",
    "imagined",
    "implementation_option",
    "init",
    "initialize",
    "leaves",
    "make_mesh",
    "map_leaves",
    "named_by_class",
    "no_weight_decay",
    "num_shards",
    "observed",
    "per_use",
    "place",
    "place_batch",
    "reader",
    "reduce",
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
