"""The implementations that the layers of a model get on a platform, and why the others are passed over."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.layers import TokenInfo
from zoo.models import Decoder, Hidden, Stack
from zoo.models.capture import refuse_edits
from zoo.models.decoder import AbstractBlock, AbstractStack, LayerStates, UnrolledStack
from zoo.models.loss import cross_entropy
from zoo.models.stack import describe_loop, swap_stack
from zoo.ops.implementations import Choice, Decision, observe_decisions
from zoo.ops.platform import Platform, normalize_platform, target_device, target_platform
from zoo.parallel import Mesh, all_gather
from zoo.parallel.imagined import is_imagined
from zoo.parallel.module import find_operations
from zoo.parallel.scope import calling_modules
from zoo.parallel.spmd import spmd


@dataclasses.dataclass(frozen=True)
class LayerImplementation:
    """The implementation that some layers of a kind get."""

    operation: str
    """`attention`, `gated linear attention`, `grouped matmul`, `loss`."""
    layer: str
    """Class of the layer; empty for the loss."""
    layers: tuple[int, ...]
    """Numbers of the layers; empty for modules outside the stack."""
    chosen: str
    is_auto: bool
    """False if the implementation was named."""
    choices: tuple[Choice, ...]
    """Verdict of `"auto"` on each implementation."""

    @property
    def reasons(self) -> dict[str, str]:
        """The reason why each other implementation was not chosen."""
        auto = next((choice.name for choice in self.choices if choice.is_chosen), None)
        reasons = {}
        for choice in self.choices:
            if choice.name == self.chosen:
                continue
            if choice.name == auto:
                reasons[choice.name] = f'{self.chosen} was named; "auto" would take this one'
            else:
                reasons[choice.name] = choice.reason or f"{auto} comes first"
        return reasons


@dataclasses.dataclass(frozen=True)
class ModelImplementations:
    """The table of `implementations`: `print` shows it."""

    platform: Platform
    batch: int
    seq_len: int
    decoding: bool
    loop: str
    """Loop over the layers, as `describe_loop` describes it; empty for a stack that is not a `Stack`."""
    rows: tuple[LayerImplementation, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the table as a JSON object."""
        rows = [
            {
                "operation": row.operation,
                "layer": row.layer,
                "layers": list(row.layers),
                "chosen": row.chosen,
                "auto": row.is_auto,
                "others": row.reasons,
                "possible": [choice.name for choice in row.choices if choice.is_possible],
            }
            for row in self.rows
        ]
        call = {"platform": self.platform, "batch": self.batch, "seq_len": self.seq_len, "decoding": self.decoding}
        return {**call, "loop": self.loop, "rows": rows}

    def __str__(self) -> str:
        if self.decoding:
            call = f"one token each after {self.seq_len:,}"
        else:
            call = f"{self.seq_len:,} tokens"
        lines = [f"implementations on {self.platform.upper()}, {self.batch} x {call}"]
        for row in self.rows:
            layers = f", layers {format_ranges(row.layers)}" if row.layers else ""
            where = f" ({row.layer}{layers})" if row.layer else ""
            named = "" if row.is_auto else ", by name"
            lines.append(f"{row.operation}{where}: {row.chosen}{named}")
            lines += [f"    not {name}: {reason}" for name, reason in row.reasons.items()]
        if self.loop:
            lines.append(f"loop over layers: {self.loop}")
        return "\n".join(lines)


def implementations(
    model: Decoder,
    *,
    batch: int = 1,
    seq_len: int = 1024,
    platform: Platform | None = None,
    mesh: Mesh | None = None,
    decoding: bool = False,
) -> ModelImplementations:
    """Return the implementation that each layer of a model would get, and the reasons against the others.

    Traces a call in shapes: nothing is computed, and `model` may hold shapes (`eqx.filter_eval_shape`). Of layers with
    equal structure only one is traced.

    - `batch`, `seq_len`: rows, and tokens of each.
    - `platform`: to compile for, by default the platform of `mesh`, or JAX's default backend.
    - `mesh`: sharding; the shapes are then the shapes of one device's shards. It may consist of `zoo.parallel.imagined`
      devices.
    - `decoding`: one token per row after a KV cache or state of `seq_len` tokens, instead of the loss of a batch.

    **Raises** `ValueError` as the model does for such a call: for an implementation that cannot compute it, with the
    reason. Also for `platform` together with `mesh`, and for edits (`zoo.patch`).
    """
    if platform is not None and mesh is not None:
        raise ValueError(f"a mesh has a platform: pass only the mesh, or platform={platform!r} without a mesh")
    refuse_edits(model, "implementations")
    recorder = _Recorder()

    def call(model: Decoder, tokens: jax.Array) -> jax.Array:
        model = swap_stack(model, lambda stack: _DistinctLayers(stack, recorder))
        if not decoding:
            cross_entropy(model, {"tokens": tokens, "targets": tokens})
            return tokens
        states = model.init_state(len(tokens), seq_len)
        one = all_gather(tokens, "seq", axis=1)[:, :1]  # which a step has on every device
        hidden, _ = model.hidden(one, TokenInfo(jnp.full((len(tokens), 1), seq_len - 1)), states)
        model.logits(hidden.x)
        return tokens

    tokens = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32)
    run = call if mesh is None else spmd(call, mesh, out="batch seq")
    device = None
    if mesh is not None and is_imagined(mesh.devices.devices.flat[0]):
        device = mesh.devices.devices.flat[0]
    with (
        target_platform(platform or target_platform.value),
        target_device(device),
        observe_decisions(recorder.record),
    ):
        eqx.filter_eval_shape(run, model, tokens)
    target = normalize_platform(platform or target_platform.value or jax.default_backend())
    if mesh is not None:
        target = mesh.platform
    with target_platform(target):
        loop = describe_loop(model.stack) if isinstance(model.stack, Stack) else ""
    return ModelImplementations(target, batch, seq_len, decoding, loop, recorder.make_rows())


