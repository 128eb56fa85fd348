"""Several adapters on one model: nested, and selected per row of a batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.models.parameter_paths import list_parameter_paths

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 6), 0, 32)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}


run = eqx.filter_jit(lambda model: model(TOKENS))


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, tied=False, key=KEY)


@pytest.mark.ci
def test_nested_adapters_keep_names_and_base(model):
    """Each adapter has its name, its strength, and the module that it wraps as its base."""
    inner = adapters.lora(model, targets=("query", "value", "down"), rank=3, alpha=6, key=jax.random.key(1))
    both = adapters.ia3(inner, targets="query", inputs=None)
    assert adapters.adapter_names(both) == ["lora", "ia3"]
    names = {path.name for path in list_parameter_paths(zoo.trainable(both))}
    assert {"layers.*.attention.query.ia3.of_out", "layers.*.attention.query.lora.down.weight"} <= names
    both = perturb(both)
    np.testing.assert_allclose(run(adapters.merge(both)), run(both), atol=1e-5)
    off = adapters.set_strength(both, {"ia3": 0})
    np.testing.assert_allclose(run(off), run(adapters.remove(both, "ia3")), atol=1e-5)
    np.testing.assert_array_equal(run(adapters.remove(both)), run(model))
    for wrong in (lambda: adapters.set_strength(both, {"dora": 1}), lambda: adapters.remove(model)):
        with pytest.raises(ValueError, match="no adapter"):
            wrong()


ROWS = ["french", None, "german", "tone", "french", None, None, "german"]


@pytest.fixture(scope="module")
def both(model):
    """The model with three adapters."""
    both = adapters.lora(model, targets=("query", "down"), adapter_name="french", key=KEY)
    both = perturb(adapters.dora(both, targets="value", adapter_name="german", key=KEY))
    return perturb(adapters.ia3(both, targets="key", inputs=None, adapter_name="tone"))


def keep_only(both, name):
    return adapters.set_strength(both, {other: 0 for other in adapters.adapter_names(both) if other != name})


def index_rows(both):
    return jnp.asarray([-1 if name is None else adapters.adapter_names(both).index(name) for name in ROWS])


@pytest.mark.ci
def test_select_per_row_matches_each_adapter_alone(model, both):
    """Rows with one of three adapters, or none, by name or by index."""
    alone = {name: run(keep_only(both, name)) for name in ("french", "german", "tone")} | {None: run(model)}
    selected = adapters.select_per_row(both, ROWS)
    assert eqx.tree_equal(selected, adapters.select_per_row(both, index_rows(both)))
    mixed = run(selected)
    for row, name in enumerate(ROWS):
        np.testing.assert_allclose(mixed[row], alone[name][row], atol=1e-5)


@pytest.mark.slow  # the test above holds the products by default
def test_select_per_row_decodes_and_runs_on_a_mesh(both):
    text = zoo.generate(adapters.select_per_row(both, ["french", "german"]), TOKENS[:2], max_new_tokens=3)
    for row, name in enumerate(("french", "german")):
        expected = zoo.generate(keep_only(both, name), TOKENS[:2], max_new_tokens=3)
        np.testing.assert_array_equal(text[row], expected[row])

    def loss_fn(model, batch):
        selected = adapters.select_per_row(model, batch["adapter"])
        return zoo.cross_entropy(selected, {name: x for name, x in batch.items() if name != "adapter"})

    mixed = run(adapters.select_per_row(both, ROWS))
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(mixed), BATCH["targets"][..., None], -1)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    batch = zoo.place_batch({**BATCH, "adapter": index_rows(both)}, mesh)
    np.testing.assert_allclose(zoo.value(loss_fn, mesh)(zoo.place(both, mesh), batch), -log_probs.mean(), rtol=1e-5)


def test_name_that_is_there_is_refused(model, tmp_path):
    """One of two adapters of a name would be saved; on other matrices the name may come again."""
    first = adapters.lora(model, targets="query", rank=2, key=KEY)
    with pytest.raises(ValueError, match=r"layers.\*.attention.query has an adapter 'lora' already: pass another"):
        adapters.lora(first, targets=("query", "value"), rank=2, key=KEY)
    with pytest.raises(ValueError, match="has an adapter 'lora' already"):
        adapters.dora(adapters.ia3(first, targets="query"), targets="query", rank=2, adapter_name="lora", key=KEY)
    assert adapters.adapter_names(adapters.lora(first, targets="value", rank=2, key=KEY)) == ["lora"]
    again = adapters.lora(adapters.remove(first), targets="query", rank=2, key=KEY)
    assert adapters.adapter_names(again) == ["lora"]
