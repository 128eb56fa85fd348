"""The sizes of an export: which are fixed, which are symbolic, and which a model does not have."""

import json
from typing import Any, Literal

from jax import export as jax_export

from zoo.layers.encoders.patches import ImageEmbedding
from zoo.models import Decoder, Encoder, ImageEncoder
from zoo.models.decoder import check_length
from zoo.parallel import Mesh

SYMBOLIC = "symbolic"
_SEQ_LEN = 128
_LENGTH = 1024


def choose_sizes(
    model: Decoder | Encoder | ImageEncoder,
    batch: int | None,
    seq_len: int | Literal["symbolic"] | None,
    length: int | None,
    image_size: int | tuple[int, int] | None,
) -> dict[str, Any]:
    """Return the sizes of the programs of a model by name; a size that may be any number is "symbolic".

    **Raises** `ValueError` for a size that the model does not have, for sizes below 1, and for more tokens than there
    are learned positions.
    """
    sizes: dict[str, Any] = {"batch": SYMBOLIC if batch is None else _check_size("batch", batch)}
    if isinstance(model, ImageEncoder):
        _refuse(model, seq_len=seq_len, length=length)
        return {**sizes, "image_size": list(_choose_image_size(model, image_size))}
    _refuse(model, image_size=image_size)
    position_embedding = model.position_embedding
    longest = None if position_embedding is None else int(position_embedding.length)
    if seq_len != SYMBOLIC:
        seq_len = _choose_length(model, "seq_len", seq_len, _SEQ_LEN, longest)
    embedding: Any = model.embedding
    sizes |= {"vocabulary": embedding.table_shape[0], "seq_len": seq_len}
    if isinstance(model, Encoder):
        _refuse(model, length=length)
        return sizes
    if seq_len == SYMBOLIC:
        if length is not None:
            raise ValueError(f"length={length} is for prefill and decode, and seq_len='symbolic' exports only forward")
        return sizes
    length = _choose_length(model, "length", length, max(_LENGTH, seq_len), longest)
    if length < seq_len:
        raise ValueError(f"length={length}: caches hold at least the seq_len={seq_len} tokens that prefill reads")
    return {**sizes, "length": length}


def make_dims(sizes: dict[str, Any]) -> tuple[Any, Any]:
    """Return the number of rows and of tokens per row, as numbers or symbolic dims of one scope."""
    batch, seq = jax_export.symbolic_shape("batch, seq")
    is_symbolic = lambda name: sizes.get(name) == SYMBOLIC
    return batch if is_symbolic("batch") else sizes["batch"], seq if is_symbolic("seq_len") else sizes.get("seq_len")


def check_mesh(mesh: Mesh | None, batch: int | None) -> None:
    """**Raises** `ValueError` for a symbolic batch on a mesh, and `NotImplementedError` for a mesh that shards tokens
    or layers."""
    if mesh is None:
        return
    if batch is None:
        raise ValueError(
            f"batch=None is a symbolic batch, which programs for a mesh do not have (jaxlib 0.10 crashes in a call of "
            f"one): pass batch, the number of rows, a multiple of {mesh.count_shards('batch')} on {mesh}"
        )
    if axes := [axis for axis in ("context", "pipe") if mesh.shape[axis] > 1]:
        raise NotImplementedError(
            f"export does not shard tokens or layers, and this mesh has {' and '.join(axes)} above 1: use data, fsdp, "
            "expert and tensor"
        )
    if batch % (shards := mesh.count_shards("batch")):
        raise ValueError(f"batch={batch} does not divide evenly over {mesh}: use a multiple of {shards}")


def _choose_length(model: Any, name: str, given: int | None, default: int, longest: int | None) -> int:
    if given is None:
        return default if longest is None else min(default, longest)
    check_length(model, _check_size(name, given))
    return given


def _choose_image_size(model: ImageEncoder, size: int | tuple[int, int] | None) -> tuple[int, int]:
    if not isinstance(model.embedding, ImageEmbedding):
        raise TypeError("the model reads PatchedImages, and programs are exported of images of one size")
    if isinstance(size, int):
        size = size, size
    if size is not None:
        height, width = size
        return _check_size("image_size", height), _check_size("image_size", width)
    embedding = model.embedding
    if embedding.positions is not None:
        rows, columns = embedding.positions.grid
        height, width = embedding.patches.patch_size
        return rows * height, columns * width
    if model.origin is not None:
        configured = json.loads(model.origin.config).get("image_size")
        if isinstance(configured, int):
            return configured, configured
    raise ValueError("image_size: the model does not say the size of its images; pass height and width in pixels")


def _check_size(name: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} is a whole number, at least 1, not {size!r}")
    return size


def _refuse(model: Any, **sizes: Any) -> None:
    for name, size in sizes.items():
        if size is not None:
            raise ValueError(f"{name}={size!r}: {type(model).__name__} has no such size, leave it out")
