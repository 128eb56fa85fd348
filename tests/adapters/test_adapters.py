"""Every method on every kind of model: nothing changes at birth, merged is wrapped, only what is tuned moves, and a
mesh computes what one device does."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import adapters
from zoo.layers import GatedDeltaNet, Mamba2, MXFP4Linear
from zoo.models.parameter_paths import list_parameter_paths

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


run = eqx.filter_jit(lambda model: model(TOKENS))


@cache
def made(kind):
    return eqx.filter_jit(MODELS[kind][0])()


def wrap(kind, method):
    model = made(kind)
    return model, METHODS[method](model, targets=MODELS[kind][1], key=jax.random.key(1))


def loss_fn(model, batch):
    return zoo.cross_entropy(model, batch)


def on_one_device(model):
    def mean(tuned):
        total, count = loss_fn(eqx.combine(tuned, model), BATCH)
        return total / count

    return jax.value_and_grad(mean)(zoo.trainable(model))


BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}


def pairs():
    """Every method with every kind: those without a mark in CI, the rest by `pytest -m slow tests/adapters`."""
    for kind in MODELS:
        for method in METHODS:
            quick = kind == "transformer" or method == "lora" or (kind, method) == ("mixture", "dora")
            yield pytest.param(kind, method, marks=() if quick else (pytest.mark.slow,))


@pytest.mark.parametrize(("kind", "method"), list(pairs()))
def test_born_merged_and_learnt(kind, method):
    model, wrapped = wrap(kind, method)
    before = run(model)
    same = partial(np.testing.assert_allclose, atol=3e-6 * float(jnp.abs(before).max()), rtol=0)  # programs differ
    same(run(wrapped), before)
    assert len({x.unsafe_buffer_pointer() for x in jax.tree.leaves(wrapped)}) == len(
        jax.tree.leaves(wrapped)
    )  # donated
    assert not any(x.weak_type for x in jax.tree.leaves(wrapped))  # else a step is compiled twice: what it gives is not

    optimizer = optax.adamw(0.05, weight_decay=0.1)

    @eqx.filter_jit
    def step(model, state):
        loss, gradients = on_one_device(model)
        updates, state = optimizer.update(gradients, state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), state, loss, gradients

    learnt, state = wrapped, optimizer.init(zoo.trainable(wrapped))
    for _ in range(3):
        learnt, state, *_ = step(learnt, state)
    tuned = {place.name for place in list_parameter_paths(zoo.trainable(wrapped))}
    assert tuned and all(f".{method}." in name for name in tuned)
    names = [place.name for place in list_parameter_paths(wrapped)]
    for name, old, new in zip(names, jax.tree.leaves(wrapped), jax.tree.leaves(learnt), strict=True):
        assert (name in tuned) != np.array_equal(old, new), name

    after = run(learnt)
    scale = float(jnp.abs(after).max())
    assert float(jnp.abs(after - before).max()) > 1e-3 * scale
    np.testing.assert_allclose(run(adapters.merge(learnt)), after, atol=2e-5 * scale)
    same(run(adapters.set_strength(learnt, {method: 0})), before)
    np.testing.assert_array_equal(run(adapters.remove(learnt)), before)
    half = adapters.set_strength(learnt, {method: 0.5})
    np.testing.assert_allclose(run(adapters.merge(half)), run(half), atol=2e-5 * scale)


@pytest.mark.parametrize("kind", MODELS)
def test_a_mesh_computes_what_one_device_does(kind):
    """Of all methods in one model, by turns around its targets and so around one another: values and gradients. In a
    mixture all of them stand around experts."""
    model, (_, targets) = made(kind), MODELS[kind]
    targets = (r".*\.experts\.\d+\.up",) if kind == "mixture" else targets
    for number, method in enumerate(METHODS.values()):
        model = method(model, targets=(targets[number % len(targets)],), key=jax.random.key(1))
    assert set(adapters.adapter_names(model)) == set(METHODS)
    noise = lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape) * (x != 0)
    model = eqx.combine(jax.tree.map(noise, zoo.trainable(model)), model)
    loss, gradients = jax.jit(lambda: on_one_device(model))()
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    theirs, on_mesh = zoo.value_and_grad(loss_fn, mesh)(zoo.place(model, mesh), zoo.place_batch(BATCH, mesh))
    np.testing.assert_allclose(theirs, loss, rtol=1e-5)
    for place, x, y in zip(
        list_parameter_paths(gradients), jax.tree.leaves(gradients), jax.tree.leaves(on_mesh), strict=True
    ):
        np.testing.assert_allclose(y, x, atol=5e-5 * max(1e-3, float(jnp.abs(x).max())), err_msg=place.name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "querry"}, "'querry'. Is it query"),
        ({"targets": ()}, "targets names no module"),
        ({"targets": "("}, "is no name, and no pattern either"),
        ({"targets": lambda name: False}, "takes none of the model's 15 matrices"),
        ({"rank": 0}, "a rank is at least 1, not 0"),
        ({"rank_pattern": {"query": 0}}, "a rank is at least 1, not 0"),
        ({"alpha_pattern": {"qery": 2}}, "'qery'. Is it query"),
    ],
)
def test_targets_and_ranks_that_cannot_be(options, message):
    model = eqx.filter_eval_shape(MODELS["transformer"][0])
    with pytest.raises(ValueError, match=message):
        adapters.lora(model, key=KEY, **options)


def test_adapters_around_adapters():
    """Each has its name, its weight, and what was there before it beneath."""
    model, one = wrap("transformer", "lora")
    both = adapters.ia3(one, targets="query", inputs=None)
    assert adapters.adapter_names(both) == ["lora", "ia3"]
    names = {place.name for place in list_parameter_paths(zoo.trainable(both))}
    assert {"layers.*.attention.query.ia3.of_out", "layers.*.attention.query.lora.down.weight"} <= names
    both = moved(both)
    np.testing.assert_allclose(run(adapters.merge(both)), run(both), atol=1e-5)
    off = adapters.set_strength(both, {"ia3": 0})
    np.testing.assert_allclose(run(off), run(adapters.remove(both, "ia3")), atol=1e-5)
    np.testing.assert_array_equal(run(adapters.remove(both)), run(model))
    for wrong in (lambda: adapters.set_strength(both, {"dora": 1}), lambda: adapters.remove(model)):
        with pytest.raises(ValueError, match="no adapter"):
            wrong()


def test_a_hundred_merges_do_not_drift():
    _, wrapped = wrap("transformer", "dora")
    wrapped = zoo.cast(moved(wrapped), jnp.bfloat16)
    merge, unmerge = eqx.filter_jit(lambda model: adapters.merge(model, keep=True)), eqx.filter_jit(adapters.unmerge)
    again = wrapped
    for _ in range(100):
        merged = merge(again)
        again = unmerge(merged)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), again, wrapped))
    scale = float(jnp.abs(run(wrapped)).max())
    np.testing.assert_allclose(run(merged), run(wrapped), atol=0.05 * scale)  # W + B A is rounded to bfloat16
    with pytest.raises(ValueError, match="keep=True"):
        adapters.unmerge(wrapped)


def moved(wrapped):
    """What was learnt is no longer as it was born."""
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)
    return eqx.combine(jax.tree.map(noise, zoo.trainable(wrapped)), wrapped)


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
def test_text(method):
    """What is decoded token by token is what whole passes give."""
    wrapped = moved(wrap("delta", method)[1])
    text = zoo.generate(wrapped, TOKENS[:2], max_new_tokens=4)
    told = jnp.concatenate([TOKENS[:2], text], axis=1)
    expected = eqx.filter_jit(lambda model: model(told))(wrapped).argmax(-1)
    np.testing.assert_array_equal(text, expected[:, SEQ - 1 : -1])


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
def test_half_precision(method):
    """Vectors keep float32 where matrices are cast."""
    wrapped = moved(wrap("transformer", method)[1])
    half = zoo.cast(wrapped, jnp.bfloat16)
    dtypes = {place.name: x.dtype for place, x in zip(list_parameter_paths(half), jax.tree.leaves(half), strict=True)}
    for name, dtype in dtypes.items():
        if name.endswith(("key.weight", "down.weight", "up.weight")):
            assert dtype == jnp.bfloat16, name
        if name.endswith(("magnitude", "of_out", "squares", "scale")):
            assert dtype == jnp.float32, name
    found, exact = run(half), run(wrapped)
    assert found.dtype == jnp.bfloat16
    assert jnp.abs(found.astype(jnp.float32) - exact).max() < 0.05 * jnp.abs(exact).max()


def work(model):
    """FLOPs of a loss and its gradient."""

    def mean(tuned):
        total, count = loss_fn(eqx.combine(tuned, model), BATCH)
        return total / count

    return zoo.inspect.count_flops(jax.make_jaxpr(jax.value_and_grad(mean))(zoo.trainable(model))).total


def test_no_gradient_is_taken_of_what_is_frozen():
    """Forward, and backward to the inputs: two thirds of what learning all of a matrix takes, the head's included."""
    make = partial(zoo.models.Transformer, vocab=256, embed=32, layers=2, heads=2, mlp=64, tied=False, key=KEY)
    model = eqx.filter_jit(make)()
    tuned = adapters.lora(model, targets="all-linear", rank=1, key=KEY)
    assert 0.6 < work(tuned) / work(model) < 0.72