class _Recorder:
    """Records the decisions that tracing makes, and the layers that it makes them for."""

    def __init__(self):
        self.layers: tuple[int, ...] = ()
        self.found: dict[tuple[Any, ...], list[int]] = {}

    def record(self, decision: Decision) -> None:
        """Record a decision for the layers that are being traced."""
        operation = decision.operation
        name = operation.name
        # The layer that holds the option: a grouped matmul is called by the experts' linears.
        holders = [x for x in calling_modules() if operation in [found for _, found in find_operations(x)]]
        layers = holders or calling_modules()
        layer = type(layers[-1]).__name__ if layers else ""
        key = (name, layer, decision.chosen, decision.is_auto, decision.choices)
        self.found.setdefault(key, []).extend(self.layers)

    @contextlib.contextmanager
    def tracing(self, layers: tuple[int, ...]) -> Iterator[None]:
        """Attribute the decisions made inside to these layers."""
        self.layers = layers
        try:
            yield
        finally:
            self.layers = ()

    def make_rows(self) -> tuple[LayerImplementation, ...]:
        """Return one row per kind of layer and decision, in the order of the layers."""
        return tuple(
            LayerImplementation(name, layer, tuple(sorted(set(layers))), chosen, is_auto, choices)
            for (name, layer, chosen, is_auto, choices), layers in self.found.items()
        )


class _DistinctLayers(AbstractStack):
    """One layer of each structure, traced for all layers that have it."""

    stack: AbstractStack

    recorder: _Recorder = eqx.field(static=True)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        return self.stack.init_state(batch, length, dtype)

    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        blocks = _list_blocks(self.stack)
        groups: dict[Any, list[int]] = {}
        for number, block in enumerate(blocks):
            leaves, structure = jax.tree.flatten(block)
            groups.setdefault((structure, tuple((x.shape, str(x.dtype)) for x in leaves)), []).append(number)
        for numbers in groups.values():
            first = numbers[0]
            state = None if states is None else states[first : first + 1]
            with self.recorder.tracing(tuple(numbers)):
                hidden, _ = UnrolledStack((blocks[first],))(hidden, info, state)
        return hidden, states


def _list_blocks(stack: AbstractStack) -> list[AbstractBlock]:
    """Return the block of each layer. **Raises** `TypeError` for a stack that does not list them."""
    if isinstance(stack, Stack | UnrolledStack):
        return list(stack.iter_blocks())
    raise TypeError(f"implementations are listed of a Stack or an UnrolledStack, not of a {type(stack).__name__}")


def format_ranges(numbers: Sequence[int]) -> str:
    """Abbreviate a set of numbers: `0-31`, `0-30 by 2`, `0-4, 6-10`, `10 of 0-59`."""
    ordered = sorted(set(numbers))
    steps = {after - before for before, after in itertools.pairwise(ordered)}
    if len(steps) <= 1:
        if not steps:
            return f"{ordered[0]}"
        step = steps.pop()
        by = f" by {step}" if step > 1 else ""
        return f"{ordered[0]}-{ordered[-1]}{by}"
    parts = []
    start = ordered[0]
    for before, after in zip(ordered, [*ordered[1:], -1], strict=True):
        if after != before + 1:
            part = f"{start}-{before}" if before > start else f"{before}"
            parts.append(part)
            start = after
    if len(parts) <= 3:
        return ", ".join(parts)
    return f"{len(ordered)} of {ordered[0]}-{ordered[-1]}"
