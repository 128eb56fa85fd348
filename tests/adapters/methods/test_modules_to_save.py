"""Parameters that are trained in full: `unfreeze`, `modules_to_save`, and their errors."""

from functools import partial

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


def run(model, tokens=TOKENS):
    return eqx.filter_jit(lambda model: model(tokens))(model)


def list_trainable(model):
    return {path.name for path in list_parameter_paths(zoo.trainable(model))}


@pytest.fixture(scope="module")
def model():
    make = partial(zoo.models.Transformer, vocab=32, embed=16, layers=2, heads=2, mlp=24, tied=False)
    return eqx.filter_jit(make)(key=KEY)


@pytest.mark.slow
def test_modules_to_save_with_lora_of_embedding(model):
    """Initial output, strength 0, `remove`, `merge` and `unmerge`."""
    options = {"targets": ("query", "embedding"), "modules_to_save": ("norm", r"layers\.1\.mixer_norm"), "rank": 2}
    wrapped = adapters.lora(model, **options, key=KEY)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(wrapped)]
    assert len(set(buffers)) == len(buffers)  # a step donates them
    assert list_trainable(wrapped) == {
        *("embedding.lora.down", "embedding.lora.up.weight", "norm.weight.lora", "layers.*.mixer_norm.weight.lora"),
        *("layers.*.attention.query.lora.down.weight", "layers.*.attention.query.lora.up.weight"),
    }
    before, changed = run(model), perturb(wrapped)
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
    assert (norms[0] == 1).all() and (norms[1] != 1).all()  # the first layer's is no target


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda model: adapters.unfreeze(model, "nrm"), ValueError, "the target 'nrm'. Is it norm or"),
        (lambda model: adapters.unfreeze(model, ()), ValueError, "targets names no parameter"),
        (lambda model: adapters.unfreeze(model, lambda name: False), ValueError, "takes none of the model's"),
        (
            lambda model: adapters.unfreeze(adapters.unfreeze(model, "norm"), "norm"),
            ValueError,
            "trained on top of it already",
        ),
        (
            lambda model: adapters.unfreeze(adapters.lora(model, key=KEY), "query"),
            ValueError,
            r"query.weight cannot be trained in full: .*query.lora.down.weight is trained",
        ),
        (
            lambda model: adapters.lora(adapters.unfreeze(model, "query"), key=KEY),
            ValueError,
            "query.weight is trained in full: no adapter wraps it",
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
            "full: trained in full, which all rows share",
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
def test_unfreeze_and_adapters_with_wrong_arguments_raise(wrong, error, message, model):
    with pytest.raises(error, match=message):
        wrong(model)
