"""Mutations of a checkpoint's files that no reader may take for the original: damage, wrong types, wrong places.

A checkpoint is a dict from file names to contents. A mutation changes it in place and says what it did. None of them
changes a number to another valid one, in the data or in the config: no format could tell. What is left is refused, or
read as if nothing had happened.
"""

import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.weights.safetensors import DTYPES

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
Files = dict[str, Any]
"""Contents of files by name, as bytes, or a `Special`."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Special:
    """Something that is no plain file, made by `make(path)`."""

    def __init__(self, name: str, make: Callable[[Path], Any]):
        self.name, self.make = name, make


def _make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**31)


SPECIAL = (
    Special("pipe", lambda path: os.mkfifo(path)),
    Special("endless device", lambda path: path.symlink_to("/dev/zero")),
    Special("device", lambda path: path.symlink_to("/dev/null")),
    Special("directory", lambda path: path.mkdir()),
    Special("link to nothing", lambda path: path.symlink_to("nowhere")),
    Special("link to itself", lambda path: path.symlink_to(path.name)),
    Special("sparse file", _make_sparse),
)


def read_files(directory: Path) -> Files:
    """Read the files of a checkpoint that are loaded: config, weights, index."""
    paths = [directory / CONFIG, *directory.glob("model*.safetensors*")]
    return {path.name: path.read_bytes() for path in sorted(paths)}


def write_files(directory: Path, files: Files) -> None:
    """Write a checkpoint to a new directory."""
    directory.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, Special):
            content.make(directory / name)
        else:
            (directory / name).write_bytes(content)


def parse_tensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file as a dict, and its data."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def build_tensors(header: Mapping[str, Any] | bytes, data: bytes, *, padding: bytes = b"") -> bytes:
    """Return a safetensors file of a header and its data."""
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + padding
    return len(text).to_bytes(8, "little") + text + data


def read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file by name."""
    header, data = parse_tensors(content)
    header.pop("__metadata__", None)
    span = lambda entry: data[entry["data_offsets"][0] : entry["data_offsets"][1]]
    return {
        name: np.frombuffer(span(entry), DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def build_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a safetensors file of these arrays, in their order."""
    header, end = {}, 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    return build_tensors(header, b"".join(x.tobytes() for x in arrays.values()))


def _pick_shard(files: Files, rng: random.Random) -> str:
    return rng.choice([name for name in files if name.endswith(".safetensors")])


def flip_header_bit(files: Files, rng: random.Random) -> str:
    """Flip one bit of the length or the text of a header."""
    name = _pick_shard(files, rng)
    content = bytearray(files[name])
    place, bit = rng.randrange(8 + int.from_bytes(content[:8], "little")), rng.randrange(8)
    content[place] ^= 1 << bit
    files[name] = bytes(content)
    return f"bit {bit} of byte {place} of {name}"


_JUNK = (None, True, -1, 0, 1.5, 2**31, 2**63, 10**400, "", "F4", "\0", [], {}, [[]], [-1, 1], "x" * 10_000)


def change_header_value(files: Files, rng: random.Random) -> str:
    """Replace a dtype, a shape or offsets of a header, or a whole entry, by junk."""
    name = _pick_shard(files, rng)
    header, data = parse_tensors(files[name])
    tensor = rng.choice([key for key in header if key != "__metadata__"])
    place, junk = rng.choice(["dtype", "shape", "data_offsets", "entry"]), rng.choice(_JUNK)
    if place == "entry":
        header[tensor] = junk
    else:
        header[tensor][place] = junk
    files[name] = build_tensors(header, data)
    return f"{place} of {tensor} in {name} = {junk!r:.40}"


def change_tensor(files: Files, rng: random.Random) -> str:
    """Drop, rename, reshape, cut, copy or add a tensor; the header stays consistent."""
    name = _pick_shard(files, rng)
    arrays = read_arrays(files[name])
    tensor = rng.choice(list(arrays))
    array = arrays[tensor]
    kind = rng.choice(["drop", "rename", "rank", "cut", "grow", "integers", "copy", "empty"])
    if kind == "drop":
        del arrays[tensor]
    elif kind == "rename":
        place = rng.randrange(len(tensor))
        arrays[tensor[:place] + rng.choice(["", "x", "\x1b", "/", "é"]) + tensor[place + 1 :]] = arrays.pop(tensor)
    elif kind == "copy":
        arrays[f"{tensor}.copy"] = array
    else:
        changes = {
            "rank": lambda: array[None] if rng.random() < 0.5 or array.ndim == 1 else array.reshape(-1),
            "cut": lambda: np.atleast_1d(array)[:-1],
            "grow": lambda: np.concatenate([array, array[:1]]) if array.ndim else array[None],
            "integers": lambda: array.astype(np.int64),
            "empty": lambda: np.atleast_1d(array)[:0],
        }
        arrays[tensor] = changes[kind]()
    files[name] = build_arrays(arrays)
    return f"{kind} {tensor} in {name}"


def change_length(files: Files, rng: random.Random) -> str:
    """Cut any file off, or append to a file of tensors."""
    name = rng.choice(list(files))
    content = files[name]
    if name.endswith(".safetensors") and rng.random() < 0.3:
        files[name] = content + rng.choice([b"\0", b" " * 8, content])
        return f"{name} is longer"
    stop = rng.randrange(len(content.rstrip()))
    files[name] = content[:stop]
    return f"{name} ends at {stop}"


def change_config_value(files: Files, rng: random.Random) -> str:
    """Give a value of the config another type, or a count a value out of its range."""
    config = json.loads(files[CONFIG])
    owner = config
    key = rng.choice(list(owner))
    if isinstance(owner[key], dict) and owner[key]:
        owner = owner[key]
        key = rng.choice(list(owner))
    value = owner[key]
    is_count = key.startswith(("num_", "n_")) or key.endswith("_size")
    counts = [0, -1, 2**30, 2**40, 10**400] if is_count and isinstance(value, int) else []
    number = [str(value), [value], {"value": value}, True, float("nan")]
    junk: dict[type, list[Any]] = {
        bool: [str(value).lower(), 0, 1, 1.0, [value], {}],
        int: [*number, *counts],
        float: [*number, float("inf"), 10**400],
        str: [[value], True, 1.5, {"value": value}, f"{value}x", "\x1b[2J"],
        list: ["yes", True, {}, 1.5],
        dict: ["yes", True, [], 1.5],
        type(None): ["yes", True, [1.5], {"value": 1}],
    }
    owner[key] = rng.choice(junk[type(value)])
    files[CONFIG] = json.dumps(config).encode()
    return f"{key} = {owner[key]!r:.40}, not {value!r:.40}"


def change_config_key(files: Files, rng: random.Random) -> str:
    """Misspell a key of the config that has a value, or add an unknown one."""
    config = json.loads(files[CONFIG])
    key = rng.choice([key for key, value in config.items() if value is not None])
    place = rng.randrange(len(key))
    other = key[:place] + rng.choice(["", "x", "\x1b", "\u202e"]) + key[place + 1 :]
    config[other if other not in config else f"{key}_"] = config[key] if rng.random() < 0.3 else config.pop(key)
    files[CONFIG] = json.dumps(config).encode()
    return f"{key} is written {other!r}"


def break_json(files: Files, rng: random.Random) -> str:
    """Break the JSON of the config or the index: encodings, nesting, names that occur twice, endless numbers."""
    name = rng.choice([name for name in files if name.endswith(".json")])
    content = files[name]
    broken = {
        "empty": b"",
        "null": b"null",
        "list": b"[" + content + b"]",
        "nested lists": b"[" * 10**6,
        "nested objects": content.rstrip()[:-1] + b', "extra": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        "nested in an ignored key": content.rstrip()[:-1] + b', "id2label": ' + b"[" * 300 + b"]" * 300 + b"}",
        "endless number": content.rstrip()[:-1] + b', "num_labels": ' + b"9" * 10_000 + b"}",
        "name twice": content.rstrip()[:-1] + b', "id2label": {"a": 1, "a": 2}}',
        "utf-16": content.decode().encode("utf-16"),
        "latin-1": content.rstrip()[:-1] + b', "caf\xe9": 1}',
        "byte order mark": b"\xef\xbb\xbf" + content,
        "python": content.replace(b'"', b"'"),
        "comma": content.rstrip()[:-1] + b",}",
        "zero bytes": content + b"\0" * 100,
    }
    kind = rng.choice(list(broken))
    files[name] = broken[kind]
    return f"{name}: {kind}"


def change_shards(files: Files, rng: random.Random) -> str:
    """Swap, remove, rename or add shards, or break the index; remove the only file of a checkpoint without shards."""
    if INDEX not in files:
        other = rng.choice(["pytorch_model.bin", "model-00001-of-00001.safetensors", "Model.safetensors"])
        files[other] = files.pop(WHOLE)
        return f"{WHOLE} is named {other}"
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    first, second = rng.sample(shards, 2)
    index = json.loads(files[INDEX])
    kind = rng.choice(["swap", "remove", "copy", "rename", "no index", "unlist", "move", "outside", "extra"])
    if kind == "swap":
        files[first], files[second] = files[second], files[first]
    elif kind == "copy":
        files[first] = files[second]
    elif kind == "rename":
        files[f"x{first}"] = files.pop(first)
    elif kind in ("remove", "no index"):
        del files[first if kind == "remove" else INDEX]
    else:
        tensor = rng.choice(list(index["weight_map"]))
        places = {
            "move": rng.choice(shards),
            "outside": rng.choice([f"../{first}", f"/tmp/{first}", "/dev/zero", ".."]),
        }
        if kind == "unlist":
            del index["weight_map"][tensor]
        else:
            index["weight_map"]["extra" if kind == "extra" else tensor] = places.get(kind, first)
        files[INDEX] = json.dumps(index).encode()
    return f"{kind} {first}"


def make_special(files: Files, rng: random.Random) -> str:
    """Put a pipe, a device, a directory, a broken link or a gigabyte of nothing in the place of a file."""
    name, special = rng.choice(list(files)), rng.choice(SPECIAL)
    files[name] = special
    return f"{name} is a {special.name}"


def make_link(files: Files, rng: random.Random) -> str:
    """Move a file away and link to it, as caches do. The checkpoint is the same."""
    name = rng.choice(list(files))
    files["blob"] = files.pop(name)
    files[name] = Special("link", lambda path: path.symlink_to("blob"))
    return f"{name} is a link"


MUTATIONS: Mapping[str, Callable[[Files, random.Random], str]] = {
    "header bit": flip_header_bit,
    "header value": change_header_value,
    "tensor": change_tensor,
    "length": change_length,
    "config value": change_config_value,
    "config key": change_config_key,
    "JSON": break_json,
    "shards": change_shards,
    "special file": make_special,
    "link": make_link,
}
