"""What a model is made of, as a table."""

import equinox as eqx
import jax
from jaxtyping import PyTree

from zoo.parallel import Mesh, leaves

from .page import ParameterRow


def tabulate_parameters(model: PyTree, mesh: Mesh) -> list[ParameterRow]:
    """A row for every array of `model`: its name, shape, dims, the mesh axes that split each, dtype and size.

    Works on abstract models too (`eqx.filter_eval_shape`): nothing is computed.
    """
    arrays = eqx.filter(model, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    rows = []
    for leaf, x in zip(leaves(arrays), jax.tree.leaves(arrays), strict=True):
        dims = leaf.dims or ()
        spec = mesh.spec(dims, x.shape, leaf.name) if dims else ()
        axes = [(entry,) if isinstance(entry, str) else entry for entry in spec]  # what stands alone JAX unpacks
        split = [f"{dim.name} over {' x '.join(over)}" for dim, over in zip(dims, axes, strict=False) if over]
        rows.append(
            ParameterRow(
                name=leaf.name,
                shape=" x ".join(map(str, x.shape)),
                dims=" ".join(dim.name for dim in dims),
                layout=", ".join(split) or "whole",
                dtype=x.dtype.name,
                count=x.size,
                bytes=x.size * x.dtype.itemsize,
            )
        )
    return rows
