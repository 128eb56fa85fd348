"""Command-line flags that recipes share: sharding, memory and precision of a step, and a run's directory."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from zoo.models.configure import configure
from zoo.parallel import SEQUENCE, ZERO1, ZERO2, ZERO3, Mesh, Schedule
from zoo.parallel.mesh import make_mesh
from zoo.parallel.remat import RematPolicy
from zoo.text.record_options import RecordOptions

from .checkpoint_folder import refuse_url

_Model = TypeVar("_Model")
_Group = TypeVar("_Group")


@dataclass(frozen=True)
class MeshOptions:
    """Sharding, memory and precision of a training step: these flags change its result only by rounding."""

    fsdp: int = 1
    """Devices over which each copy of the parameters is sharded."""
    tensor: int = 1
    """Devices over which heads, MLPs and the vocabulary are sharded. All devices that remain shard the batch."""
    zero_stage: Literal[1, 2, 3] = 3
    """With fsdp, 3 shards parameters, gradients and optimizer state; 2 the latter two; 1 only the optimizer state."""
    sequence_parallel: bool = False
    """With tensor, shard hidden states between sublayers along their tokens, to save memory."""
    context: int = 1
    """Devices over which the tokens of each sequence are sharded."""
    context_attention: Literal["ring", "heads", "gathered"] = "ring"
    """With context, keys travel around the devices, heads are exchanged for tokens, or keys are all-gathered."""
    expert: int = 1
    """Devices over which the experts of mixtures are sharded, and the batch with them."""
    pipe: int = 1
    """Stages of a pipeline: devices over which layers are sharded, and through which micro-batches pass."""
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    """With pipe, gpipe runs all micro-batches forward and then backward, for any loss; 1f1b runs each backward as soon
    as it can, so that memory does not grow with the number of micro-batches."""
    rounds: int = 1
    """With pipe, parts of the layers on each device: more rounds, interleaved, leave devices less idle and send
    more."""
    microbatches: int = 1
    """Sequential micro-batches over which gradients are accumulated, to save memory; with pipe several per stage."""
    remat: RematPolicy = "elementwise"
    """Activations that the backward pass recomputes, to save memory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. Parameters, optimizer state, routers and recurrent states are float32; the frozen base of adapters
    is held in the compute dtype."""
    attention: Literal["auto", "cudnn", "splash", "tokamax", "grouped", "blockwise", "reference"] = "auto"
    """Implementation of attention; auto chooses by platform, shapes and options."""
    recurrence: Literal["auto", "pallas", "tokamax", "chunked", "recurrent"] = "auto"
    """Implementation of recurrences."""
    grouped_matmul: Literal["auto", "padded", "ragged", "tokamax", "masked", "reference"] = "auto"
    """Implementation of the matrix products of mixtures of experts."""

    def apply(self, model: _Model) -> _Model:
        """Return `model` with `remat` and these implementations. **Raises** `ValueError` for an implementation of an
        operation that no layer of the model computes."""
        names = {name: getattr(self, name) for name in ("attention", "recurrence", "grouped_matmul")}
        named = {name: value for name, value in names.items() if value != "auto"}
        return configure(model, remat=self.remat, **named)

    @property
    def accumulation(self) -> dict[str, Any]:
        """Keywords of `zoo.value_and_grad`: how micro-batches run."""
        return {"microbatches": self.microbatches, "schedule": Schedule(self.schedule)}

    def make_mesh(self) -> Mesh:
        """Return the mesh over all devices.

        **Raises** as `zoo.make_mesh` does, and `ValueError` for a `schedule` or `rounds` that the mesh would ignore.
        """
        if self.pipe == 1 and (self.rounds > 1 or self.schedule != "gpipe"):
            raise ValueError(f"schedule={self.schedule} and rounds={self.rounds} are of a pipeline: set pipe above 1")
        layout = (ZERO1, ZERO2, ZERO3)[self.zero_stage - 1]
        if self.sequence_parallel:
            layout = layout.with_dims(tokens=SEQUENCE.axes("tokens"))
        layout = dataclasses.replace(layout, context=self.context_attention, rounds=self.rounds)
        sizes = {axis: getattr(self, axis) for axis in ("fsdp", "expert", "context", "tensor", "pipe")}
        count = math.prod(sizes.values())
        devices = jax.device_count()
        if 0 < count < devices and devices % count:
            flags = " ".join(f"--{axis} {size}" for axis, size in sizes.items() if size > 1)
            raise ValueError(
                f"{flags} takes a multiple of {count} devices, and there are {devices}: let the flags multiply to a "
                f"divisor of {devices}, or show the program fewer (CUDA_VISIBLE_DEVICES, TPU_VISIBLE_CHIPS)"
            )
        return make_mesh(**sizes, layout=layout)


@dataclass(frozen=True)
class RunOptions:
    """A run's directory, its PRNG seed, and whether it is resumed, traced, or started from compiled programs."""

    out: Path
    """Directory of the run: configuration, metrics, checkpoints, report."""
    seed: int = 0
    """PRNG seed of parameters, data order, dropout and samples."""
    resume: bool | int = False
    """Continue from the newest checkpoint in `out`, on any mesh; with a number, from the checkpoint of that step."""
    profile: bool = False
    """Trace a few steps into `out`/profile, for Perfetto, XProf and TensorBoard."""
    watchdog: int = 0
    """After so many seconds without a step, write the stacks of all threads to stderr and into `out`, and go on; 0 for
    never."""
    no_compile_cache: bool = False
    """Compile anew: neither read compiled programs from the user's cache folder nor keep them there."""
    deterministic: bool = False
    """On GPUs, take only kernels that give the same bits in every run; slower. CPUs and TPUs always do."""
    checkpoint_url: str | None = None
    """Checkpoints below a URL, `gs://bucket/run`, instead of in `out`/checkpoints."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Experiment trackers that get configuration, metrics, samples and report: one or several."""

    def __post_init__(self):
        object.__setattr__(self, "out", Path(self.out))  # a script may pass a string
        refuse_url(self.out)

    @property
    def checkpoints(self) -> Path | str:
        """Folder of the checkpoints, or its URL."""
        if self.checkpoint_url is None:
            return self.out / "checkpoints"
        return self.checkpoint_url

    def subrun(self, name: str) -> "RunOptions":
        """Return the options of one of several runs, in the subdirectory `name` of `out`."""
        if self.checkpoint_url is None:
            url = None
        else:
            url = f"{self.checkpoint_url.rstrip('/')}/{name}"
        return dataclasses.replace(self, out=self.out / name, checkpoint_url=url)


