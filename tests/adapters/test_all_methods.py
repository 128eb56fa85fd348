"""All methods on all kinds of models: initialization, training, merging, half precision, decoding, meshes."""

import dataclasses
from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from tests.adapters.perturb import perturb
from tests.quick import mark_slow
from zoo import adapters
from zoo.layers import GatedDeltaNet, Mamba2
from zoo.models.parameter_paths import list_parameter_paths
from zoo.parallel.rounds import count_rounds, merge_rounds, split_rounds

KEY = jax.random.key(0)
VOCAB, ROWS, SEQ = 32, 8, 8
SIZES = {"vocab": VOCAB, "embed": 16, "layers": 2, "key": KEY}
MODELS = {
    "transformer": (partial(zoo.models.Transformer, **SIZES, heads=4, kv_heads=2, mlp=24), ("query", "value", "down")),
    "mixture": (
        partial(zoo.models.MixtureOfExperts, **SIZES, heads=2, mlp=16, experts=4, top=2),
        (r".*\.experts\.\d+\.(up|down)", "query"),
    ),
    "mamba2": (
        partial(zoo.models.Hybrid, **SIZES, pattern=[partial(Mamba2, heads=4, head_dim=8, state_dim=4)]),
        ("x", "B", "dt", "out"),
    ),
    "delta": (partial(zoo.models.Hybrid, **SIZES, pattern=[partial(GatedDeltaNet, heads=2)]), ("key", "value", "rate")),
}
METHODS = {
    "lora": partial(adapters.lora, rank=3, alpha=6, rank_pattern={r"layers\.1\..*": 2}),
    "dora": partial(adapters.dora, rank=2),
    "vera": partial(adapters.vera, rank=4),
    "loha": partial(adapters.loha, rank=2),
    "lokr": partial(adapters.lokr, rank=2, alpha=4, factor=4),
    "oft": partial(adapters.oft, block_size=4),
    "adalora": partial(adapters.adalora, rank=3, alpha=9),
    "ia3": lambda model, *, targets, key: adapters.ia3(
        model, targets=targets, inputs=r".*\.(down|out)" if any("down" in x or x == "out" for x in targets) else None
    ),
}
TOKENS = jax.random.randint(KEY, (ROWS, SEQ), 0, VOCAB)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}

run = eqx.filter_jit(lambda model: model(TOKENS))
merge = eqx.filter_jit(adapters.merge)  # and not operation by operation


@cache
def make_model(kind):
    return eqx.filter_jit(MODELS[kind][0])()


def wrap(kind, method):
    model = make_model(kind)
    return model, METHODS[method](model, targets=MODELS[kind][1], key=jax.random.key(1))


def loss_fn(model, batch):
    return zoo.cross_entropy(model, batch)


@pytest.mark.slow  # models/test_parameter_paths.py has rounds
@pytest.mark.parametrize("method", METHODS)
def test_adapters_do_not_depend_on_rounds(method):
    """Made, merged and removed in rounds as in one."""
    kind = "mixture" if method == "dora" else "transformer"
    model, wrapped = wrap(kind, method)
    dealt = METHODS[method](split_rounds(model, 2), targets=MODELS[kind][1], key=jax.random.key(1))
    assert count_rounds(dealt) == 2 and eqx.tree_equal(merge_rounds(dealt), wrapped)
    for function in (adapters.remove, adapters.merge):
        assert eqx.tree_equal(function(dealt), split_rounds(function(wrapped), 2))


def value_and_grad_on_one_device(model):
    def mean(trainable):
        total, count = loss_fn(eqx.combine(trainable, model), BATCH)
        return total / count

    return jax.value_and_grad(mean)(zoo.trainable(model))


def list_pairs():
    """Pair every method with every kind of model; most pairs are slow: `pytest -m slow tests/adapters`."""
    for kind in MODELS:
        for method in METHODS:
            quick = kind == "transformer" and method == "lora"  # DoRA: tests/adapters/peft/test_parity.py
            yield pytest.param(kind, method, marks=() if quick else (pytest.mark.slow,))


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "method"), list(list_pairs()))
def test_adapter_initialization_training_and_merge(kind, method):
    model, wrapped = wrap(kind, method)
    before = run(model)
    same = partial(np.testing.assert_allclose, atol=3e-6 * float(jnp.abs(before).max()), rtol=0)  # different programs
    same(run(wrapped), before)
    assert len({x.unsafe_buffer_pointer() for x in jax.tree.leaves(wrapped)}) == len(
        jax.tree.leaves(wrapped)
    )  # donated
    assert not any(
        x.weak_type for x in jax.tree.leaves(wrapped)
    )  # otherwise a step compiles twice: its outputs are strong

    optimizer = optax.adamw(0.05, weight_decay=0.1)

    @eqx.filter_jit
    def step(model, state):
        loss, gradients = value_and_grad_on_one_device(model)
        updates, state = optimizer.update(gradients, state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), state, loss, gradients

    trained, state = wrapped, optimizer.init(zoo.trainable(wrapped))
    for _ in range(3):
        trained, state, *_ = step(trained, state)
    trainable = {path.name for path in list_parameter_paths(zoo.trainable(wrapped))}
    assert trainable and all(f".{method}." in name for name in trainable)
    names = [path.name for path in list_parameter_paths(wrapped)]
    for name, old, new in zip(names, jax.tree.leaves(wrapped), jax.tree.leaves(trained), strict=True):
        assert (name in trainable) != np.array_equal(old, new), name

    after = run(trained)
    scale = float(jnp.abs(after).max())
    assert float(jnp.abs(after - before).max()) > 1e-3 * scale
    np.testing.assert_allclose(run(merge(trained)), after, atol=2e-5 * scale)
    same(run(adapters.set_strength(trained, {method: 0})), before)
    np.testing.assert_array_equal(run(adapters.remove(trained)), before)
    half = adapters.set_strength(trained, {method: 0.5})
    np.testing.assert_allclose(run(merge(half)), run(half), atol=2e-5 * scale)


