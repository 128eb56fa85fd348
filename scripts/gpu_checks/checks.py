"""The checks, in order of worth, and their programs."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax.numpy as jnp

import zoo
from scripts.benchmarks import adapted, measure, ours, recurrences
from scripts.benchmarks.ours import ONE_BILLION, Kernel, Sizes, Training
from scripts.benchmarks.recurrences import Operation, Recurrent
from zoo import precision
from zoo.ops.attention import AttentionMask, attention, reference_attention
from zoo.ops.moe.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_implementation,
    grouped_matmul_reference,
)
from zoo.parallel.chips import find_chip
from zoo.parallel.topology import parse_topology
from zoo.tools.plan import TrainingOptions, plan_training

from . import runs
from .check import Check, Program, has_cudnn
from .scopes import time_scopes
from .sizes import EIGHT_BILLION, MIXTURE, NEW_TOKENS, RECURRENT, choose, list_recurrences

TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-4}
"""Largest relative errors of an output and of gradients, by the dtype of the inputs."""


def rates(toy: bool) -> list[Program]:
    ceilings = cache(measure.ceilings)
    return [
        Program(
            name,
            lambda _, name=name: ceilings()[name],
            examine=lambda _, name=name: {"amount": measure.work()[name]},
        )
        for name in ("matmul float32", "matmul bfloat16", "copy")
    ]


def kernels(attentions: tuple[str, ...], products: tuple[str, ...], toy: bool) -> list[Program]:
    """List packed attention and the grouped matmul by these implementations; with gradients, their errors."""
    batch, seq, heads, kv_heads, dim = (1, 32, 4, 2, 16) if toy else (4, 4096, 16, 4, 128)
    loads = [0, 5000, 600, 1400, 3000, 2000, 384, 4000]
    loads = [load // (256 if toy else 1) for load in loads]
    rows, width, out = sum(loads), *((16, 32) if toy else (2048, 5632))

    def draw_attention():
        draw = partial(recurrences.Draw, seq, batch=batch, dtype="bfloat16")
        segments = jnp.broadcast_to(jnp.repeat(jnp.arange(4), seq // 4), (batch, seq))
        return draw(sizes=(heads, dim)).heads(), *draw(sizes=(kv_heads, dim)).qkv()[1:], segments

    def draw_product():
        x, weight = (recurrences.Draw(1).shared(*shape) for shape in ((rows, width), (len(loads), out, width)))
        return x.astype("bfloat16"), weight.astype("bfloat16"), jnp.array(loads)

    def attend(run: Callable, query: Any, key: Any, value: Any, segments: Any) -> Any:
        return run(query, key, value, AttentionMask(True, query_segments=segments, key_segments=segments))

    def multiply(name: str, *inputs: Any) -> Any:
        with grouped_matmul_implementation(name):
            return grouped_matmul(*inputs)

    def entries() -> Iterator[tuple[str, Callable, Callable, Callable]]:
        reference = partial(attend, reference_attention)
        for name in attentions:
            run = partial(attend, partial(attention, implementation=name))
            yield f"packed attention, {name}", run, draw_attention, reference
        for name in products:
            yield f"grouped matmul, {name}", partial(multiply, name), draw_product, grouped_matmul_reference

    return [
        Program(
            f"{name}{', with gradients' if gradient else ''}",
            lambda device, run=run, draw=draw, gradient=gradient: Kernel(
                run, draw, gradient=gradient, calls=1 if toy else 20, device=device
            ),
            examine=partial(judge, reference) if gradient else lambda run: {},
        )
        for name, run, draw, reference in entries()
        for gradient in (False, True)
    ]


def judge(reference: Callable, run: Kernel) -> dict[str, Any]:
    """Compare outputs and gradients with a reference in float32."""
    errors = run.compare(reference)
    dtype = str(run.arguments[1].dtype)
    equal = all(error < TOLERANCES[dtype] for error in errors)  # and none is NaN
    return {"errors": errors, "verdict": "equal" if equal else "differs"}


def step(
    name: str,
    sizes: Sizes,
    remat: str = "elementwise",
    *,
    adapt: Callable = lambda model: model,
    examine: Callable = lambda run: {},
    options: dict[str, Any] | None = None,
    **facts: Any,
) -> Program:
    """A training step in bfloat16 with parameters in float32. Without cuDNN to compile with, attention is
    blockwise."""

    def make(device: Any) -> Training:
        lacks_cudnn = device is not None and not has_cudnn()
        attention = "blockwise" if lacks_cudnn and not isinstance(sizes, Recurrent) else None
        whole = lambda model: zoo.set_implementations(adapt(model), attention=attention)
        return Training(sizes, "bfloat16", remat, adapt=whole, device=device, **(options or {}))

    known = {"tokens": sizes.batch * sizes.seq}
    if not isinstance(sizes, Recurrent):
        known["flops"] = sizes.model_flops
    return Program(name, make, {**known, **facts}, examine)


def dense_steps(toy: bool) -> list[Program]:
    rival = "torch, 4 rows, compiled"
    return [
        step("zoo, 8 rows, remat=full", choose(ONE_BILLION, toy, batch=8), "full"),
        step("zoo, 4 rows, remat=elementwise", choose(ONE_BILLION, toy, batch=4), examine=time_scopes, rival=rival),
    ]


def torch_steps(sizes: Sizes, name: str, toy: bool, **options: Any) -> list[Program]:
    """A compiled step of transformers."""
    return [runs.torch_step(name, choose(sizes, toy, batch=4), **options)]


def mixture_steps(names: tuple[str, ...], toy: bool) -> list[Program]:
    sizes = choose(MIXTURE, toy)
    adapt = lambda name: partial(zoo.set_implementations, grouped_matmul=name)
    rival = "torch, grouped_mm, compiled"
    return [step(f"zoo, {name}", sizes, adapt=adapt(name), rival=rival) for name in names]


def single_recurrences(toy: bool) -> list[Program]:
    return [
        Program(
            name + gradient * ", with gradient",
            lambda device, name=name, gradient=gradient, sizes=sizes: Operation(
                name, gradient=gradient, device=device, **sizes
            ),
            {"tokens": sizes["batch"] * sizes["seq"], "rival": f"fla, {name}{gradient * ', with gradient'}"},
        )
        for name, gradient, sizes in list_recurrences(toy)
    ]


def decode(toy: bool) -> list[Program]:
    models = {"Transformer": choose(ONE_BILLION, toy)}
    for kind, layers in RECURRENT.items():
        models[kind] = choose(Recurrent(vocab=32768, embed=2048, layers=layers, kind=kind), toy)
    new = 4 if toy else NEW_TOKENS
    return [
        Program(
            f"zoo, {kind}, batch {batch}",
            lambda device, sizes=sizes, batch=batch: ours.Decoding(
                sizes, batch, new=new, dtype="bfloat16", device=device
            ),
            {"tokens": batch * new, "rival": f"transformers, {kind}, batch {batch}"},
            lambda run: {"bytes_needed": run.bytes_a_token() * run.new},
        )
        for kind, sizes in models.items()
        for batch in (1, 8, 64)
    ]


def low_precision_steps(toy: bool) -> list[Program]:
    recipes = {"FP8": precision.CurrentScaling(), "MXFP8": precision.MXFP8()}
    sizes = choose(ONE_BILLION, toy, batch=4)
    fp8 = lambda recipe: partial(precision.fp8, recipe=recipe)
    found = [step(name, sizes, adapt=fp8(recipe), rival="bfloat16") for name, recipe in recipes.items()]
    return [step("bfloat16", sizes), *found]


def adapter_steps(toy: bool) -> list[Program]:
    def adapt(kind: str) -> Callable:
        return lambda model: adapted.KINDS[kind](zoo.cast(model, "bfloat16"))

    sizes = choose(ONE_BILLION, toy, batch=4)
    large = choose(EIGHT_BILLION, toy)
    options = {"kv_heads": 1 if toy else 8, "tied": False}
    lora, nf4 = adapt("LoRA"), adapt("QLoRA, NF4")
    return [
        step("QLoRA, NF4", sizes, "full", adapt=nf4, flops=None),
        step("LoRA", sizes, "full", adapt=lora, flops=None, rival="peft, LoRA"),
        step("8B, QLoRA, NF4", large, "full", adapt=nf4, options=options, flops=None),
    ]


def planned_steps(toy: bool) -> list[Program]:
    """Eight steps in the order of their memory, since a process has one peak."""
    mamba2, deltanet = (
        Recurrent(vocab=32768, embed=2048, layers=layers, kind=kind, batch=2, seq=4096)
        for kind, layers in RECURRENT.items()
    )
    lora = lambda model: adapted.KINDS["LoRA"](zoo.cast(model, "bfloat16"))
    cases = [
        ("LoRA, 4 rows, remat=full", ONE_BILLION, 4, "full", lora),
        ("dense, 1 row, remat=full", ONE_BILLION, 1, "full", None),
        ("Gated DeltaNet, 2 rows, remat=full", deltanet, 2, "full", None),
        ("Mamba-2, 2 rows, remat=full", mamba2, 2, "full", None),
        ("mixture, 4 rows, remat=full", MIXTURE, 4, "full", None),
        ("dense, 8 rows, remat=full", ONE_BILLION, 8, "full", None),
        ("dense, 4 rows, remat=elementwise", ONE_BILLION, 4, "elementwise", None),
        ("dense, 4 rows, remat=dots", ONE_BILLION, 4, "dots", None),
    ]
    found = []
    for name, whole, batch, remat, adapt in cases:
        sizes = choose(whole, toy, batch=batch)
        rank = None if adapt is None else adapted.RANK
        examine = partial(
            plan, sizes, TrainingOptions(sizes.batch, sizes.seq, remat=ours.parse_policy(remat), lora=rank)
        )
        found.append(step(name, sizes, remat, adapt=adapt or (lambda model: model), examine=examine, flops=None))
    return found


def plan(sizes: Sizes, options: TrainingOptions, run: Training) -> dict[str, Any]:
    """Return what `zoo plan` says of a step on this device; elsewhere than on a GPU, on an H100."""
    chip = find_chip(next(iter(run.batch["tokens"].devices())))
    make = lambda key: sizes.make(key)
    planned = plan_training(make, {}, parse_topology(f"{chip.name if chip else 'h100'}:1"), options)
    return {"at_least": planned.lower_bound, "in_turns": planned.sequential, "planned_peak": planned.peak}


_DETERMINISTIC = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true", "JAX_ENABLE_COMPILATION_CACHE": "false"}
_TORCH = ("torch", "transformers")
_SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment of checks in which others need memory of the GPU too."""
_ON_CPU = {"JAX_PLATFORMS": "cpu"}
"""Environment of rivals: JAX holds no memory of the GPU."""
CHECKS = (
    Check("rates", "Products and copies", rates, 20),
    Check(
        "kernels",
        "Packed attention and grouped matmul",
        partial(kernels, ("cudnn", "blockwise", "grouped"), ("padded", "ragged", "masked")),
        90,
        gigabytes=40,
        tried=slice(1, None, 4),
    ),
    Check("kernels/tokamax", "", partial(kernels, ("tokamax",), ("tokamax",)), 60, ("tokamax",), 40),
    Check("step", "Training step of 1.09 billion parameters", dense_steps, 75, gigabytes=36, tried=slice(1, 2)),
    Check(
        "step/torch",
        "",
        partial(torch_steps, ONE_BILLION, "torch, 4 rows, compiled"),
        80,
        _TORCH,
        environment=_ON_CPU,
    ),
    Check("recurrences", "Recurrences", single_recurrences, 180, gigabytes=40, tried=slice(1, None, 8)),
    Check("recurrences/fla", "", runs.fla_recurrences, 120, ("torch", "fla"), environment=_ON_CPU),
    Check(
        "mixture",
        "Training step of a mixture",
        partial(mixture_steps, ("padded", "ragged")),
        75,
        gigabytes=48,
        tried=slice(1),
    ),
    Check("mixture/tokamax", "", partial(mixture_steps, ("tokamax",)), 40, ("tokamax",), 48),
    Check(
        "mixture/torch",
        "",
        partial(torch_steps, MIXTURE, "torch, grouped_mm, compiled", experts="grouped_mm"),
        90,
        _TORCH,
        environment=_ON_CPU,
    ),
    Check("decoding", "Decoding", decode, 150, gigabytes=16, tried=slice(0, None, 6)),
    Check("decoding/transformers", "", runs.torch_decoding, 120, _TORCH, environment=_ON_CPU),
    Check("fp8", "Training step in FP8", low_precision_steps, 100, gigabytes=48, tried=slice(1, 2)),
    Check("adapters", "Training step of adapters", adapter_steps, 120, gigabytes=56, tried=slice(2, 3)),
    Check("adapters/peft", "", runs.torch_adapters, 60, (*_TORCH, "peft"), environment=_ON_CPU),
    Check("plans", "Planned and measured steps", planned_steps, 200, gigabytes=48, tried=slice(1)),
    Check("deterministic", "The same bits", runs.deterministic_steps, 60, environment=_DETERMINISTIC),
    Check(
        "exchange",
        "Arrays shared with PyTorch",
        runs.exchanges,
        20,
        ("torch",),
        environment=_SHARING,
    ),
    Check("first", "First step of 48 layers", runs.first_steps, 90, environment=_SHARING),
    Check("first/torch", "", runs.torch_first_steps, 240, _TORCH, environment=_ON_CPU),
)
