"""A step, compiled and not run: what it costs, and what XLA made of it."""

import dataclasses
import inspect
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding

from . import hlo
from .collectives import Collective, sum_collectives
from .operations import Flops, count_flops
from .report import format_program

_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class DonationError(ValueError):
    """Donated memory that no result took over."""


@dataclasses.dataclass(frozen=True)
class CompileTimes:
    """What the first call of a step waits for, besides running."""

    trace: float
    """Python, once: from the function to a jaxpr. 0 or so where the step has run before."""
    lower: float
    """From the jaxpr to what XLA reads."""
    compile: float
    cached: bool
    """Whether the program came out of the persistent compilation cache, which is why `compile` is short."""


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """Bytes on one device while the step runs."""

    arguments: int
    outputs: int
    aliased: int
    """Part of both: the outputs that take over the memory of arguments."""
    temporaries: int
    code: int
    peak: int | None
    """The most that lives at a time, by XLA's own account, which on a CPU leaves temporaries out; None where the
    backend does not tell."""

    @property
    def total(self) -> int:
        """What has to fit, were every temporary to live at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Donation:
    """An array that a step was given to overwrite."""

    name: str
    """As the step calls it: `model.stack.segments.0.blocks.0.mixer.query.weight`."""
    bytes: int
    """On one device."""
    aliased: bool
    """Whether an output took over its memory. Where none did, both are held at once."""
    used: bool
    """Whether the step reads it at all."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What `compiled` found out. `print(program)` shows it in a dozen lines, `program.as_dict()` is for JSON."""

    name: str
    mesh: dict[str, int]
    """Axes of more than one device, and their sizes."""
    devices: int
    seconds: CompileTimes
    flops: Flops
    """Of matrix products and convolutions, of all devices together."""
    bytes_moved: int
    """On one device, to and from main memory, at most: as if no cache held anything."""
    endless: tuple[str, ...]
    """Loops of the compiled program whose length it does not tell: what they move and send is counted once."""
    memory: MemoryStats | None
    """None where the backend does not tell."""
    collectives: tuple[Collective, ...]
    donations: tuple[Donation, ...]
    text: str = dataclasses.field(repr=False)
    """The optimized HLO."""

    @property
    def failed_donations(self) -> tuple[Donation, ...]:
        return tuple(one for one in self.donations if not one.aliased)

    def require_donations(self) -> None:
        """**Raises** `DonationError`, with the names, where donated memory was not taken over.

        JAX warns of that on some backends and Equinox hides the warning; what it costs is memory, and a copy.
        """
        if failed := sorted(self.failed_donations, key=lambda one: -one.bytes):
            lines = [f"  {one.name}: {one.bytes:,} bytes{'' if one.used else ', never read'}" for one in failed[:20]]
            lines += [f"  and {len(failed) - 20} more"] if len(failed) > 20 else []
            raise DonationError(
                f"{self.name} was given {len(failed)} arrays to overwrite that no output took over. Each needs an "
                "output of its own shape, dtype and sharding: return one, or do not donate it:\n" + "\n".join(lines)
            )

    def as_dict(self) -> dict[str, Any]:
        """All but the text, in plain values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "text"}

    def __str__(self) -> str:
        return format_program(self)


def compiled(step: Callable, *args: Any, **kwargs: Any) -> CompiledProgram:
    """Trace, lower and compile `step(*args, **kwargs)`, and say what that gives. Nothing runs and nothing is donated.

    `step` is a jitted function (`eqx.filter_jit`, `jax.jit`), or a plain one, which is jitted here. Called afterward
    with the same arguments, a jitted one is not compiled again.

    Counts are read off the program: FLOPs off its jaxpr, everything else off the HLO after optimization. XLA's own
    `cost_analysis()` is not used: it counts a loop's body once, and the layers of a model are a loop.

    **Raises** `TypeError` for shapes in place of arrays, and for an object that has a `lower` but is not jitted.
    """
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((args, kwargs))):
        raise TypeError("zoo.inspect.compiled takes arrays, as the step does: it has to know where they lie")
    step = step if hasattr(step, "lower") else eqx.filter_jit(step)
    start = time.perf_counter()
    jaxpr = eqx.filter_make_jaxpr(step)(*args, **kwargs)[0].jaxpr
    calls = [equation for equation in jaxpr.eqns if "donated_invars" in equation.params]
    if len(calls) != 1:
        raise TypeError(f"{_get_step_name(step)} is not one jitted function: pass what eqx.filter_jit or jax.jit gave")
    traced = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")  # `donations` says which
        stage: Any = step.lower(*args, **kwargs)
    lowered = time.perf_counter()
    with _CacheHitListener() as hits:
        stage = stage.compile()
    seconds = CompileTimes(traced - start, lowered - traced, time.perf_counter() - lowered, bool(hits))
    executable = getattr(stage, "compiled", stage)  # Equinox wraps JAX's own
    text = executable.as_text() or ""
    module = hlo.parse_module(text)
    found, endless = hlo.list_executions(module)
    devices = hlo.count_devices(module)
    mesh = _find_mesh(jaxpr, (args, kwargs), devices)
    return CompiledProgram(
        name=_get_step_name(step),
        mesh={} if mesh is None else {axis: size for axis, size in mesh.shape.items() if size > 1},
        devices=devices,
        seconds=seconds,
        flops=count_flops(jaxpr),
        bytes_moved=hlo.count_bytes_moved(module, found),
        endless=tuple(endless),
        memory=_read_memory_stats(executable),
        collectives=sum_collectives(found, mesh, devices),
        donations=tuple(_check_donations(calls[0], _name_arguments(step, jaxpr, args, kwargs), executable, module)),
        text=text,
    )


class _CacheHitListener:
    """What comes out of the persistent compilation cache, in this thread."""

    def __enter__(self) -> list[str]:
        self.hits: list[str] = []
        self.thread = threading.get_ident()
        jax.monitoring.register_event_listener(self.record)
        return self.hits

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_listener(self.record)

    def record(self, event: str, **_: Any) -> None:
        if event == _CACHE_HIT_EVENT and threading.get_ident() == self.thread:
            self.hits.append(event)


def _get_step_name(step: Any) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _find_mesh(jaxpr: Any, args: Any, devices: int) -> Mesh | None:
    """The mesh that the arguments lie on, or that the step itself brings; None where there is none of so many devices.
    The program numbers its devices as the mesh does."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)] + list(
        _find_meshes(jaxpr)
    )
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.size == devices), None)


