"""Read parameters of Flax, Haiku or any nested dict of arrays into a model by a table of names, and write them back.

A table is a name map as a family has one (`zoo.models.hf.spec`), with full names of tensors: their path, with slashes,
on the left, and our parameter path on the right. `fused(..., transposed=True)` is a matrix stored as (in, out).

    {
        "params/embed/embedding": "embedding.weight",
        "params/layers_*/up/kernel": fused("layers.*.mlp.up.weight", transposed=True),    # one dict per layer
        "params/layers/down/kernel": fused("layers.*.mlp.down.weight", transposed=True),  # a stacked array: nn.scan
    }
"""

import math
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from numbers import Number
from operator import mul
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zoo.models.hf.spec import NameMap, Shape, TensorMapping, prefixed

from .plan import TensorPlan, plan_tensors
from .safetensors import CheckpointError, raise_problems
from .save import export_tensors

_Model = TypeVar("_Model")
_DISAGREE = "tree, table and model do not agree:"
_Stacked = list[tuple[re.Pattern[str], int]]
"""Patterns of their names that have fewer stars than ours, and the number of dims they stack for these."""


def read_tree(model: _Model, tree: Mapping[str, Any], table: NameMap) -> _Model:
    """Return a model with its arrays filled from a nested dict: of Flax (Linen or NNX), Haiku, or another library.

    - `model`: a model of `zoo.parallel.Module`s, in arrays or in shapes (`eqx.filter_eval_shape`). Its classes,
      dtypes and shardings are kept.
    - `tree`: nested mappings and lists with arrays at the leaves, in boxes such as `nnx.Param` or `nn.Partitioned` or
      without. `None` is skipped.
    - `table`: their path -> our parameter path. A star is a number. Where theirs has fewer stars than ours, its array
      stacks layers or experts in its first dims.

    Neighboring dims are merged where ours has their product: a `DenseGeneral` kernel (embed, heads, head_dim) is read
    as the matrix (embed, heads * head_dim). Numbers are cast to the model's dtype.

    **Raises** `CheckpointError` that lists every array of the tree that has no place, is missing or has another shape,
    or integers in place of floating-point numbers, and for an array of the model without a row; `ValueError` for a row
    with more stars than its parameter. A square matrix that the table forgets to transpose is not noticed: compare
    outputs once.
    """
    name_map, stacked = _expand(table)
    theirs = _unstack(dict(flatten(tree)), stacked)
    plans = plan_tensors(model, name_map)
    leaves, treedef = jax.tree.flatten(model)
    _check(plans, theirs, [np.dtype(leaf.dtype) for leaf in leaves])
    buffers = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
    for name, plan in plans.items():
        tensor = theirs[name].reshape(plan.shape)
        views = plan.mapping.views(tensor, plan.part_shapes, plan.num_stacked_dims)
        for view, piece in zip(views, plan.slices, strict=True):
            buffers[piece.leaf][piece.index] = view.reshape(piece.shape)
    return jax.tree.unflatten(treedef, map(_place_like, buffers, leaves))


