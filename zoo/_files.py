"""Write files atomically: under a temporary name, then renamed."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: a concurrent reader sees the old file or the new one, never a partial one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path` as JSON, atomically, converted by `to_jsonable`."""
    write_text(path, json.dumps(to_jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def to_jsonable(value: object) -> Any:
    """Convert `value` to JSON types: tuples to lists, dataclasses to objects, NaN, infinity and others to strings."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)
