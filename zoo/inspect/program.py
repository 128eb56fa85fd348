"""Compile a step without running it, and report its FLOPs, memory, collectives, donation and compile times."""

import dataclasses
import functools
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding

from zoo.ops.platform import normalize_platform
from zoo.parallel.chips import count_domain, find_chip
from zoo.parallel.mesh import is_array_or_shape

from . import hlo, lowering
from .buffers import Buffer, read_buffers
from .collectives import Collective, sum_collectives
from .executions import count_bytes_moved, list_executions
from .exposed_communication import ScheduledCollective, add_seconds, read_schedule
from .format import Rows, format_program
from .operations import Flops, count_flops
from .products import RecomputedProducts, count_compiled_flops, sum_recomputed
from .unfused import UnfusedTraffic, sum_unfused

_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class DonationError(ValueError):
    """Raised for donated buffers that no output reuses."""


@dataclasses.dataclass(frozen=True)
class CompileTimes:
    """Seconds of tracing, lowering and compiling a step."""

    trace: float
    """From the function to a jaxpr. About 0 if the step has run before."""
    lower: float
    """From the jaxpr to StableHLO."""
    compile: float
    """From StableHLO to an executable."""
    cached: bool
    """True if the executable came from the persistent compilation cache, so that `compile` is short."""


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """Memory of a step, in bytes per device."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that reuse the buffers of donated arguments; included in `arguments` and in `outputs`."""
    temporaries: int
    code: int
    peak: int | None
    """Peak memory reported by XLA. On a CPU it omits temporaries. On a TPU it includes on-chip memory, where other
    parts may live that no field above counts. None if the backend does not report it."""

    @property
    def total(self) -> int:
        """Upper bound of the memory, as if all temporaries were live at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Donation:
    """A donated array argument of a step."""

    name: str
    """Argument and path: `model.stack.segments.0.blocks.0.mixer.query.weight`."""
    bytes: int
    """Bytes per device."""
    aliased: bool
    """True if an output reuses its buffer. Otherwise both are in memory at once."""
    used: bool
    """True if the step reads it."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Report of `compiled`. `print(program)` prints a dozen lines, `program.as_dict()` is for JSON."""

    name: str
    mesh: dict[str, int]
    """Mesh axes of size above 1, and their sizes."""
    devices: int
    platform: str
    """The platform that the step was compiled for: cpu, gpu or tpu."""
    chip: str | None
    """Name in `zoo.tools.plan.CHIPS` of the chip that it was compiled for; None for a CPU and any other that is not
    listed there."""
    seconds: CompileTimes
    flops: Flops
    """FLOPs of matrix products and convolutions in the jaxpr, summed over all devices."""
    compiled_flops: int | None
    """FLOPs of the matrix products in the optimized HLO, on one device: without products that XLA drops, and with the
    products that it recomputes. None if some are kernels, such as Pallas' and cuDNN's, that do not say
    how many they are."""
    recomputed: Rows[RecomputedProducts] | None
    """Matrix products that rematerialization computes again in the backward pass, by module: part of `compiled_flops`,
    and None where they are None."""
    bytes_moved: int
    """Main memory traffic per device, in bytes: an upper bound that assumes no cache hits."""
    unfused: Rows[UnfusedTraffic]
    """Part of `bytes_moved`: copies, transposes, gathers and all else that XLA fused with no other operation, except
    for matrix products and collectives."""
    endless: tuple[str, ...]
    """Loops without a known trip count; their traffic and collectives are counted for one iteration."""
    memory: MemoryStats | None
    """None if the backend does not report it."""
    collectives: tuple[Collective, ...]
    schedule: Rows[ScheduledCollective] | None
    """The collectives one by one, with the products that run between start and done and the seconds that these do not
    cover. None on CPUs, whose threads take instructions in any order."""
    donations: tuple[Donation, ...]
    text: str = dataclasses.field(repr=False)
    """The optimized HLO."""
    _read_stablehlo: Callable[[], str] = dataclasses.field(repr=False, compare=False)
    _read_buffers: Callable[[], Rows[Buffer]] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def stablehlo(self) -> str:
        """The StableHLO that JAX gave to XLA."""
        return self._read_stablehlo()

    @functools.cached_property
    def buffers(self) -> Rows[Buffer]:
        """All buffers that are in memory at the peak, largest first: arguments, results, constants, and the temporaries
        at the time at which they sum to most. On a TPU without those on the chip.

        The first access compiles the step once more, which takes as long as `seconds.compile`: XLA writes its buffer
        assignment only while it compiles. It changes neither the compilation cache nor what a call of the step runs.

        **Raises** `RuntimeError` if the backend's compiler writes no buffer assignment.
        """
        return self._read_buffers()

    @property
    def failed_donations(self) -> tuple[Donation, ...]:
        return tuple(donation for donation in self.donations if not donation.aliased)

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds of all transfers that products do not cover, in one step (`zoo.inspect.exposed_communication`). None
        without a schedule or a known chip."""
        if self.chip is None or self.schedule is None:
            return None
        return sum((row.exposed_seconds or 0.0 for row in self.schedule), 0.0)

    def require_donations(self) -> None:
        """**Raises** `DonationError`, with the names, if a donated buffer is not reused by an output.

        The step then needs more memory and copies the array. JAX warns on some backends only, and Equinox hides the
        warning.
        """
        if failed := sorted(self.failed_donations, key=lambda donation: -donation.bytes):
            lines = []
            for donation in failed[:20]:
                unused = "" if donation.used else ", never read"
                lines.append(f"  {donation.name}: {donation.bytes:,} bytes{unused}")
            if len(failed) > 20:
                lines.append(f"  and {len(failed) - 20} more")
            raise DonationError(
                f"{self.name} donates {len(failed)} arrays whose buffers no output reuses. Each needs an output of the "
                "same shape, dtype and sharding: return one, or do not donate it:\n" + "\n".join(lines)
            )

    def as_dict(self) -> dict[str, Any]:
        """Convert the fields except the HLO text, and the sum `exposed_seconds`, to plain values."""
        left_out = {"text": "", "_read_stablehlo": str, "_read_buffers": Rows}  # nothing that asdict would copy
        plain = dataclasses.asdict(dataclasses.replace(self, **left_out))
        fields = {name: value for name, value in plain.items() if name not in left_out}
        return {**fields, "exposed_seconds": self.exposed_seconds}

    def __str__(self) -> str:
        return format_program(self)


def compiled(step: Callable, *args: Any, **kwargs: Any) -> CompiledProgram:
    """Trace, lower and compile `step(*args, **kwargs)`, and report its costs. Nothing runs and nothing is donated.

    `step` is a jitted function (`eqx.filter_jit`, `jax.jit`), or a plain one, which is jitted here. A jitted one is not
    compiled again when it is called with the same arrays.

    A `jax.ShapeDtypeStruct` may stand for an array. Its sharding says which devices the step is compiled for; they may
    be `zoo.parallel.imagined`, and no array is ever made:

        mesh = zoo.make_mesh(data=-1, tensor=2, devices=zoo.parallel.imagined("v5e:2x4"))
        model = zoo.place(eqx.filter_eval_shape(make, jax.random.key(0)), mesh)
        opt_state = zoo.place(jax.eval_shape(optimizer.init, zoo.trainable(model)), mesh.optimizer)
        tokens = jax.ShapeDtypeStruct((16, 1024), "int32")
        batch = zoo.place_batch({"tokens": tokens, "targets": tokens}, mesh)
        print(zoo.inspect.compiled(step, batch, model, opt_state))

    FLOPs are counted in the jaxpr and, if the optimized HLO says what its products are, there too; everything else is
    counted in the HLO. XLA's `cost_analysis()` is not used: it counts a loop's body once, and the layers of a model are
    a loop.

    **Raises** `TypeError` for an object that has a `lower` but is not jitted.
    """
    if not hasattr(step, "lower"):
        step = eqx.filter_jit(step)
    leaves = [x for x in jax.tree.leaves((args, kwargs)) if is_array_or_shape(x)]
    start = time.perf_counter()
    closed, call = lowering.trace(step, args, kwargs, leaves)
    traced = time.perf_counter()
    stage = lowering.lower(step, closed, call, args, kwargs, leaves)
    stage = getattr(stage, "lowered", stage)  # Equinox wraps JAX's own
    lowered = time.perf_counter()
    options = lowering.choose_compiler_options(leaves)
    with _CacheHitListener() as hits:
        executable = stage.compile(compiler_options=options or None)
    jaxpr = closed.jaxpr
    seconds = CompileTimes(traced - start, lowered - traced, time.perf_counter() - lowered, bool(hits))
    text = executable.as_text() or ""
    module = hlo.parse_module(text)
    executions, endless = list_executions(module)
    devices = hlo.count_devices(module)
    mesh = _find_mesh(jaxpr, (args, kwargs), devices)
    shape = {} if mesh is None else mesh.shape
    targets = lowering.list_devices(mesh, leaves)
    platform = normalize_platform(targets[0].platform)
    chip = find_chip(targets[0])
    schedule = None
    if platform != "cpu":
        schedule = read_schedule(module, mesh, devices, chip, count_domain(targets))
    arguments = list(_list_arguments(call, name_arguments(step, jaxpr, args, kwargs), executable, module))
    names = {argument.number: argument.name for argument in arguments if argument.used}
    return CompiledProgram(
        name=lowering.get_step_name(step),
        mesh={axis: size for axis, size in shape.items() if size > 1},
        devices=devices,
        platform=platform,
        chip=None if chip is None else chip.name,
        seconds=seconds,
        flops=count_flops(jaxpr),
        compiled_flops=count_compiled_flops(module, executions),
        recomputed=sum_recomputed(module, executions),
        bytes_moved=count_bytes_moved(module, executions),
        unfused=sum_unfused(module, executions),
        endless=tuple(endless),
        memory=_read_memory_stats(executable),
        collectives=add_seconds(sum_collectives(module, executions, mesh, devices), schedule),
        schedule=schedule,
        donations=tuple(_check_donations(arguments, module)),
        text=text,
        _read_stablehlo=stage.as_text,
        _read_buffers=functools.partial(read_buffers, stage, options, platform, names),
    )


class _CacheHitListener:
    """Record hits of the persistent compilation cache in this thread."""

    def __enter__(self) -> list[str]:
        self.hits: list[str] = []
        self.thread = threading.get_ident()
        jax.monitoring.register_event_listener(self._record)
        return self.hits

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_listener(self._record)

    def _record(self, event: str, **_: Any) -> None:
        if event == _CACHE_HIT_EVENT and threading.get_ident() == self.thread:
            self.hits.append(event)


def _find_mesh(jaxpr: Any, args: Any, devices: int) -> Mesh | None:
    """Return the mesh of the arguments, otherwise of a `shard_map` in the step; None without one of `devices` devices.
    Device numbers of the program are positions in this mesh."""
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


def name_arguments(step: Any, jaxpr: Any, args: tuple, kwargs: dict) -> dict[int, tuple[str, Any]]:
    """Return name and array of each argument, by the id of its variable in the jaxpr: a literal has no hash."""
    paths, _ = jax.tree_util.tree_flatten_with_path(eqx.filter((args, kwargs), is_array_or_shape))
    positional = _name_positional_arguments(step, len(args))
    names = {}
    for variable, ((part, key, *path), x) in zip(jaxpr.invars, paths, strict=True):
        name = positional[key.idx] if part.idx == 0 else key.key
        if path:
            name += "." + jax.tree_util.keystr(tuple(path), simple=True, separator=".")
        names[id(variable)] = name, x
    return names


def _name_positional_arguments(step: Any, count: int) -> list[str]:
    """Return the names of the first `count` positional arguments of the step."""
    parameters = inspect.signature(step).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "")
    return [*names[:count], *(f"{variadic}.{i}" for i in range(count - len(names)))]


class _Argument(NamedTuple):
    """An array argument of a jitted call."""

    name: str
    array: Any
    number: int
    """Number of the program's parameter, if the argument is used."""
    used: bool
    donated: bool


