"""Draw one layer of a Transformer on a mesh: which device stores what, what it fetches, and where sums are taken.

    python scripts/draw_layer.py --fsdp 2 --tensor 4 > layer.svg
    python scripts/draw_layer.py --data 2 --fsdp 2 --tensor 2 --device 3 --narrow > layer.svg

Nothing is computed and no device is needed: everything shown is read off the layout, as `zoo.place` reads it.
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
from zoo.cli.devices import make_abstract_mesh, use_cpu
from zoo.parallel import AXES, Dim, Mesh, leaves

MOST_DEVICES = 64


@dataclass(frozen=True)
class LayerArray:
    """An array of a layer as it lies on a mesh."""

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    stored: tuple[tuple[str, ...], ...]
    """The axes that split each dim where the array is stored."""
    fetched: tuple[tuple[str, ...], ...]
    """Those of them over which it is brought together before it is used."""
    sizes: Mapping[str, int]
    """Of the axes of the mesh."""

    def num_shards(self, dim_index: int) -> int:
        """Into how many shares a dim is cut."""
        return math.prod(self.sizes[axis] for axis in self.stored[dim_index])

    def shard_index(self, device: int) -> tuple[int, ...]:
        """Which share of each dim a device stores. Devices are numbered as they stand in the mesh."""
        place = np.unravel_index(device, [self.sizes[axis] for axis in AXES])
        index: dict[str, Any] = dict(zip(AXES, place, strict=True))

        def number(axes: tuple[str, ...]) -> int:
            return int(np.ravel_multi_index([index[a] for a in axes], [self.sizes[a] for a in axes])) if axes else 0

        return tuple(map(number, self.stored))

    @property
    def numbers_stored(self) -> int:
        """How many numbers each device stores."""
        return math.prod(self.shape) // math.prod(map(self.num_shards, range(len(self.shape))))

    @property
    def numbers_fetched(self) -> int:
        """How many more it has while it computes."""
        return self.numbers_stored * (math.prod(self.sizes[axis] for axes in self.fetched for axis in axes) - 1)


def list_layer_arrays(mesh: Mesh, *, embed: int, heads: int, kv_heads: int, mlp: int) -> dict[str, LayerArray]:
    """The arrays of one block of a Transformer, by name: `mixer.query.weight`.

    **Raises** `ValueError` where the layout does not divide a size.
    """

    def block(key):
        sizes: dict[str, Any] = {"embed": embed, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
        stack: Any = zoo.models.Transformer(vocab=1, layers=1, **sizes, key=key).stack
        return next(stack.iter_blocks())

    shapes = eqx.filter_eval_shape(block, jax.random.key(0))
    found = {}
    for leaf, x in zip(leaves(shapes), jax.tree.leaves(shapes), strict=True):
        dims = leaf.dims or ()
        spec = tuple(mesh.spec(dims, x.shape, leaf.name))
        stored = tuple((axes,) if isinstance(axes, str) else axes or () for axes in spec)
        gathered = dict(mesh.find_gather_dims(dims))
        fetched = tuple(gathered.get(place, ()) for place in range(len(dims)))
        stored += ((),) * (len(dims) - len(stored))
        found[leaf.name] = LayerArray(leaf.name, dims, x.shape, stored, fetched, mesh.shape)
    return found


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
    """A layer of these sizes on `mesh` as an `<svg>` element, as seen from one device; `narrow` for a phone.

    **Raises** `ValueError` where the layout does not divide a size, for a device that the mesh does not have, and for
    more devices than a picture can show.
    """
    devices = mesh.devices.size
    if devices > MOST_DEVICES:
        raise ValueError(f"{mesh} has {devices} devices, and a picture shows up to {MOST_DEVICES}")
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
        kv_heads: Heads of keys and values.
        mlp: Width of the gated MLP.
        device: The device whose share is shown, by its number in the mesh.
        narrow: One half of the layer above the other, for a phone.
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
