"""Implement `zoo draw`."""

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import equinox as eqx
import jax
import tyro

from zoo import models
from zoo._files import write_text
from zoo._terminal import show
from zoo.parallel import SEQUENCE, ZERO1, ZERO2, ZERO3, Mesh
from zoo.parallel.devices import make_abstract_mesh, use_cpu
from zoo.parallel.mesh import make_mesh
from zoo.weights.shapes import read_shapes


def draw(
    directory: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("layout.svg"),
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    zero_stage: Literal[1, 2, 3] = 3,
    sequence_parallel: bool = False,
    context_attention: Literal["ring", "heads", "gathered"] = "ring",
    seq_len: int = 1024,
    width: int = 860,
    overwrite: bool = False,
) -> None:
    """Draw a model on a mesh as SVG: shards of parameters, and what moves in a step.

    Each kind of layer is drawn once, with its parameters cut into the shards of the devices. A list has the collectives
    of a training step: of parameters before their use, of partial sums, of tokens to experts, of keys around a ring, of
    gradients. The step is traced, not run: no accelerator is needed, and the mesh need not exist.

    Args:
        directory: Checkpoint directory with config.json and safetensors, of which only headers are read; or a
            name on the Hugging Face hub.
        preset: Name of a preset instead, in float32; `zoo presets` lists them.
        out: SVG file to write.
        data: Data parallelism: number of devices that shard the batch.
        fsdp: Fully sharded data parallelism: number of devices that shard the parameters and the batch.
        expert: Expert parallelism: devices that share the experts of mixtures out, and the rows.
        context: Context parallelism: number of devices that shard the tokens of a sequence, and no parameters.
        tensor: Tensor parallelism: number of devices that shard heads, MLP and vocabulary.
        pipe: Pipeline parallelism: number of devices that share the layers out, as stages.
        zero_stage: With fsdp, 1 shards the optimizer state, 2 gradients as well, 3 parameters too.
        sequence_parallel: With tensor, shard hidden states between sublayers along their tokens.
        context_attention: With context, keys travel around the devices, heads are exchanged for tokens, or keys are
            all-gathered.
        seq_len: Tokens per row of the step that is traced; bytes of activations grow with it.
        width: Width of the drawing; 400 for a phone.
        overwrite: Replace an existing file.
    """
    if directory is not None and preset is not None:
        raise ValueError(f"{directory} and --preset {preset} are two models: pass one of them")
    if os.path.lexists(out) and (out.is_dir() or not overwrite):
        if out.is_dir():
            advice = "pass another file"
        else:
            advice = "pass another file, or --overwrite"
        raise ValueError(f"{out} exists already: {advice}")
    if seq_len < 1:
        raise ValueError(f"--seq-len must be at least 1, not {seq_len}")
    use_cpu()
    from zoo.tools.draw import draw_layout  # which takes a second to import, and other commands do not need

    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor, "pipe": pipe}
    layout = (ZERO1, ZERO2, ZERO3)[zero_stage - 1]
    if sequence_parallel:
        layout = layout.with_dims(tokens=SEQUENCE.axes("tokens"))
    mesh = make_abstract_mesh(dataclasses.replace(layout, context=context_attention), **sizes) or _make_one_device()
    if preset is not None:
        make = partial(models.preset, preset, key=jax.random.key(0))
        model = eqx.filter_eval_shape(make)
        title = preset
    elif directory is not None:
        model = read_shapes(directory)
        title = directory.resolve().name
    else:
        raise ValueError("pass a checkpoint directory, or --preset NAME; `zoo presets` lists the names")
    svg = draw_layout(model, mesh, title=title, seq_len=seq_len, width=width)
    write_text(out, svg)
    show(f"wrote {out}, {title} on {mesh}")


def _make_one_device() -> Mesh:
    return make_mesh(devices=jax.devices("cpu")[:1])
