"""The matrices of a finished model in 8 bits or in 4, for adapters to stand around."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax.numpy as jnp

from zoo.layers import AbstractLinear, AbstractPackedLinear, Int8Linear, Linear, NF4Linear
from zoo.models.names import Numbers, map_modules, places

from .abstract import AbstractAdapter
from .dora import DoRA
from .several import innermost
from .targets import ALL, Found, Targets, chooser, matrices, multiplies, over_stacked

Model = TypeVar("Model")
Kind = Literal["nf4", "int8"]

KINDS: dict[str, type[Int8Linear] | type[NF4Linear]] = {"nf4": NF4Linear, "int8": Int8Linear}


def quantise(model: Model, kind: Kind = "nf4", *, targets: Targets = "all-linear") -> Model:
    """The model with its matrices rounded to 4 bits (`NF4Linear`) or to 8 (`Int8Linear`), which `zoo.trainable` omits:
    what QLoRA puts its adapters around (Dettmers et al., arXiv:2305.14314, section 3). Matrices that have adapters
    already are rounded beneath them.

    - `targets`: as `lora` has them. `"all-linear"` leaves out, beside the head, matrices that are declared to keep full
      precision, as a router's: name these to round them too.

    One stacked array is rounded after another; the model that was given lives as long as somebody holds it. How far
    numbers are off: `zoo.ops.nf4.encode`, `zoo.ops.int8.encode`. How much is left: `zoo.inspect.size`.

    **Raises** `ValueError` for another kind, for a target that means no matrix, and, before anything is computed and
    for all of them at once, for matrices that cannot be rounded: that are no plain `Linear`, that are stacked with
    layers that `targets` leave out, or, in NF4, whose inputs are no whole blocks of 64.
    """
    if kind not in KINDS:
        raise ValueError(f"matrices are quantised to {' or '.join(KINDS)}, not {kind!r}")
    found = matrices(model)
    meant = chooser(targets, found)
    kept = {place.name for place in places(model) if place.leaf.full_precision} if targets == ALL else set()
    chosen = [one for one in found if f"{one.name}.weight" not in kept and one.table(meant, bool).any()]
    if wrong := [f"{one.name}: {reason}" for one in chosen for reason in faults(one, meant, kind)]:
        raise ValueError(f"these cannot be quantised to {kind}:\n  " + "\n  ".join(wrong))
    names = {one.name for one in chosen}
    made = lambda base: KINDS[kind](base.matrix, base.shift, in_=base.in_, out=base.out)

    def one(name: str, numbers: Numbers, module: Any) -> Any:
        return over_stacked(beneath(made), numbers)(module) if name in names else module

    return map_modules(one, model, multiplies)


def faults(found: Found, meant: Callable[[str], bool], kind: Kind) -> Iterator[str]:
    """Why a matrix that is meant cannot be quantised."""
    base, meant_here = innermost(found.module), found.table(meant, bool)
    if not meant_here.all():
        count = f"{meant_here.sum()} of the {meant_here.size} that are one array"
        yield f"targets mean {count}: all of them become integers, or none"
    if type(base) is not Linear:
        yield f"it is a {type(base).__name__}, and no Linear"
    elif reason := KINDS[kind].unfit(found.sizes()[1], base.in_):
        yield f"{reason}: take int8, or leave it out"


def dequantise(model: Model) -> Model:
    """The model with a float32 `Linear` in place of each matrix that `quantise` has rounded: of the same numbers, in 4
    to 8 times the memory."""

    def decoded(base: AbstractLinear) -> AbstractLinear:
        return base.unpacked(base.matrix, base.shift) if isinstance(base, Int8Linear | NF4Linear) else base

    def one(name: str, numbers: Numbers, module: Any) -> Any:
        packed = isinstance(innermost(module), AbstractPackedLinear)
        return over_stacked(beneath(decoded), numbers)(module) if packed else module

    return map_modules(one, model, multiplies)


def beneath(function: Callable[[Any], AbstractLinear]) -> Callable[[AbstractLinear], AbstractLinear]:
    """`function` of what lies under all adapters, which stay around it. What a DoRA knows of its base is found anew."""

    def one(module: AbstractLinear) -> AbstractLinear:
        if not isinstance(module, AbstractAdapter):
            return function(module)
        base = one(module.base)
        changed = eqx.tree_at(lambda adapter: adapter.base, module, base)
        if not isinstance(changed, DoRA):
            return changed
        return eqx.tree_at(lambda dora: dora.squares, changed, jnp.square(base.matrix).sum(-1))

    return one
