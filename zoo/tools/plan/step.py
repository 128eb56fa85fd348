"""The plan of a step: memory, traffic and time on a topology, only from its trace."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from zoo._terminal import format_count
from zoo.inspect.format import format_decimal_prefix
from zoo.inspect.links import Transfer, time_transfer
from zoo.parallel.chips import CHIPS, Chip
from zoo.parallel.mesh import format_sizes
from zoo.parallel.topology import Topology, parse_topology

from .options import DecodingOptions, TrainingOptions
from .traced import TracedProgram, trace_program

MARGIN = 0.3
"""Relative error of the estimated peak in 48 of 50 compiled steps, at most (`tests/tools/plan/test_compiled.py`)."""
_SECONDS_PER_DAY = 86_400


class BudgetError(ValueError):
    """Raised for a step that needs more memory than a device has."""


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Least seconds of a step that gathering ahead can overlap."""

    transfers: float
    """Gathers and scatters of parameters."""
    products: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Result of `plan`. `print(plan)` prints a screen, `plan.as_dict()` is for JSON."""

    topology: Topology
    chip: Chip
    program: TracedProgram
    transfers: tuple[Transfer, ...]
    model_flops: int | None = None
    """FLOPs of the model per step over all devices, without recomputation and pipeline bubbles."""
    options: TrainingOptions | DecodingOptions | None = None
    """Rows, tokens and the rest of a step of `plan_training` or `plan_decoding`; None for your own step."""
    rewritten: int | None = None
    """Bytes per device of the arguments that a step reads and writes outside of products, such as parameters and
    moments in an update; None for all arguments."""
    sampler: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes per device that only sampling holds, by kind (`zoo.tools.plan.rollouts`)."""
    overlap: Overlap | None = None
    """Transfers that gathering ahead could overlap; None where it does not pay, and for your own step."""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes per device at the peak, by kind; they sum to `peak`.

        Arguments of the step by name: `model` are `parameters`, `opt_state` is `optimizer state`, `states` are the
        `cache` of a step that decodes. Other arrays: `logits` are arrays of the loss over the vocabulary, in chunks of
        tokens, and are 0 if the peak is in the backward pass of the layers; `gradients` are the gradients that the
        step's `shard_map` returns; `activations` are all others, which depend on the option `remat`.
        """
        kinds: dict[str, int] = {}
        for name, size in self.program.arguments.items():
            kind = _KINDS.get(name.partition(".")[0], name.partition(".")[0])
            kinds[kind] = kinds.get(kind, 0) + size
        temporaries = self.program.live
        logits = sum(x.bytes for x in temporaries.arrays if _LOGITS.search(x.scope))
        gradients = min(self.program.gradients, temporaries.bytes - logits)
        kinds["gradients"] = gradients
        kinds["logits"] = logits
        kinds["activations"] = temporaries.bytes - logits - gradients
        return {kind: size for kind, size in kinds.items() if size}

    @property
    def peak(self) -> int:
        """Estimate of the peak memory of a device in the step, in bytes."""
        return self.program.peak

    @property
    def sampling_memory(self) -> dict[str, int]:
        """Bytes per device while completions are sampled between two steps, by kind; {} if none are. Batch, gradients,
        logits and activations of the step are not alive then, and the sampler's copy and caches not in the step."""
        if not self.sampler:
            return {}
        resting = {kind: size for kind, size in self.memory.items() if kind in ("parameters", "optimizer state")}
        return {**resting, **self.sampler}

    @property
    def fits(self) -> bool:
        """True if the estimated peak is at most the memory of a device, and so is what sampling holds."""
        return self._largest <= self.chip.memory

    @property
    def fits_with_margin(self) -> bool:
        """True if the step fits even if its peak is underestimated by `MARGIN`."""
        return self._largest <= (1 - MARGIN) * self.chip.memory

    @property
    def _largest(self) -> int:
        return max(self.peak, sum(self.sampling_memory.values()))

    @property
    def seconds(self) -> dict[str, float]:
        """Minimum seconds that a step takes on each resource: products, main memory, fast links and the network."""
        work = self.program.work
        rewritten = sum(self.program.arguments.values()) if self.rewritten is None else self.rewritten
        times = {"products": sum(count / self.chip.rate(dtype) for dtype, count in work.flops.items())}
        times["memory"] = (work.product_bytes + 2 * rewritten) / self.chip.bandwidth
        for name, crosses in (("links", False), ("network", True)):
            times[name] = sum(transfer.seconds for transfer in self.transfers if transfer.crosses == crosses)
        return times

    @property
    def measured_product_seconds(self) -> float:
        """Seconds of the products at the rates that were measured on the chip (`Chip.measured_rate`)."""
        return sum(count / self.chip.measured_rate(dtype) for dtype, count in self.program.work.flops.items())

    @property
    def lower_bound(self) -> float:
        """Least seconds of a step: the slowest resource works all the time at its data sheet's rate, and hides all
        others."""
        return max(self.seconds.values())

    @property
    def sequential(self) -> float:
        """Seconds of a step if products, memory and collectives take turns, with products at measured rates."""
        seconds = self.seconds
        return self.measured_product_seconds + seconds["memory"] + seconds["links"] + seconds["network"]

    @property
    def tokens_per_second(self) -> dict[str, float] | None:
        """Tokens per second over all devices, for both times of a step; None for your own step."""
        if self.options is None:
            return None
        tokens = self.options.tokens
        return {"lower_bound": tokens / self.lower_bound, "sequential": tokens / self.sequential}

    def count_days(self, tokens: float) -> dict[str, float] | None:
        """Return the days that training on so many tokens takes, for both times of a step; None for your own step."""
        if self.tokens_per_second is None:
            return None
        return {name: tokens / rate / _SECONDS_PER_DAY for name, rate in self.tokens_per_second.items()}

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def mfu(self, seconds: float) -> float | None:
        """Return the model FLOPs utilization (PaLM, arXiv:2204.02311, appendix B) of a step of so many seconds."""
        if self.model_flops is None:
            return None
        return self.model_flops / self.topology.devices / self.chip.rate("bfloat16") / seconds

    def require_fit(self) -> None:
        """**Raises** `BudgetError`, with the largest arrays and ways to make room, if a device has too little
        memory."""
        if self.fits:
            return
        if self.peak <= self.chip.memory:
            parts = ", ".join(f"{kind} {_format(size)}" for kind, size in self.sampling_memory.items())
            raise BudgetError(
                f"{_format(self._largest)} while sampling, and {self.topology.kind} has {_format(self.chip.memory)}: "
                f"{parts}. Sample fewer rows at a time, or shorter ones; tensor shards the heads of keys and values"
            )
        lines = [f"  {name}: {_format(size)}" for name, size in self.list_largest(6)]
        kind = max(self.memory, key=lambda name: self.memory[name])
        raise BudgetError(
            f"about {_format(self.peak)} at the peak, and {self.topology.kind} has {_format(self.chip.memory)}. "
            f"The largest part, {_format(self.memory[kind])}, is for {kind}: {_ADVICE.get(kind, 'shard it')}. "
            "The largest arrays per device:\n" + "\n".join(lines)
        )

    def list_largest(self, count: int) -> list[tuple[str, int]]:
        """Return names and bytes per device of the largest arrays at the peak: arguments by their path, others by the
        operation and the modules that made them, with equal ones added up."""
        arrays = dict(self.program.arguments)
        for x in self.program.live.arrays:
            name = f"{x.dtype}[{','.join(map(str, x.shape))}] of {x.primitive} in {x.scope or 'the step'}"
            arrays[name] = arrays.get(name, 0) + x.bytes
        return sorted(arrays.items(), key=lambda item: -item[1])[:count]

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values."""
        transfers = [
            {
                "kind": x.collective.kind,
                "axes": list(x.collective.axes or ()),
                "count": x.collective.count,
                "bytes": x.collective.bytes,
                "sent": x.sent,
                "network": x.crosses,
                "seconds": x.seconds,
            }
            for x in self.transfers
        ]
        times = {"lower_bound": self.lower_bound, "sequential": self.sequential}
        options = None if self.options is None else self.options.as_dict()
        overlap = None if self.overlap is None else dataclasses.asdict(self.overlap)
        return {
            "topology": str(self.topology),
            "devices": self.topology.devices,
            "mesh": self.program.shape,
            "options": options,
            "memory": self.memory,
            "peak": self.peak,
            "sampling_memory": self.sampling_memory,
            "budget": self.chip.memory,
            "fits": self.fits,
            "fits_with_margin": self.fits_with_margin,
            "margin": MARGIN,
            "flops": self.program.work.flops,
            "model_flops": self.model_flops,
            "collectives": transfers,
            "seconds": {**self.seconds, "measured_products": self.measured_product_seconds, **times},
            "mfu": {name: self.mfu(value) for name, value in times.items()},
            "tokens_per_second": self.tokens_per_second,
            "bound": self.bound,
            "overlap": overlap,
        }


_KINDS = {
    "model": "parameters",
    "tower": "parameters",
    "opt_state": "optimizer state",
    "batch": "batch",
    "states": "cache",
}
_LOGITS = re.compile(r"\blogits\b")
"""The name scope of `zoo.models.loss`."""
_ADVICE = {
    "cache": "fewer rows or a shorter context; tensor shards the heads of keys and values",
    "logits": "a smaller `chunk` of zoo.cross_entropy; tensor shards the vocabulary",
    "activations": "fewer rows per micro-batch, remat='full', or context and tensor, which shard them",
    "parameters": "more devices along fsdp, tensor or pipe, which shard them",
    "optimizer state": "more devices along fsdp, tensor or pipe, which shard it",
    "gradients": "more devices along tensor, pipe or, from ZeRO-2 on, fsdp, which shard them",
}


def plan(step: Callable, *args: Any, on: str | Topology, model_flops: int | None = None) -> Plan:
    """Estimate peak memory, communication and minimum time of a step on a topology, without compiling it.

        mesh = zoo.make_mesh(fsdp=16, tensor=4, devices=jax.devices("cpu")[:1] * 64)
        model = zoo.place(eqx.filter_eval_shape(make, jax.random.key(0)), mesh)
        opt_state = zoo.place(jax.eval_shape(optimizer.init, zoo.trainable(model)), mesh.optimizer)
        print(zoo.plan(step, batch, model, opt_state, on="v5p:4x4x4"))

    - `step`: a jitted function, such as the training step of a recipe.
    - `args`: its arguments, as `jax.ShapeDtypeStruct`s or arrays, placed on a mesh as large as the topology. One CPU
      device, repeated, stands in for devices that this machine does not have.
    - `on`: the topology, as `zoo.parallel.imagined` names it: "v5p:4x4x4", "h100:8x8". No compiler for it is needed.
    - `model_flops`: FLOPs of the model per step, for `Plan.mfu`.

    Memory at rest is exact, and so are FLOPs and bytes of collectives inside `shard_map`. The peak is an estimate by
    liveness analysis, within 30% in 48 of 50 compiled steps. Times follow a roofline model (Williams, Waterman &
    Patterson, doi:10.1145/1498765.1498785).

    **Raises** `ValueError` for an unknown topology, and for one of another size than the mesh.
    """
    topology = parse_topology(on) if isinstance(on, str) else on
    chip = CHIPS[topology.kind]
    program = trace_program(step, *args, platform=chip.platform)
    devices = 1
    for size in program.shape.values():
        devices *= size
    if devices != topology.devices:
        mesh = f"{format_count(devices, 'device')}, {format_sizes(program.shape)}"
        raise ValueError(f"the arguments are on a mesh of {mesh}, and {topology} has {topology.devices}")
    transfers = [time_transfer(row, program.shape, topology, chip) for row in program.work.collectives]
    return Plan(topology, chip, program, tuple(transfers), model_flops)


def _format(size: float | int) -> str:
    return f"{format_decimal_prefix(size)}B"
