"""Recurrences: single operations, training steps of recurrent models, and their decoding."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

import zoo
from zoo.layers import GatedDeltaNet, Mamba, Mamba2, TokenInfo
from zoo.models.stack import swap_stack
from zoo.ops.recurrence.decoupled_delta import comba, gdn2
from zoo.ops.recurrence.delta_rule import delta_rule, gated_delta_product, gated_delta_rule, kda
from zoo.ops.recurrence.hgrn import hgrn
from zoo.ops.recurrence.linear_attention import gla, linear_attention, retention, simple_gla
from zoo.ops.recurrence.mamba import selective_scan
from zoo.ops.recurrence.mamba2 import ssd
from zoo.ops.recurrence.mesa_net import mesa_net
from zoo.ops.recurrence.mlstm import mlstm
from zoo.ops.recurrence.rg_lru import rg_lru
from zoo.ops.recurrence.rwkv4 import rwkv4
from zoo.ops.recurrence.rwkv6 import rwkv6
from zoo.ops.recurrence.rwkv7 import rwkv7

from .entrants import name_loop
from .ours import Kernel, Sizes, Training

HEADS = (4, 64)
"""Number of heads, and the size of their queries, keys and values."""
CHANNELS = 512
"""Channels of diagonal recurrences and of the selective scan."""
STATE = 16
"""State size per channel of the selective scan."""
POSITIONS = (128, 8192)
"""Prompt lengths after which decoding continues."""


class Draw:
    """Random inputs of an operation for `batch` rows of `seq` tokens, each from the next key. Gates and decays are
    float32, all else has the `dtype`."""

    def __init__(self, seq: int, *, batch: int = 1, sizes: tuple[int, int] | None = None, dtype: str = "float32"):
        self.seq, self.batch, self.dtype = seq, batch, dtype
        self.sizes = sizes or HEADS
        self.keys = iter(jax.random.split(jax.random.key(0), 8))

    def shared(self, *shape: int) -> Array:
        """Draw an array shared by all tokens."""
        return jax.random.normal(next(self.keys), shape)

    def rows(self, *dims: int, steps: int = 1) -> Array:
        """Draw `steps` rows of `dims` per token."""
        return self.shared(self.batch, self.seq * steps, *dims)

    def heads(self, *, steps: int = 1) -> Array:
        return self.rows(*self.sizes, steps=steps).astype(self.dtype)

    def units(self, *, steps: int = 1) -> Array:
        """Draw vectors of unit length per head."""
        x = self.rows(*self.sizes, steps=steps)
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(self.dtype)

    def decays(self, *dims: int) -> Array:
        """Draw log decays."""
        return jax.nn.log_sigmoid(self.rows(*dims) + 3)

    def head_decays(self) -> Array:
        return self.decays(self.sizes[0])

    def rates(self, *, steps: int = 1) -> Array:
        """Draw one number in (0, 1) per head."""
        return jax.nn.sigmoid(self.rows(self.sizes[0], steps=steps)).astype(self.dtype)

    def qkv(self) -> tuple[Array, ...]:
        """Draw queries, keys and values."""
        return self.heads(), self.heads(), self.heads()

    def delta_rule_inputs(self, *, steps: int = 1) -> tuple[Array, ...]:
        """Draw queries, keys, values and rates of a delta rule."""
        return self.heads(), self.units(steps=steps), self.heads(steps=steps), self.rates(steps=steps)

    def mamba2_inputs(self) -> tuple[Array, ...]:
        """Draw x, dt, A, B, C and D of Mamba-2, with one group of B and C."""
        heads, dim = self.sizes
        x, dt, A = self.heads(), jax.nn.softplus(self.rows(heads) - 3), -jnp.exp(self.shared(heads))
        B, C = (self.rows(1, dim).astype(self.dtype) for _ in range(2))
        return x, dt, A, B, C, self.shared(heads)

    def mamba_inputs(self) -> tuple[Array, ...]:
        """Draw x, dt, A, B, C and D of Mamba."""
        x, dt, A = self.rows(CHANNELS), jax.nn.softplus(self.rows(CHANNELS) - 3), -jnp.exp(self.shared(CHANNELS, STATE))
        return x, dt, A, self.rows(STATE), self.rows(STATE), self.shared(CHANNELS)

    def hgrn2_inputs(self) -> tuple[Array, ...]:
        """Draw queries, keys, values and decays of HGRN2, where a key is one minus the decay."""
        decays = self.decays(*self.sizes)
        return self.heads(), -jnp.expm1(decays).astype(self.dtype), self.heads(), decays

    def rwkv7_inputs(self) -> tuple[Array, ...]:
        """Draw queries, keys, values, decays, reads and writes of RWKV-7."""
        removed = self.units()
        return *self.qkv(), self.decays(*self.sizes), -removed, removed * self.rates()[..., None]

    def gdn2_inputs(self) -> tuple[Array, ...]:
        """Draw queries, keys, values, decays, and erase and write gates."""
        gates = (jax.nn.sigmoid(self.heads()) for _ in range(2))
        return self.heads(), self.units(), self.heads(), self.decays(*self.sizes), *gates

    def comba_inputs(self) -> tuple[Array, ...]:
        """Draw queries, keys, values, read keys, rates and decays of Comba."""
        query, key, value, rate = self.delta_rule_inputs()
        return query, key, value, 0.7 * key, rate, self.head_decays()

    def mesa_net_inputs(self) -> tuple[Array, ...]:
        """Draw queries, keys, values, decays and rates; lambda is 1."""
        query, key, value, rate = self.delta_rule_inputs()
        return query, key, value, self.head_decays(), rate, jnp.ones(self.sizes)

    def mlstm_inputs(self) -> tuple[Array, ...]:
        """Draw queries, keys, values, and input and forget gates."""
        return *self.qkv(), self.rows(self.sizes[0]), self.rows(self.sizes[0]) + 3

    def channels(self, count: int) -> tuple[Array, ...]:
        return tuple(self.rows(CHANNELS) for _ in range(count))


OPERATIONS: Mapping[str, tuple[Callable, Callable[[Draw], tuple[Array, ...]]]] = {
    "linear_attention": (linear_attention, Draw.qkv),
    "retention": (retention, Draw.qkv),
    "simple_gla": (simple_gla, lambda draw: (*draw.qkv(), draw.head_decays())),
    "gla": (gla, lambda draw: (*draw.qkv(), draw.decays(*draw.sizes))),
    "hgrn2": (gla, Draw.hgrn2_inputs),
    "rwkv6": (rwkv6, lambda draw: (*draw.qkv(), draw.decays(*draw.sizes), draw.shared(*draw.sizes))),
    "rwkv7": (rwkv7, Draw.rwkv7_inputs),
    "ssd": (ssd, Draw.mamba2_inputs),
    "mlstm": (mlstm, Draw.mlstm_inputs),
    "delta_rule": (delta_rule, Draw.delta_rule_inputs),
    "gated_delta_rule": (gated_delta_rule, lambda draw: (*draw.delta_rule_inputs(), draw.head_decays())),
    "kda": (kda, lambda draw: (*draw.delta_rule_inputs(), draw.decays(*draw.sizes))),
    "gated_delta_product": (
        gated_delta_product,
        lambda draw: (*draw.delta_rule_inputs(steps=2), draw.head_decays()),
    ),
    "gdn2": (gdn2, Draw.gdn2_inputs),
    "comba": (comba, Draw.comba_inputs),
    "mesa_net": (mesa_net, Draw.mesa_net_inputs),
    "selective_scan": (selective_scan, Draw.mamba_inputs),
    "hgrn": (hgrn, lambda draw: (*draw.channels(1), draw.decays(CHANNELS))),
    "rg_lru": (rg_lru, lambda draw: (*draw.channels(3), draw.shared(CHANNELS))),
    "rwkv4": (rwkv4, lambda draw: (*draw.channels(2), draw.shared(CHANNELS), draw.shared(CHANNELS))),
}
"""Operations and their inputs."""
ELEMENTWISE = ("selective_scan", "hgrn", "rg_lru", "rwkv4")
"""Memory-bound operations, without matrix products."""


class Operation(Kernel):
    """Run rows through an operation, with or without the gradient of all its inputs; `sizes` go to `Draw`."""

    def __init__(self, name: str, seq: int, *, gradient: bool, calls: int = 1, device: Any = None, **sizes: Any):
        operation, draw_inputs = OPERATIONS[name]
        draw = lambda: draw_inputs(Draw(seq, **sizes))
        super().__init__(operation, draw, gradient=gradient, calls=calls, device=device)
        self.name, self.seq = name, seq

    def facts(self) -> dict[str, Any]:
        """Return FLOPs and bytes of the compiled program, and the bytes of inputs and outputs, a lower bound."""
        program = self.program()
        found = {
            "dtype": "float32",
            "tokens": self.seq,
            "bytes_passed": self.bytes_passed(),
            "bytes_moved": program.bytes_moved,
            "temporaries": program.memory.temporaries if program.memory else None,
        }
        return found if self.name in ELEMENTWISE else found | {"flops": program.flops.total}


KINDS: Mapping[str, Callable[[int], Callable]] = {
    "Mamba": lambda width: partial(Mamba, inner=2 * width, state_dim=16),
    "Mamba-2": lambda width: partial(Mamba2, heads=width // 32, head_dim=64, state_dim=128),
    "Gated DeltaNet": lambda width: partial(GatedDeltaNet, heads=width // 64, key_dim=64, value_dim=128),
}
"""Mixers of a model of a given width, each a layer without a feed-forward part, as in Mamba."""


@dataclasses.dataclass(frozen=True)
class Recurrent(Sizes):
    """A model whose layers are mixers of one kind, without feed-forward layers."""

    layers: int = 6
    kind: str = "Mamba-2"

    def make(self, key: Any, **options: Any) -> zoo.models.Decoder:
        """Build the model, with tied embeddings."""
        sizes = {"vocab": self.vocab, "embed": self.embed, "layers": self.layers}
        return zoo.models.Hybrid(**sizes, pattern=[KINDS[self.kind](self.embed)], **options, key=key)


class Continuing:
    """Greedy decoding after `position` tokens; a call generates `NEW` tokens, always from the same state."""

    NEW = 64

    def __init__(self, sizes: Sizes, position: int):
        model = jax.block_until_ready(eqx.filter_jit(sizes.make)(jax.random.key(0)))
        model = swap_stack(model, zoo.models.Stack.unstack)

        @eqx.filter_jit
        def prefill(model, tokens):
            positions = jnp.broadcast_to(jnp.arange(position), tokens.shape)
            return model.hidden(tokens, TokenInfo(positions), model.init_state(1, position + self.NEW))[1]

        @eqx.filter_jit
        def decode(model, token, states):
            def step(i, carry):
                token, states = carry
                hidden, states = model.hidden(token, TokenInfo(jnp.full((1, 1), position + i)), states)
                return model.logits(hidden.x).argmax(-1).astype(token.dtype), states

            return jax.lax.fori_loop(0, self.NEW, step, (token, states))[0]

        tokens = jax.random.randint(jax.random.key(1), (1, position), 0, sizes.vocab)
        self.model, self.token, self.decode = model, tokens[:, -1:], decode
        self.states = jax.block_until_ready(prefill(model, tokens))

    def __call__(self) -> None:
        jax.block_until_ready(self.decode(self.model, self.token, self.states))

    def bytes_remembered(self) -> int:
        """Count the bytes of the decoding states."""
        return sum(x.nbytes for x in jax.tree.leaves(self.states))


def single_operations(
    operations: Sequence[str], lengths: Sequence[int]
) -> tuple[dict[str, Callable], dict[str, dict[str, Any]]]:
    """Return the entrants of each recurrence at each length, with and without its gradient."""
    if unknown := set(operations) - set(OPERATIONS):
        sys.exit(f"bench.py: no operation {min(unknown)!r}; there are {', '.join(OPERATIONS)}")
    entrants, facts = {}, {}
    for name in operations:
        for gradient in (False, True):
            for seq in lengths:
                title = f"{name}, {seq:,} tokens{', with gradient' if gradient else ''}"
                entrants[title] = run = Operation(name, seq, gradient=gradient)
                facts[title] = run.facts()
    return entrants, facts


def steps(
    vs: str, remat: Sequence[Any], loops: Sequence[Any] = ("auto",), *, slow: bool = False
) -> tuple[dict[str, Callable], dict[str, dict[str, Any]]]:
    """Return the entrants of training steps, one recurrent mixer per model."""
    entrants, facts = {}, {}
    for kind in KINDS:
        sizes = Recurrent(kind=kind)
        for policy, loop in itertools.product(remat, loops):
            name = f"zoo {kind}, remat={policy}{name_loop(loop)}"
            entrants[name] = run = Training(sizes, "float32", policy, loop=loop)
            facts[name] = {"tokens": sizes.batch * sizes.seq, **run.executed()}
        if vs == "torch":
            from . import pytorch

            if slow or kind not in pytorch.SLOW:
                entrants[f"transformers {kind}"] = pytorch.Training(sizes, "float32", compiled=False)
                facts[f"transformers {kind}"] = {"tokens": sizes.batch * sizes.seq}
                for name in facts:
                    if name.startswith(f"zoo {kind},"):
                        facts[name]["rivals"] = (f"transformers {kind}",)
    return entrants, facts


def decoding_steps() -> tuple[dict[str, Callable], dict[str, dict[str, Any]]]:
    """Return the entrants of decoding after short and long prompts: a recurrent model, and a Transformer."""
    models = {"Gated DeltaNet": Recurrent(kind="Gated DeltaNet"), "Transformer": Sizes(layers=6)}
    entrants, facts = {}, {}
    for kind, sizes in models.items():
        for position in POSITIONS:
            name = f"{kind}, after {position:,} tokens"
            entrants[name] = run = Continuing(sizes, position)
            facts[name] = {"tokens": run.NEW, "bytes_remembered": run.bytes_remembered()}
    return entrants, facts