ALL = tuple(METHODS)
ZERO2_SEQUENCE = dataclasses.replace(zoo.parallel.ZERO2, compute=zoo.parallel.SEQUENCE.compute)
LAYOUTS = {
    "tensor": ({"data": 2}, None),
    "tokens": ({"data": 1, "context": 2}, ZERO2_SEQUENCE),
    "experts": ({"data": 1, "expert": 2}, zoo.Layout(expert="boxes")),
}
"""Axes beside fsdp 2 and tensor 2. The second shards tokens over context and tensor, and gradients over fsdp."""


def list_meshes():
    """Eight methods in one program are quick for one kind of model. Where experts are sharded, one is."""
    for kind in MODELS:
        for layout in LAYOUTS if kind == "mixture" else ("tensor", "tokens"):
            is_small = kind == "transformer" and layout == "tensor"
            yield pytest.param(kind, ALL, layout, marks=() if is_small else (pytest.mark.slow,))
    yield pytest.param("mixture", ("lora",), "experts", marks=pytest.mark.slow)
    yield pytest.param("transformer", ("lora", "dora"), "tokens", marks=pytest.mark.slow)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize(
    ("kind", "methods", "layout"), list(list_meshes()), ids=lambda x: x if isinstance(x, str) else str(len(x))
)
def test_adapters_on_a_mesh_match_one_device(kind, methods, layout):
    """Values and gradients of a model that has adapters of several methods, nested around the same layers. In a mixture
    all of them wrap experts."""
    model, (_, targets) = make_model(kind), MODELS[kind]
    targets = (r".*\.experts\.\d+\.up",) if kind == "mixture" else targets

    @eqx.filter_jit  # and not operation by operation
    def nest(model):
        for number, method in enumerate(methods):
            model = METHODS[method](model, targets=(targets[number % len(targets)],), key=jax.random.key(1))
        noise = lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape) * (x != 0)
        return eqx.combine(jax.tree.map(noise, zoo.trainable(model)), model)

    model = nest(model)
    assert set(adapters.adapter_names(model)) == set(methods)
    loss, gradients = jax.jit(lambda: value_and_grad_on_one_device(model))()
    sizes, table = LAYOUTS[layout]
    mesh = zoo.make_mesh(**sizes, fsdp=2, tensor=2, layout=table)
    loss_on_mesh, gradients_on_mesh = zoo.value_and_grad(loss_fn, mesh)(
        zoo.place(model, mesh), zoo.place_batch(BATCH, mesh)
    )
    np.testing.assert_allclose(loss_on_mesh, loss, rtol=1e-5)
    for path, x, y in zip(
        list_parameter_paths(gradients), jax.tree.leaves(gradients), jax.tree.leaves(gradients_on_mesh), strict=True
    ):
        np.testing.assert_allclose(y, x, atol=5e-5 * max(1e-3, float(jnp.abs(x).max())), err_msg=path.name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
def test_generate_with_adapter_matches_forward(method):
    """Greedy decoding with a state gives the argmax of a forward pass over the text."""
    wrapped = perturb(wrap("delta", method)[1])
    text = zoo.generate(wrapped, TOKENS[:2], max_new_tokens=4)
    full = jnp.concatenate([TOKENS[:2], text], axis=1)
    expected = eqx.filter_jit(lambda model: model(full))(wrapped).argmax(-1)
    np.testing.assert_array_equal(text, expected[:, SEQ - 1 : -1])


@pytest.mark.ci
@pytest.mark.parametrize("method", mark_slow(["lora", "dora", "ia3"], but=["dora"]))
def test_cast_keeps_adapter_vectors_in_float32(method):
    wrapped = perturb(wrap("transformer", method)[1])
    half = zoo.cast(wrapped, jnp.bfloat16)
    dtypes = {path.name: x.dtype for path, x in zip(list_parameter_paths(half), jax.tree.leaves(half), strict=True)}
    for name, dtype in dtypes.items():
        if name.endswith(("key.weight", "down.weight", "up.weight")):
            assert dtype == jnp.bfloat16, name
        if name.endswith(("magnitude", "of_out", "squares", "scale")):
            assert dtype == jnp.float32, name
    logits, exact = run(half), run(wrapped)
    assert logits.dtype == jnp.bfloat16
    assert jnp.abs(logits.astype(jnp.float32) - exact).max() < 0.05 * jnp.abs(exact).max()


def count_flops(make):
    """FLOPs of a loss and its gradient, in shapes."""

    def mean(trainable, model):
        total, count = loss_fn(eqx.combine(trainable, model), BATCH)
        return total / count

    model = eqx.filter_eval_shape(make)
    return zoo.inspect.count_flops(jax.make_jaxpr(jax.value_and_grad(mean))(zoo.trainable(model), model)).total


def test_step_computes_no_gradient_of_frozen_weights():
    """Forward, and backward to the inputs: two thirds of the FLOPs of full training."""
    make = partial(zoo.models.Transformer, vocab=256, embed=32, layers=2, heads=2, mlp=64, tied=False, key=KEY)
    adapt = lambda: adapters.lora(make(), targets="all-linear", rank=1, key=KEY)
    assert 0.6 < count_flops(adapt) / count_flops(make) < 0.72
