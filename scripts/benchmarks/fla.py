"""Entrants of flash-linear-attention: recurrences by its Triton kernels, on the inputs of ours.

Needs torch, a GPU, and the package fla. Inputs are drawn by JAX on the CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import fla.ops.delta_rule  # pyright: ignore[reportMissingImports]
import fla.ops.gated_delta_rule  # pyright: ignore[reportMissingImports]
import fla.ops.gla  # pyright: ignore[reportMissingImports]
import fla.ops.kda  # pyright: ignore[reportMissingImports]
import fla.ops.linear_attn  # pyright: ignore[reportMissingImports]
import fla.ops.retention  # pyright: ignore[reportMissingImports]
import fla.ops.rwkv7  # pyright: ignore[reportMissingImports]
import fla.ops.simple_gla  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp
import torch  # pyright: ignore[reportMissingImports]

from .recurrences import OPERATIONS, Draw


def _expand_mamba2(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any) -> tuple[Any, ...]:
    """Return queries, keys, values and decays: fla has Mamba-2 as gated linear attention with a head's decay."""
    query, key = (jnp.broadcast_to(each, (*x.shape[:3], each.shape[-1])) for each in (C, B))
    return query, key, (x * dt[..., None]).astype(x.dtype), dt * A


KERNELS: Mapping[str, tuple[Callable, str]] = {
    "linear_attention": (lambda **qkv: fla.ops.linear_attn.chunk_linear_attn(**qkv, normalize=False), "q k v"),
    "retention": (fla.ops.retention.chunk_retention, "q k v"),
    "gla": (fla.ops.gla.chunk_gla, "q k v g"),
    "hgrn2": (fla.ops.gla.chunk_gla, "q k v g"),
    "delta_rule": (fla.ops.delta_rule.chunk_delta_rule, "q k v beta"),
    "gated_delta_rule": (fla.ops.gated_delta_rule.chunk_gated_delta_rule, "q k v beta g"),
    "kda": (fla.ops.kda.chunk_kda, "q k v beta g"),
    "rwkv7": (fla.ops.rwkv7.chunk_rwkv7, "r k v w a b"),
    "ssd": (fla.ops.simple_gla.chunk_simple_gla, "q k v g"),
}
"""Kernels by our names, and their names of our inputs in order. There is none for the mLSTM."""


class Operation:
    """Rows through an operation, with or without the gradient of its inputs; a call runs it `calls` times."""

    def __init__(self, name: str, seq: int, *, gradient: bool, calls: int = 1, **sizes: Any):
        self.kernel, names = KERNELS[name]
        drawn = OPERATIONS[name][1](Draw(seq, **sizes))
        if name == "ssd":
            drawn = _expand_mamba2(*drawn)
        tensors = [torch.from_dlpack(x).cuda().requires_grad_(gradient) for x in drawn]
        self.inputs = dict(zip(names.split(), tensors, strict=True))
        self.gradient, self.calls = gradient, calls
        self.weights = torch.randn_like(self.inputs["v"])

    def __call__(self) -> None:
        with torch.set_grad_enabled(self.gradient):
            for _ in range(self.calls):
                output, _ = self.kernel(**self.inputs)
                if self.gradient:
                    torch.autograd.grad(output, list(self.inputs.values()), self.weights)
        torch.cuda.synchronize()
