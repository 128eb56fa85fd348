"""LoRA: a trainable low-rank update B A of a frozen weight matrix."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from zoo._keywords import check_keywords
from zoo.layers import AbstractLinear
from zoo.layers.embedding import AbstractEmbedding
from zoo.models.targets import LinearSite, Targets, find_linears, get_linear_shape, lookup_by_pattern, match_targets
from zoo.ops.moe.grouped_matmul import expand_group_values
from zoo.parallel import buffer
from zoo.parallel.tokens import match_tokens

from ..apply import apply_adapters, check_rank, refuse_embedding
from ..base import Matrix
from ..names import translate_patterns
from ..peft_limits import resolve_targets
from .embedding import EmbeddingLoRA
from .low_rank import AbstractLowRankAdapter, check_dropout_rate, low_rank_product
from .modules_to_save import BiasOption, train_biases_and_modules

_Model = TypeVar("Model")
LoRAInit = Literal["zero", "gaussian", "pissa", "olora"]
"""Initialization of the factors. B is zero and A uniform ("zero") or normal ("gaussian"); or both are a part of W that
is subtracted from the base: its largest singular values (PiSSA, Meng et al., arXiv:2404.02948, section 3), or the first
columns of its QR decomposition (OLoRA, Büyükakyüz, arXiv:2406.01775, section 3). Switching such an adapter off leaves
W without that part."""


class LoRA(AbstractLowRankAdapter):
    """y = W x + b + scale B A x, with A of shape [rank, in] and B [out, rank] (Hu et al., arXiv:2106.09685, section
    4.1).

    `scale` is alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski, arXiv:2312.03732). If stacked layers have
    different ranks, their arrays have the largest, padded with zero rows of A and zero columns of B. These stay zero
    in training, since the gradient of either is a product with the other.

    FLOPs: 2 rank (in + out) per token, in addition to the base's 2 in out.
    """

    first_down: Float[Array, "rank in"] | None = buffer()
    first_up: Float[Array, "out rank"] | None = buffer()
    """Initial A and B if they were subtracted from the base, whose original weight is W + scale B A of these."""

    def __init__(
        self,
        base: AbstractLinear,
        *,
        max_rank: int,
        rank: int | Int[Array, ""],
        scale: float | Float[Array, ""],
        init: LoRAInit = "zero",
        dropout: float | int = 0.0,
        adapter_name: str = "lora",
        key: Key[Array, ""],
    ):
        """- `max_rank`: rank of the arrays, of which this layer uses `rank`.
        - `init`: A is uniform within 1 / sqrt(in), or normal with standard deviation 1 / rank ("gaussian"), and B zero;
          or both are a part of W ("pissa", "olora").
        - `dropout`: dropout rate of the inputs of A while the model is called with a key.
        """
        out_size, in_size = get_linear_shape(base)
        rank = jnp.asarray(rank, jnp.int32)
        scale = jnp.where(rank > 0, jnp.asarray(scale, jnp.float32), 0)
        is_used = jnp.arange(max_rank) < rank
        up = jnp.zeros((out_size, max_rank), jnp.float32)
        self.first_down = None
        self.first_up = None
        if init == "gaussian":
            down = jax.random.normal(key, (max_rank, in_size), jnp.float32) / jnp.maximum(rank, 1)
        elif init == "zero":
            down = jax.random.uniform(key, (max_rank, in_size), jnp.float32, -(in_size**-0.5), in_size**-0.5)
        else:
            down, up = _factorize_weight(base.dense_weight, max_rank, jnp.where(scale == 0, 1, scale), init)
            up = jnp.where(is_used, up, 0)
            base = _subtract_from_base(base, scale * jnp.matmul(up, down, precision="highest"))
            self.first_down = jnp.where(is_used[:, None], down, 0)
            self.first_up = up
        down = jnp.where(is_used[:, None], down, 0)
        super().__init__(base, down=down, up=up, rank=rank, scale=scale, dropout=dropout, adapter_name=adapter_name)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """Return W x + b + scale B A x."""
        y = self.base(x)
        scale = self.scale * self.strength_per_row(x)
        scaled_down = self.project_down(x, scale)  # scale A x
        return self.up.add_matmul(y, match_tokens(scaled_down, y))  # y + B (scale A x)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        """Return Wᵀ x + scale Aᵀ Bᵀ x."""
        inner = self.up.transposed(x.astype(self.up.weight.dtype))
        inner = (inner * (self.scale * self.strength_per_row(x))).astype(inner.dtype)
        return self.base.transposed(x) + self.down.transposed(inner).astype(x.dtype)

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        """Return W_h x_h + b_h + scale B_h A x_h for each head h: heads share A."""
        scaled_down = self.project_down(x, self.scale * self.strength_per_row(x))
        return self.base.per_head(x) + self.up.per_head(scaled_down).astype(x.dtype)

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        """Return W_hᵀ x_h + scale Aᵀ B_hᵀ x_h for each head h."""
        inner = self.up.per_head_transposed(x.astype(self.up.weight.dtype))
        inner = (inner * (self.scale * self.strength_per_row(x))).astype(inner.dtype)
        return self.base.per_head_transposed(x) + self.down.transposed(inner).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes)
        inner = inner * expand_group_values((self.scale * self.strength_per_expert(self.scale))[:, None], sizes, len(x))
        return self.base.grouped(x, sizes) + self.up.grouped(inner.astype(self.up.weight.dtype), sizes).astype(x.dtype)

    def merge_weight(self, weight: Matrix) -> Matrix:
        return weight + self.scale * self.strength_per_expert(self.scale) * low_rank_product(self.down, self.up)


@check_keywords
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
    """Wrap each target module with a `LoRA` and freeze the rest of the model. The output does not change at first.

    - `targets`: names, patterns, or a predicate of module paths: see `zoo.models.targets.match_targets`. For a model of
      a family also names and patterns of PEFT's, such as `q_proj`; `"all-linear"` then leaves out the layers that PEFT
      does not wrap, such as a Mamba's step size, with a line in the log. Named, they are trained, also with a line.
    - `rank`, `alpha`: of all modules that no pattern in `rank_pattern` or `alpha_pattern` matches. `alpha` defaults to
      `rank`. The update is scaled by alpha / rank, or by alpha / sqrt(rank) if `rank_stabilized`.
    - `init`: initialization of A and B: "zero", "gaussian", "pissa" or "olora".
    - `dropout`: dropout rate of the inputs of A while the model is called with a key.
    - `bias`: biases that are trained too: "none", "lora_only" for the biases of the targets, or "all".
    - `modules_to_save`: modules that are trained in full: see `unfreeze`.
    - `adapter_name`: the name that the adapter's parameter paths contain.

    **Raises** `ValueError` for a target or pattern that matches nothing, and for a rank below 1.
    """
    factory = partial(LoRA, init=init, dropout=check_dropout_rate(dropout), adapter_name=adapter_name)
    return apply_low_rank(
        model,
        factory,
        targets=targets,
        rank=rank,
        alpha=alpha,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        rank_stabilized=rank_stabilized,
        bias=bias,
        modules_to_save=modules_to_save,
        key=key,
    )


def apply_low_rank(
    model: _Model,
    factory: partial[Any],
    *,
    targets: Targets,
    rank: int,
    alpha: float | int | None,
    rank_pattern: Mapping[str, int] | None,
    alpha_pattern: Mapping[str, float | int] | None,
    rank_stabilized: bool,
    bias: BiasOption,
    modules_to_save: Sequence[str],
    key: Key[Array, ""],
) -> _Model:
    """Wrap each target module with a low-rank adapter whose rank and scale may differ between layers, and train biases
    and modules in full: shared by `lora` and `dora`."""
    sites = find_linears(model, include_embeddings=True)
    ranks = translate_patterns(model, rank_pattern, sites)
    alphas = translate_patterns(model, alpha_pattern, sites)
    check_rank(min([rank, *ranks.values()]))
    targets = resolve_targets(model, targets, sites, factory.func.__name__)
    is_target = match_targets(targets, sites)
    get_rank = lookup_by_pattern(ranks, rank)
    get_alpha = lookup_by_pattern(alphas, rank if alpha is None else alpha)

    def get_scale(name: str) -> float:
        return get_alpha(name) / (get_rank(name) ** 0.5 if rank_stabilized else get_rank(name))

    def plan(site: LinearSite) -> Any:
        site_ranks = site.tabulate(lambda name: get_rank(name) if is_target(name) else 0, np.int32)
        if not site_ranks.any():
            return None
        if factory.keywords.get("dropout") and not site.supports_dropout:
            raise ValueError(
                f"{site.name}: what embeddings, heads and experts read is not dropped: leave "
                "dropout out, or target other modules"
            )
        if isinstance(site.module, AbstractEmbedding):
            return _plan_embedding(factory, site_ranks, site, get_scale)
        tables = {"rank": site_ranks, "scale": site.tabulate(get_scale, np.float32)}
        return partial(factory, max_rank=int(site_ranks.max())), tables

    model = apply_adapters(model, plan, key)
    return train_biases_and_modules(model, targets, bias, modules_to_save, factory.keywords["adapter_name"])


def _plan_embedding(factory: partial[Any], ranks: np.ndarray, site: LinearSite, get_scale: Callable) -> Any:
    """Plan the LoRA of an embedding. **Raises** `ValueError` for another method or initialization."""
    adapter_name = factory.keywords["adapter_name"]
    init = factory.keywords["init"]
    if factory.func is not LoRA:
        refuse_embedding(site, adapter_name)
    if init != "zero":
        raise ValueError(f"{site.name}: a LoRA of a table starts as zero, not as {init!r}")
    tables = {"rank": ranks, "scale": site.tabulate(get_scale, np.float32)}
    return partial(EmbeddingLoRA, max_rank=int(ranks.max()), adapter_name=adapter_name), tables


def _factorize_weight(
    weight: Matrix, rank: int, scale: Float[Array, ""], init: LoRAInit
) -> tuple[Float[Array, "rank in"], Float[Array, "out rank"]]:
    """Return A and B of PiSSA, where scale B A is the best approximation of the weight of this rank; or of OLoRA, where
    B A is the first part of its QR decomposition, unscaled as in the paper."""
    if rank > min(weight.shape):
        raise ValueError(
            f"a matrix of {list(weight.shape)} has no {rank} directions to start from: take a smaller rank"
        )
    if init == "olora":
        q, r = jnp.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    left, values, right = jnp.linalg.svd(weight, full_matrices=False)
    roots = jnp.sqrt(values[:rank] / scale)
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def _subtract_from_base(base: AbstractLinear, part: Matrix) -> AbstractLinear:
    """Subtract a matrix from the weight of the base, in the base's dtypes."""
    return jax.tree.map(
        lambda new, old: new.astype(old.dtype), base.with_weight(base.dense_weight - part, base.dense_bias), base
    )
