"""Cost of a gradient on each mesh: FLOPs, memory, collectives and compile time, without running it.

    python scripts/mesh_costs.py                                 # every data x fsdp x tensor mesh over the devices
    python scripts/mesh_costs.py --layers 24 --embed 1024 --remat full

On a machine without accelerators use eight virtual devices:
XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

import zoo
from zoo.inspect.collectives import Collective
from zoo.parallel.remat import Remat


def main(
    *,
    vocab: int = 512,
    embed: int = 128,
    layers: int = 6,
    heads: int = 8,
    mlp: int = 512,
    seq: int = 64,
    rows_per_device: int = 1,
    remat: Remat = "none",
) -> None:
    """Compile the gradient of a Transformer's loss on each mesh, and print one line per mesh.

    Args:
        vocab: Size of the vocabulary.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads.
        mlp: Hidden width of the gated MLP.
        seq: Tokens per row.
        rows_per_device: Rows of the batch per device.
        remat: Rematerialization in the backward pass.
    """

    def make(key):
        return zoo.models.Transformer(
            vocab=vocab, embed=embed, layers=layers, heads=heads, mlp=mlp, remat=remat, key=key
        )

    def loss_fn(model, batch):
        return zoo.cross_entropy(model, batch)

    tokens = jnp.zeros((rows_per_device * jax.device_count(), seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    print(f"{'mesh':28} {'FLOP':>10} {'parameters':>12} {'temporaries':>12} {'compile':>9}  sent per device")
    for mesh in iter_meshes(jax.device_count()):
        model = zoo.init(make, jax.random.key(0), mesh)
        program = zoo.inspect.compiled(eqx.filter_jit(zoo.value_and_grad(loss_fn, mesh)), model, batch)
        stored = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        temporaries = program.memory.temporaries if program.memory else float("nan")  # not every backend reports it
        sent = ", ".join(map(format_collective, program.collectives)) or "nothing"
        print(
            f"{mesh!s:28} {program.flops.total / program.devices / 1e6:>8.1f} M {stored / 1e6:>9.2f} MB "
            f"{temporaries / 1e6:>9.2f} MB {program.seconds.compile:>7.1f} s  {sent}",
            flush=True,
        )


def format_collective(collective: Collective) -> str:
    """Format as `12 all-reduce over tensor 0.52 MB`."""
    axes = collective.groups if collective.axes is None else " and ".join(collective.axes)
    return f"{collective.count} {collective.kind} over {axes} {collective.bytes / 1e6:.2f} MB"


def iter_meshes(devices: int) -> Iterator[zoo.parallel.Mesh]:
    """Yield every data x fsdp x tensor mesh over this number of devices."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for fsdp in divisors:
        for tensor in divisors:
            if devices % (fsdp * tensor) == 0:
                yield zoo.make_mesh(data=-1, fsdp=fsdp, tensor=tensor)


if __name__ == "__main__":
    tyro.cli(main)
