"""What a gradient costs on each mesh: collectives, memory and compile time of the compiled step, without running it.

    python scripts/mesh_costs.py                                 # every data x fsdp x tensor mesh over the devices
    python scripts/mesh_costs.py --layers 24 --embed 1024 --remat full

On a machine without accelerators eight virtual devices stand in:
XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu.
"""

import collections
import re
import time
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

import zoo

COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


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
    print(f"{'mesh':28} {'parameters':>12} {'temporaries':>12} {'compile':>9}  collectives in the program")
    for mesh in meshes(jax.device_count()):
        model = zoo.init(make, jax.random.key(0), mesh)
        start = time.perf_counter()
        step = eqx.filter_jit(zoo.value_and_grad(loss_fn, mesh))
        compiled = step.lower(model, batch).compile().compiled
        seconds = time.perf_counter() - start
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        memory, program = compiled.memory_analysis(), compiled.as_text() or ""  # not every backend tells
        spare = memory.temp_size_in_bytes if memory else float("nan")
        moved = collections.Counter(COLLECTIVE.findall(program))
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(moved.items())) or "none"
        print(f"{mesh!s:28} {held / 1e6:>9.2f} MB {spare / 1e6:>9.2f} MB {seconds:>7.1f} s  {counts}", flush=True)


def meshes(devices: int) -> Iterator[zoo.parallel.Mesh]:
    """Every way to write the number of devices as data x fsdp x tensor."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for fsdp in divisors:
        for tensor in divisors:
            if devices % (fsdp * tensor) == 0:
                yield zoo.make_mesh(data=-1, fsdp=fsdp, tensor=tensor)


if __name__ == "__main__":
    tyro.cli(main)
