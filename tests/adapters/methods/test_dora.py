"""DoRA around other adapters: the norm is that of the current weight, in the forward pass as in merging."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from tests.jaxprs import arrays
from zoo import adapters
from zoo.adapters.methods.dora import DoRA
from zoo.layers import Linear
from zoo.parallel import Dim

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (2, 6), 0, 16)
BENEATH = {
    "lora": lambda model: adapters.lora(model, targets="query", rank=2, key=KEY),
    "dora": lambda model: adapters.dora(model, targets="query", rank=2, adapter_name="inner", key=KEY),
    "ia3": lambda model: adapters.ia3(model, targets="query", inputs=None),
    "oft": lambda model: adapters.oft(model, targets="query", block_size=4),
}

run = eqx.filter_jit(lambda model: model(TOKENS))


def add_dora(model, targets="query"):
    return adapters.dora(model, targets=targets, rank=2, adapter_name="outer", key=jax.random.key(1))


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(vocab=16, embed=16, layers=2, heads=2, mlp=16, key=KEY)


@pytest.mark.parametrize(
    "method", ["lora", *(pytest.param(name, marks=pytest.mark.ci) for name in ("dora", "ia3", "oft"))]
)
def test_dora_around_an_adapter_computes_what_it_merges(method, model):
    """Both trained together, and with the adapter beneath scaled or switched off afterwards."""
    both = perturb(add_dora(BENEATH[method](model)), scale=0.3)
    name = adapters.adapter_names(both)[0]
    base = run(model)
    seen = []
    for strength in (1, 0.5, 0):
        changed = adapters.set_strength(both, {name: strength})
        logits = run(changed)
        np.testing.assert_allclose(run(adapters.merge(changed)), logits, atol=1e-5 * float(jnp.abs(logits).max()))
        seen.append(logits)
    assert all(jnp.abs(x - y).max() > 1e-2 for x, y in zip(seen, [*seen[1:], base], strict=True))
    without = adapters.remove(both, name)  # its rows' squares are those of the base again
    np.testing.assert_allclose(run(without), seen[-1], atol=1e-5 * float(jnp.abs(base).max()))


def make_linear_with_both(dropout=0.0):
    linear = Linear(12, 8, bias=True, in_=Dim("embed"), out=Dim("mlp"), key=KEY)
    lora = adapters.LoRA(linear, max_rank=3, rank=2, scale=2.0, dropout=dropout, key=KEY)
    return perturb(DoRA(lora, max_rank=3, rank=3, scale=1.5, key=jax.random.key(1)))


def test_norm_of_dora_around_a_lora_is_constant():
    """m / |W| (W x) + b, where W has all updates, and |W| is a constant in the backward pass."""
    dora, x = make_linear_with_both(), jax.random.normal(KEY, (2, 5, 12))
    updated = dora.base.dense_weight + 1.5 * dora.up.weight @ dora.down.weight
    norm = jnp.linalg.norm(updated, axis=-1)
    expected = x @ (dora.magnitude / norm * updated.T) + dora.base.base.bias
    np.testing.assert_allclose(dora(x), expected, atol=1e-5)
    np.testing.assert_allclose(dora.transposed(dora(x)), dora(x) @ dora.dense_weight, atol=1e-4)

    def sum_squares(up, constant):
        dora_ = eqx.tree_at(lambda dora: (dora.base.up.weight, dora.up.weight), dora, up)
        scaled = dora_.base.dense_weight + 1.5 * dora_.up.weight @ dora_.down.weight
        y = x @ (dora.magnitude / norm * scaled.T) + dora.base.base.bias if constant else dora_(x)
        return jnp.square(y).sum()

    gradients = [jax.grad(sum_squares)((dora.base.up.weight, dora.up.weight), constant) for constant in (True, False)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *gradients)

    keys = jax.random.split(KEY, 2)
    dropped = eqx.tree_at(lambda dora: dora.base.keys, make_linear_with_both(0.5), keys, is_leaf=lambda x: x is None)
    np.testing.assert_array_equal(dropped._compute_norm(), dora._compute_norm())


@pytest.mark.ci
def test_dora_around_a_lora_of_experts_computes_what_it_merges():
    model = zoo.models.MixtureOfExperts(vocab=16, embed=16, layers=1, heads=2, mlp=16, experts=2, top=1, key=KEY)
    targets = r".*\.experts\.\d+\.up"
    both = perturb(add_dora(adapters.lora(model, targets=targets, rank=2, key=KEY), targets))
    logits = run(both)
    np.testing.assert_allclose(run(adapters.merge(both)), logits, atol=1e-5 * float(jnp.abs(logits).max()))


def test_dora_alone_computes_no_dense_matrix():
    """Around a layer without an adapter the squares of W are stored."""
    dora, x = make_linear_with_both(), jnp.ones((1, 1, 12))
    alone = dora.with_base(dora.base.base)
    np.testing.assert_allclose(alone.squares, jnp.square(dora.base.base.weight).sum(-1), rtol=1e-6)
    for module, is_dense in ((alone, False), (dora, True)):
        program = jax.make_jaxpr(lambda module, x: module(x))(module, x)
        assert (max(array.size for array in arrays(program)) >= 12 * 8) == is_dense


def test_select_per_row_refuses_a_dora_around_another_adapter(model):
    both = add_dora(BENEATH["lora"](model))
    with pytest.raises(ValueError, match="the DoRA 'outer' .* includes the adapter 'lora'.* DoRA first"):
        adapters.select_per_row(both, ["lora", "outer"])
    inner = adapters.lora(add_dora(model), targets="query", rank=2, key=KEY)
    mixed = run(adapters.select_per_row(perturb(inner), ["outer", "lora"]))
    alone = run(adapters.set_strength(perturb(inner), {"lora": 0}))
    np.testing.assert_allclose(mixed[0], alone[0], atol=1e-5)
