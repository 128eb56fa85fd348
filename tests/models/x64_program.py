"""Compare models with `jax_enable_x64` and without it, in a process of its own: the flag is set once for all.

python -m tests.models.x64_program "softmax attention" Mamba-2 jetmoe      # mixers, and families of checkpoints
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zoo
from tests.docs.parallel_matrix import MIXERS
from zoo import adapters, train
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES

FIXTURES = Path(__file__).parents[1] / "fixtures"
KEY = jax.random.key(0)
TOKENS = (np.arange(24, dtype=np.int32).reshape(2, 12) * 5) % 16
BATCH = {
    "tokens": TOKENS,
    "targets": np.roll(TOKENS, -1, 1),
    "segment_ids": np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], np.int32),
}
TOLERANCE = 1e-5


def make_mixers(names: list[str], key: jax.Array) -> zoo.models.Decoder:
    """Make one model of several mixers, a layer each."""
    pattern = [MIXERS[name] for name in names]
    return zoo.models.Hybrid(vocab=16, embed=16, layers=len(pattern), pattern=pattern, mlp=16, key=key)


def run_family(folder: Path) -> dict[str, Any]:
    """Run a model of a checkpoint's architecture, initialized from scratch."""
    config = json.loads((folder / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    inputs = TOKENS
    if "image_size" in config:
        size = config["image_size"]
        inputs = np.random.default_rng(0).normal(size=(2, 3, size, size)).astype(np.float32)
    return run(lambda key: family.build(read_config(family, config), key=key), inputs)


def run(make: Callable, inputs: np.ndarray = TOKENS) -> dict[str, Any]:
    """Return what a model computes, from the initialization on."""
    model = eqx.filter_jit(make)(KEY)
    results = {"parameters": zoo.trainable(model), "outputs": eqx.filter_jit(lambda model: model(inputs))(model)}
    is_decoder = isinstance(model, zoo.models.Decoder)

    def loss(model):
        if not is_decoder:
            return sum(jnp.square(x).mean() for x in jax.tree.leaves(model(inputs)))
        total, count = zoo.cross_entropy(model, jax.tree.map(jnp.asarray, BATCH))
        return total / count

    results["loss, gradients"] = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
    if is_decoder:
        results["generated"] = zoo.generate(model, jnp.asarray(TOKENS[:, :5]), max_new_tokens=3)
    return results


def run_training() -> dict[str, Any]:
    """Return parameters, losses and optimizer states of two steps of the adapters and optimizers of the library."""
    make = partial(zoo.models.Transformer, vocab=16, embed=16, layers=1, heads=2, mlp=16)
    base, mesh = make(key=KEY), zoo.make_mesh(devices=jax.devices()[:1])
    lora = partial(adapters.lora, base, rank=2, key=KEY)
    moments = {"first": train.BlockwiseMoment(min_size=16), "second": train.BlockwiseMoment(min_size=16, signed=False)}
    optimizers = {
        "adamw": (lora(), optax.adamw(1e-2, mask=train.decay_mask)),
        "moments": (adapters.dora(base, rank=2, key=KEY), train.adamw(1e-2, b1=0.0, **moments)),
        "skips": (lora(init="pissa"), train.skip_nonfinite(train.adamw(1e-2))),
        "loss scale": (lora(init="olora"), train.dynamic_loss_scale(optax.adafactor(1e-2, min_dim_size_to_factor=2))),
    }
    batch = zoo.place_batch(BATCH | {"positions": np.tile(np.arange(12, dtype=np.int32), (2, 1))}, mesh)
    results = {}
    for name, (model, optimizer) in optimizers.items():

        @eqx.filter_jit
        def step(batch, model, state, optimizer=optimizer):
            gradient = zoo.value_and_grad(zoo.cross_entropy, mesh, microbatches=2)
            loss, grads = gradient(model, batch, loss_scale=train.loss_scale(state))
            updates, state = optimizer.update(grads, state, zoo.trainable(model))
            return zoo.place(eqx.apply_updates(model, updates), mesh), zoo.place(state, mesh.optimizer), loss

        model = zoo.place(model, mesh)
        state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        for _ in range(2):
            model, state, loss = step(batch, model, state)
        results[name] = (zoo.trainable(model), state, loss)
    return results


def list_differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """List arrays with another dtype, with numbers that are not finite, or further off than the tolerance."""
    lines = []
    for name in expected:
        pairs = zip(jax.tree.leaves(expected[name]), jax.tree.leaves(found[name]), strict=True)
        for x, y in pairs:
            if not eqx.is_array_like(x) or jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
                continue
            x, y = np.asarray(x), np.asarray(y)
            if x.dtype != y.dtype:
                lines.append(f"{name}: {y.dtype.name}{list(y.shape)} instead of {x.dtype.name}")
            error = np.abs(x.astype(np.float64) - y.astype(np.float64)).max(initial=0)
            if not error <= TOLERANCE * max(1, np.abs(x.astype(np.float64)).max(initial=0)):  # or NaN
                lines.append(f"{name}: {error:.1e} off in {x.dtype.name}{list(x.shape)}")
    return sorted(set(lines))


def main(names: list[str]) -> int:
    """Print what differs, and return 1 if anything does."""
    mixers = [name for name in names if name in MIXERS]
    folders = [FIXTURES / name for name in names if "/" in name]
    subjects: dict[str, Callable] = {folder.name: partial(run_family, folder) for folder in folders}
    if mixers:
        subjects[", ".join(mixers)] = partial(run, partial(make_mixers, mixers))
    if "training" in names:
        subjects["training"] = run_training
    assert len(mixers) + len(folders) + ("training" in names) == len(names), f"no mixer or folder is named so: {names}"
    expected = {name: jax.device_get(compute()) for name, compute in subjects.items()}
    jax.config.update("jax_enable_x64", True)
    lines = [f"{name}: {line}" for name in subjects for line in list_differences(expected[name], subjects[name]())]
    print(*lines, sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
