"""Rules of XLA's compilers that decide how much memory a step takes, by platform.

Read off XLA's list of buffers for H100s (`--xla_dump_to`), and off the order and layouts of compiled programs for TPU
v5e: of training steps, by jaxlib 0.10.2 and libtpu 0.0.42.1.
"""

import dataclasses

from zoo.ops.platform import Platform


@dataclasses.dataclass(frozen=True)
class CompilerRules:
    """Fusions, order and copies of a platform's compiler."""

    arithmetic_into_products: bool = False
    """True if a matrix product computes its operands: the TPU's compiler fuses elementwise operations into it, while a
    GPU's kernel takes operands from memory, and changes no more than their dtype and layout."""
    tiles: int = 0
    """Tiles of 128 x 128 results that occupy the device. A product of fewer is cut along its contraction into a power
    of two of partial sums, in float32, which its reader adds up: split-K. 0 for a compiler that does not."""
    pads: bool = False
    """True if the last two dims of arrays in `shard_map`, but for those of size 1, are padded to tiles of 8 x 128."""

    postpones: bool = False
    """True if a reduce-scatter, and what needs its result, waits for all other operations around it."""
    postpones_weight_gradients: bool = False
    """True if products that only results need wait for all others: the gradients of parameters in a backward pass."""
    postpones_beside_loops: bool = False
    """As `postpones_weight_gradients`, but only beside a loop and a reduce-scatter, which these products then hide."""
    early_zeros: bool = False
    """True if constants that a loop starts from, as zeros to add to, are made when the computation around it begins."""

    pipelines_scatters: bool = False
    """True if a loop that stacks the results of reduce-scatters does them an iteration later: the first iteration is
    peeled off, and the operands are carried."""
    scatters_after_loops: bool = False
    """True if `sum += reduce_scatter(x)` in a loop becomes a reduce-scatter of the sum of x, which is whole."""
    copies_rows: bool = False
    """True if a row of a stacked array is copied for a product or a loop that reads it."""
    copies_for_loops: bool = False
    """True if a loop of unknown length reads a copy of an array that is needed after it."""
    transposes_gathered: bool = False
    """True if stacked inputs that a loop gathers along a later dim are transposed, once for the whole computation."""
    casts_before_loops: bool = False
    """True if stacked parameters that a loop inside a loop casts are cast before the outer one."""


RULES: dict[Platform, CompilerRules] = {
    "tpu": CompilerRules(
        arithmetic_into_products=True,
        pads=True,
        postpones=True,
        postpones_beside_loops=True,
        scatters_after_loops=True,
        casts_before_loops=True,
    ),
    "gpu": CompilerRules(
        tiles=132,  # multiprocessors of an H100
        postpones=True,
        postpones_weight_gradients=True,
        early_zeros=True,
        pipelines_scatters=True,
        copies_rows=True,
        copies_for_loops=True,
        transposes_gathered=True,
    ),
    "cpu": CompilerRules(),
}
