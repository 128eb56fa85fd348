"""Table of a model's parameters, with their dims and sharding."""

import equinox as eqx
import jax
from jaxtyping import PyTree

from zoo.parallel import Mesh, leaves

from .page import ParameterRow


def tabulate_parameters(model: PyTree, mesh: Mesh) -> list[ParameterRow]:
    """Return a row per array of `model`: name, shape, dims, the mesh axes that shard each dim, dtype and size.

    Accepts abstract models (`eqx.filter_eval_shape`), since nothing is computed.
    """
    arrays = eqx.filter(model, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    rows = []
    for leaf, x in zip(leaves(arrays), jax.tree.leaves(arrays), strict=True):
        dims = leaf.dims or ()
        spec = mesh.spec(dims, x.shape, leaf.name) if dims else ()
        axes = [(entry,) if isinstance(entry, str) else entry for entry in spec]  # JAX unpacks single axes
        sharded = [f"{dim.name} over {' x '.join(over)}" for dim, over in zip(dims, axes, strict=False) if over]
        rows.append(
            ParameterRow(
                name=leaf.name,
                shape=" x ".join(map(str, x.shape)),
                dims=" ".join(dim.name for dim in dims),
                layout=", ".join(sharded) or "replicated",
                dtype=x.dtype.name,
                count=x.size,
                bytes=x.size * x.dtype.itemsize,
            )
        )
    return rows
