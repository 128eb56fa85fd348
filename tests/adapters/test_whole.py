"""What is learnt beside factors: whole parameters, tables; what is dropped; and rows with adapters of their own."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import adapters
from zoo.models.parameter_paths import list_parameter_paths

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 6), 0, 32)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}


def make(**options):
    sizes = {"vocab": 32, "embed": 16, "layers": 2, "heads": 2, "mlp": 24, **options}
    return eqx.filter_jit(partial(zoo.models.Transformer, **sizes))(key=KEY)


def moved(model):
    """A model whose learnt numbers are no longer those of birth."""
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)
    return eqx.combine(jax.tree.map(noise, zoo.trainable(model)), model)


def run(model, tokens=TOKENS):
    return eqx.filter_jit(lambda model: model(tokens))(model)


def learnt(model):
    return {place.name for place in list_parameter_paths(zoo.trainable(model))}


@pytest.fixture(scope="module")
def model():
    return make(tied=False)


def test_whole_parameters_and_tables(model):
    """Nothing changes at birth; switched off, taken away, merged, kept and brought back."""
    options = {"targets": ("query", "embedding"), "modules_to_save": ("norm", r"layers\.1\.mixer_norm"), "rank": 2}
    wrapped = adapters.lora(model, **options, key=KEY)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(wrapped)]
    assert len(set(buffers)) == len(buffers)  # a step donates them
    assert learnt(wrapped) == {
        *("embedding.lora.down", "embedding.lora.up.weight", "norm.weight.lora", "layers.*.mixer_norm.weight.lora"),
        *("layers.*.attention.query.lora.down.weight", "layers.*.attention.query.lora.up.weight"),
    }
    before, changed = run(model), moved(wrapped)
    np.testing.assert_array_equal(run(wrapped), before)
    after = run(changed)
    scale = float(jnp.abs(after).max())
    assert jnp.abs(after - before).max() > 0.1 * scale
    np.testing.assert_array_equal(run(adapters.set_strength(changed, {"lora": 0})), before)
    np.testing.assert_array_equal(run(adapters.remove(changed)), before)
    kept = adapters.merge(changed, keep=True)
    for merged in (adapters.merge(changed), kept):
        np.testing.assert_allclose(run(merged), after, atol=2e-5 * scale)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), adapters.unmerge(kept), changed))
    norms = adapters.merge(changed).stack.segments[0].blocks[0].mixer_norm.weight
    assert (norms[0] == 1).all() and (norms[1] != 1).all()  # the first layer's was not meant


def test_a_tied_head_sees_the_change_of_its_table():
    changed = moved(adapters.lora(make(), targets="embedding", rank=2, key=KEY))
    np.testing.assert_allclose(run(adapters.merge(changed)), run(changed), atol=2e-5)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_dropout_on_a_mesh(method, model):
    """A mask depends on the row's key and the place alone; without a key nothing is dropped."""
    options = {"targets": ("query", "down"), "modules_to_save": ("head", "norm"), "rank": 2, "dropout": 0.4}
    wrapped = moved(getattr(adapters, method)(model, **options, key=KEY))

    def loss_fn(model, batch, key=None):
        return zoo.cross_entropy(model, batch, key=key)

    one, mesh = zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(data=2, fsdp=2, tensor=2)
    take = lambda mesh, key: zoo.value_and_grad(loss_fn, mesh)(
        zoo.place(wrapped, mesh), zoo.place_batch(BATCH, mesh), key=key
    )
    (loss, ours), (on_mesh, theirs) = take(one, KEY), take(mesh, KEY)
    np.testing.assert_allclose(on_mesh, loss, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(y, x, atol=5e-5 * max(1e-3, float(jnp.abs(x).max())))
    other, still = take(one, jax.random.key(7))[0], take(one, None)[0]
    assert abs(float(loss - other)) > 1e-4 and abs(float(loss - still)) > 1e-4


def test_each_row_its_own(model):
    """Rows with one of two adapters, or none; chosen by name, and inside a loss by number, on a mesh too."""
    both = adapters.lora(model, targets=("query", "down"), adapter_name="french", key=KEY)
    both = moved(adapters.dora(both, targets="value", adapter_name="german", key=KEY))
    both = moved(adapters.ia3(both, targets="key", inputs=None, adapter_name="tone"))
    each = {label: run(adapters.set_strength(both, {other: 0 for other in adapters.adapter_names(both) if other != label}))
            for label in ("french", "german", "tone")}  # fmt: skip
    rows = ["french", None, "german", "tone", "french", None, None, "german"]
    mixed = run(adapters.select_per_row(both, rows))
    for row, label in enumerate(rows):
        expected = run(model)[row] if label is None else each[label][row]
        np.testing.assert_allclose(mixed[row], expected, atol=1e-5)

    text = zoo.generate(adapters.select_per_row(both, ["french", "german"]), TOKENS[:2], max_new_tokens=3)
    for row, label in enumerate(("french", "german")):
        alone = adapters.set_strength(both, {other: 0 for other in adapters.adapter_names(both) if other != label})
        np.testing.assert_array_equal(text[row], zoo.generate(alone, TOKENS[:2], max_new_tokens=3)[row])

    def loss_fn(model, batch):
        chosen = adapters.select_per_row(model, batch["adapter"])
        return zoo.cross_entropy(chosen, {name: x for name, x in batch.items() if name != "adapter"})

    numbers = jnp.asarray([-1 if label is None else adapters.adapter_names(both).index(label) for label in rows])
    chances = jnp.take_along_axis(jax.nn.log_softmax(mixed), BATCH["targets"][..., None], -1)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    batch = zoo.place_batch({**BATCH, "adapter": numbers}, mesh)
    np.testing.assert_allclose(zoo.value(loss_fn, mesh)(zoo.place(both, mesh), batch), -chances.mean(), rtol=1e-5)


def test_b_learns_at_a_rate_of_its_own(model):
    """LoRA+: sixteen times A's; the first step of Adam is as long as its rate."""
    wrapped = adapters.lora(model, targets=("query", "embedding"), modules_to_save=("norm",), rank=2, key=KEY)
    labels = adapters.lora_plus(wrapped)
    assert jax.tree.leaves(labels).count("B") == 2
    optimizer = optax.partition({"rest": optax.adam(1e-3), "B": optax.adam(16e-3)}, adapters.lora_plus)
    tuned = zoo.trainable(wrapped)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, tuned), optimizer.init(tuned), tuned)
    for place, step in zip(list_parameter_paths(updates), jax.tree.leaves(updates), strict=True):
        expected = 16e-3 if place.name.endswith("lora.up.weight") else 1e-3
        np.testing.assert_allclose(step, -expected, rtol=1e-4)
    with pytest.raises(ValueError, match="no LoRA is learnt"):
        adapters.lora_plus(adapters.unfreeze(model, "norm"))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda model: adapters.unfreeze(model, "nrm"), ValueError, "the target 'nrm'. Is it norm or"),
        (lambda model: adapters.unfreeze(model, ()), ValueError, "targets names no parameter"),
        (lambda model: adapters.unfreeze(model, lambda name: False), ValueError, "takes none of the model's"),
        (
            lambda model: adapters.unfreeze(adapters.unfreeze(model, "norm"), "norm"),
            ValueError,
            "learnt on top of it already",
        ),
        (
            lambda model: adapters.unfreeze(adapters.lora(model, key=KEY), "query"),
            ValueError,
            r"query.weight is not learnt as a whole: .*query.lora.down.weight is learnt",
        ),
        (
            lambda model: adapters.lora(adapters.unfreeze(model, "query"), key=KEY),
            ValueError,
            "query.weight is learnt as a whole: no adapter goes around it",
        ),
        (lambda model: adapters.dora(model, targets="embedding", key=KEY), ValueError, "only a LoRA goes around"),
        (lambda model: adapters.loha(model, targets="embedding", key=KEY), ValueError, "only a LoRA goes around"),
        (
            lambda model: adapters.lora(model, targets="embedding", init="pissa", key=KEY),
            ValueError,
            "starts as zero, not as 'pissa'",
        ),
        (lambda model: adapters.lora(model, targets="head", dropout=0.1, key=KEY), ValueError, "is not dropped"),
        (lambda model: adapters.lora(model, dropout=1, key=KEY), ValueError, "less than 1, not 1"),
        (
            lambda model: adapters.select_per_row(adapters.unfreeze(model, "norm"), ["full"]),
            ValueError,
            "full: whole parameters are learnt there",
        ),
        (lambda model: adapters.select_per_row(adapters.lora(model, key=KEY), ["ora"]), ValueError, "no adapter 'ora'"),
        (
            lambda model: adapters.select_per_row(adapters.lora(model, key=KEY), ["lora"])(TOKENS),
            ValueError,
            "for 1 rows of a batch, and it reads",
        ),
        (
            lambda model: adapters.merge(adapters.select_per_row(adapters.lora(model, key=KEY), ["lora"])),
            NotImplementedError,
            "for some rows of a batch only",
        ),
    ],
)
def test_what_cannot_be(wrong, error, message, model):
    with pytest.raises(error, match=message):
        wrong(model)