_LEFT_OUT = ("resume", "profile", "watchdog", "no_compile_cache", "deterministic", "checkpoint_url")


def find_group(config: Any, kind: type[_Group]) -> _Group | None:
    """Return the first option group of a class among the fields of a configuration."""
    return next((value for value in list_fields(config).values() if isinstance(value, kind)), None)


def find_run_options(config: Any) -> RunOptions:
    """Return the `RunOptions` of a configuration, or of a directory. **Raises** `TypeError` without any."""
    if isinstance(config, RunOptions):
        return config
    if isinstance(config, str | Path):
        return RunOptions(Path(config))
    options = find_group(config, RunOptions)
    if options is None:
        raise TypeError(f"{type(config).__name__} has no field of train.RunOptions")
    return options


def flatten_config(config: Any) -> dict[str, Any]:
    """Return a configuration, a dataclass or a mapping, as a dictionary with the fields of option groups in place of
    the groups, by the names of their flags.

    `resume`, `profile`, `watchdog`, `no_compile_cache`, `deterministic` and `checkpoint_url` are omitted, so a resumed
    run has the same configuration.
    """
    flat: dict[str, Any] = {}
    for name, value in list_fields(config).items():
        if isinstance(value, MeshOptions | RunOptions | RecordOptions):
            flat.update(list_fields(value))
        else:
            flat[name] = value
    return {name: value for name, value in flat.items() if name not in _LEFT_OUT}


def list_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or the items of a mapping, by name."""
    if isinstance(config, Mapping):
        return dict(config)
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
