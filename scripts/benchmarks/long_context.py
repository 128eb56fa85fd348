"""Long contexts: attention alone, prefill and training steps, from 2,048 to 32,768 tokens in a row."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax

import zoo
from zoo.ops.attention import AttentionMask, attention

from .entrants import Entrants
from .ours import Sizes, Training

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
_GRADIENT = 3.5
"""FLOPs of attention with its gradient, relative to those without: seven products for two."""


class Attention:
    """Causal grouped-query attention of one row in float32, alone or with the gradient of its three inputs."""

    def __init__(self, seq: int, *, gradient: bool, implementation: str = "auto"):
        keys = jax.random.split(jax.random.key(0), 4)
        query, cotangent = (jax.random.normal(key, (1, seq, HEADS, HEAD_DIM)) for key in keys[:2])
        key, value = (jax.random.normal(key, (1, seq, KV_HEADS, HEAD_DIM)) for key in keys[2:])
        attend = functools.partial(attention, attention_mask=AttentionMask(True), implementation=implementation)
        total = lambda query, key, value: (attend(query, key, value) * cotangent).sum()
        self.run = jax.jit(jax.grad(total, (0, 1, 2)) if gradient else lambda *qkv: attend(*qkv))
        self.arguments = query, key, value

    def __call__(self) -> None:
        jax.block_until_ready(self.run(*self.arguments))

    def temporaries(self) -> int | None:
        """Count the bytes of the program's temporaries."""
        memory = zoo.inspect.compiled(self.run, *self.arguments).memory
        return memory.temporaries if memory else None


class Prefill:
    """Greedy generation of one token after a prompt of `seq` tokens, which fills the KV caches."""

    def __init__(self, sizes: Sizes, seq: int):
        self.model = jax.block_until_ready(eqx.filter_jit(sizes.make)(jax.random.key(0)))
        self.tokens = jax.random.randint(jax.random.key(1), (1, seq), 0, sizes.vocab)

    def __call__(self) -> None:
        jax.block_until_ready(zoo.generate(self.model, self.tokens, max_new_tokens=1))


def count_attention_flops(seq: int, *, gradient: bool) -> float:
    """Count the FLOPs of the causal half of attention's products."""
    return 2 * seq**2 * HEADS * HEAD_DIM * (_GRADIENT if gradient else 1)


def count_prefill_flops(sizes: Sizes, seq: int) -> float:
    """Count the FLOPs of a prompt's matrices and of the causal half of its attention, without the head."""
    matrices = sizes.layers * sizes.embed * (4 * sizes.embed + 3 * sizes.mlp)
    return 2 * seq * matrices + 2 * seq**2 * sizes.layers * sizes.embed


def attentions(vs: str, seq: int) -> Entrants:
    """Return the entrants of attention over `seq` tokens, with and without its gradient."""
    runs, facts = {}, {}
    for gradient in (False, True):
        what = f"{seq:,} tokens{', with gradient' if gradient else ''}"
        row = {"dtype": "float32", "tokens": seq, "flops": count_attention_flops(seq, gradient=gradient)}
        runs[f"zoo, {what}"] = run = Attention(seq, gradient=gradient)
        facts[f"zoo, {what}"] = {**row, "temporaries": run.temporaries(), "rivals": (f"torch, {what}",)}
        if vs == "torch":
            from . import pytorch

            rival = pytorch.Attention(seq, HEADS, KV_HEADS, HEAD_DIM, gradient=gradient)
            runs[f"torch, {what}"], facts[f"torch, {what}"] = rival, row
    return runs, facts


def prefills(vs: str, seq: int) -> Entrants:
    """Return the entrants of a prompt of `seq` tokens."""
    sizes, name, rival = Sizes(), f"zoo, {seq:,} tokens", f"transformers, {seq:,} tokens"
    row = {"dtype": "float32", "tokens": seq, "flops": count_prefill_flops(sizes, seq)}
    runs: dict[str, Any] = {name: Prefill(sizes, seq)}
    facts = {name: {**row, "rivals": (rival,)}}
    if vs == "torch":
        from . import pytorch

        runs[rival], facts[rival] = pytorch.Prefill(sizes, seq), row
    return runs, facts


def steps(vs: str, seq: int, remat: Any) -> Entrants:
    """Return the entrants of a training step on one row of `seq` tokens."""
    sizes = dataclasses.replace(Sizes(), batch=1, seq=seq)
    row = {"dtype": "float32", "tokens": seq, "flops": sizes.model_flops}
    name = f"zoo, 1 x {seq:,} tokens, remat={remat}"
    runs: dict[str, Any] = {name: Training(sizes, "float32", remat)}
    facts: dict[str, Any] = {name: row | runs[name].executed()}
    if vs == "torch":
        from . import pytorch

        for compiled in (False, True):
            rival = f"torch, 1 x {seq:,} tokens, {'compiled' if compiled else 'eager'}"
            runs[rival], facts[rival] = pytorch.Training(sizes, "float32", compiled=compiled), row
        facts[name]["rivals"] = tuple(rival for rival in facts if rival != name)
    return runs, facts
