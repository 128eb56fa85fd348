"""Programs of the checks that are not a step or a kernel of ours: rivals, equal bits, shared arrays, first steps."""

import dataclasses
import tempfile
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zoo
from scripts.bench import in_new_process
from scripts.benchmarks.ours import ONE_BILLION, Sizes, Training

from .check import Program
from .sizes import NEW_TOKENS, choose, list_recurrences

DEPTH = 48


def torch_step(name: str, sizes: Sizes, **options: Any) -> Program:
    def make(_: Any) -> Any:
        from scripts.benchmarks import pytorch

        return pytorch.Training(sizes, "bfloat16", compiled=True, **options)

    return Program(name, make, {"tokens": sizes.batch * sizes.seq, "flops": sizes.model_flops}, find_torch_peak)


def find_torch_peak(_: Any) -> dict[str, Any]:
    from scripts.benchmarks import pytorch

    return pytorch.find_peak()


def fla_recurrences(toy: bool) -> list[Program]:
    def make(name: str, gradient: bool, sizes: dict[str, Any]) -> Any:
        from scripts.benchmarks import fla

        return fla.Operation(name, gradient=gradient, **sizes)

    return [
        Program(
            f"fla, {name}{gradient * ', with gradient'}",
            lambda _, case=(name, gradient, sizes): make(*case),
            {"tokens": sizes["batch"] * sizes["seq"]},
        )
        for name, gradient, sizes in list_recurrences(toy)
        if name != "mlstm"  # which fla does not have
    ]


def torch_decoding(toy: bool) -> list[Program]:
    new = 4 if toy else NEW_TOKENS

    def make(batch: int) -> Any:
        from scripts.benchmarks import pytorch

        sizes = choose(ONE_BILLION, toy)
        return pytorch.Decoding(sizes, batch, new=new, dtype="bfloat16", static=True)

    return [
        Program(
            f"transformers, Transformer, batch {batch}",
            lambda _, batch=batch: make(batch),
            {"tokens": batch * new},
            find_torch_peak,
        )
        for batch in (1, 8, 64)
    ]


def torch_adapters(toy: bool) -> list[Program]:
    sizes = choose(ONE_BILLION, toy, batch=4)

    def make(_: Any) -> Any:
        from scripts.benchmarks import adapted, pytorch

        return pytorch.Adapting(sizes, "bfloat16", kind="LoRA", rank=adapted.RANK)

    return [Program("peft, LoRA", make, {"tokens": sizes.batch * sizes.seq}, find_torch_peak)]


def deterministic_steps(toy: bool) -> list[Program]:
    """Three steps, twice: the process has XLA's flag for deterministic kernels, which refuses cuDNN's attention."""
    sizes = dataclasses.replace(choose(ONE_BILLION, toy), layers=1 if toy else 2)

    grouped = partial(zoo.set_implementations, attention="grouped")

    def make(_: Any) -> dict[str, Any]:
        digests = []
        for _ in range(2):
            jax.clear_caches()
            run = Training(sizes, "bfloat16", "elementwise", adapt=grouped)
            for _ in range(3):
                run()
            digests.append(
                [np.asarray(x).tobytes() for x in jax.tree.leaves((run.model, run.state)) if hasattr(x, "shape")]
            )
        return {"verdict": "the same bits" if digests[0] == digests[1] else "other bits"}

    return [Program("three steps of two layers", make)]


def exchanges(toy: bool) -> list[Program]:
    def make(_: Any) -> dict[str, Any]:
        import torch  # pyright: ignore[reportMissingImports]

        array = jnp.arange(4096.0)
        tensor = torch.from_dlpack(array)
        shared = tensor.data_ptr() == array.unsafe_buffer_pointer() and tensor.cpu().tolist() == array.tolist()
        theirs = torch.arange(4096.0, device=tensor.device)
        if theirs.is_cuda:
            torch.cuda.synchronize()
        back = jnp.from_dlpack(theirs)
        shared &= back.unsafe_buffer_pointer() == theirs.data_ptr() and back.tolist() == theirs.cpu().tolist()
        return {"verdict": "shared" if shared else "copied, or other numbers"}

    return [Program("to torch and back", make)]


def first_steps(toy: bool) -> list[Program]:
    """A new process with an empty cache of compiled programs, and a second one with what the first has left."""
    depth = 1 if toy else DEPTH
    folder = tempfile.mkdtemp()
    source = f"from scripts.benchmarks import ours; found = ours.first_step({depth})"
    make = lambda _: in_new_process(source, cache=folder)
    return [Program(f"zoo, {depth} layers, {start} start", make) for start in ("first", "second")]


def torch_first_steps(toy: bool) -> list[Program]:
    depth = 1 if toy else DEPTH
    source = f"from scripts.benchmarks import pytorch; found = pytorch.first_step({depth}, compiled=True)"
    return [Program(f"torch, compiled, {depth} layers", lambda _: in_new_process(source))]
