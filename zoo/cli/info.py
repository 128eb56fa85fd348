"""Implement `zoo info`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zoo._terminal import align_columns, format_bytes, show
from zoo.models.hf.support import families
from zoo.models.presets.published import find_preset
from zoo.ops.platform import Platform
from zoo.parallel import ZERO1, ZERO2, ZERO3
from zoo.parallel.devices import make_abstract_mesh, use_cpu

from .parts import Summary, summarize, summarize_preset


def info(
    directory: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    zero_stage: Literal[1, 2, 3] = 3,
    platform: Platform | None = None,
    names: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Show a checkpoint's parameters, memory, KV cache and sharding.

    Reads safetensors headers only and needs no accelerator, whatever the size of the model. Parameters have their
    names in zoo, with * for the layer number; their shapes include the layers. The mesh need not exist.

    With --preset instead of a directory, shows a model of a published size; `zoo presets` lists them.

    Args:
        directory: Checkpoint directory with config.json and safetensors, in one file or in shards, or a name on the
            Hugging Face hub, with @REVISION behind it for another than the newest.
        preset: Name of a preset, in float32, as zoo.models.preset builds it.
        data: Data parallelism: number of devices that shard the batch.
        fsdp: Fully sharded data parallelism: number of devices that shard the parameters and the batch.
        expert: Expert parallelism: devices that share the experts of mixtures out, and the rows.
        context: Context parallelism: number of devices that shard the tokens of a sequence, and no parameters.
        tensor: Tensor parallelism: number of devices that shard heads, MLP and vocabulary.
        pipe: Pipeline parallelism: number of devices that share the layers out, as stages.
        zero_stage: With fsdp, 1 shards the optimizer state, 2 gradients as well, 3 parameters too.
        platform: Also show which implementation of attention, of recurrences, of grouped matmuls and of the loss each
            layer gets on this platform, and why not another.
        names: Also show the name of each parameter's tensor in the checkpoint.
        as_json: Print a JSON object, which always includes tensor names.
    """
    if directory is not None and preset is not None:
        raise ValueError(f"{directory} and --preset {preset} are two models: pass one of them")
    use_cpu()
    layout = (ZERO1, ZERO2, ZERO3)[zero_stage - 1]
    mesh = make_abstract_mesh(
        data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor, pipe=pipe, layout=layout
    )
    if preset is not None:
        summary = summarize_preset(preset, mesh, platform)
    elif directory is not None:
        summary = summarize(directory, mesh, platform)
    else:
        raise ValueError("pass a checkpoint directory, or --preset NAME; `zoo presets` lists the names")
    if as_json:
        show(json.dumps(_build_json(summary, preset), indent=2))
    else:
        show("\n".join(_format_summary(summary, preset, names)))


def _build_json(summary: Summary, preset: str | None) -> dict[str, Any]:
    """Return the summary as a JSON object. Scripts read its keys: they do not change."""
    model = summary.model
    parts = []
    for row in model.rows:
        part: dict[str, Any] = {
            "name": row.name,
            "part": row.part,
            "layers": list(row.layers),
            "dims": row.dims.split(),
            "shape": list(row.shape),
            "dtypes": list(row.dtypes),
            "parameters": row.count,
            "lear" + "nt": row.trainable,  # in two parts, since elsewhere the word is trainable
            "share": row.count / model.count,
            "tensors": list(row.tensors),
        }
        if row.spec is not None:
            part["spec"] = list(row.spec)
            part["bytes_per_device"] = row.bytes_per_device
        parts.append(part)
    mesh = {}
    if model.mesh is not None:
        mesh["mesh"] = {**model.mesh.shape, "bytes_per_device": model.bytes_per_device}
    if preset is None:
        origin = {}
    else:
        origin = {"preset": preset, "source": find_preset(preset).source}
    stored: dict[str, Any] = {}
    if summary.stored is not None:
        stored = {"files": summary.stored.files, "bytes": summary.stored.bytes, "tensors": summary.stored.tensors}
        if summary.stored.left_aside:
            stored["left_aside"] = summary.stored.left_aside
    images = {} if model.images is None else {"images": model.images}
    chosen = {}
    if summary.implementations is not None:
        chosen["implementations"] = summary.implementations.as_dict()
    return {
        **origin,
        "family": summary.family,
        "architecture": summary.architecture,
        "tested": dataclasses.asdict(families()[summary.family]),
        "parameters": model.count,
        "active": model.active,
        "tied": model.tied,
        **stored,
        "dtypes": model.dtypes,
        "segments": model.segments,
        "cache": model.cache,
        **images,
        **mesh,
        **chosen,
        "rows": parts,
    }


def _format_summary(summary: Summary, preset: str | None, names: bool) -> list[str]:
    model = summary.model
    if preset is None:
        rows = []
    else:
        rows = [("preset", f"{preset}, with the sizes of {find_preset(preset).source}")]
    rows += [
        ("family", f"{summary.family} ({summary.architecture} in transformers)"),
        ("tested", str(families()[summary.family])),
        *model.describe_parameters(),
    ]
    dtypes = ", ".join(model.dtypes)
    if (stored := summary.stored) is None:
        rows.append(("in memory", f"{format_bytes(model.bytes)} of {dtypes}"))
    else:
        files = "1 file" if stored.files == 1 else f"{stored.files} files"
        rows.append(("on disk", f"{format_bytes(stored.bytes)} in {files}, {stored.tensors:,} tensors of {dtypes}"))
        if stored.left_aside:
            rows.append(("left aside", stored.left_aside))
    rows += [*model.describe_layers(), *model.describe_mesh()]
    if summary.implementations is None:
        chosen = []
    else:
        chosen = ["", str(summary.implementations)]
    return [*align_columns(rows), "", *model.format_table(names=names), *chosen]
