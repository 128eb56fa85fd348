"""Adapters around the matrices of a finished model, in all layers that are stacked together."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from zoo.layers import AbstractEmbedding
from zoo.models.names import map_modules
from zoo.parallel import Learnt

from .abstract import AbstractAdapter
from .added import LoHa, LoKr
from .dora import DoRA
from .embedding import EmbeddingLoRA
from .factors import checked_rate
from .full import Bias, beside
from .ia3 import IA3
from .lora import LoRA, Start
from .several import innermost
from .targets import Found, Targets, by_pattern, chooser, matrices, multiplies, over_stacked
from .vera import VeRA, shared_projections

Model = TypeVar("Model")
Plan = Callable[[Found], tuple[Callable[..., AbstractAdapter], Mapping[str, np.ndarray]] | None]
"""For a matrix: a maker of its adapter, and the numbers that differ between its layers, or None where it stays."""


def wrapped(model: Model, plan: Plan, key: Key[Array, ""]) -> Model:
    """`model` with `make(base, key=..., **numbers)` around each matrix for which `plan` gives a maker. It is called for
    one layer's matrix, with that layer's numbers and a key of its own, and mapped over the dims that are stacked."""
    order = {found.place: number for number, found in enumerate(matrices(model, tables=True))}

    def put(name: str, numbers: Any, module: Any) -> Any:
        planned = plan(Found(name, numbers, module))
        if planned is None:
            return module
        make, tables = planned
        if isinstance(getattr(innermost(module), "weight", None), Learnt):
            raise ValueError(f"{name}.weight is learnt as a whole: no adapter goes around it")

        def build(base: Any, key: Key[Array, ""], own: dict[str, Array]) -> Any:
            return make(base, key=key, **own)

        keys = jax.random.split(jax.random.fold_in(key, order[name, numbers]), tuple(len(run) for run in numbers))
        return over_stacked(build, numbers)(module, keys, {word: jnp.asarray(table) for word, table in tables.items()})

    return map_modules(put, model, multiplies)


def lora(
    model: Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float | int] | None = None,
    rank_stabilised: bool = False,
    start: Start = "zero",
    dropout: float | int = 0.0,
    bias: Bias = "none",
    modules_to_save: Sequence[str] = (),
    label: str = "lora",
    key: Key[Array, ""],
) -> Model:
    """The model with a `LoRA` around each of the targets, and nothing else of it learnt. It computes what it did.

    - `targets`: names, patterns, or a function of names, layers' numbers in them: see `zoo.adapters.chooser`.
    - `rank`, `alpha`: of all, unless a pattern in `rank_pattern` or `alpha_pattern` means a module. `alpha` is `rank`
      unless given. The change is scaled by alpha / rank, or by alpha / sqrt(rank) if `rank_stabilised`.
    - `start`: how A and B start: "zero", "gaussian", "pissa" or "olora".
    - `dropout`: the share of what A reads that is zeroed while the model is given a key.
    - `bias`: which biases are learnt too: "none", "lora_only" for those of the targets, or "all" of the model's.
    - `modules_to_save`: what else is learnt as a whole: see `full`.
    - `label`: the adapter's name, under which its parameters stand.

    **Raises** `ValueError` for a target or pattern that means no matrix, and for a rank below 1.
    """
    make = partial(LoRA, start=start, dropout=checked_rate(dropout), label=label)
    model = ranked(model, make, targets, rank, alpha, rank_pattern, alpha_pattern, rank_stabilised, key)
    return beside(model, targets, bias, modules_to_save, label)


def dora(
    model: Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float | int] | None = None,
    rank_stabilised: bool = False,
    start: Start = "zero",
    dropout: float | int = 0.0,
    bias: Bias = "none",
    modules_to_save: Sequence[str] = (),
    label: str = "dora",
    key: Key[Array, ""],
) -> Model:
    """The model with a `DoRA` around each of the targets. Arguments and errors are those of `lora`."""
    make = partial(DoRA, start=start, dropout=checked_rate(dropout), label=label)
    model = ranked(model, make, targets, rank, alpha, rank_pattern, alpha_pattern, rank_stabilised, key)
    return beside(model, targets, bias, modules_to_save, label)


def ia3(
    model: Model,
    *,
    targets: Targets = ("key", "value", "down"),
    inputs: Targets | None = ("down",),
    label: str = "ia3",
    key: Key[Array, ""] | None = None,
) -> Model:
    """The model with an `IA3` around each of the targets; of those that `inputs` means too, it is the inputs that are
    multiplied. **Raises** `ValueError` for a target that means no matrix."""
    found = matrices(model, tables=True)
    meant = chooser(targets, found)
    of_inputs = (lambda _: False) if inputs is None else chooser(inputs, found)

    def plan(found: Found) -> Any:
        applies = found.table(meant, bool)
        if not applies.any():
            return None
        matrix_only(found, "ia3")
        kinds = {of_inputs(name) for name in found.names().values() if meant(name)}
        if len(kinds) > 1:
            raise ValueError(f"ia3: {found.name} is one array over its layers: multiply the inputs of all, or of none")
        one = kinds.pop()
        make = lambda base, *, key, applies: IA3(base, inputs=one, applies=applies, label=label)
        return make, {"applies": applies}

    return wrapped(model, plan, jax.random.key(0) if key is None else key)


def vera(
    model: Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 256,
    first: float = 0.1,
    label: str = "vera",
    key: Key[Array, ""],
) -> Model:
    """The model with a `VeRA` around each of the targets, their random matrices cut out of one pair. `first` is what
    `down_scale` starts as. **Raises** `ValueError` for a target that means no matrix, and for a rank below 1."""
    scale(None, rank)
    found = matrices(model, tables=True)
    meant = chooser(targets, found)
    sizes = [one.sizes() for one in found if one.table(meant, bool).any()]
    outputs, inputs = (max(side) for side in zip(*sizes, strict=True))
    shared = shared_projections(rank, outputs, inputs, key)

    def make(base: Any, *, key: Key[Array, ""], applies: Array) -> VeRA:
        return VeRA(base, shared=shared, applies=applies, first=first, label=label)

    return alike(model, make, targets, key, label)


def loha(
    model: Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    label: str = "loha",
    key: Key[Array, ""],
) -> Model:
    """The model with a `LoHa` around each of the targets, its difference scaled by alpha / rank; `alpha` is `rank`
    unless given. **Raises** `ValueError` for a target that means no matrix, and for a rank below 1."""
    return alike(model, partial(LoHa, rank=rank, scale=scale(alpha, rank), label=label), targets, key, label)


def lokr(
    model: Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    factor: int = -1,
    both: bool = False,
    label: str = "lokr",
    key: Key[Array, ""],
) -> Model:
    """The model with a `LoKr` around each of the targets, its difference scaled by alpha / rank; `alpha` is `rank`
    unless given, `factor` and `both` are `LoKr`'s. **Raises** `ValueError` for a target that means no matrix, and for a
    rank below 1."""
    make = partial(LoKr, rank=rank, scale=scale(alpha, rank), factor=factor, both=both, label=label)
    return alike(model, make, targets, key, label)


def scale(alpha: float | int | None, rank: int) -> float:
    if rank < 1:
        raise ValueError(f"a rank is at least 1, not {rank}")
    return 1.0 if alpha is None else alpha / rank


def matrix_only(found: Found, method: str) -> None:
    """**Raises** `ValueError` for a table, around which only a LoRA goes."""
    if isinstance(found.module, AbstractEmbedding):
        raise ValueError(f"{method}: {found.name} is a table that is looked up, which only a LoRA goes around")


def alike(
    model: Model, make: Callable[..., AbstractAdapter], targets: Targets, key: Key[Array, ""], label: str
) -> Model:
    """Adapters that are as large in every layer that has one."""
    meant = chooser(targets, matrices(model, tables=True))

    def plan(found: Found) -> Any:
        applies = found.table(meant, bool)
        if not applies.any():
            return None
        matrix_only(found, label)
        return make, {"applies": applies}

    return wrapped(model, plan, key)


def ranked(
    model: Model,
    make: partial[Any],
    targets: Targets,
    rank: int,
    alpha: float | int | None,
    rank_pattern: Mapping[str, int] | None,
    alpha_pattern: Mapping[str, float | int] | None,
    rank_stabilised: bool,
    key: Key[Array, ""],
) -> Model:
    """Adapters of two narrow matrices, in each layer of its own rank."""
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    if (least := min([rank, *ranks.values()])) < 1:
        raise ValueError(f"a rank is at least 1, not {least}")
    found = matrices(model, tables=True)
    meant = chooser(targets, found)
    for pattern in (*ranks, *alphas):
        chooser(pattern, found)
    rank_of, alpha_of = by_pattern(ranks, rank), by_pattern(alphas, rank if alpha is None else alpha)

    def scale_of(name: str) -> float:
        return alpha_of(name) / (rank_of(name) ** 0.5 if rank_stabilised else rank_of(name))

    def plan(found: Found) -> Any:
        own = found.table(lambda name: rank_of(name) if meant(name) else 0, np.int32)
        if not own.any():
            return None
        if make.keywords.get("dropout") and not found.reads_rows:
            raise ValueError(
                f"{found.name}: what embeddings, heads and experts read is not dropped: leave "
                "dropout out, or target other modules"
            )
        if isinstance(found.module, AbstractEmbedding):
            return of_table(make, own, found, scale_of)
        return partial(make, largest=int(own.max())), {"rank": own, "scale": found.table(scale_of, np.float32)}

    return wrapped(model, plan, key)


def of_table(make: partial[Any], rank: np.ndarray, found: Found, scale_of: Callable) -> Any:
    """Around an embedding: a LoRA that starts with zeros. **Raises** `ValueError` for another method or start."""
    if make.func is not LoRA:
        matrix_only(found, make.keywords["label"])
    if make.keywords["start"] != "zero":
        raise ValueError(f"{found.name}: a LoRA of a table starts as zero, not as {make.keywords['start']!r}")
    numbers = {"rank": rank, "scale": found.table(scale_of, np.float32)}
    return partial(EmbeddingLoRA, largest=int(rank.max()), label=make.keywords["label"]), numbers
