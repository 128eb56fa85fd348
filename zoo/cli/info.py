"""`zoo info`."""

import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from zoo.models.presets.published import find_preset

from .devices import make_abstract_mesh, use_cpu
from .parts import ParameterSummary, Summary, summarize, summarize_preset
from .terminal import align_columns, format_bytes, format_ranges


def info(
    directory: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    names: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Show what a checkpoint holds, and how it would lie on a mesh.

    Only headers are read and no device is needed, whatever the size. Parameters are named as in our models, a star for
    the number of a layer; shapes hold all layers of a row. The mesh need not exist.

    With --preset, in place of a directory, the same of a model of a published size, which need not exist either. `zoo
    presets` lists them.

    Args:
        directory: Holds config.json and safetensors, in one file or in shards.
        preset: A model of a published size, in float32, as zoo.models.preset makes it.
        data: Devices of the mesh that share the batch.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share heads, MLP and vocabulary.
        names: Show the names of the tensors, too, that each parameter is stored in.
        as_json: Print one JSON object instead; it holds the tensors' names in any case.
    """
    if directory is not None and preset is not None:
        raise ValueError(f"{directory} and --preset {preset} are two models: name one of them")
    use_cpu()
    mesh = make_abstract_mesh(data=data, fsdp=fsdp, tensor=tensor)
    if preset is not None:
        found = summarize_preset(preset, mesh)
    elif directory is not None:
        found = summarize(directory, mesh)
    else:
        raise ValueError("name a directory to look into, or --preset and a model; `zoo presets` lists them")
    print(
        json.dumps(_build_json(found, preset), indent=2)
        if as_json
        else "\n".join(_format_summary(found, preset, names))
    )


def _build_json(summary: Summary, preset: str | None) -> dict[str, Any]:
    parts = [
        {
            "name": row.name,
            "part": row.part,
            "layers": list(row.layers),
            "dims": row.dims.split(),
            "shape": list(row.shape),
            "dtypes": list(row.dtypes),
            "parameters": row.count,
            "learnt": row.trainable,
            "share": row.count / summary.count,
            "tensors": list(row.tensors),
            **({} if row.spec is None else {"spec": list(row.spec), "bytes_per_device": row.bytes_per_device}),
        }
        for row in summary.rows
    ]
    mesh = {}
    if summary.mesh is not None:
        mesh["mesh"] = {**summary.mesh.shape, "bytes_per_device": summary.bytes_per_device}
    whose = {} if preset is None else {"preset": preset, "source": find_preset(preset).source}
    stored = {}
    if summary.stored is not None:
        stored = {"files": summary.stored.files, "bytes": summary.stored.bytes, "tensors": summary.stored.tensors}
    return {
        **whose,
        "family": summary.family,
        "architecture": summary.architecture,
        "parameters": summary.count,
        "active": summary.active,
        "tied": summary.tied,
        **stored,
        "dtypes": summary.dtypes,
        "segments": summary.segments,
        "cache": summary.cache,
        **mesh,
        "rows": parts,
    }


def _format_summary(summary: Summary, preset: str | None, names: bool) -> list[str]:
    facts = [] if preset is None else [("preset", f"{preset}, of the sizes of {find_preset(preset).source}")]
    facts += [
        ("family", f"{summary.family} ({summary.architecture} in transformers)"),
        ("parameters", f"{summary.count:,}" + (", the head being the embedding's table" if summary.tied else "")),
    ]
    if summary.active < summary.count:
        facts.append(("active", f"{summary.active:,} that each token meets, of all experts those it goes to"))
    dtypes = ", ".join(summary.dtypes)
    if (stored := summary.stored) is None:
        facts.append(("in memory", f"{format_bytes(summary.bytes)} of {dtypes}"))
    else:
        files = "1 file" if stored.files == 1 else f"{stored.files} files"
        facts.append(("on disk", f"{format_bytes(stored.bytes)} in {files}, {stored.tensors:,} tensors of {dtypes}"))
    if summary.segments:
        layers = sum(period * repeats for period, repeats in summary.segments)
        cut = " + ".join(f"{period} x {repeats}" for period, repeats in summary.segments)
        facts.append(("layers", f"{layers}, scanned as {cut} (layers in a pattern x repeats)"))
    if summary.cache:
        told = f"{format_bytes(summary.cache['bytes_per_token'])} for each token of a row, in {summary.cache['dtype']}"
        if not summary.cache["bytes_per_token"]:
            told = (
                f"{format_bytes(summary.cache['bytes_per_row'])} for a row, however long, in {summary.cache['dtype']}"
            )
        if summary.cache["length"]:
            told += f"; {format_bytes(summary.cache['bytes'])} for {summary.cache['length']:,} tokens"
        facts.append(("cache", told))
    if summary.mesh is not None:
        per_device = (
            f"{format_bytes(summary.bytes_per_device)} of parameters on each of {summary.mesh.devices.size} devices"
        )
        facts.append(("mesh", f"{summary.mesh}: {per_device}"))
    return [*align_columns(facts), "", *_format_table(summary, names)]


def _format_table(summary: Summary, names: bool) -> list[str]:
    """A line for each parameter, those of a part together, below what the part has in all."""
    lines = [["parameter", "layers", "dims", "shape", "dtype", "share"]]
    lines[0] += [] if summary.mesh is None else ["on the mesh", "a device"]
    for part in dict.fromkeys(row.part for row in summary.rows):
        rows = [row for row in summary.rows if row.part == part]
        count = sum(row.count for row in rows)
        lines.append([f"{part}: {count:,}", "", "", "", "", _format_percentage(count, summary.count)])
        for row in rows:
            lines.append(_format_cells(row, summary))
            lines += [[f"    {name}"] for name in row.tensors] if names else []
    return align_columns(lines, right=(5, 7))


def _format_cells(row: ParameterSummary, summary: Summary) -> list[str]:
    layers = format_ranges(row.layers) if row.layers else ""
    shape = " x ".join(map(str, row.shape))
    here = [
        f"  {row.name}",
        layers,
        row.dims,
        shape,
        ", ".join(row.dtypes),
        _format_percentage(row.count, summary.count),
    ]
    return here if row.spec is None else [*here, str(row.spec), format_bytes(row.bytes_per_device)]


def _format_percentage(count: int, total: int) -> str:
    return f"{100 * count / total:.2f}%"
