"""Merging: at any strength, repeatedly, into a packed base, and what other functions make of a merged model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.adapters.methods.rank_allocation import keep_top_ranks, rank_importance
from zoo.layers.quantized.linear import MXFP4Linear

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 8), 0, 32)
METHODS = {
    "lora": lambda model: adapters.lora(
        model, targets=("query", "embedding"), rank=2, modules_to_save=["norm"], key=KEY
    ),
    "dora": lambda model: adapters.dora(model, targets=r"layers\.1\.attention\.(query|value)", rank=2, key=KEY),
    "vera": lambda model: adapters.vera(model, targets="key", rank=4, key=KEY),
    "loha": lambda model: adapters.loha(model, targets="out", rank=2, key=KEY),
    "lokr": lambda model: adapters.lokr(model, targets="up", rank=2, key=KEY),
    "oft": lambda model: adapters.oft(model, targets="gate", block_size=4),
    "adalora": lambda model: adapters.adalora(model, targets="down", rank=2, key=KEY),
    "ia3": lambda model: adapters.ia3(model, targets="value", inputs=None),
}

run = eqx.filter_jit(lambda model: model(TOKENS))


@pytest.fixture(scope="module")
def base():
    return zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, key=KEY)


@pytest.fixture(scope="module")
def adapted(base):
    """A model with adapters of all methods, two of them around the same layers."""

    @eqx.filter_jit
    def adapt(model):
        for method in METHODS.values():
            model = method(model)
        return perturb(model)

    return adapt(base)


def test_merge_at_a_strength_computes_what_the_adapters_do(base, adapted):
    """Also with all at once: each adapter alone changes the output as much merged as not."""
    for names in (*((name,) for name in METHODS), tuple(METHODS)):
        strengths = {name: 0.5 * (name in names) for name in METHODS}
        half = adapters.set_strength(adapted, strengths)
        logits = run(half)
        assert jnp.abs(logits - run(base)).max() > 1e-3, names
        merged = run(adapters.merge(half))
        np.testing.assert_allclose(merged, logits, atol=2e-5 * float(jnp.abs(logits).max()), err_msg=str(names))


def test_functions_of_a_model_that_was_merged_with_keep(base, adapted, tmp_path):
    """As on the model before merging."""
    kept = adapters.merge(adapted, keep=True)
    assert adapters.adapter_names(kept) == adapters.adapter_names(adapted)
    assert eqx.tree_equal(adapters.remove(kept), base)
    assert eqx.tree_equal(adapters.remove(kept, "dora"), adapters.remove(adapted, "dora"))
    assert eqx.tree_equal(adapters.merge(kept), adapters.merge(adapted))
    assert eqx.tree_equal(adapters.merge(kept, keep=True), kept)
    assert zoo.count(kept) == 16  # the norm, whose copy is no adapter that is merged
    for name, model in {"kept": kept, "adapted": adapted}.items():
        adapters.save(model, tmp_path / name, adapter_name="ia3")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "kept" / file).read_bytes() == (tmp_path / "adapted" / file).read_bytes()


def test_merged_model_refuses_changes_of_its_adapters(adapted, tmp_path):
    """They would have no effect."""
    kept = adapters.merge(adapted, keep=True)
    refused = {
        "set_strength": lambda: adapters.set_strength(kept, {"lora": 0}),
        "select_per_row": lambda: adapters.select_per_row(kept, ["lora"] * len(TOKENS)),
        "unfreeze": lambda: adapters.unfreeze(kept, "norm"),
        "load": lambda: adapters.load(kept, tmp_path),
        "quantize": lambda: adapters.quantize(kept, "int8"),
        "dequantize": lambda: adapters.dequantize(kept),
        "lora_plus": lambda: adapters.lora_plus(kept),
        "orthogonality": lambda: adapters.orthogonality(kept),
        "rank_importance": lambda: rank_importance(kept, kept),
        "keep_top_ranks": lambda: keep_top_ranks(kept, (), 2),
        "trainable": lambda: zoo.trainable(kept),
        **{name: lambda method=method: method(kept) for name, method in METHODS.items()},
    }
    for name, call in refused.items():
        with pytest.raises(ValueError, match=r"merged into its weights.*zoo\.adapters\.unmerge\(model\) first"):
            call()
            pytest.fail(f"{name} changed a merged model")


@pytest.mark.ci
def test_merge_and_unmerge_are_exact_a_hundred_times():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, key=KEY)
    wrapped = adapters.dora(model, targets=("query", "value", "down"), rank=2, key=jax.random.key(1))
    run = eqx.filter_jit(lambda model: model(TOKENS))
    wrapped = zoo.cast(perturb(wrapped), jnp.bfloat16)
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


@pytest.mark.ci
def test_lora_of_a_packed_linear():
    """The packed base does not change; merging needs an explicit choice of format."""
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
    largest = jnp.abs(lora.dense_weight).max(-1, keepdims=True)  # each row is one block
    assert (
        isinstance(rounded.base, MXFP4Linear)
        and (jnp.abs(rounded.dense_weight - lora.dense_weight) <= largest / 4).all()
    )
    assert eqx.tree_equal(adapters.unmerge(rounded), lora)
    with pytest.raises(NotImplementedError, match="MXFP4 is rounded.*'pissa' or 'olora'"):
        adapters.LoRA(packed, max_rank=2, rank=2, scale=1.0, init="pissa", key=KEY)


@pytest.mark.ci
def test_save_of_a_model_with_adapters_names_merge(tmp_path):
    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=24, key=jax.random.key(0))
    adapted = adapters.lora(model, key=jax.random.key(1))
    for other in (adapted, adapters.merge(adapted, keep=True), adapters.unfreeze(model, "norm")):
        with pytest.raises(zoo.CheckpointError, match=r"zoo.adapters.merge\(model\) .* zoo.adapters.save\(model, dir"):
            zoo.save(other, tmp_path)
    assert not list(tmp_path.iterdir())
