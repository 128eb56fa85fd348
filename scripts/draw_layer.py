"""Draw one layer of a Transformer on a mesh: the shards of each device, all-gathers and all-reduces.

    python scripts/draw_layer.py --fsdp 2 --tensor 4 > layer.svg
    python scripts/draw_layer.py --data 2 --fsdp 2 --tensor 2 --device 3 --narrow > layer.svg

Nothing is computed and no device is needed: everything is read off the layout, as `zoo.place` reads it.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
import tyro

import zoo
from scripts.picture import Picture
from zoo.parallel import Dim, Mesh, leaves
from zoo.parallel.devices import make_abstract_mesh, use_cpu
from zoo.parallel.layout import AXES

_MAX_DEVICES = 64


@dataclass(frozen=True)
class LayerArray:
    """An array of a layer, with its sharding on a mesh."""

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    sharded_axes: tuple[tuple[str, ...], ...]
    """Mesh axes that shard each dim at rest."""
    gathered_axes: tuple[tuple[str, ...], ...]
    """Those of them over which the array is all-gathered before use."""
    axis_sizes: Mapping[str, int]
    """Sizes of the mesh axes."""

    def num_shards(self, dim_index: int) -> int:
        """Return the number of shards of a dim."""
        return math.prod(self.axis_sizes[axis] for axis in self.sharded_axes[dim_index])

    def shard_index(self, device: int) -> tuple[int, ...]:
        """Return the index of a device's shard along each dim. Devices are numbered in the order of the mesh."""
        coordinates = np.unravel_index(device, [self.axis_sizes[axis] for axis in AXES])
        index: dict[str, Any] = dict(zip(AXES, coordinates, strict=True))

        def ravel(axes: tuple[str, ...]) -> int:
            sizes = [self.axis_sizes[axis] for axis in axes]
            return int(np.ravel_multi_index([index[axis] for axis in axes], sizes)) if axes else 0

        return tuple(map(ravel, self.sharded_axes))

    @property
    def num_stored(self) -> int:
        """The number of elements that each device stores."""
        return math.prod(self.shape) // math.prod(map(self.num_shards, range(len(self.shape))))

    @property
    def num_gathered(self) -> int:
        """The number of further elements that each device all-gathers."""
        return self.num_stored * (math.prod(self.axis_sizes[axis] for axes in self.gathered_axes for axis in axes) - 1)


def list_layer_arrays(mesh: Mesh, *, embed: int, heads: int, kv_heads: int, mlp: int) -> dict[str, LayerArray]:
    """Return the arrays of one block of a Transformer, by name: `mixer.query.weight`.

    **Raises** `ValueError` where the layout does not divide a size.
    """

    def block(key):
        sizes: dict[str, Any] = {"embed": embed, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
        stack: Any = zoo.models.Transformer(vocab=1, layers=1, **sizes, key=key).stack
        return next(stack.iter_blocks())

    shapes = eqx.filter_eval_shape(block, jax.random.key(0))
    arrays = {}
    for leaf, x in zip(leaves(shapes), jax.tree.leaves(shapes), strict=True):
        dims = leaf.dims or ()
        spec = tuple(mesh.spec(dims, x.shape, leaf.name))
        sharded = tuple((axes,) if isinstance(axes, str) else axes or () for axes in spec)
        sharded += ((),) * (len(dims) - len(sharded))
        axes_by_dim = dict(mesh.find_gather_dims(dims))
        gathered = tuple(axes_by_dim.get(dim_index, ()) for dim_index in range(len(dims)))
        arrays[leaf.name] = LayerArray(leaf.name, dims, x.shape, sharded, gathered, mesh.shape)
    return arrays


def draw(
    mesh: Mesh,
    *,
    embed: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    device: int,
    narrow: bool = False,
) -> str:
    """Return a layer of these sizes on `mesh` as an `<svg>` element, seen from one device; `narrow` for a phone.

    **Raises** `ValueError` where the layout does not divide a size, for a device that the mesh does not have, and for
    more devices than a picture can show.
    """
    devices = mesh.devices.size
    if devices > _MAX_DEVICES:
        raise ValueError(f"{mesh} has {devices} devices, and a picture shows up to {_MAX_DEVICES}")
    if not 0 <= device < devices:
        raise ValueError(f"device {device}: {mesh} has devices 0 to {devices - 1}")
    return Picture(
        str(mesh), list_layer_arrays(mesh, embed=embed, heads=heads, kv_heads=kv_heads, mlp=mlp), device, narrow
    ).svg()


def main(
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    embed: int = 64,
    heads: int = 8,
    kv_heads: int = 4,
    mlp: int = 128,
    device: int = 0,
    narrow: bool = False,
) -> None:
    """Print one layer of a Transformer on a mesh as SVG.

    Args:
        data: Devices along `data`.
        fsdp: Devices along `fsdp`.
        tensor: Devices along `tensor`.
        embed: Width of the residual stream.
        heads: Attention heads.
        kv_heads: Key and value heads.
        mlp: Width of the gated MLP.
        device: Index in the mesh of the device whose shards are highlighted.
        narrow: Stack the two halves of the layer, for a phone.
    """
    use_cpu()
    mesh = make_abstract_mesh(data=data, fsdp=fsdp, tensor=tensor)
    if mesh is None:
        raise SystemExit("One device holds everything: give --data, --fsdp or --tensor.")
    sizes = {"embed": embed, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
    try:
        sys.stdout.write(draw(mesh, **sizes, device=device, narrow=narrow))
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    tyro.cli(main)
