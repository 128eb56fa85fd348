"""Data, ZeRO-3 (FSDP) and tensor parallelism, derived from annotated dims, one layout table and one `shard_map`."""

from zoo._processes import initialize

from .batch import reader
from .collectives import all_gather, num_shards, reduce, scan, shard, vary
from .dims import Dim
from .fields import buffer, full_precision, implementation_option, named_by_class, no_weight_decay, stacked
from .gather import gather
from .imagined import imagined
from .layout import SEQUENCE, ZERO1, ZERO2, ZERO3
from .mesh import Mesh
from .module import Module, leaves
from .printing import install_printing
from .remat import SaveNames
from .schedule import Schedule

install_printing(Module)

__all__ = [
    "SEQUENCE",
    "ZERO1",
    "ZERO2",
    "ZERO3",
    "Dim",
    "Mesh",
    "Module",
    "SaveNames",
    "Schedule",
    "all_gather",
    "buffer",
    "full_precision",
    "gather",
    "imagined",
    "implementation_option",
    "initialize",
    "leaves",
    "named_by_class",
    "no_weight_decay",
    "num_shards",
    "reader",
    "reduce",
    "scan",
    "shard",
    "stacked",
    "vary",
]
