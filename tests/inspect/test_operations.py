"""FLOPs equal hand counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import zoo
from zoo.inspect import count_flops
from zoo.inspect.operations import Flops

A, B = jnp.ones((8, 16)), jnp.ones((16, 32))
SQUARE, STACK = jnp.ones((16, 16)), jnp.ones((5, 16, 16))


def count(function, *args) -> Flops:
    return count_flops(jax.make_jaxpr(function)(*args))


def layers(x, stack):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0].sum()


@jax.custom_vjp
def squared(x):
    return x @ x


squared.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))

ONE = 2 * 8 * 16 * 16
CASES = {
    "a product": (lambda: count(jnp.matmul, A, B), 2 * 8 * 16 * 32),
    "a batch of them": (lambda: count(jax.vmap(lambda w: A @ w), STACK), 5 * ONE),
    "complex": (lambda: count(jnp.matmul, A.astype(jnp.complex64), B), 4 * 2 * 8 * 16 * 32),
    "elementwise is free": (lambda: count(lambda x: jnp.tanh(x).sum() + jnp.sort(x).max(), A), 0),
    "a scan": (lambda: count(layers, A, STACK), 5 * ONE),
    "its gradient": (lambda: count(jax.grad(layers, (0, 1)), A, STACK), 5 * 3 * ONE),
    "rematerialized": (lambda: count(jax.grad(jax.checkpoint(layers), (0, 1)), A, STACK), 5 * 4 * ONE),
    "jit inside jit": (lambda: count(jax.jit(lambda x: jax.jit(jnp.matmul)(x, SQUARE)), A), ONE),
    "a loop of known length": (lambda: count(lambda x: lax.fori_loop(0, 4, lambda i, x: x @ SQUARE, x), A), 4 * ONE),
    "the larger branch": (
        lambda: count(lambda x: lax.cond(x[0, 0] > 0, lambda: x @ SQUARE @ SQUARE, lambda: x @ SQUARE), A),
        2 * ONE,
    ),
    "a custom gradient": (lambda: count(squared, SQUARE), 2 * 16**3),
    "taken": (lambda: count(jax.grad(lambda x: squared(x).sum()), SQUARE), 3 * 2 * 16**3),
    "ragged": (lambda: count(lambda x: lax.ragged_dot(x, STACK, jnp.array([1, 2, 3, 0, 2])), A), ONE),
    "a ragged gradient": (
        lambda: count(jax.grad(lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 2, 3, 0, 2])).sum(), (0, 1)), A, STACK),
        3 * ONE,
    ),
    "a convolution": (
        lambda: count(
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", feature_group_count=2),
            jnp.ones((3, 4, 10, 10)),
            jnp.ones((6, 2, 3, 5)),
        ),
        2 * (3 * 6 * 8 * 6) * (2 * 3 * 5),
    ),
}


@pytest.mark.parametrize(("counted", "wanted"), CASES.values(), ids=CASES)
def test_flops_of_operations(counted, wanted):
    assert counted() == Flops(wanted)


def test_flops_of_a_shard_map_count_every_device():
    mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = jax.P("rows"), jax.P(None, "columns")
    product = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=specs, out_specs=jax.P("rows", "columns"))
    assert count(product, A, B) == Flops(2 * 8 * 16 * 32)
    repeated = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=jax.P("rows"))
    assert count(repeated, A, B) == Flops(4 * 2 * 8 * 16 * 32)  # replicated over four columns of devices


def test_uncounted_operations_are_named():
    def search(x):
        with jax.named_scope("search"):
            return lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ SQUARE, x)

    assert count(search, A) == Flops(ONE, ("while loop in search",))
    assert count(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), A) == Flops(0)
    hidden = count(lambda x: jax.pure_callback(np.tanh, x, x), A)
    assert hidden == Flops(0, ("pure_callback outside any module",))
    assert hidden + hidden == hidden and (hidden * 3).uncounted == hidden.uncounted


def test_flops_of_a_transformer_and_its_gradient():
    rows, seq, vocab, embed, depth, mlp = 2, 8, 32, 16, 3, 24
    tokens = jnp.zeros((rows, seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    sizes = {"vocab": vocab, "embed": embed, "layers": depth, "heads": 4, "mlp": mlp}
    model = zoo.models.Transformer(**sizes, implementation=zoo.ops.attention.reference_attention, key=jax.random.key(0))

    def loss(model):
        return zoo.cross_entropy(model, batch)[0]

    projections, attention, feed_forward = 4 * embed**2, 2 * seq * embed, 3 * embed * mlp
    forward = 2 * rows * seq * (depth * (projections + attention + feed_forward) + embed * vocab)
    assert count(loss, model) == Flops(forward)
    assert count(jax.grad(loss), model) == Flops(3 * forward)
