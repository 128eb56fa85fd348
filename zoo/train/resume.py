"""Flags of a resumed run: taken from its folder's `config.json`, unless the command line gives them."""

import contextlib
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from zoo._files import read_json, to_jsonable
from zoo._terminal import show
from zoo.parallel.mesh import AXES, format_device_count

from .metrics import read_metrics
from .options import MeshOptions, flatten_config

_NOT_TAKEN = ("out", "checkpoint_url", "resume", "profile")  # a folder may have moved; the others describe a start

_Config = TypeVar("_Config")
_Parse = Callable[[Sequence[str]], _Config]
"""Parser of a recipe's command line: the words to the configuration. It exits for words that are not flags."""


def parse_resumed(parse: _Parse[_Config], words: Sequence[str], out: Path, defaults: Mapping[str, Any]) -> _Config:
    """Parse `words` with the flags of the run in `out` as defaults, and print the flags that are taken from there.

    - `defaults`: of all flags, by name. Entries of the configuration that are not flags are left to `Run.restore`,
      which compares configurations.

    With `--steps` in `words`, the `--epochs` of the run are not taken.

    Without a configuration in `out`, parses only `words`. **Raises** `ValueError` for a damaged configuration, and for
    a value that its flag does not accept.
    """
    path = find_config(out)
    if path is None:
        return parse(words)
    config = _read_config(path)
    if has_flag(words, "steps"):
        config = {name: value for name, value in config.items() if name != "epochs"}
    saved = {name: flag for name, value in config.items() if (flag := _format_flag(name, value, defaults))}
    resumed = _try_parse(parse, [*itertools.chain(*saved.values()), *words])
    if resumed is None:
        name = next((name for name in saved if _try_parse(parse, [*saved[name], *words]) is None), next(iter(saved)))
        flag = _flag_name(name)
        raise ValueError(f"{path}: {name}={config[name]!r} is not a value of {flag}: give {flag} on the command line")
    before = flatten_config(parse(words))
    after = flatten_config(resumed)
    if taken := [flag for name, flag in saved.items() if after[name] != before[name]]:
        show(f"from {path}: {' '.join(itertools.chain(*taken))}")
    return resumed


def has_flag(words: Sequence[str], name: str) -> bool:
    """Return True if the words of a command line set the flag of the field `name`."""
    return any(word.partition("=")[0] == _flag_name(name) for word in words)


def check_resumed_mesh(given: MeshOptions, resumed: MeshOptions, config: Path | None) -> None:
    """Check that the mesh of the earlier start fits the devices of this one.

    - `given`: with the flags of the command line; `resumed`: with the flags of the folder's `config` too.

    **Raises** `ValueError` with the flags that make it fit these devices.
    """
    count = jax.device_count()
    sizes = {axis: getattr(resumed, axis) for axis in AXES if axis != "data"}
    taken = {axis: size for axis, size in sizes.items() if size > 1 and getattr(given, axis) != size}
    if not taken or count % math.prod(sizes.values()) == 0:
        return
    before = " ".join(f"{_flag_name(axis)}={size}" for axis, size in taken.items())
    instead = " ".join(f"{_flag_name(axis)} 1" for axis in taken)
    raise ValueError(
        f"{config} has {before}, for a multiple of {math.prod(sizes.values())} devices, and "
        f"{format_device_count(count)}: give {instead}, or other sizes that multiply to {count}"
    )


def read_learning_rate(path: Path) -> float | None:
    """Return the last learning rate in the metrics at `path`, if they have one; of a sweep the largest."""
    rates = [record["learning_rate"] for record in read_metrics(path) if "learning_rate" in record]
    return float(np.max(rates[-1])) if rates else None


def find_config(out: Path) -> Path | None:
    """Return the `config.json` of the run in `out`, or of the newest run in its subdirectories; None without one."""
    if (out / "config.json").exists():
        return out / "config.json"
    # An exported model has a config.json too, but no environment.
    found = [path for path in out.glob("*/config.json") if path.with_name("env.json").exists()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = read_json(path)
        if not isinstance(config, Mapping):
            raise ValueError(f"{type(config).__name__} instead of an object")
    except ValueError as error:
        raise ValueError(
            f"{path}: damaged ({error}): delete it and give all flags, to go on from the last checkpoint"
        ) from error
    return config


def _format_flag(name: str, value: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Return the words that set a flag to a value of the configuration; none for its default, and for other entries."""
    if name in _NOT_TAKEN or name not in defaults or value == to_jsonable(defaults[name]):
        return []
    flag = _flag_name(name)
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if not isinstance(value, bool) or not isinstance(defaults[name], bool):
        return [f"{flag}={value}"]
    if value:
        return [flag]
    return [flag.replace("--", "--no-", 1)]


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _try_parse(parse: _Parse[_Config], words: Sequence[str]) -> _Config | None:
    """Parse silently; return None for words that are not flags."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        return parse(words)
    return None
