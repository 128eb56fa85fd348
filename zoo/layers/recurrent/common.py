"""What recurrent mixers with heads share: how queries, keys and values are made, gates, how heads become a stream."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from zoo.ops.normalization import layer_norm, rms_norm
from zoo.parallel import Dim, Module, full_precision, num_shards, shard_offset
from zoo.shapes import HeadVectors, HiddenStates, LogDecays

from ..abstract import AbstractLinear, AbstractNorm
from ..convolution import ConvState, ShortConvolution
from ..linear import Linear
from ..norm import RMSNorm
from .context import RecurrenceContext

_HeadRows = Float[Array, "batch rows heads _"]


class RecurrentState(Module):
    """What a recurrent mixer remembers: its matrix a head, in float32, and the last inputs of its convolutions. As
    large after a million tokens as after one."""

    matrix: Float[Array, "batch heads key_dim value_dim"]
    windows: tuple[ConvState, ...] = ()


class QKVProjections(Module):
    """Queries, keys and values: W x, then a short convolution and an activation where they are given.

    Of each head so many keys and values a token (`steps`); they follow one another in time.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    convolutions: tuple[ShortConvolution, ...]
    """Of queries, keys and values, or none."""

    key_dim: int = eqx.field(static=True)
    value_dim: int = eqx.field(static=True)
    activation: Callable | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        num_householder: int = 1,
        conv_width: int | None = None,
        activation: Callable | None = None,
        key: Key[Array, ""],
    ):
        """- `convolution`: how wide, if there is one.
        - `activation`: after it, or after the projections where there is none.

        **Raises** `ValueError` for a size below 1.
        """
        sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "num_householder": num_householder}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and a size is at least 1")
        parts = [(1, key_dim), (num_householder, key_dim), (num_householder, value_dim)]
        linear_keys, convolution_keys = jax.random.split(key, 6).reshape(2, 3)
        made = [
            Linear(embed, heads * n * size, in_=Dim("embed"), out=Dim("heads", n * size), key=own)
            for (n, size), own in zip(parts, linear_keys, strict=True)
        ]
        self.query, self.key, self.value = made
        self.convolutions = ()
        if conv_width is not None:
            self.convolutions = tuple(
                ShortConvolution(heads * n * size, conv_width, features=Dim("heads", n * size), key=own)
                for (n, size), own in zip(parts, convolution_keys, strict=True)
            )
        self.key_dim, self.value_dim, self.activation = key_dim, value_dim, activation

    def __call__(
        self, x: HiddenStates, context: RecurrenceContext, conv_states: tuple[ConvState, ...] | None
    ) -> tuple[HeadVectors, _HeadRows, _HeadRows, tuple[ConvState, ...]]:
        """Of however many heads live here, keys and values with `steps` rows a token; and the convolutions' last
        inputs, where those before came."""
        made, after = [part(x) for part in (self.query, self.key, self.value)], []
        if self.convolutions:
            before = (None, None, None) if conv_states is None else conv_states
            pairs = [
                convolve(context.mask_padding(y), context, window)
                for convolve, y, window in zip(self.convolutions, made, before, strict=True)
            ]
            made, after = [y for y, _ in pairs], [window for _, window in pairs if window is not None]
        if self.activation is not None:
            made = [self.activation(y) for y in made]
        sizes = (self.key_dim, self.key_dim, self.value_dim)
        heads = self.query.out_size // self.key_dim
        query, key, value = (split_heads_and_steps(y, heads, size) for y, size in zip(made, sizes, strict=True))
        return query, key, value, tuple(after)

    def init_state(self, batch: int, columns: int | None = None, dtype: Any = jnp.float32) -> RecurrentState:
        """An empty memory; `columns` wide, where not as wide as values."""
        heads = self.query.out_size // self.key_dim
        matrix = jnp.zeros((batch, heads, self.key_dim, columns or self.value_dim), jnp.float32)
        return RecurrentState(matrix, tuple(each.init_state(batch, dtype) for each in self.convolutions))


def split_heads_and_steps(x: Float[Array, "batch seq features"], heads: int, size: int) -> _HeadRows:
    """Heads of this size; those of one head and token, where there are several, one after another along seq."""
    x = x.reshape(*x.shape[:2], heads, -1, size).swapaxes(2, 3)
    return x.reshape(x.shape[0], -1, heads, size)