def _list_arguments(
    call: Any, known: dict[int, tuple[str, Any]], executable: Any, module: hlo.HloModule
) -> Iterator[_Argument]:
    """Yield the arguments of a jitted call, with names, in the order of the program's parameters.

    The program has no parameters for unused arguments, and such arguments have no sharding. Constants that JAX turned
    into parameters come before all others.
    """
    is_used = [layout.sharding is not None for layout in jax.tree.leaves(executable.input_formats)]
    number = hlo.count_parameters(module) - sum(is_used)
    for variable, donated, used in zip(call.invars, call.params["donated_invars"], is_used, strict=True):
        name, x = known.get(id(variable), ("an array that the step closes over", variable.aval))
        yield _Argument(name, x, number, used, donated)
        number += used


def _check_donations(arguments: Sequence[_Argument], module: hlo.HloModule) -> Iterator[Donation]:
    """Yield the donated arguments, checked against the input-output aliasing of the program."""
    aliased = hlo.find_aliased_parameters(module)
    for argument in arguments:
        if argument.donated:
            reused = argument.used and argument.number in aliased
            yield Donation(argument.name, count_device_bytes(argument.array), reused, argument.used)


def count_device_bytes(x: Any) -> int:
    """Count the bytes of an array per device."""
    shape = x.shape
    if is_array_or_shape(x) and x.sharding is not None:
        shape = x.sharding.shard_shape(shape)
    return math.prod(shape) * x.dtype.itemsize
