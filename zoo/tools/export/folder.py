"""Write an export into a folder that is one whole export, an earlier one, or none."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo._files import create_files, read_json
from zoo.weights.safetensors import hold_array, write_tensors

MANIFEST = "export.json"
WEIGHTS = "weights.safetensors"
SERVE = "serve.py"
_FORMAT = "equizoo export"


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """**Raises** `ValueError` for a file, and without `overwrite` for a folder with files that are not an export."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: pass a folder")
    if overwrite or not folder.exists() or not any(folder.iterdir()) or _read_manifest(folder):
        return
    raise ValueError(
        f"{folder} is not empty, and not an earlier export: pass another folder, or overwrite=True (--overwrite)"
    )


def write_folder(folder: Path, programs: Mapping[str, Any], weights: Mapping[str, Any], about: dict[str, Any]) -> None:
    """Write programs (`jax.export.Exported`), weights, `serve.py` and, last, the description, which makes the folder an
    export. Files of an earlier export are replaced, and the ones that this does not have deleted."""
    earlier = _read_manifest(folder).get("files", [])
    files: dict[str, bytes] = {SERVE: (Path(__file__).parent / SERVE).read_bytes()}
    for name, program in programs.items():
        files[f"{name}.jax_export"] = bytes(program.serialize())
        files[f"{name}.mlir"] = program.mlir_module().encode()
    about = {"format": _FORMAT, "version": 1, **about, "files": [*files, WEIGHTS, MANIFEST]}
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with create_files(folder) as create:
            for name, content in files.items():
                create(name).write(content)
            write_tensors(create(WEIGHTS), {name: hold_array(x) for name, x in weights.items()})
            create(MANIFEST).write(_format_json(about).encode())
            # A description stands for files that belong together, so none is there while they are replaced.
            (folder / MANIFEST).unlink(missing_ok=True)
    except BaseException:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        raise
    for name in set(earlier) - set(about["files"]):
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)


def _format_json(about: dict[str, Any]) -> str:
    """Format a description as JSON, with the shape and dtype of an array in one line."""
    pattern = r"\{[^][{}]*\[[^][{}]*\][^][{}]*\}|\[[^][{}]*\]"
    return re.sub(pattern, lambda match: json.dumps(json.loads(match[0])), json.dumps(about, indent=2)) + "\n"


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the description of the export in a folder; {} if there is none."""
    try:
        about = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return {}
    if isinstance(about, dict) and about.get("format") == _FORMAT:
        return about
    return {}
