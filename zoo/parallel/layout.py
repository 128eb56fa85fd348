"""The layout: one table from dims to the mesh axes that shard them. Every PartitionSpec is derived from it.

Like Levanter's axis mappings it has one part per use of an array: `compute`, `parameters` at rest, and `optimizer` for
gradients and optimizer state. ZeRO-1, ZeRO-2, ZeRO-3 (FSDP) and Megatron tensor parallelism are entries of the table.
"""

import dataclasses
from collections.abc import Mapping

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, outermost first: axes that communicate most are innermost, over the nearest devices."""

_COMPUTE: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "seq": ("context",),
    "tokens": ("context",),
    "key_seq": ("context",),
    "slots": ("context",),
    "layers": ("pipe",),
    "experts": ("expert",),
    "vocab": ("pipe", "tensor"),
    **dict.fromkeys(("heads", "kv_heads", "groups", "mlp", "inner", "grams"), ("tensor",)),
    **dict.fromkeys(("embed", "head_dim", "state", "latent", "conv", "positions", "classes", "chunk", "rank"), ()),
    **dict.fromkeys(("registers", "token_types", "distances", "channels", "patch_height", "patch_width", "blocks"), ()),
    **dict.fromkeys(("height", "width", "images", "patches", "pixels"), ()),
    **dict.fromkeys(
        ("in", "out", "features", "prompt", "new", "text", "stops", "choices", "top", "key_dim", "value_dim"), ()
    ),
    **dict.fromkeys(
        ("left_out", "left_in", "right_out", "right_in", "pairs", "parts", "ends", "rounds", "history"), ()
    ),
    **dict.fromkeys(("text", "stops", "source"), ()),
}
_PARAMETERS: dict[str, tuple[str, ...]] = {"embed": ("fsdp",)}

CONTEXT_FORMS = ("ring", "heads", "gathered")
"""Forms of attention within a sharded sequence: keys travel around the devices, heads are exchanged for tokens, or keys
are all-gathered."""

EXPERT_FORMS = ("auto", "gathered", "boxes", "ragged")
"""Ways to move tokens to experts on other devices: all-gather the tokens, or exchange them in boxes of fixed size or
without padding. "auto" takes whichever of the first two sends fewer bytes."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mapping from dim to the mesh axes that shard it, for each use of an array.

    - `compute`: sharding during compute. `heads` over `tensor` is Megatron tensor parallelism (arXiv:1909.08053).
    - `parameters`: additional sharding of parameters at rest. `gather` all-gathers them just before use: ZeRO-3
      (arXiv:1910.02054, section 5.3).
    - `gradients`: additional sharding of gradients in the backward pass, and of their sums over micro-batches: the
      gradients of a block are reduce-scattered as soon as they are complete (ZeRO-2). The same as `parameters` unless
      given.
    - `optimizer`: additional sharding of optimizer state, and of the gradients that `zoo.value_and_grad` returns; the
      same as `gradients` unless given.
    - `context`: form of attention where `seq` is sharded, one of `CONTEXT_FORMS`: `zoo.layers.attention.context`.
    - `expert`: way to move tokens to their experts where the experts are sharded, one of `EXPERT_FORMS`:
      `zoo.layers.moe.exchange`. Experts with a capacity take an all-to-all of their slots.

    - `rounds`: number of parts of the layers that each stage of a pipeline has. A micro-batch goes around as many
      times: the interleaved schedule. `zoo.place` deals the layers out.

    `Layout()` is the default table; `Layout().with_dims(sensors=("tensor",))` adds a dim.

    **Raises** `ValueError` for an unknown axis or form, for `rounds` below 1, for a dim that `compute` lacks, if
    `gradients` does not contain `parameters` or `optimizer` does not contain `gradients`, if an axis shards gradients
    but no tokens, if `tokens` are sharded over other axes than `seq`, with or without `tensor`, and if `slots` are over
    other axes than `context`.
    """

    # Excluded from the hash, which one trace computes a hundred thousand times; == compares the tables.
    compute: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=_COMPUTE.copy, hash=False)
    parameters: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=_PARAMETERS.copy, hash=False)
    optimizer: Mapping[str, tuple[str, ...]] | None = dataclasses.field(default=None, hash=False)
    gradients: Mapping[str, tuple[str, ...]] | None = dataclasses.field(default=None, hash=False)
    context: str = "ring"
    expert: str = "auto"
    rounds: int = 1

    def __post_init__(self):
        if self.context not in CONTEXT_FORMS:
            raise ValueError(
                f"attention over the context axis is one of {', '.join(CONTEXT_FORMS)}, not {self.context!r}"
            )
        if self.expert not in EXPERT_FORMS:
            raise ValueError(f"tokens go to their experts by one of {', '.join(EXPERT_FORMS)}, not {self.expert!r}")
        if self.rounds < 1:
            raise ValueError(f"a pipeline has one round or more, not rounds={self.rounds}")
        for row in (self.compute, self.parameters, self.gradients or {}, self.optimizer or {}):
            for dim, axes in row.items():
                if unknown := [axis for axis in axes if axis not in AXES]:
                    raise ValueError(f"the layout shards {dim!r} over {unknown[0]!r}, but the mesh axes are {AXES}")
                if dim not in self.compute:
                    raise ValueError(f"the layout shards {dim!r} at rest, a dim that its table `compute` does not have")
        gradients = self.parameters if self.gradients is None else self.gradients
        optimizer = gradients if self.optimizer is None else self.optimizer
        if any(gradients.get(dim) != axes for dim, axes in self.parameters.items()):
            raise ValueError(
                "parameters that are sharded at rest need sharded gradients: let `gradients` contain `parameters`"
            )
        if any(optimizer.get(dim) != axes for dim, axes in gradients.items()):
            raise ValueError(
                "parameters or gradients that are sharded need sharded optimizer state: let `optimizer` contain "
                "`parameters` and `gradients`"
            )
        self._check_gradient_axes()
        seq = self.compute.get("seq", ())
        tokens = self.compute.get("tokens", seq)
        if tokens not in (seq, (*seq, "tensor")):
            raise ValueError(
                f"`tokens` of hidden states are sharded over {seq}, as `seq` is, or over {(*seq, 'tensor')}, not over "
                f"{tokens}"
            )
        if (slots := self.compute.get("slots", ())) not in ((), ("context",)):
            raise ValueError(f"`slots` of KV caches are sharded over ('context',) or not at all, not over {slots}")

    def _check_gradient_axes(self) -> None:
        token_axes = {*self.compute.get("batch", ()), *self.compute.get("seq", ())}
        for dim, axes in (self.gradients or {}).items():
            if others := [axis for axis in axes if axis not in token_axes]:
                raise ValueError(
                    f"`gradients` shards {dim!r} over {others[0]!r}, which shards no tokens: its devices have equal "
                    "gradients, not parts of a sum"
                )

    def with_dims(self, **rows: tuple[str, ...]) -> "Layout":
        """Return the layout with dims added to `compute`, or with other axes for existing ones."""
        return dataclasses.replace(self, compute={**self.compute, **rows})

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes that shard a dim during compute. **Raises** `ValueError` for an unknown dim."""
        if dim.isdigit():
            return ()
        if dim not in self.compute:
            raise ValueError(
                f"the layout has no dim {dim!r}. It knows {', '.join(sorted(self.compute))}; "
                f"Layout().with_dims({dim}=()) adds one that is replicated."
            )
        return self.compute[dim]


ZERO1 = Layout(parameters={}, optimizer=_PARAMETERS)
"""ZeRO stage 1 (arXiv:1910.02054, section 5): optimizer state sharded over `fsdp`, parameters and sums of gradients
replicated. Each gradient is reduce-scattered once a step."""
ZERO2 = Layout(parameters={}, gradients=_PARAMETERS)
"""ZeRO stage 2: gradients and their sums over micro-batches sharded too. The gradients of a block are reduce-scattered
in the backward pass of every micro-batch."""
ZERO3 = Layout()
"""ZeRO stage 3, which is FSDP and the default: parameters sharded as well, and all-gathered block by block."""
SEQUENCE = Layout().with_dims(tokens=("context", "tensor"))
"""Sequence parallelism inside tensor parallelism (arXiv:2205.05198, section 4.2.2): the hidden states between sublayers
are sharded along their tokens by `tensor`. See `zoo.parallel.tokens`."""
