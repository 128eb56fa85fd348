"""The choice between a scan over layers and the plain loop, by platform, rematerialization, depth and size.

A scan compiles one pattern of layers, and keeps what the backward pass needs in arrays stacked over layers. XLA's CPU
backend copies into and out of these; the plain loop has no such copies, and compiles every layer. But XLA merges what
is recomputed, or gathered again, with the forward pass where no scan stands between them: its CPU backend drops the
barriers that `rematerialize` puts there. So "auto" takes the plain loop only where everything is saved, or all but
elementwise operations, which is chosen for speed rather than for memory.
"""

from typing import Any, Literal, get_args

from zoo.ops.implementations import always_holds
from zoo.ops.platform import current_platform
from zoo.parallel.remat import Remat, rematerializes

Loop = Literal["auto", "scan", "ahead", "plain"] | int
"""Loop over layers: "scan" over the repeats of a pattern, with a number for that many repeats per iteration
(`lax.scan(unroll=)`), "ahead" for a scan that gathers the parameters of the next block while one runs
(`zoo.parallel.scan_ahead`), "plain" for the loop that compiles every layer, or "auto"."""

MAX_PLAIN_LAYERS = 24
"""Most layers that "auto" puts in a plain loop. Each takes 0.2 to 1.2 s of a core to compile."""
MIN_PLAIN_SIZE = 2**16
"""Fewest elements of the hidden states for which "auto" takes a plain loop: with fewer, it takes hundreds of training
steps to save what it costs to compile."""

_FAST_POLICIES = ("none", "elementwise")


def check_loop(loop: Any) -> Loop:
    """Return `loop`. **Raises** `ValueError` unless it is a name or a positive number."""
    names = get_args(get_args(Loop)[0])
    if loop in names or (isinstance(loop, int) and not isinstance(loop, bool) and loop > 0):
        return loop
    raise ValueError(f"loop is one of {', '.join(names)} or a number of repeats per iteration, not {loop!r}")


def select_loop(loop: Loop, *, layers: int, remat: Remat, size: int) -> Loop:
    """Return `loop`, or the choice of "auto" for hidden states of `size` elements on this device."""
    if loop != "auto":
        return loop
    small = not always_holds(lambda: size >= MIN_PLAIN_SIZE)
    return "scan" if small or find_drawback(layers, remat) else "plain"


def find_drawback(layers: int, remat: Remat) -> str | None:
    """Return why "auto" passes over the plain loop for hidden states of any size; None if it takes it for large
    ones."""
    if (platform := current_platform()) != "cpu":
        return f"compiled for a {platform}"
    if rematerializes("none"):
        return "sharded parameters are gathered again"
    if remat not in _FAST_POLICIES:
        return f"remat={remat}"
    if layers > MAX_PLAIN_LAYERS:
        return f"{layers} layers, more than {MAX_PLAIN_LAYERS}"
    return None
