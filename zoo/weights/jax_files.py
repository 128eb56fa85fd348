"""Read the files of other JAX libraries as nested dicts of NumPy arrays: Flax's msgpack and Orbax's folders.

Neither needs the library that wrote the file, and neither runs code from it.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zoo._files import open_regular
from zoo._optional import import_optional

from .safetensors import DTYPES, CheckpointError

_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3
"""Codes of the extension types with which `flax.serialization` writes arrays, complex numbers and scalars of NumPy."""
_CHUNKED = "__msgpack_chunked_array__"
"""Marks the dict that `flax.serialization` writes for an array of more than 1 GiB, cut into chunks."""
_DTYPES = {dtype.name: dtype for dtype in (*DTYPES.values(), np.dtype("complex64"), np.dtype("complex128"))}


def read_msgpack(source: str | Path | bytes) -> Any:
    """Read what `flax.serialization.to_bytes` or `msgpack_serialize` wrote, without Flax.

    - `source`: a file, or its bytes.

    Returns nested dicts with arrays as leaves; a list or tuple that `to_bytes` wrote is a dict with the keys "0", "1",
    and so on, as in Flax's state dicts. Arrays have the dtype that they were stored in. Reading takes about twice the
    memory of the file.

    **Raises** `CheckpointError` for bytes that are not msgpack, and for an array with a dtype that is not a number's or
    with more or fewer bytes than its shape asks for; `ImportError` without the package `msgpack`.
    """
    msgpack = import_optional("msgpack", "pip install msgpack, which Orbax and so 'equizoo[train]' bring")
    if isinstance(source, bytes):
        name = "the msgpack"
        data = source
    else:
        name = str(source)
        try:
            with open_regular(Path(source)) as file:
                data = file.read()
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from None

    def read_extension(code: int, content: bytes) -> Any:
        if code == _COMPLEX:
            real, imaginary = msgpack.unpackb(content)
            return complex(real, imaginary)
        if code not in (_NDARRAY, _SCALAR):
            raise ValueError(f"there is an extension of type {code}, and Flax writes the types 1, 2 and 3")
        array = _read_array(*msgpack.unpackb(content, raw=False))
        if code == _SCALAR:
            return array[()]
        return array

    try:
        return _join_chunks(msgpack.unpackb(data, ext_hook=read_extension, strict_map_key=False))
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{name} cannot be read as what Flax writes: {reason}") from None


def _read_array(shape: Any, dtype_name: Any, data: Any) -> np.ndarray:
    """Return the array of Flax's `(shape, dtype, bytes)`. **Raises** `ValueError` if these do not fit together."""
    if dtype_name not in _DTYPES:
        raise ValueError(f"an array has the dtype {dtype_name!r}; these are read: {', '.join(sorted(_DTYPES))}")
    sizes = _check_shape(shape)
    dtype = _DTYPES[dtype_name]
    if len(data) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"an array of the shape {list(sizes)} in {dtype_name} has {len(data):,} bytes")
    return np.frombuffer(data, dtype).reshape(sizes)


def _check_shape(shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{list(sizes)[:8]} is not a shape")
    return sizes


def _join_chunks(tree: Any) -> Any:
    """Return a tree with the chunks of each large array joined."""
    if not isinstance(tree, dict):
        return tree
    if _CHUNKED not in tree:
        return {key: _join_chunks(value) for key, value in tree.items()}
    shape = _check_shape(_list_values(tree["shape"]))
    chunks = _list_values(tree["chunks"])
    if not all(isinstance(chunk, np.ndarray) and chunk.ndim == 1 for chunk in chunks):
        raise ValueError("a chunk of a large array is not a vector")
    size = sum(chunk.size for chunk in chunks)
    if not chunks or size != math.prod(shape):
        raise ValueError(f"the chunks of an array of the shape {list(shape)} have {size:,} numbers")
    return np.concatenate(chunks).reshape(shape)


def _list_values(numbered: Mapping[str, Any]) -> list[Any]:
    """Return the values of a dict with the keys "0", "1", and so on."""
    return [numbered[str(number)] for number in range(len(numbered))]


def read_orbax(folder: str | Path) -> Any:
    """Read a tree that Orbax saved, such as a published Gemma, as nested dicts of NumPy arrays.

    - `folder`: with `_METADATA`, as `StandardCheckpointer` and `PyTreeCheckpointer` write it; of a `CheckpointManager`
      the folder of one item in one step.

    Shardings in the folder are not followed: every array is read whole into the host's memory.

    **Raises** `CheckpointError` for a folder without `_METADATA`, and for arrays that cannot be read; `ImportError`
    without Orbax.
    """
    ocp = import_optional("orbax.checkpoint", "pip install 'equizoo[train]'")
    epath = import_optional("etils.epath", "pip install 'equizoo[train]'")
    path = Path(folder).absolute()
    if not (path / "_METADATA").is_file():
        message = f"{path} is not the folder of a tree that Orbax saved: it has no _METADATA"
        if below := [str(child.parent.relative_to(path)) for child in sorted(path.glob("**/_METADATA"))]:
            message += f"; pass one of its folders: {', '.join(below[:4])}"
        raise CheckpointError(message)
    handler = ocp.PyTreeCheckpointHandler()
    try:
        metadata = handler.metadata(epath.Path(path))
        tree = getattr(metadata, "tree", metadata)
        restore = ocp.RestoreArgs(restore_type=np.ndarray)
        wanted = jax.tree.map(lambda _: restore, tree, is_leaf=lambda x: x is None)
        return handler.restore(epath.Path(path), args=ocp.args.PyTreeRestore(restore_args=wanted))
    except MemoryError:
        raise
    except Exception as error:  # of many classes, from TensorStore too
        raise CheckpointError(f"{path} cannot be read by Orbax: {type(error).__name__}: {error}") from error
    finally:
        handler.close()