class OutputGate(Module):
    """From heads to the stream: W_out (activation(W_gate x) * norm(heads)), norm and gate where they are given.

    The norm is over each head by itself unless it says otherwise with `whole`.
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
        """- `gate`: whether there is one; or a maker of it, called as `Linear` is.
        - `whole`: the norm is over the values of all heads.
        """
        gate_key, out_key = jax.random.split(key)
        values, stream = Dim("heads", value_dim), Dim("embed")
        make = Linear if gate is True else gate
        self.gate = make(embed, heads * value_dim, in_=stream, out=values, key=gate_key) if make else None
        self.norm = None if norm is None else norm()
        self.out = Linear(heads * value_dim, embed, in_=values, out=stream, scale=out_scale, key=out_key)
        self.activation, self.norm_over_heads = activation, norm_over_heads

    def __call__(self, mixed: Float[Array, "batch seq heads value_dim"], x: HiddenStates) -> HiddenStates:
        if self.norm is not None and not self.norm_over_heads:
            mixed = self.norm(mixed)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        if self.norm is not None and self.norm_over_heads:
            mixed = self.norm(mixed)
        return self.out(mixed if self.gate is None else self.activation(self.gate(x)) * mixed)


class HeadNorm(AbstractNorm):
    """Each head's features divided by their root mean square, or, `centered`, by their deviation once their mean is
    taken off; then a scale for every feature of every head, and a bias where there is one: a group norm (Wu & He,
    arXiv:1803.08494) whose groups are heads, as RetNet, RWKV and xLSTM have it before they read out."""

    weight: Float[Array, "features"] = full_precision()
    bias: Float[Array, "features"] | None = full_precision()

    features: Dim = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    centered: bool = eqx.field(static=True)

    def __init__(self, heads: int, head_dim: int, *, epsilon: float = 1e-6, centered: bool = False, bias: bool = False):
        self.weight = jnp.ones(heads * head_dim)
        self.bias = jnp.zeros(heads * head_dim) if bias else None
        self.features, self.epsilon, self.centered = Dim("heads", head_dim), epsilon, centered

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        heads = x.reshape(*x.shape[:-1], -1, self.features.unit)
        normed = (layer_norm if self.centered else rms_norm)(heads, epsilon=self.epsilon).reshape(x.shape)
        scaled = normed * self.weight
        return (scaled if self.bias is None else scaled + self.bias).astype(x.dtype)


class LowRank(AbstractLinear):
    """W_up activation(W_down x) + b: a matrix of low rank, where no activation comes between."""

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
        return self.up(inner if self.activation is None else self.activation(inner))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        """**Raises** `NotImplementedError` where an activation lies between the two."""
        if self.activation is not None:
            raise NotImplementedError("a LowRank with an activation is no matrix, and has no transpose")
        return self.down.transposed(self.up.transposed(x))


class DecayGate(Module):
    """log decay = -exp(A_log) softplus(W x + bias), a number a head, or a head and key channel: Mamba-2's form of a
    decay that depends on the token (arXiv:2405.21060, section 7.1), as Gated DeltaNet (arXiv:2412.06464) and Kimi
    Linear (arXiv:2510.26692, section 3) have it."""

    step: AbstractLinear
    A_log: Float[Array, "heads"] = full_precision()
    bias: Float[Array, "out"] = full_precision()

    out: Dim = eqx.field(static=True)

    def __init__(self, step: Callable[..., AbstractLinear], heads: int, per_head: int = 1, *, key: Key[Array, ""]):
        """`step` is called with the number of outputs, `out=` and `key=`. A starts uniform in [1, 16], and the bias so
        that steps are log-uniform in [0.001, 0.1] where W x is 0 (arXiv:2405.21060, appendix)."""
        step_key, decay_key, bias_key = jax.random.split(key, 3)
        self.out = Dim("heads", per_head)
        self.step = step(heads * per_head, out=self.out, key=step_key)
        self.A_log = jnp.log(jax.random.uniform(decay_key, (heads,), minval=1.0, maxval=16.0))
        self.bias = inverse_softplus(sample_log_uniform(bias_key, heads * per_head, 1e-3, 1e-1))

    def __call__(self, x: HiddenStates) -> LogDecays:
        steps = jax.nn.softplus(self.step(x).astype(jnp.float32) + self.bias)
        rate = -jnp.exp(self.A_log)
        return rate * steps if self.out.unit == 1 else rate[:, None] * steps.reshape(*x.shape[:2], -1, self.out.unit)


def sample_log_uniform(key: Key[Array, ""], size: int, low: float, high: float) -> Float[Array, "size"]:
    """Numbers whose logarithms are uniform between those of `low` and `high`."""
    return jnp.exp(jax.random.uniform(key, (size,), minval=jnp.log(low), maxval=jnp.log(high)))


def inverse_softplus(x: Float[Array, "size"]) -> Float[Array, "size"]:
    """y with log(1 + exp(y)) = x."""
    return x + jnp.log(-jnp.expm1(-x))


def l2_normalize(x: HeadVectors) -> HeadVectors:
    """x / sqrt(sum(x²) + 1e-6) over the last dim, in float32: keys and queries of delta rules (arXiv:2406.06484,
    section 3.3)."""
    return (x.shape[-1] ** -0.5 * rms_norm(x, epsilon=1e-6 / x.shape[-1]).astype(jnp.float32)).astype(x.dtype)


def local_heads(make: Callable[[int], Float[Array, "heads"]], x: HeadVectors) -> Float[Array, "_"]:
    """Of the numbers that belong to all heads, those of the heads of `x` that live here."""
    here = x.shape[2]
    return lax.dynamic_slice_in_dim(make(here * num_shards(x, "heads")), shard_offset(x, "heads", here), here)


def head_norm_factory(value_dim: int) -> Callable[[], RMSNorm]:
    """A maker of the norm over each head's values."""
    return partial(RMSNorm, value_dim, features=Dim("value_dim"))


def recurrence_options(context: RecurrenceContext, state: RecurrentState | None) -> dict[str, Any]:
    """Where a recurrence starts, and how it runs."""
    before = None if state is None else state.matrix
    return {"state": before, "segment_ids": context.segment_ids, "mode": context.mode}
