"""Parts of recurrent mixers with heads: QKV projections, decay gate, head norm, output gate, recurrent state."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from zoo.ops.normalization import layer_norm, rms_norm
from zoo.parallel import Dim, Module, full_precision, num_shards
from zoo.parallel.collectives import shard_offset
from zoo.shapes import HeadVectors, HiddenStates, LogDecays, MatrixState, ResidualStream, Values

from ..abstract import AbstractLinear, AbstractNorm
from ..convolution import ConvState, ShortConvolution
from ..heads import select_kv_heads
from ..linear import Linear
from ..norm import RMSNorm
from .context import RecurrenceContext

_HeadRows = Float[Array, "batch rows heads _"]
_GroupRows = Float[Array, "batch _ _ key_dim"]


class RecurrentState(Module):
    """Recurrent state: one matrix per head, in float32, and the states of the short convolutions. Its size does not
    depend on the sequence length."""

    matrix: MatrixState
    conv_states: tuple[ConvState, ...] = ()


class QKVProjections(Module):
    """Queries, keys and values activation(conv(W x)); convolution and activation are optional, and with `plain_values`
    the values have neither.

    With `num_householder` n, each token has n keys and values per head, which follow one another along seq.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    convolutions: tuple[ShortConvolution, ...]
    """Those of queries, keys and, without `plain_values`, values; or empty."""

    key_dim: int = eqx.field(static=True)
    value_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    """Query heads per KV head."""
    num_householder: int = eqx.field(static=True)
    activation: Callable | None = eqx.field(static=True)
    plain_values: bool = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        groups: int | None = None,
        kv_heads: int | None = None,
        num_householder: int = 1,
        conv_width: int | None = None,
        activation: Callable | None = None,
        plain_values: bool = False,
        key: Key[Array, ""],
    ):
        """- `groups`: heads of queries and keys, if they are fewer than heads of values.
        - `kv_heads`: heads of keys and values, if they are fewer than query heads, which repeat them.
        - `conv_width`: width of the short convolutions; None for no convolution.
        - `activation`: after the convolutions, or after the projections.
        - `plain_values`: values are W x, without convolution and activation.

        **Raises** `ValueError` for a size below 1, and if `groups` or `kv_heads` does not divide `heads`.
        """
        counts = {"heads": heads, "groups": heads if groups is None else groups}
        counts["kv_heads"] = heads if kv_heads is None else kv_heads
        sizes = {**counts, "num_householder": num_householder, "key_dim": key_dim, "value_dim": value_dim}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        if heads % counts["groups"]:
            raise ValueError(f"{heads} heads do not divide evenly over {groups} groups")
        if heads % counts["kv_heads"]:
            raise ValueError(f"{heads} heads do not divide evenly over {kv_heads} KV heads")
        unit = "heads" if groups is None else "groups"
        dims = (
            Dim(unit, key_dim),
            Dim(unit if kv_heads is None else "kv_heads", num_householder * key_dim),
            Dim("heads" if kv_heads is None else "kv_heads", num_householder * value_dim),
        )
        linear_keys, conv_keys = jax.random.split(key, 6).reshape(2, 3)
        self.query, self.key, self.value = (
            Linear(embed, counts[dim.name] * dim.unit, in_=Dim("embed"), out=dim, key=linear_key)
            for dim, linear_key in zip(dims, linear_keys, strict=True)
        )
        self.convolutions = ()
        if conv_width is not None:
            convolutions = (
                ShortConvolution(counts[dim.name] * dim.unit, conv_width, features=dim, key=conv_key)
                for dim, conv_key in zip(dims, conv_keys, strict=True)
            )
            self.convolutions = tuple(convolutions)[: 2 if plain_values else 3]
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.group = heads // counts["kv_heads"]
        self.num_householder = num_householder
        self.activation = activation
        self.plain_values = plain_values

    def __call__(
        self, x: HiddenStates, context: RecurrenceContext, conv_states: tuple[ConvState, ...] | None
    ) -> tuple[_GroupRows, _GroupRows, _HeadRows, tuple[ConvState, ...]]:
        """Return queries, keys and values by head, keys and values with `num_householder` rows per token; and the
        updated convolution states, if there are any."""
        qkv = [linear(x) for linear in (self.query, self.key, self.value)]
        plain = []
        if self.plain_values:
            plain = [qkv.pop()]
        new_states = []
        if self.convolutions:
            old_states = [None] * len(qkv) if conv_states is None else conv_states
            convolved = [
                convolution(context.mask_padding(y), context, conv_state)
                for convolution, y, conv_state in zip(self.convolutions, qkv, old_states, strict=True)
            ]
            qkv = [y for y, _ in convolved]
            new_states = [state for _, state in convolved if state is not None]
        if self.activation is not None:
            qkv = [self.activation(y) for y in qkv]
        sizes = (self.key_dim, self.key_dim, self.value_dim)
        steps = (1, self.num_householder, self.num_householder)
        query, key, value = (
            split_heads_and_steps(y, y.shape[-1] // (size * count), size)
            for y, size, count in zip([*qkv, *plain], sizes, steps, strict=True)
        )
        return query, self.repeat(key, query), self.repeat(value, query), tuple(new_states)

    def repeat(self, x: _HeadRows, query: HeadVectors) -> _HeadRows:
        """Repeat the vectors of each KV head for its query heads on this device."""
        if self.group == 1:
            return x
        x = select_kv_heads(x, query, self.group)
        return jnp.repeat(x, query.shape[2] // x.shape[2], axis=2)

    def init_state(self, batch: int, columns: int | None = None, dtype: Any = jnp.float32) -> RecurrentState:
        """Return an empty state, whose matrices have `columns` columns, `value_dim` by default."""
        of_values = self.value.out_size // (self.value_dim * self.num_householder)
        heads = max(of_values, self.query.out_size // self.key_dim)
        matrix = jnp.zeros((batch, heads, self.key_dim, columns or self.value_dim), jnp.float32)
        return RecurrentState(matrix, tuple(conv.init_state(batch, dtype) for conv in self.convolutions))


def split_heads_and_steps(x: Float[Array, "batch seq features"], heads: int, size: int) -> _HeadRows:
    """Reshape features to heads of this size. Several vectors per head and token (Householder steps) become consecutive
    rows along seq."""
    x = x.reshape(*x.shape[:2], heads, -1, size).swapaxes(2, 3)
    return x.reshape(x.shape[0], -1, heads, size)


class OutputGate(Module):
    """Gated output projection W_out (activation(W_gate x) * norm(heads)); norm and gate are optional.

    The norm is per head, or with `norm_over_heads` over the features of all heads.
    """

    norm: AbstractNorm | None
    gate: AbstractLinear | None
    out: AbstractLinear

    activation: Callable = eqx.field(static=True)
    norm_over_heads: bool = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        value_dim: int,
        *,
        norm: Callable[[], AbstractNorm] | None = None,
        norm_over_heads: bool = False,
        gate: Callable | bool = False,
        activation: Callable = jax.nn.silu,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `gate`: True for a `Linear` gate, or a factory called like `Linear`.
        - `norm_over_heads`: apply the norm to the concatenated heads.
        """
        gate_key, out_key = jax.random.split(key)
        head_values = Dim("heads", value_dim)
        embed_dim = Dim("embed")
        gate_factory = Linear if gate is True else gate
        self.gate = None
        if gate_factory:
            self.gate = gate_factory(embed, heads * value_dim, in_=embed_dim, out=head_values, key=gate_key)
        self.norm = None if norm is None else norm()
        self.out = Linear(heads * value_dim, embed, in_=head_values, out=embed_dim, scale=out_scale, key=out_key)
        self.activation = activation
        self.norm_over_heads = norm_over_heads

    def __call__(self, mixed: Values, x: HiddenStates) -> ResidualStream:
        if self.norm is not None and not self.norm_over_heads:
            mixed = self.norm(mixed)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        if self.norm is not None and self.norm_over_heads:
            mixed = self.norm(mixed)
        if self.gate is not None:
            mixed = self.activation(self.gate(x)) * mixed
        return self.out(mixed)


class HeadNorm(AbstractNorm):
    """Group norm (Wu & He, arXiv:1803.08494) with heads as groups, before the output projection of RetNet, RWKV and
    xLSTM: an RMSNorm of each head, or if `centered` a LayerNorm, then a weight and an optional bias per feature."""

    weight: Float[Array, "features"] = full_precision()
    bias: Float[Array, "features"] | None = full_precision()

    features: Dim = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    centered: bool = eqx.field(static=True)

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        epsilon: float = 1e-6,
        centered: bool = False,
        bias: bool = False,
        unit: str = "heads",
    ):
        """`unit` is the layout's name of heads."""
        self.weight = jnp.ones(heads * head_dim, jnp.float32)
        self.bias = jnp.zeros(heads * head_dim, jnp.float32) if bias else None
        self.features = Dim(unit, head_dim)
        self.epsilon = epsilon
        self.centered = centered

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        heads = x.reshape(*x.shape[:-1], -1, self.features.unit)
        normalize = layer_norm if self.centered else rms_norm
        y = normalize(heads, epsilon=self.epsilon).reshape(x.shape) * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.astype(x.dtype)


class LowRank(AbstractLinear):
    """Low-rank projection W_up activation(W_down x) + b; the activation is optional."""

    down: AbstractLinear
    up: AbstractLinear

    activation: Callable | None = eqx.field(static=True)

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        rank: int,
        in_: Dim = Dim("embed"),
        out: Dim = Dim("out"),
        bias: bool = False,
        activation: Callable | None = None,
        key: Key[Array, ""],
    ):
        down_key, up_key = jax.random.split(key)
        self.down = Linear(in_size, rank, in_=in_, out=Dim("rank"), key=down_key)
        self.up = Linear(rank, out_size, in_=Dim("rank"), out=out, bias=bias, key=up_key)
        self.activation = activation

    @property
    def out_size(self) -> int:
        return self.up.out_size

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        inner = self.down(x)
        if self.activation is not None:
            inner = self.activation(inner)
        return self.up(inner)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        """Return W_downᵀ W_upᵀ x. **Raises** `NotImplementedError` if the layer has an activation."""
        if self.activation is not None:
            raise NotImplementedError("a LowRank with an activation is not a matrix, and has no transpose")
        return self.down.transposed(self.up.transposed(x))


class DecayGate(Module):
    """Data-dependent log decay -exp(A_log) softplus(W x + bias), one per head, or one per key channel of a head: that
    of Mamba-2 (arXiv:2405.21060, section 7.1), Gated DeltaNet (arXiv:2412.06464) and Kimi Linear (arXiv:2510.26692,
    section 3). With a `lower_bound` it is lower_bound sigmoid(exp(A_log) (W x + bias)), which a kernel can exponentiate
    without care (Ling 3, Ant Group, 2026)."""

    step: AbstractLinear
    A_log: Float[Array, "heads"] = full_precision()
    bias: Float[Array, "out"] = full_precision()

    out: Dim = eqx.field(static=True)
    lower_bound: float | None = eqx.field(static=True)

    def __init__(
        self,
        step: Callable[..., AbstractLinear],
        heads: int,
        per_head: int = 1,
        *,
        lower_bound: float | None = None,
        key: Key[Array, ""],
    ):
        """`step` is a factory of W, called with the number of outputs, `out=` and `key=`. A is initialized uniformly in
        [1, 16], and the bias such that softplus(bias) is log-uniform in [0.001, 0.1] (arXiv:2405.21060, appendix)."""
        step_key, decay_key, bias_key = jax.random.split(key, 3)
        self.out = Dim("heads", per_head)
        self.lower_bound = lower_bound
        self.step = step(heads * per_head, out=self.out, key=step_key)
        self.A_log = jnp.log(jax.random.uniform(decay_key, (heads,), jnp.float32, minval=1.0, maxval=16.0))
        self.bias = inverse_softplus(sample_log_uniform(bias_key, heads * per_head, 1e-3, 1e-1))

    def __call__(self, x: HiddenStates) -> LogDecays:
        step = self.step(x).astype(jnp.float32) + self.bias
        if self.lower_bound is None:
            return self._multiply(-jnp.exp(self.A_log), jax.nn.softplus(step))
        return self.lower_bound * jax.nn.sigmoid(self._multiply(jnp.exp(self.A_log), step))

    def _multiply(self, rate: Float[Array, "heads"], step: Float[Array, "batch seq out"]) -> LogDecays:
        """Multiply the steps by the rate of their head, and split them by heads if these have several."""
        if self.out.unit == 1:
            return rate * step
        return rate[:, None] * step.reshape(*step.shape[:2], -1, self.out.unit)


def sample_log_uniform(key: Key[Array, ""], size: int, low: float, high: float) -> Float[Array, "size"]:
    """Sample a log-uniform distribution between `low` and `high`."""
    return jnp.exp(jax.random.uniform(key, (size,), jnp.float32, minval=jnp.log(low), maxval=jnp.log(high)))


def inverse_softplus(x: Float[Array, "size"]) -> Float[Array, "size"]:
    """Return y with softplus(y) = log(1 + exp(y)) = x."""
    return x + jnp.log(-jnp.expm1(-x))


def l2_normalize(x: HeadVectors) -> HeadVectors:
    """Return x / sqrt(sum(x²) + 1e-6) over the last dim, computed in float32: keys and queries of delta rules
    (arXiv:2406.06484, section 3.3)."""
    return (x.shape[-1] ** -0.5 * rms_norm(x, epsilon=1e-6 / x.shape[-1]).astype(jnp.float32)).astype(x.dtype)


def divide_by_sum(x: HeadVectors) -> HeadVectors:
    """Return x / sum(x) over the last dim, computed in float32: keys and queries above 0, after Schlag et al.
    (arXiv:2102.11174, section 4.2)."""
    x_float32 = x.astype(jnp.float32)
    return (x_float32 / x_float32.sum(-1, keepdims=True)).astype(x.dtype)


def elu_plus_one(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return elu(x) + 1 > 0: the feature map of Katharopoulos et al. (arXiv:2006.16236, equation 7)."""
    return jax.nn.elu(x) + 1


def local_heads(make: Callable[[int], Float[Array, "heads"]], x: HeadVectors) -> Float[Array, "_"]:
    """Call `make` with the number of all heads, and slice out the heads of this device's shard of `x`."""
    heads = x.shape[2]
    return lax.dynamic_slice_in_dim(make(heads * num_shards(x, "heads")), shard_offset(x, "heads", heads), heads)


def head_norm_factory(value_dim: int, epsilon: float = 1e-6, scaled: bool = True) -> Callable[[], RMSNorm]:
    """Return a factory of an RMSNorm over the values of each head, with a weight if `scaled`."""
    return partial(RMSNorm, value_dim, features=Dim("value_dim"), epsilon=epsilon, scaled=scaled)