def write_tree(model: PyTree, table: NameMap, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a model's arrays as a nested dict of another library, in NumPy: the inverse of `read_tree`.

    - `like`: a tree of the wanted structure and shapes, such as `jax.eval_shape(net.init, key, x)`. Default: paths are
      split at each slash, and heads stay merged.

    Boxes of `like` are not made again. Sharded arrays are gathered, one at a time.

    **Raises** `CheckpointError` for an array without a row, and where `like` has other names or shapes.
    """
    name_map, stacked = _expand(table)
    tensors: dict[str, np.ndarray] = {}
    layers: dict[str, dict[Shape, np.ndarray]] = {}
    for name, tensor in export_tensors(model, name_map).items():
        base, index = _split_stacked(name, stacked)
        if index:
            layers.setdefault(base, {})[index] = tensor.read()
        else:
            tensors[name] = tensor.read()
    for name, parts in layers.items():
        sizes = [size + 1 for size in max(parts)]
        tensors[name] = np.stack([parts[index] for index in sorted(parts)]).reshape(*sizes, *parts[max(parts)].shape)
    if like is None:
        return _nest(tensors)
    shapes = {name: np.shape(leaf) for name, leaf in flatten(like, as_arrays=False)}
    problems = [f"{name} is in the table and not in the tree" for name in tensors.keys() - shapes.keys()]
    problems += [f"{name} is in the tree and not in the table" for name in shapes.keys() - tensors.keys()]
    for name in tensors.keys() & shapes.keys():
        if not _merges_into(shapes[name], tensors[name].shape):
            problems.append(f"{name} is {list(shapes[name])} in the tree, and {list(tensors[name].shape)} here")
    raise_problems(_DISAGREE, problems)
    return fill_like(like, {name: tensor.reshape(shapes[name]) for name, tensor in tensors.items()})


def _expand(table: NameMap) -> tuple[dict[str, TensorMapping], _Stacked]:
    """Return a table whose names have a star, `/*`, for each dim that stacks layers or experts, and these names."""
    name_map = {}
    stacked = []
    for name, mapping in prefixed("", "", table).items():
        counts = {part.count("*") for part in mapping.parts}
        missing = min(counts) - name.count("*")
        if len(counts) > 1 or missing < 0:
            raise ValueError(f"{name} has {name.count('*')} stars, and {', '.join(mapping.parts)} has other numbers")
        if missing:
            pattern = re.compile(re.escape(name).replace(r"\*", r"\d+"))
            stacked.append((pattern, missing))
        name_map[name + "/*" * missing] = mapping
    return name_map, stacked


def _unstack(theirs: Mapping[str, np.ndarray], stacked: _Stacked) -> dict[str, np.ndarray]:
    """Return their arrays with one view for each layer or expert of those that stack them."""
    found = {}
    for name, array in theirs.items():
        dims = next((count for pattern, count in stacked if pattern.fullmatch(name)), 0)
        for index in np.ndindex(array.shape[:dims]):
            found["/".join([name, *map(str, index)])] = array[(*index, ...)]
    return found


def _split_stacked(name: str, stacked: _Stacked) -> tuple[str, Shape]:
    """Return the name of the array that stacks a tensor, and its index in it; () if none does."""
    for pattern, dims in stacked:
        base, *index = name.rsplit("/", dims)
        if len(index) == dims and pattern.fullmatch(base):
            return base, tuple(map(int, index))
    return name, ()


def flatten(tree: Any, name: str = "", *, as_arrays: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield path and array of each leaf, out of boxes."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flatten(value, _extend_path(name, key), as_arrays=as_arrays)
    elif tree is not None:
        leaf = _unbox(tree)
        if not (hasattr(leaf, "shape") or isinstance(leaf, Number)):
            raise CheckpointError(f"{name} is {type(leaf).__name__}: expected an array")
        yield name, np.asarray(leaf) if as_arrays else leaf


def _extend_path(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


def _unbox(leaf: Any) -> Any:
    """Return the array in a box: `nnx.Param`, `nn.Partitioned`, `nn.LogicallyPartitioned`."""
    if hasattr(leaf, "get_value"):
        return leaf.get_value()
    if hasattr(leaf, "unbox"):
        return leaf.unbox()
    return leaf


def _check(plans: Mapping[str, TensorPlan], theirs: Mapping[str, np.ndarray], dtypes: list[np.dtype]) -> None:
    """**Raises** `CheckpointError` for every array that is missing, left over, or does not fit."""
    problems = [f"{name} {list(plans[name].shape)} is missing" for name in plans.keys() - theirs.keys()]
    problems += [f"{name} {list(theirs[name].shape)} has no place" for name in theirs.keys() - plans.keys()]
    for name in plans.keys() & theirs.keys():
        wanted = plans[name].shape
        given = theirs[name].shape
        mapping = plans[name].mapping
        if not _merges_into(given, wanted):
            problem = f"{name} is {list(given)}, and {', '.join(mapping.parts)} asks for {list(wanted)}"
            if given[::-1] == wanted and not mapping.transposed:
                problem += ": transposed=True?"
            problems.append(problem)
        expected = {_get_kind(dtypes[piece.leaf]) for piece in plans[name].slices}
        if expected != {_get_kind(theirs[name].dtype)}:
            problems.append(f"{name} is {theirs[name].dtype}: expected {' or '.join(sorted(expected))}")
    raise_problems(_DISAGREE, problems)


def _merges_into(fine: Shape, coarse: Shape) -> bool:
    """Return True if `coarse` is `fine` with some neighboring dims merged."""
    products = set(accumulate(fine, mul))
    return math.prod(fine) == math.prod(coarse) and products.issuperset(accumulate(coarse, mul))


def _get_kind(dtype: Any) -> str:
    kinds = {"floating point": jnp.floating, "complex": jnp.complexfloating, "bool": jnp.bool_}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), "integers")


def _place_like(buffer: np.ndarray, leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, buffer.__getitem__)
    return jnp.asarray(buffer)


def _nest(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return a nested dict of arrays by path. **Raises** `CheckpointError` if a path goes through an array."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *outer, last = name.split("/")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{name} lies below {key}, which is an array")
        node[last] = tensor
    return tree


def fill_like(like: Any, tensors: Mapping[str, np.ndarray], name: str = "") -> Any:
    """Return a tree of the structure of `like`, with the arrays of these paths. Others remain as they are."""
    if isinstance(like, Mapping):
        return {key: fill_like(value, tensors, _extend_path(name, key)) for key, value in like.items()}
    if isinstance(like, list | tuple):
        return [fill_like(value, tensors, _extend_path(name, number)) for number, value in enumerate(like)]
    return tensors.get(name, like)
