"""A correct mixer with faults to switch on. The switches are traced, so that all faults share compiled programs."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.layers import AbstractLinear, AbstractMixer, Linear, TokenInfo
from zoo.parallel import Dim, Module, buffer, full_precision, implementation_option, num_shards, reduce, scan

FAULTS = (
    *("later token", "other row", "padded segment", "padded position", "padding not finite", "segment", "piece"),
    *("decode", "mode", "mesh", "unused"),
)


class PlantedState(Module):
    h: Float[Array, "batch inner"]


class Planted(AbstractMixer):
    """y = W_out norm(h), h_t = a h_{t-1} + W_in x_t + bias, a = sigmoid(decay), with at most one fault."""

    in_proj: AbstractLinear
    out: AbstractLinear
    decay: Float[Array, "inner"] = full_precision()
    bias: Float[Array, "inner"] = full_precision()
    faults: Float[Array, "choices"] = buffer()

    mode: Literal["recurrent", "other"] = implementation_option()

    def __init__(self, fault: str = "", *, embed: int = 6, inner: int = 4, key):
        in_key, out_key = jax.random.split(key)
        self.in_proj = Linear(embed, inner, in_=Dim("embed"), out=Dim("inner"), key=in_key)
        self.out = Linear(inner, embed, in_=Dim("inner"), out=Dim("embed"), key=out_key)
        self.decay, self.bias = jnp.linspace(-1.0, 1.0, inner), jnp.zeros(inner)
        self.faults, self.mode = jnp.asarray([float(fault == name) for name in FAULTS]), "recurrent"

    def init_state(self, batch, length, dtype=jnp.float32):
        return PlantedState(jnp.zeros((batch, self.in_proj.out_size)))

    def __call__(self, x, info: TokenInfo, state=None):
        fault = dict(zip(FAULTS, self.faults, strict=True))
        ids = jnp.ones(x.shape[:2], int) if info.segment_ids is None else info.segment_ids
        b = self.in_proj(x).astype(jnp.float32) + (1 - fault["unused"]) * self.bias
        is_next = jnp.pad(ids[:, 1:] == ids[:, :-1], [(0, 0), (0, 1)])[..., None]
        b += fault["later token"] * is_next * jnp.pad(b[:, 1:], [(0, 0), (0, 1), (0, 0)])
        a = jax.nn.sigmoid(self.decay) * jnp.ones_like(b)
        before = jnp.pad(ids[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
        is_kept = jnp.where(before > 0, fault["segment"], fault["padded segment"] * (before == 0))
        a = jnp.where((ids == before)[..., None], a, is_kept[..., None] * a)
        is_padding = (ids == 0)[..., None]
        if state is not None:
            assert info.positions is not None
            is_padding = (info.positions < 0)[..., None]
            is_masked = is_padding & (fault["padded position"] == 0)
            a = jnp.where(is_masked, 1.0, jax.nn.sigmoid(self.decay))
            b = jnp.where(is_masked, 0.0, b)
        start = jnp.zeros_like(b[:, 0]) if state is None else state.h
        start = start * (1 - fault["piece"] * (x.shape[1] > 1))

        def step(h, inputs):
            new = inputs[0] * h + inputs[1]
            return new, jnp.where(fault["decode"] * (state is not None) * (x.shape[1] == 1) > 0, h, new)

        last, h = scan(step, start, (a.swapaxes(0, 1), b.swapaxes(0, 1)))
        y = self.normalize(h.swapaxes(0, 1), fault["mesh"])
        y += fault["other row"] * y.mean(0)
        y = y * (1 + fault["mode"] * (self.mode == "other"))
        y = self.out(y.astype(x.dtype))
        y = jnp.where(is_padding & (fault["padding not finite"] > 0), jnp.nan, y)
        return y, None if state is None else PlantedState(last)

    def normalize(self, h, fault):
        squares = (h * h).sum(-1, keepdims=True)
        squares = fault * squares * num_shards(h, "inner") ** 2 + (1 - fault) * reduce(squares, over="inner")
        return h * jax.lax.rsqrt(squares / (h.shape[-1] * num_shards(h, "inner")) + 1e-6)


class WrongDtypes(AbstractMixer):
    """A mixer that returns float32 outputs of bfloat16 inputs, and a state of another dtype than it began with."""

    mixer: Planted

    def init_state(self, batch, length, dtype=jnp.float32):
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, x, info, state=None):
        y, state = self.mixer(x, info, state)
        return y.astype(jnp.float32), None if state is None else PlantedState(state.h.astype(jnp.float16))
