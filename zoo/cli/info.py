"""`zoo info`."""

import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from zoo.models.published import find_preset

from .devices import imagined, on_the_host
from .parts import Parameter, Summary, summarise, summarise_preset
from .terminal import aligned, runs, size


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
    on_the_host()
    mesh = imagined(data=data, fsdp=fsdp, tensor=tensor)
    if preset is not None:
        found = summarise_preset(preset, mesh)
    elif directory is not None:
        found = summarise(directory, mesh)
    else:
        raise ValueError("name a directory to look into, or --preset and a model; `zoo presets` lists them")
    print(json.dumps(as_object(found, preset), indent=2) if as_json else "\n".join(as_text(found, preset, names)))


def as_object(found: Summary, preset: str | None) -> dict[str, Any]:
    parts = [
        {
            "name": row.name,
            "part": row.part,
            "layers": list(row.layers),
            "dims": row.dims.split(),
            "shape": list(row.shape),
            "dtypes": list(row.dtypes),
            "parameters": row.count,
            "learnt": row.learnt,
            "share": row.count / found.count,
            "tensors": list(row.tensors),
            **({} if row.spec is None else {"spec": list(row.spec), "bytes_per_device": row.bytes_per_device}),
        }
        for row in found.rows
    ]
    mesh = {}
    if found.mesh is not None:
        mesh["mesh"] = {**found.mesh.shape, "bytes_per_device": found.bytes_per_device}
    whose = {} if preset is None else {"preset": preset, "source": find_preset(preset).source}
    stored = {}
    if found.stored is not None:
        stored = {"files": found.stored.files, "bytes": found.stored.bytes, "tensors": found.stored.tensors}
    return {
        **whose,
        "family": found.family,
        "architecture": found.architecture,
        "parameters": found.count,
        "active": found.active,
        "tied": found.tied,
        **stored,
        "dtypes": found.dtypes,
        "segments": found.segments,
        "cache": found.cache,
        **mesh,
        "rows": parts,
    }


def as_text(found: Summary, preset: str | None, names: bool) -> list[str]:
    facts = [] if preset is None else [("preset", f"{preset}, of the sizes of {find_preset(preset).source}")]
    facts += [
        ("family", f"{found.family} ({found.architecture} in transformers)"),
        ("parameters", f"{found.count:,}" + (", the head being the embedding's table" if found.tied else "")),
    ]
    if found.active < found.count:
        facts.append(("active", f"{found.active:,} that each token meets, of all experts those it goes to"))
    dtypes = ", ".join(found.dtypes)
    if (stored := found.stored) is None:
        facts.append(("in memory", f"{size(found.bytes)} of {dtypes}"))
    else:
        files = "1 file" if stored.files == 1 else f"{stored.files} files"
        facts.append(("on disk", f"{size(stored.bytes)} in {files}, {stored.tensors:,} tensors of {dtypes}"))
    if found.segments:
        layers = sum(period * repeats for period, repeats in found.segments)
        cut = " + ".join(f"{period} x {repeats}" for period, repeats in found.segments)
        facts.append(("layers", f"{layers}, scanned as {cut} (layers in a pattern x repeats)"))
    if found.cache:
        told = f"{size(found.cache['bytes_per_token'])} for each token of a row, in {found.cache['dtype']}"
        if not found.cache["bytes_per_token"]:
            told = f"{size(found.cache['bytes_per_row'])} for a row, however long, in {found.cache['dtype']}"
        if found.cache["length"]:
            told += f"; {size(found.cache['bytes'])} for {found.cache['length']:,} tokens"
        facts.append(("cache", told))
    if found.mesh is not None:
        per_device = f"{size(found.bytes_per_device)} of parameters on each of {found.mesh.devices.size} devices"
        facts.append(("mesh", f"{found.mesh}: {per_device}"))
    return [*aligned(facts), "", *table(found, names)]


def table(found: Summary, names: bool) -> list[str]:
    """A line for each parameter, those of a part together, below what the part has in all."""
    lines = [["parameter", "layers", "dims", "shape", "dtype", "share"]]
    lines[0] += [] if found.mesh is None else ["on the mesh", "a device"]
    for part in dict.fromkeys(row.part for row in found.rows):
        rows = [row for row in found.rows if row.part == part]
        count = sum(row.count for row in rows)
        lines.append([f"{part}: {count:,}", "", "", "", "", share(count, found.count)])
        for row in rows:
            lines.append(cells(row, found))
            lines += [[f"    {name}"] for name in row.tensors] if names else []
    return aligned(lines, right=(5, 7))


def cells(row: Parameter, found: Summary) -> list[str]:
    layers = runs(row.layers) if row.layers else ""
    shape = " x ".join(map(str, row.shape))
    here = [f"  {row.name}", layers, row.dims, shape, ", ".join(row.dtypes), share(row.count, found.count)]
    return here if row.spec is None else [*here, str(row.spec), size(row.bytes_per_device)]


def share(count: int, total: int) -> str:
    return f"{100 * count / total:.2f}%"