def test_around_a_packed_matrix():
    """Its 4 bits stay as they are: learnt beside, and merged into only as is asked."""
    keys = jax.random.split(KEY)
    packed = MXFP4Linear(32, 8, key=keys[0])
    lora = adapters.LoRA(packed, max_rank=2, rank=2, scale=1.0, key=keys[1])
    lora = eqx.tree_at(lambda lora: lora.up.weight, lora, jnp.ones((8, 2)))
    x = jax.random.normal(KEY, (3, 32))
    expected = x @ (packed.dense_weight + jnp.ones((8, 2)) @ lora.down.weight).T
    np.testing.assert_allclose(lora(x), expected, atol=1e-5)
    np.testing.assert_allclose(lora.dense_weight, packed.dense_weight + jnp.ones((8, 2)) @ lora.down.weight, atol=1e-6)
    with pytest.raises(ValueError, match="quantized='decode'.*quantized='round'"):
        adapters.merge(lora)
    np.testing.assert_array_equal(adapters.merge(lora, quantized="decode").weight, lora.dense_weight)
    rounded = adapters.merge(lora, quantized="round", keep=True)
    largest = jnp.abs(lora.dense_weight).max(-1, keepdims=True)  # of the one block that a row has here
    assert isinstance(rounded.base, MXFP4Linear) and (jnp.abs(rounded.dense_weight - lora.dense_weight) <= largest / 4).all()
    assert eqx.tree_equal(adapters.unmerge(rounded), lora)
    with pytest.raises(NotImplementedError, match="MXFP4 is rounded.*'pissa' or 'olora'"):
        adapters.LoRA(packed, max_rank=2, rank=2, scale=1.0, init="pissa", key=KEY)
