"""Adapters around the matrices of a finished model, in all layers that are stacked together."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from zoo.layers import AbstractEmbedding
from zoo.models.parameter_paths import map_modules
from zoo.parallel import TrainableCopy

from .base import AbstractAdapter
from .compose import get_base_layer
from .methods.dora import DoRA
from .methods.embedding import EmbeddingLoRA
from .methods.ia3 import IA3
from .methods.lora import LoRA, LoRAInit
from .methods.low_rank import check_dropout_rate
from .methods.lycoris import LoHa, LoKr
from .methods.modules_to_save import BiasOption, train_biases_and_modules
from .methods.vera import VeRA, init_shared_projections
from .targets import LinearSite, Targets, find_linears, is_linear_site, lookup_by_pattern, match_targets, vmap_stacked

_Model = TypeVar("Model")
_AdapterPlan = Callable[[LinearSite], tuple[Callable[..., AbstractAdapter], Mapping[str, np.ndarray]] | None]
"""For a matrix: a maker of its adapter, and the numbers that differ between its layers, or None where it stays."""


def apply_adapters(model: _Model, plan: _AdapterPlan, key: Key[Array, ""]) -> _Model:
    """`model` with `make(base, key=..., **numbers)` around each matrix for which `plan` gives a maker. It is called for
    one layer's matrix, with that layer's numbers and a key of its own, and mapped over the dims that are stacked."""
    order = {found.identity: number for number, found in enumerate(find_linears(model, include_embeddings=True))}

    def put(name: str, numbers: Any, module: Any) -> Any:
        planned = plan(LinearSite(name, numbers, module))
        if planned is None:
            return module
        make, tables = planned
        if isinstance(getattr(get_base_layer(module), "weight", None), TrainableCopy):
            raise ValueError(f"{name}.weight is learnt as a whole: no adapter goes around it")

        def build(base: Any, key: Key[Array, ""], own: dict[str, Array]) -> Any:
            return make(base, key=key, **own)

        keys = jax.random.split(jax.random.fold_in(key, order[name, numbers]), tuple(len(run) for run in numbers))
        return vmap_stacked(build, numbers)(module, keys, {word: jnp.asarray(table) for word, table in tables.items()})

    return map_modules(put, model, is_linear_site)


def lora(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float | int] | None = None,
    rank_stabilized: bool = False,
    init: LoRAInit = "zero",
    dropout: float | int = 0.0,
    bias: BiasOption = "none",
    modules_to_save: Sequence[str] = (),
    adapter_name: str = "lora",
    key: Key[Array, ""],
) -> _Model:
    """The model with a `LoRA` around each of the targets, and nothing else of it learnt. It computes what it did.

    - `targets`: names, patterns, or a function of names, layers' numbers in them: see `zoo.adapters.chooser`.
    - `rank`, `alpha`: of all, unless a pattern in `rank_pattern` or `alpha_pattern` means a module. `alpha` is `rank`
      unless given. The change is scaled by alpha / rank, or by alpha / sqrt(rank) if `rank_stabilized`.
    - `start`: how A and B start: "zero", "gaussian", "pissa" or "olora".
    - `dropout`: the share of what A reads that is zeroed while the model is given a key.
    - `bias`: which biases are learnt too: "none", "lora_only" for those of the targets, or "all" of the model's.
    - `modules_to_save`: what else is learnt as a whole: see `full`.
    - `label`: the adapter's name, under which its parameters stand.

    **Raises** `ValueError` for a target or pattern that means no matrix, and for a rank below 1.
    """
    make = partial(LoRA, init=init, dropout=check_dropout_rate(dropout), adapter_name=adapter_name)
    model = _apply_ranked(model, make, targets, rank, alpha, rank_pattern, alpha_pattern, rank_stabilized, key)
    return train_biases_and_modules(model, targets, bias, modules_to_save, adapter_name)


def dora(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float | int] | None = None,
    rank_stabilized: bool = False,
    init: LoRAInit = "zero",
    dropout: float | int = 0.0,
    bias: BiasOption = "none",
    modules_to_save: Sequence[str] = (),
    adapter_name: str = "dora",
    key: Key[Array, ""],
) -> _Model:
    """The model with a `DoRA` around each of the targets. Arguments and errors are those of `lora`."""
    make = partial(DoRA, init=init, dropout=check_dropout_rate(dropout), adapter_name=adapter_name)
    model = _apply_ranked(model, make, targets, rank, alpha, rank_pattern, alpha_pattern, rank_stabilized, key)
    return train_biases_and_modules(model, targets, bias, modules_to_save, adapter_name)


def ia3(
    model: _Model,
    *,
    targets: Targets = ("key", "value", "down"),
    inputs: Targets | None = ("down",),
    adapter_name: str = "ia3",
    key: Key[Array, ""] | None = None,
) -> _Model:
    """The model with an `IA3` around each of the targets; of those that `inputs` means too, it is the inputs that are
    multiplied. **Raises** `ValueError` for a target that means no matrix."""
    found = find_linears(model, include_embeddings=True)
    meant = match_targets(targets, found)
    of_inputs = (lambda _: False) if inputs is None else match_targets(inputs, found)

    def plan(found: LinearSite) -> Any:
        applies = found.tabulate(meant, bool)
        if not applies.any():
            return None
        _refuse_embedding(found, "ia3")
        kinds = {of_inputs(name) for name in found.names().values() if meant(name)}
        if len(kinds) > 1:
            raise ValueError(f"ia3: {found.name} is one array over its layers: multiply the inputs of all, or of none")
        one = kinds.pop()
        make = lambda base, *, key, applies: IA3(base, inputs=one, applies=applies, adapter_name=adapter_name)
        return make, {"applies": applies}

    return apply_adapters(model, plan, jax.random.key(0) if key is None else key)


def vera(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 256,
    d_initial: float = 0.1,
    adapter_name: str = "vera",
    key: Key[Array, ""],
) -> _Model:
    """The model with a `VeRA` around each of the targets, their random matrices cut out of one pair. `first` is what
    `down_scale` starts as. **Raises** `ValueError` for a target that means no matrix, and for a rank below 1."""
    compute_scale(None, rank)
    found = find_linears(model, include_embeddings=True)
    meant = match_targets(targets, found)
    sizes = [one.sizes() for one in found if one.tabulate(meant, bool).any()]
    outputs, inputs = (max(side) for side in zip(*sizes, strict=True))
    shared = init_shared_projections(rank, outputs, inputs, key)

    def make(base: Any, *, key: Key[Array, ""], applies: Array) -> VeRA:
        return VeRA(base, shared=shared, applies=applies, d_initial=d_initial, adapter_name=adapter_name)

    return apply_uniform(model, make, targets, key, adapter_name)


def loha(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    adapter_name: str = "loha",
    key: Key[Array, ""],
) -> _Model:
    """The model with a `LoHa` around each of the targets, its difference scaled by alpha / rank; `alpha` is `rank`
    unless given. **Raises** `ValueError` for a target that means no matrix, and for a rank below 1."""
    return apply_uniform(
        model,
        partial(LoHa, rank=rank, scale=compute_scale(alpha, rank), adapter_name=adapter_name),
        targets,
        key,
        adapter_name,
    )


def lokr(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    factor: int = -1,
    decompose_both: bool = False,
    adapter_name: str = "lokr",
    key: Key[Array, ""],
) -> _Model:
    """The model with a `LoKr` around each of the targets, its difference scaled by alpha / rank; `alpha` is `rank`
    unless given, `factor` and `both` are `LoKr`'s. **Raises** `ValueError` for a target that means no matrix, and for a
    rank below 1."""
    make = partial(
        LoKr,
        rank=rank,
        scale=compute_scale(alpha, rank),
        factor=factor,
        decompose_both=decompose_both,
        adapter_name=adapter_name,
    )
    return apply_uniform(model, make, targets, key, adapter_name)


def compute_scale(alpha: float | int | None, rank: int) -> float:
    if rank < 1:
        raise ValueError(f"a rank is at least 1, not {rank}")
    return 1.0 if alpha is None else alpha / rank


def _refuse_embedding(site: LinearSite, method: str) -> None:
    """**Raises** `ValueError` for a table, around which only a LoRA goes."""
    if isinstance(site.module, AbstractEmbedding):
        raise ValueError(f"{method}: {site.name} is a table that is looked up, which only a LoRA goes around")


def apply_uniform(
    model: _Model, make: Callable[..., AbstractAdapter], targets: Targets, key: Key[Array, ""], adapter_name: str
) -> _Model:
    """Adapters that are as large in every layer that has one."""
    meant = match_targets(targets, find_linears(model, include_embeddings=True))

    def plan(found: LinearSite) -> Any:
        applies = found.tabulate(meant, bool)
        if not applies.any():
            return None
        _refuse_embedding(found, adapter_name)
        return make, {"applies": applies}

    return apply_adapters(model, plan, key)


def _apply_ranked(
    model: _Model,
    make: partial[Any],
    targets: Targets,
    rank: int,
    alpha: float | int | None,
    rank_pattern: Mapping[str, int] | None,
    alpha_pattern: Mapping[str, float | int] | None,
    rank_stabilized: bool,
    key: Key[Array, ""],
) -> _Model:
    """Adapters of two narrow matrices, in each layer of its own rank."""
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    if (least := min([rank, *ranks.values()])) < 1:
        raise ValueError(f"a rank is at least 1, not {least}")
    found = find_linears(model, include_embeddings=True)
    meant = match_targets(targets, found)
    for pattern in (*ranks, *alphas):
        match_targets(pattern, found)
    rank_of, alpha_of = lookup_by_pattern(ranks, rank), lookup_by_pattern(alphas, rank if alpha is None else alpha)

    def scale_of(name: str) -> float:
        return alpha_of(name) / (rank_of(name) ** 0.5 if rank_stabilized else rank_of(name))

    def plan(found: LinearSite) -> Any:
        own = found.tabulate(lambda name: rank_of(name) if meant(name) else 0, np.int32)
        if not own.any():
            return None
        if make.keywords.get("dropout") and not found.supports_dropout:
            raise ValueError(
                f"{found.name}: what embeddings, heads and experts read is not dropped: leave "
                "dropout out, or target other modules"
            )
        if isinstance(found.module, AbstractEmbedding):
            return _embedding_factory(make, own, found, scale_of)
        return partial(make, max_rank=int(own.max())), {"rank": own, "scale": found.tabulate(scale_of, np.float32)}

    return apply_adapters(model, plan, key)


def _embedding_factory(make: partial[Any], rank: np.ndarray, site: LinearSite, scale_of: Callable) -> Any:
    """Around an embedding: a LoRA that starts with zeros. **Raises** `ValueError` for another method or start."""
    if make.func is not LoRA:
        _refuse_embedding(site, make.keywords["adapter_name"])
    if make.keywords["init"] != "zero":
        raise ValueError(f"{site.name}: a LoRA of a table starts as zero, not as {make.keywords['init']!r}")
    numbers = {"rank": rank, "scale": site.tabulate(scale_of, np.float32)}
    return partial(EmbeddingLoRA, max_rank=int(rank.max()), adapter_name=make.keywords["adapter_name"]), numbers