def _find_meshes(jaxpr: Any) -> Iterator[Any]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "shard_map":
            yield equation.params["mesh"]
        elif "jaxpr" in equation.params:
            yield from _find_meshes(equation.params["jaxpr"])


def _read_memory_stats(executable: Any) -> MemoryStats | None:
    stats = executable.memory_analysis()
    if stats is None:
        return None
    return MemoryStats(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=getattr(stats, "peak_memory_in_bytes", None) or None,
    )


def _name_arguments(step: Any, jaxpr: Any, args: tuple, kwargs: dict) -> dict[int, tuple[str, Any]]:
    """Name and array of each argument, by the identity of its variable in the jaxpr: a literal has no hash."""
    paths, _ = jax.tree_util.tree_flatten_with_path(eqx.filter((args, kwargs), eqx.is_array))
    words, named = _name_positional_arguments(step, len(args)), {}
    for variable, ((part, key, *path), x) in zip(jaxpr.invars, paths, strict=True):
        first = words[key.idx] if part.idx == 0 else key.key
        rest = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
        named[id(variable)] = (f"{first}.{rest}" if rest else first), x
    return named


def _name_positional_arguments(step: Any, count: int) -> list[str]:
    """What the step calls its first `count` positional arguments."""
    parameters = inspect.signature(step).parameters.values()
    own = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "")
    return [own[place] if place < len(own) else f"{more}.{place - len(own)}" for place in range(count)]


def _check_donations(
    call: Any, known: dict[int, tuple[str, Any]], executable: Any, module: hlo.HloModule
) -> Iterator[Donation]:
    """The donated among the arguments of a jitted call, held against what the program says.

    The program lacks the arguments that it does not use: those have no sharding there. Constants that JAX turned into
    arguments stand before all others.
    """
    used = [form.sharding is not None for form in jax.tree.leaves(executable.input_formats)]
    place = hlo.count_parameters(module) - sum(used)
    taken = hlo.find_aliased_parameters(module)
    for variable, donated, use in zip(call.invars, call.params["donated_invars"], used, strict=True):
        if donated:
            name, x = known.get(id(variable), ("an array that the step closes over", variable.aval))
            yield Donation(name, _count_device_bytes(x), use and place in taken, use)
        place += use


def _count_device_bytes(x: Any) -> int:
    """On one device."""
    shape = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
    return math.prod(shape) * x.dtype.itemsize
