"""Implement `zoo export`."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zoo._files import read_json
from zoo._terminal import format_bytes, show
from zoo.parallel.devices import use_cpu
from zoo.weights.directory import resolve_directory
from zoo.weights.load import load

_EXAMPLES = {"decoder": '"1 2 3" --new 8', "encoder": '"1 2 3"', "image encoder": "images.npy"}


def export(
    directory: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    *,
    batch: int | None = None,
    seq_len: int | None = None,
    length: int | None = None,
    platforms: tuple[Literal["cpu", "cuda", "rocm", "tpu"], ...] = (),
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    overwrite: bool = False,
) -> None:
    """Export a checkpoint as programs that run without this library, by jax.export and as StableHLO.

    Writes forward, and for a decoder init, prefill and decode, each as NAME.jax_export and NAME.mlir; the weights,
    which are arguments of the programs; and serve.py, which runs them with jax, numpy and flatbuffers. Needs the extra
    export.

    Args:
        directory: Checkpoint directory with config.json and safetensors, or a name on the Hugging Face hub.
        out: Output folder, created if missing. An earlier export is replaced.
        batch: Number of rows of all programs. Default: symbolic, any number.
        seq_len: Tokens per row of forward and prefill. Default: 128, or fewer if the model learned fewer positions.
        length: Capacity of the KV caches, for prompt and new tokens. Default: 1024, or the learned positions.
        platforms: Platforms that the programs run on. Default: the one of this machine.
        dtype: Dtype of all parameters. Default: as stored.
        overwrite: Write to a folder that holds other files.
    """
    source = resolve_directory(directory)
    if platforms:
        use_cpu()
    from zoo.tools.export.export import export as export_model  # which other commands do not need
    from zoo.tools.export.folder import MANIFEST, SERVE, check_folder

    check_folder(out, overwrite=overwrite)  # before the weights are read
    folder = export_model(
        load(source, dtype=dtype),
        out,
        platforms=platforms or None,
        batch=batch,
        seq_len=seq_len,
        length=length,
        overwrite=overwrite,
    )
    about = read_json(folder / MANIFEST)
    for name in about["files"]:
        show(f"wrote     {folder / name} ({format_bytes((folder / name).stat().st_size)})")
    command = f"python {shlex.quote(str(folder / SERVE))} {_EXAMPLES[about['kind']]}"
    show(f"runs on   {', '.join(about['platforms'])}: {command}")
