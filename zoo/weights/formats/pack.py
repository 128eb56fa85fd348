"""Models that hold the matrices of a quantized file packed: `GroupQuantizedLinear` in place of `Linear`.

The arrays of such a layer are tensors `NAME.codes`, `NAME.scales` and `NAME.zeros` with the outputs in front, so that
the rows of fused matrices are split, and sharded, like the rows of any matrix; and vectors that belong to the whole
matrix, such as `NAME.group_index`. They are read lazily from the tensors of the file, and written back to them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from zoo.layers import Linear
from zoo.layers.quantized.groups import AbstractGroupLinear
from zoo.models.hf.spec import NameMap, TensorMapping
from zoo.models.parameter_paths import IndexRanges, ParameterPath, format_path, iterate_indices, map_modules
from zoo.models.restack import stack_apart
from zoo.models.stack import Stack, is_stack
from zoo.models.targets import find_linears, is_linear_site
from zoo.ops.quantized.groups import CODES_PER_BYTE
from zoo.parallel.module import Leaf

from ..plan import find_mapping, invert_name_map
from ..safetensors import CheckpointError, LazyTensor, hold_array
from .base import AbstractQuantizedFormat, Parts, count_groups, read_in_chunks
from .compressed_tensors import describe_packing
from .lazy import drop_parts, find_quantized, make_lazy_matrix
from .side import decode_side_tensors, encode_side_tensors

_FIELDS = ("codes", "scales", "constants", "zeros", "group_index", "steps", "first", "table", "offset", "global_scale")
"""Fields of packed layers besides `bias`."""
_Model = TypeVar("_Model")


def pack_model(
    model: _Model,
    name_map: NameMap,
    tensors: Mapping[str, LazyTensor],
    quantized: AbstractQuantizedFormat,
    location: str,
) -> tuple[_Model, dict[str, LazyTensor], str]:
    """Return a model in shapes whose layers are packed where the file's are, the tensors that its arrays are read from,
    and the text of its side tensors.

    Layers in which different matrices are packed are stacked apart: they are other programs.

    **Raises** `CheckpointError` as `find_quantized` does; and for experts that are stacked with plain ones, and
    matrices that could not be written back as they are stored.
    """
    found = find_quantized(tensors, quantized, location)
    errors = [error for name, parts in sorted(found.items()) for error in quantized.find_packing_errors(name, parts)]
    mappings = invert_name_map(name_map)
    num_parts = {}

    def find_names(name: str, ranges: IndexRanges) -> tuple[list[str], list[int], TensorMapping] | None:
        """Return the names of the matrices of a layer in the file, their layers, and how they are mapped."""
        try:
            pattern, mapping, _ = find_mapping(ParameterPath(f"{name}.codes", ranges, Leaf(name, None)), mappings)
        except KeyError:
            return None
        numbers = [theirs for _, theirs in iterate_indices(ranges[: pattern.count("*")])]
        names = [format_path(pattern, indices).removesuffix(".codes") for indices in numbers]
        return names, [indices[0] if indices else 0 for indices in numbers], mapping

    def find_packed_layers(name: str, ranges: IndexRanges, module: Any) -> Iterator[int]:
        """Yield the layers whose matrices of this name are quantized."""
        if type(module) is Linear and (mapped := find_names(name, ranges)) is not None:
            names, layers, _ = mapped
            yield from (layer for stem, layer in zip(names, layers, strict=True) if stem in found)

    model = _stack_apart(model, find_packed_layers)

    def pack(name: str, ranges: IndexRanges, module: Any) -> Any:
        if type(module) is not Linear or (mapped := find_names(name, ranges)) is None:
            return module
        names, _, mapping = mapped
        missing = [stem for stem in names if stem not in found]
        if len(missing) == len(names):
            return module
        if missing:
            errors.append(f"{missing[0]} is plain, and stacked in one array with others that are quantized")
        num_parts.update(dict.fromkeys(names, len(mapping.parts)))
        if mapping.groups > 1 and (vectors := quantized.list_whole_vectors()):
            interleaved = f"{names[0]} interleaves {', '.join(mapping.parts)}"
            errors.append(f"{interleaved}, and its {', '.join(vectors)} belong to all of it")
        try:
            return _pack_linear(module, quantized)
        except ValueError as error:
            errors.append(f"{names[0]}: {error}")
            return module

    packed = map_modules(pack, model, is_linear_site)
    unused = sorted(found.keys() - num_parts.keys())
    errors += [f"{name} is not a linear layer that could be packed" for name in unused if not errors]
    if errors:
        listed = "; ".join([*dict.fromkeys(errors)][:8])
        raise CheckpointError(f"{location} cannot be held packed: {listed}. Without packed=True it is decoded")
    virtual = {
        key: x
        for name, parts in found.items()
        for key, x in _view_packed(name, parts, quantized, num_parts[name]).items()
    }
    names = (f"{name}.{suffix}" for name in found for suffix in quantized.side_suffixes)
    side_tensors = encode_side_tensors({name: tensors[name] for name in names if name in tensors})
    return packed, drop_parts(tensors, found, quantized) | virtual, side_tensors


def _stack_apart(model: _Model, find_layers: Callable[[str, IndexRanges, Any], Iterable[int]]) -> _Model:
    """Return a model in shapes whose arrays stack layers in which the same matrices are packed. `find_layers` returns
    the layers in which those of one module are."""
    packed: dict[int, set[str]] = {}

    def visit(name: str, ranges: IndexRanges, module: Any) -> Any:
        if name.startswith("layers.*"):
            for layer in find_layers(name, ranges, module):
                packed.setdefault(layer, set()).add(name)
        return module

    map_modules(visit, model, is_linear_site)
    stacks = [x for x in jax.tree.leaves(model, is_leaf=is_stack) if isinstance(x, Stack)]
    count = sum(len(layers) for stack in stacks for _, layers in stack.iter_stacked())
    return stack_apart(model, [frozenset(packed.get(layer, ())) for layer in range(count)])


def _pack_linear(linear: Linear, quantized: AbstractQuantizedFormat) -> AbstractGroupLinear:
    """Return the packed layer of a linear layer, in shapes. **Raises** `ValueError` for sizes that it cannot have."""
    *stacked, out, in_ = linear.weight.shape
    packed = eqx.filter_eval_shape(lambda: quantized.make_layer(in_, out, in_=linear.in_, out=linear.out))
    packed = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*stacked, *x.shape), x.dtype), packed)
    return eqx.tree_at(lambda x: x.bias, packed, linear.bias, is_leaf=lambda x: x is None)


def _view_packed(name: str, parts: Parts, quantized: AbstractQuantizedFormat, num_layers: int) -> dict[str, LazyTensor]:
    """Return the tensors of the packed layers, one or several, that the rows of a matrix are divided among. They are
    read from its parts."""
    out, in_ = quantized.find_shape(parts)
    halves = CODES_PER_BYTE[quantized.kind]
    groups = count_groups(in_, quantized.input_group or in_)

    def read_some_codes(rows: np.ndarray, columns: slice) -> np.ndarray:
        codes = quantized.read_codes(parts, rows, slice(columns.start * halves, columns.stop * halves)).view(np.uint8)
        if quantized.kind == "float8_e4m3fn" and ((codes & 127) == 127).any():
            raise CheckpointError(f"{name}.weight has a number that is not finite")
        if halves == 2:
            return codes[:, 0::2] | codes[:, 1::2] << 4
        return codes

    def read_codes(rows: np.ndarray, columns: slice) -> np.ndarray:
        return read_in_chunks(read_some_codes, rows, columns, np.uint8)

    def read_scales(rows: np.ndarray, columns: slice) -> np.ndarray:
        if not quantized.is_reordered:
            quantized.read_groups(name, parts, slice(0, in_))  # raises for groups that are not consecutive
        return quantized.read_scales(parts, rows)[:, columns]

    def read_zeros(rows: np.ndarray, columns: slice) -> np.ndarray:
        zeros = quantized.read_zeros(name, parts, rows)
        assert not isinstance(zeros, int)
        return zeros[:, columns]

    make = lambda field, dtype, columns, read: make_lazy_matrix(
        f"{name}.{field}", np.dtype(dtype), (out, columns), read, parts, keeps_dtype=True
    )
    field = quantized.scale_field
    dtype = quantized.read_scales(parts, np.arange(0)).dtype
    views = {
        f"{name}.codes": make("codes", np.uint8, in_ // halves, read_codes),
        f"{name}.{field}": make(field, dtype, groups, read_scales),
    }
    if quantized.has_zeros:
        views[f"{name}.zeros"] = make("zeros", np.uint8, groups, read_zeros)
    for field, vector in quantized.view_vectors(name, parts).items():
        if field in quantized.list_whole_vectors():
            vector = _repeat_vector(vector, num_layers)
        views[f"{name}.{field}"] = vector
    return views


def _repeat_vector(vector: LazyTensor, num_layers: int) -> LazyTensor:
    """Return a tensor from which each of several layers reads the whole vector."""
    if num_layers == 1:
        return vector
    views = lambda mapping, shapes, num_stacked_dims: [vector.read()] * num_layers
    return dataclasses.replace(vector, shape=(vector.shape[0] * num_layers,), views=views)


def list_packed(model: Any) -> tuple[str, ...]:
    """Return the paths of the layers that hold the matrices of a quantized file."""
    nodes = jax.tree.leaves(model, is_leaf=_is_packed_linear)
    if not any(map(_is_packed_linear, nodes)):  # layers are merged only if some are packed
        return ()
    return tuple(sorted({site.name for site in find_linears(model) if isinstance(site.module, AbstractGroupLinear)}))


def _is_packed_linear(node: Any) -> bool:
    return isinstance(node, AbstractGroupLinear)


def pack_like(built: _Model, model: Any, quantized: AbstractQuantizedFormat) -> _Model:
    """Return a model in shapes with the same layers packed as in `model`."""
    sites = [site for site in find_linears(model) if isinstance(site.module, AbstractGroupLinear)]
    packed = {site.identity for site in sites}
    layers: dict[str, set[int]] = {}
    for site in sites:
        layers.setdefault(site.name, set()).update(site.ranges[0] if site.ranges else ())

    def find_layers(name: str, ranges: IndexRanges, module: Any) -> set[int]:
        return layers.get(name, set())

    built = _stack_apart(built, find_layers)

    def pack(name: str, ranges: IndexRanges, module: Any) -> Any:
        if (name, ranges) in packed and type(module) is Linear:
            return _pack_linear(module, quantized)
        return module

    return map_modules(pack, built, is_linear_site)


def unpack_tensors(
    tensors: Mapping[str, LazyTensor], quantized: AbstractQuantizedFormat, side_tensors: str
) -> dict[str, LazyTensor]:
    """Return the tensors of the file in place of the tensors of packed layers: the inverse of `pack_model`. The
    `side_tensors` of layers that are packed are among them."""
    written = {name: tensor for name, tensor in tensors.items() if not _is_packed(name, tensors)}
    held = decode_side_tensors(side_tensors)
    halves = CODES_PER_BYTE[quantized.kind]

    def read_field(stem: str, field: str) -> np.ndarray:
        if field == "codes" and halves == 2:
            packed = tensors[f"{stem}.codes"].read()
            return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        if field == "group_index" and not quantized.is_reordered:
            size = tensors[f"{stem}.codes"].shape[1] * halves
            return (np.arange(size) // (quantized.input_group or size)).astype(np.int32)
        return tensors[f"{stem}.{field}"].read()

    def encode(stem: str, suffix: str, shape: tuple[int, ...]) -> np.ndarray:
        part = quantized.encode_part(suffix, partial(read_field, stem))
        if part.ndim == 1:  # of a vector, each layer has a copy
            return part[: shape[0]]
        return part

    for stem in [name.removesuffix(".codes") for name in tensors if name.endswith(".codes")]:
        out, columns = tensors[f"{stem}.codes"].shape
        scales = tensors[f"{stem}.{quantized.scale_field}"].dtype
        for suffix, (shape, dtype) in quantized.list_file_parts(out, columns * halves, scales).items():
            read = partial(encode, stem, suffix, shape)
            written[f"{stem}.{suffix}"] = LazyTensor(np.dtype(dtype), shape, read)
        for name in (f"{stem}.{suffix}" for suffix in quantized.side_suffixes):
            if name in held:
                written[name] = hold_array(held[name])
    return dict(sorted(written.items()))


def _is_packed(name: str, specs: Mapping[str, Any]) -> bool:
    stem, _, field = name.rpartition(".")
    return field in _FIELDS and f"{stem}.codes" in specs


def describe_quantization(model: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a model that `zoo.adapters.quantize` packed to int4 or NVFP4; None for other
    models. **Raises** `CheckpointError` if its layers have several formats."""
    is_packed = lambda node: isinstance(node, AbstractGroupLinear)
    layers = jax.tree.leaves(model, is_leaf=is_packed)  # names would deal layers of a pipeline out anew
    configs = [describe_packing(layer) for layer in layers if is_packed(layer)]
    if not configs:
        return None
    if any(config != configs[0] for config in configs):
        raise CheckpointError("a file has one number format for all packed matrices, and the model's have several")
    return configs[0]


def drop_quantization_if_plain(model: Any, config: Mapping[str, Any], packed: Sequence[str]) -> dict[str, Any]:
    """Return the config to save a model with whose layers `packed` were loaded packed: without its
    `quantization_config` if none of them is packed any more.

    **Raises** `CheckpointError` if only some still are.
    """
    now = list_packed(model)
    if not packed or set(now) >= set(packed):
        return dict(config)
    if now:
        changed = sorted(set(packed) - set(now))
        raise CheckpointError(
            f"{', '.join(changed[:4])} were packed in the file and are plain now, and {now[0]} is still packed: "
            "zoo.adapters.dequantize(model) makes all of them plain"
        )
    return {key: value for key, value in config.items() if key != "quantization_config"}
