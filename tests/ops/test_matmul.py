import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from zoo.ops.matmul import add_matmul, blocked_transpose, einsum_fp32_accum
from zoo.parallel.remat import rematerialize

SPECS = {
    "ri,oi->ro": ((6, 4), (8, 4)),
    "ri,io->ro": ((5, 3), (3, 7)),
    "ab,ac->cb": ((6, 4), (6, 8)),
    "abc,abd->cd": ((2, 3, 4), (2, 3, 5)),
    "bnrd,bnkd->bnrk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bnrk,bnkd->bnrd": ((2, 3, 4, 6), (2, 3, 6, 5)),
}


def operands(spec, dtype, seed):
    keys = jax.random.split(jax.random.key(seed), 2)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, SPECS[spec], strict=True)]


@pytest.mark.ci
@settings(max_examples=8)
@given(
    spec=st.sampled_from(sorted(SPECS)),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    wide=st.booleans(),
    seed=st.integers(0, 3),
)
def test_einsum_fp32_accum_equals_einsum_with_gradients(spec, dtype, wide, seed):
    x, y = operands(spec, dtype, seed)
    out = jnp.float32 if wide else dtype
    weight = jax.random.normal(jax.random.key(9), jnp.einsum(spec, x, y).shape).astype(dtype).astype(jnp.float32)

    def total(multiply, x, y):
        return (multiply(x, y).astype(jnp.float32) * weight).sum()

    plain = lambda x, y: jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32), precision="highest")
    fp32_accum = lambda x, y: einsum_fp32_accum(spec, x, y, dtype=out)
    run = lambda multiply: (multiply(x, y), *jax.grad(lambda x, y: total(multiply, x, y), (0, 1))(x, y))
    # Operation by operation: in one program XLA may leave out a rounding.
    found, expected = run(fp32_accum), jax.jit(lambda: run(plain))()
    for ours, theirs, rounded in zip(found, expected, (out, dtype, dtype), strict=True):
        assert ours.dtype == rounded
        ours, theirs = (np.asarray(a, np.float32) for a in (ours, theirs))
        assert np.abs(ours - theirs).max() <= 2 * jnp.finfo(rounded).eps * np.abs(theirs).max()


@pytest.mark.parametrize(("rows", "swapped"), [(1, False), (8, True), (128, False)])
def test_einsum_fp32_accum_multiplies_weights_by_few_rows(rows, swapped):
    x, weight = (jax.random.normal(jax.random.key(n), (n, 32)) for n in (rows, 96))
    step = lambda x, weight: einsum_fp32_accum("ri,oi->ro", x, weight)
    np.testing.assert_allclose(step(x, weight), np.asarray(x) @ np.asarray(weight).T, rtol=1e-4, atol=1e-5)
    found = jax.grad(lambda x, weight: (step(x, weight) ** 2).sum(), (0, 1))(x, weight)
    expected = jax.grad(lambda x, weight: ((x @ weight.T) ** 2).sum(), (0, 1))(x, weight)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)
    assert ("optimization_barrier" in str(jax.make_jaxpr(step)(x, weight))) == swapped


@pytest.mark.slow
def test_einsum_fp32_accum_aligns_varying_operands_on_a_mesh():
    """Sharded weights with replicated rows, and the reverse: gradients are all-reduced where needed."""
    make = lambda key: zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=16, key=key)
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss_fn = lambda model, batch: zoo.cross_entropy(zoo.cast(model, jnp.bfloat16), batch)
    found = []
    for sizes in (dict(data=1, devices=jax.devices()[:1]), dict(data=2, fsdp=2, tensor=2)):
        mesh = zoo.make_mesh(**sizes)
        model = zoo.init(make, jax.random.key(0), mesh)
        loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, zoo.place_batch(batch, mesh))
        found.append((loss, *jax.tree.leaves(grads)))
    for one, other in zip(*map(jax.device_get, found), strict=True):
        np.testing.assert_allclose(one, other, atol=0.03 * np.abs(other).max())


def test_einsum_fp32_accum_is_saved_by_remat_policies():
    """Remat policies save the result of the custom VJP like any other product."""
    function = lambda x, y: jnp.sin(einsum_fp32_accum("ri,oi->ro", jnp.sin(x), y).astype(jnp.float32)).sum()

    def products(remat, dtype):
        x, y = operands("ri,oi->ro", dtype, 0)
        text = str(jax.make_jaxpr(jax.grad(rematerialize(function, remat), (0, 1)))(x, y))
        return text.count("dot_general")

    for dtype in (jnp.float32, jnp.bfloat16):
        assert [products(remat, dtype) for remat in ("none", "elementwise", "dots", "full")] == [3, 3, 3, 4]


def test_einsum_fp32_accum_forward_mode_in_float32_alone():
    x, y = operands("ri,oi->ro", jnp.float32, 0)
    tangent = jax.jvp(lambda x: einsum_fp32_accum("ri,oi->ro", x, y), (x,), (x,))[1]
    np.testing.assert_allclose(tangent, x @ y.T, rtol=1e-5)
    x, y = operands("ri,oi->ro", jnp.bfloat16, 0)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: einsum_fp32_accum("ri,oi->ro", x, y), (x,), (x,))


@pytest.mark.parametrize("shape", [(64, 96), (7, 5), (1, 8), (40, 24)])
def test_blocked_transpose_equals_transpose(shape):
    x = jnp.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(blocked_transpose(x.astype(jnp.float32)), x.T)


@pytest.mark.parametrize("spec", ["ri,oi->r", "ri,oi", "rix,oi->ro"])
def test_einsum_fp32_accum_raises_for_other_specs(spec):
    with pytest.raises(ValueError, match="is not a product of two arrays"):
        einsum_fp32_accum(spec, jnp.ones((2, 3)), jnp.ones((4, 3)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_add_matmul_equals_its_formula_with_gradients(dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 3, 5), (2, 3, 4), (5, 4), (2, 3, 5))
    *given, ahead = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
    plain = lambda y, x, weight: y + jnp.einsum("abi,oi->abo", x, weight)
    (ours, pull), (theirs, reference) = (jax.vjp(form, *given) for form in (add_matmul, plain))
    tolerance = 1e-5 if dtype == jnp.float32 else 0.06
    for x, y in zip((ours, *pull(ahead)), (theirs, *reference(ahead)), strict=True):
        assert x.dtype == y.dtype == dtype
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), atol=tolerance)


def test_add_matmul_saves_the_sum_alone_as_residual():
    """A policy that saves products saves W x + V x, and neither W x nor V x."""
    x, first, second = jnp.ones((8, 3)), jnp.ones((4, 3)), jnp.ones((4, 3))

    def kept(layer):
        _, pull = jax.vjp(rematerialize(lambda x: jnp.tanh(layer(x)).sum(), "elementwise"), x)
        return sum(leaf.shape == (8, 4) for leaf in jax.tree.leaves(pull))

    assert kept(lambda x: add_matmul(einsum_fp32_accum("ri,oi->ro", x, first), x, second)) == 1
    assert kept(lambda x: einsum_fp32_accum("ri,oi->ro", x, first) + einsum_fp32_accum("ri,oi->ro", x, second)) == 2
