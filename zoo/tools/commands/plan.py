"""Implement `zoo plan`."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import equinox as eqx
import jax
import tyro

from zoo import models
from zoo._terminal import align_columns, format_bytes, show, show_error
from zoo.models.hf.config import read_config
from zoo.models.hf.families import get_family
from zoo.models.hf.wrappers import read_text_config
from zoo.models.presets.published import find_preset
from zoo.parallel import SEQUENCE, ZERO1, ZERO2, ZERO3
from zoo.parallel.devices import use_cpu
from zoo.parallel.mesh import format_sizes
from zoo.parallel.topology import Topology, parse_topology
from zoo.weights.directory import CONFIG_NAME, resolve_directory
from zoo.weights.formats import split_quantization
from zoo.weights.resolve import find_family
from zoo.weights.safetensors import read_json

if TYPE_CHECKING:
    from zoo.tools.plan import Plan
    from zoo.tools.plan.search import Candidate


def plan(
    directory: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    on: Annotated[str, tyro.conf.arg(metavar="TOPOLOGY")],
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    rows: int | None = None,
    seq_len: int = 4096,
    microbatches: int = 1,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    remat: Literal["none", "elementwise", "dots", "full"] = "full",
    loop: Literal["auto", "scan", "ahead", "plain"] = "auto",
    zero_stage: Literal[1, 2, 3] = 3,
    sequence_parallel: bool = False,
    lora: Annotated[int | None, tyro.conf.arg(metavar="RANK")] = None,
    quantization: Literal["none", "nf4", "int8"] = "none",
    tokens: Annotated[str | None, tyro.conf.arg(metavar="NUMBER")] = None,
    decode: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="ROWS LENGTH")] = None,
    rollouts: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="ROWS LENGTH")] = None,
    search: bool = False,
    compiled: Annotated[bool, tyro.conf.arg(name="compile")] = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Plan a training run or decoding: memory, collectives and time of a step, before there is hardware.

    The step is the recipes' training step, with AdamW and float32 parameters. It is traced in shapes, which takes
    seconds for any model on any number of devices; --compile then compiles it for the devices, which this machine need
    not have. The peak is an estimate, within 30% in 48 of 50 compiled steps. Of the two times, no step takes less than
    the first, and steps measured on H100s took 0.9 to 1.4 times the second.

    Does it fit on my GPU? zoo plan Qwen/Qwen3-8B --on rtx4090:1 --lora 16 --quantization nf4 --seq-len 2048, and
    --decode 1 8192 in place of --lora 16.

    Without a flag for a mesh axis, a mesh is suggested: the first that fits among data, fsdp, and either with tensor.

    Exits with status 1 if the step needs more memory than a device has, and names the largest parts.

    Args:
        directory: Directory with a config.json, or a name on the Hugging Face hub; weights are not read.
        preset: Instead of a directory: model of a published size; `zoo presets` lists them.
        on: Devices: v5e:16x16, v5p:4x4x4, v5p:4x4x4*2 for two slices, v6e:16x16, tpu7x:4x4x4; h100:64x8 for hosts x
            GPUs, and a100, h200 and b200 likewise; rtx4090:1 for the cards of one host, and rtx3090, rtx5090, l4, l40s.
        data: Data parallelism: number of devices that shard the batch. -1 for all remaining devices, on one axis only.
        fsdp: Fully sharded data parallelism: number of devices that shard the parameters and the batch.
        expert: Expert parallelism: devices that share the experts of mixtures out, and the rows.
        context: Context parallelism: number of devices that shard the tokens of a sequence.
        tensor: Tensor parallelism: number of devices that shard heads, MLP and vocabulary.
        pipe: Pipeline parallelism: number of devices that share the layers out, as stages, by 1F1B.
        rows: Rows of the global batch. Default: one per micro-batch and device that shards rows; for a suggested mesh
            or a search, one per device.
        seq_len: Tokens per row.
        microbatches: Micro-batches that a step takes one after the other.
        dtype: Dtype of activations and products.
        remat: What the backward pass recomputes.
        loop: Loop over layers: a scan, one that gathers the next block's parameters ahead, or every layer compiled.
        zero_stage: With fsdp, 1 shards the optimizer state, 2 gradients as well, 3 parameters too.
        sequence_parallel: Shard hidden states over tensor, too.
        lora: Train LoRA of this rank on all linear layers but the head, of a frozen base in --dtype.
        quantization: Format of the linear layers of the frozen base (QLoRA), or of the model that decodes.
        tokens: Tokens of the training run, such as 1e12 or 1T, to print its days.
        decode: Plan a decoding step instead: rows at a time, and tokens of the longest, prompt included.
        rollouts: Completions that reinforcement learning samples between steps: rows at a time, and tokens of each,
            prompt included. Counts their caches, and the sampler's copy of the parameters.
        search: Plan the most promising meshes instead of one, and show the best.
        compiled: Compile the step, or the best three of a search, which takes minutes each. If --loop ahead may pay,
            the step is compiled with it, too.
        as_json: Print a JSON object.
    """
    count = None if tokens is None else _parse_count(tokens)
    if decode is not None:
        given = {"lora": lora, "rollouts": rollouts, "search": search, "compile": compiled, "rows": rows}
        training = {"seq-len": seq_len != 4096, "microbatches": microbatches != 1, "remat": remat != "full"}
        _refuse_beside_decode(given | {"tokens": tokens, "loop": loop != "auto"} | training)
    make = _choose_model(directory, preset)
    use_cpu()
    from zoo.tools import plan as planning
    from zoo.tools.plan.ahead import compare_loops
    from zoo.tools.plan.compiled import compile_training
    from zoo.tools.plan.decoding import suggest_decoding_mesh
    from zoo.tools.plan.format import format_plan
    from zoo.tools.plan.options import RolloutOptions
    from zoo.tools.plan.search import Candidate, suggest_mesh
    from zoo.tools.plan.step import BudgetError

    topology = parse_topology(on)
    sizes = {"pipe": pipe, "data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor}
    layout = (ZERO1, ZERO2, ZERO3)[zero_stage - 1]
    if sequence_parallel:
        layout = layout.with_dims(tokens=SEQUENCE.axes("tokens"))
    if search and any(size != 1 for size in sizes.values()):
        raise ValueError(f"--search chooses the sizes of all axes: leave out {_format_flags(sizes)}")
    is_suggested = not search and topology.devices > 1 and all(size == 1 for size in sizes.values())
    shards = topology.devices
    if not search and not is_suggested:
        sizes = _complete_sizes(sizes, topology)
        shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    packed = None if quantization == "none" else quantization
    sampled = None if rollouts is None else RolloutOptions(*rollouts)
    decoding = None if decode is None else planning.DecodingOptions(*decode, dtype, packed)
    options = planning.TrainingOptions(
        rows=rows or microbatches * shards,
        seq=seq_len,
        dtype=dtype,
        remat=remat,
        microbatches=microbatches,
        rollouts=sampled,
        loop=loop,
        lora=lora,
        quantization=packed if decoding is None else None,
    )
    programs = []
    ahead = None
    with _show_progress() as progress:
        if search:
            found = planning.search_meshes(make, topology, options, layout, progress=progress)
        elif decoding is not None:
            progress(f"decoding on {topology}")
            if is_suggested:
                found = [suggest_decoding_mesh(make, topology, decoding, layout)]
            else:
                found = [Candidate(sizes, planning.plan_decoding(make, sizes, topology, decoding, layout))]
        elif is_suggested:
            found = [suggest_mesh(make, topology, options, layout, progress=progress)]
        else:
            progress(f"the step on {format_sizes(sizes)}")
            found = [Candidate(sizes, planning.plan_training(make, sizes, topology, options, layout))]
        if compiled:
            for candidate in found[:3]:
                progress(f"compiling for {format_sizes(candidate.sizes)}, which takes minutes")
                programs.append(compile_training(make, candidate.sizes, topology, options, layout))
            if not search and loop == "auto" and found[0].plan.overlap is not None:
                progress("compiling with --loop ahead, which takes minutes")
                gathering = dataclasses.replace(options, loop="ahead")
                ahead = compile_training(make, found[0].sizes, topology, gathering, layout)
    if as_json:
        plans = [_list_figures(candidate.plan, count) | {"suggested": is_suggested} for candidate in found]
        for described, program in zip(plans, programs, strict=False):
            described["compiled"] = program.as_dict()
        if ahead is not None:
            plans[0]["compiled_ahead"] = ahead.as_dict()
        shown = plans if search else plans[0]
        show(json.dumps(shown, indent=2))
    else:
        if search:
            show(f"{options.rows:,} rows of {options.seq:,} tokens on {topology}; --rows chooses another number\n")
            show("\n".join(_format_candidates(found)) + "\n")
        if is_suggested:
            mesh = _format_flags(found[0].sizes)
            more = "; --search compares several" if decoding is None and lora is None else ""
            show(f"Suggested mesh: {mesh}. Any flag for an axis overrides it{more}.\n")
        show(format_plan(found[0].plan, tokens=count))
        if directory is not None and isinstance(eqx.filter_eval_shape(make, key=jax.random.key(0)), models.ImageText):
            show("The step is of texts without images: their tower is in memory, and does not run.")
        for candidate, program in zip(found, programs, strict=False):
            show(f"\nCompiled for {format_sizes(candidate.sizes)} on {on}:\n{program}")
        if ahead is not None:
            show(f"\nCompiled with --loop ahead:\n{ahead}\n\n{compare_loops(programs[0], ahead)}")
    try:
        found[0].plan.require_fit()
    except BudgetError as error:
        show_error(f"zoo plan: {error}")
        sys.exit(1)


def _parse_count(text: str) -> float:
    """Parse a number of tokens: 1e12, 300B, 1T, 1_000_000. **Raises** `ValueError` for any other text."""
    match = re.fullmatch(r"((?:\d+(?:_\d+)*)?\.?\d+(?:e[+-]?\d+)?)\s*([KMBGT]?)", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"--tokens takes a number such as 1e12, 300B or 1T, not {text!r}")
    return float(match[1]) * _PREFIXES[match[2].upper()]


_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def _refuse_beside_decode(flags: Mapping[str, Any]) -> None:
    """**Raises** `ValueError` for a flag that a decoding step does not have."""
    given = [f"--{name}" for name, value in flags.items() if value not in (None, False)]
    if given:
        raise ValueError(f"--decode plans a step of decoding: leave out {' and '.join(given)}")


def _choose_model(directory: Path | None, preset: str | None) -> Callable[..., Any]:
    """Return a function `key -> model`. **Raises** `ValueError` unless one of the two is given."""
    if preset is not None and directory is None:
        find_preset(preset)
        return partial(models.preset, preset)
    if directory is None or preset is not None:
        raise ValueError("pass a directory, a name on the Hugging Face hub, or --preset NAME, and only one of them")
    path = resolve_directory(directory, weights=False) / CONFIG_NAME
    config = read_json(path)
    family = find_family(config, path)
    is_whole = family is get_family(str(config.get("model_type")))
    plain, _ = split_quantization(config if is_whole else read_text_config(config))
    return partial(family.build, read_config(family, plain))


def _list_figures(plan: "Plan", tokens: float | None) -> dict[str, Any]:
    """Return the figures of a plan as plain values, with the days for so many tokens if they are given."""
    described = plan.as_dict()
    if tokens is not None:
        described["days"] = plan.count_days(tokens)
    return described


def _format_flags(sizes: Mapping[str, int]) -> str:
    """Return the flags of a mesh."""
    return " ".join(f"--{axis} {size}" for axis, size in sizes.items() if size != 1)


def _complete_sizes(sizes: dict[str, int], topology: Topology) -> dict[str, int]:
    """Replace a size of -1 by the number of remaining devices.

    **Raises** `ValueError` for two of them, and for sizes that do not multiply to the number of devices.
    """
    given = math.prod(size for size in sizes.values() if size != -1)
    left = [axis for axis, size in sizes.items() if size == -1]
    if len(left) > 1:
        raise ValueError(f"only one axis may take all devices that are left, not {' and '.join(left)}")
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"sizes of mesh axes are at least 1, or -1 for what is left: {sizes}")
    if topology.devices % given or (not left and given != topology.devices):
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1))
        if left or topology.devices % given:
            hint = ""
        else:
            hint = f"; --data {topology.devices // given} would take them all"
        raise ValueError(f"{product} are {given} devices, and {topology} has {topology.devices}{hint}")
    left_over = {axis: topology.devices // given for axis, size in sizes.items() if size == -1}
    return {**sizes, **left_over}


@contextmanager
def _show_progress() -> Iterator[Callable[[str], object]]:
    """Yield a function that prints what is being planned, on standard error if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _format_candidates(found: Sequence["Candidate"]) -> list[str]:
    lines = [["mesh", "peak", "fits", "at least", "in turns", "MFU at most", "in turns", "bound by"]]
    for candidate in found:
        plan = candidate.plan
        lines.append(
            [
                format_sizes(candidate.sizes),
                f"about {format_bytes(plan.peak)}",
                _format_fit(plan),
                f"{plan.lower_bound:.3g} s",
                f"{plan.sequential:.3g} s",
                *(_format_share(plan.mfu(seconds)) for seconds in (plan.lower_bound, plan.sequential)),
                plan.bound,
            ]
        )
    table = align_columns(lines, right=(1, 3, 4, 5, 6))
    if all(candidate.plan.fits_with_margin or not candidate.plan.fits for candidate in found):
        return table
    return [*table, "barely: the estimate leaves less than 30% of the memory free, and may be off by as much"]


def _format_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _format_fit(plan: "Plan") -> str:
    if plan.fits_with_margin:
        return "yes"
    if plan.fits:
        return "barely"
    return "no"
