"""What a gradient costs on each mesh: compute, memory, collectives and compile time, without running it.

    python scripts/mesh_costs.py                                 # every data x fsdp x tensor mesh over the devices
    python scripts/mesh_costs.py --layers 24 --embed 1024 --remat full

On a machine without accelerators eight virtual devices stand in:
XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

import zoo


def main(
    *,
    vocab: int = 512,
    embed: int = 128,
    layers: int = 6,
    heads: int = 8,
    mlp: int = 512,
    seq: int = 64,
    rows_per_device: int = 1,
    remat: zoo.parallel.Remat = "none",
) -> None:
    """Compile the gradient of a Transformer's loss on each mesh, and print a line for it.

    Args:
        vocab: Tokens in the vocabulary.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads.
        mlp: Width of the gated MLP.
        seq: Tokens in a row.
        rows_per_device: Rows of the batch for each device.
        remat: What the backward pass computes again.
    """

    def make(key):
        return zoo.models.Transformer(
            vocab=vocab, embed=embed, layers=layers, heads=heads, mlp=mlp, remat=remat, key=key
        )

    def loss_fn(model, batch):
        return zoo.cross_entropy(model, batch)

    tokens = jnp.zeros((rows_per_device * jax.device_count(), seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    print(f"{'mesh':28} {'FLOP':>10} {'parameters':>12} {'temporaries':>12} {'compile':>9}  sent, a device")
    for mesh in meshes(jax.device_count()):
        model = zoo.init(make, jax.random.key(0), mesh)
        program = zoo.inspect.compiled(eqx.filter_jit(zoo.value_and_grad(loss_fn, mesh)), model, batch)
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        spare = program.memory.temporaries if program.memory else float("nan")  # not every backend tells
        sent = ", ".join(map(sentence, program.collectives)) or "nothing"
        print(
            f"{mesh!s:28} {program.flops.total / program.devices / 1e6:>8.1f} M {held / 1e6:>9.2f} MB "
            f"{spare / 1e6:>9.2f} MB {program.seconds.compile:>7.1f} s  {sent}",
            flush=True,
        )


def sentence(found: zoo.inspect.Collective) -> str:
    """`12 all-reduce over tensor, 0.52 MB`."""
    axes = found.groups if found.axes is None else " and ".join(found.axes)
    return f"{found.count} {found.kind} over {axes} {found.bytes / 1e6:.2f} MB"


def meshes(devices: int) -> Iterator[zoo.parallel.Mesh]:
    """Every way to write the number of devices as data x fsdp x tensor."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for fsdp in divisors:
        for tensor in divisors:
            if devices % (fsdp * tensor) == 0:
                yield zoo.make_mesh(data=-1, fsdp=fsdp, tensor=tensor)


if __name__ == "__main__":
    tyro.cli(main)
