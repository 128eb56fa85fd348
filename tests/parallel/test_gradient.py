"""`value` and `value_and_grad` sum over devices and micro-batches; losses that break their contract raise."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import zoo
from tests.parallel.any_mesh import make_any_mesh
from tests.parallel.scale_problem import KEY, Scale, loss_fn, make_problem
from zoo import Layout
from zoo.layers import Linear
from zoo.parallel import ZERO1, ZERO2, ZERO3, Dim, Module, all_gather, gather, reduce
from zoo.parallel.collectives import shard_offset


@pytest.mark.parametrize(
    ("microbatches", "sizes"),
    [
        pytest.param(1, {"data": 8}, marks=pytest.mark.slow),
        pytest.param(1, {"fsdp": 8}, marks=pytest.mark.slow),
        (1, {"data": 2, "fsdp": 2, "tensor": 2}),
        (2, {"data": 8}),
        (2, {"fsdp": 8}),
        pytest.param(2, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_loss_is_the_total_over_the_count_of_all_devices(sizes, microbatches):
    mesh, model, batch = make_problem(16, **sizes)
    loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)(model, batch)
    weights = batch["weights"][:, None]
    assert jnp.allclose(loss, (batch["x"] * jnp.arange(16.0) * weights).sum() / weights.sum(), rtol=1e-5)
    assert jnp.allclose(grads.weight, (batch["x"] * weights).sum(0) / weights.sum(), rtol=1e-4, atol=1e-6)
    assert grads.weight.sharding == model.weight.sharding
    assert jnp.allclose(zoo.value(loss_fn, mesh)(model, batch), loss, rtol=1e-6)


class Experts(Module):
    """Sum of all experts. Each has the tokens of all devices along its axis, as after an all-to-all."""

    weight: Float[Array, "experts embed"]
    scale: Float[Array, "vocab"]

    def __call__(self, x):
        experts = gather(self)
        everywhere = all_gather(x, "experts", 0)
        y = reduce(jnp.tanh(everywhere[:, None] * experts.weight).sum(1), over="experts")
        return jax.lax.dynamic_slice_in_dim(y, shard_offset(x, "experts", len(x)), len(x)) * experts.scale.prod()


def test_gradients_are_summed_where_they_are_partial_sums():
    """`weight` is complete over `expert` and partial over `data`; a `scale` of odd size is replicated over `expert`,
    though the layout names it, and its gradient partial."""
    model = Experts(jax.random.normal(KEY, (4, 16)), jnp.array([0.5, 2.0, 1.5]))
    batch = {"x": jax.random.normal(KEY, (8, 16)), "weights": jnp.arange(8.0)}
    expected = jax.grad(lambda model: loss_fn(model, batch)[0] / batch["weights"].sum())(model)
    mesh = make_any_mesh(Layout().with_dims(vocab=("expert",)), data=2, fsdp=2, expert=2)
    placed = zoo.place(model, mesh)
    assert (placed.weight.sharding.spec, placed.scale.sharding.spec) == (jax.P(("expert",), ("fsdp",)), jax.P())
    _, grads = zoo.value_and_grad(loss_fn, mesh)(placed, batch)
    assert jnp.allclose(grads.weight, expected.weight, rtol=1e-5, atol=1e-6)
    assert jnp.allclose(grads.scale, expected.scale, rtol=1e-5)


class Pairs(Module):
    """A batch that says its dims: rows that are not its first, and a table that has none."""

    x: Float[Array, "batch features"]
    weights: Float[Array, "choices batch"]
    table: Float[Array, "choices"]


def test_batch_that_is_a_module_is_cut_into_microbatches():
    mesh, model, batch = make_problem(16, data=4, tensor=2)
    pairs = Pairs(batch["x"], jnp.stack([batch["weights"], batch["weights"] ** 2]), jnp.array([1.0, 0.5]))

    def loss(model, pairs, key):
        assert (pairs.x.shape, pairs.weights.shape, pairs.table.shape, key.shape) == ((2, 16), (2, 2), (2,), (2,))
        weights = pairs.table @ pairs.weights
        return (model(pairs.x) * weights[:, None]).sum(), weights.sum()

    _, grads = zoo.value_and_grad(loss, mesh, microbatches=2)(model, zoo.place_batch(pairs, mesh), key=KEY)
    weights = pairs.table @ pairs.weights
    assert jnp.allclose(grads.weight, (weights @ batch["x"]) / weights.sum(), rtol=1e-4, atol=1e-6)


def test_aux_is_summed_over_devices_and_microbatches():
    mesh, model, batch = make_problem(16, data=4, tensor=2)

    def with_aux(model, batch):
        return loss_fn(model, batch), {"rows": jnp.ones(()), "sums": batch["x"].sum(0)}

    (loss, aux), _ = zoo.value_and_grad(with_aux, mesh, has_aux=True, microbatches=2)(model, batch)
    assert aux["rows"] == 4 * 2
    assert jnp.allclose(aux["sums"], batch["x"].sum(0), rtol=1e-5, atol=1e-5)
    assert jnp.allclose(zoo.value(with_aux, mesh, has_aux=True)(model, batch)[0], loss, rtol=1e-6)


def sum_squares(model):
    return sum(jnp.square(x).sum() for x in jax.tree.leaves(model))


def test_penalty_of_gathered_parameters_equals_one_device():
    """With `ZERO2` the gradient of a penalty of other leaves would be lost: it is NaN."""

    def penalized(model, batch):
        total, count = loss_fn(model, batch)
        return total + count * sum_squares(gather(model)), count

    def penalized_without_gather(model, batch):
        total, count = loss_fn(model, batch)
        return total + count * sum_squares(model), count

    results = []
    for layout in (ZERO1, ZERO2, ZERO3):
        mesh, model, batch = make_problem(fsdp=8, layout=layout)
        results.append(jax.device_get(zoo.value_and_grad(penalized, mesh)(model, batch)))
    weights = batch["weights"][:, None]
    expected = (batch["x"] * weights).sum(0) / weights.sum() + 2 * jnp.arange(16.0)
    for loss, gradients in results:
        assert jnp.allclose(loss, results[0][0], rtol=1e-5)
        assert jnp.allclose(gradients.weight, expected, rtol=1e-4, atol=1e-5)
    mesh, model, batch = make_problem(fsdp=8, layout=ZERO2)
    assert jnp.isnan(zoo.value_and_grad(penalized_without_gather, mesh)(model, batch)[0])


def test_loss_of_no_counted_token_is_zero_and_not_nan():
    mesh, model, batch = make_problem(data=8)
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch | {"weights": jnp.zeros(8)})
    assert loss == 0 and not grads.weight.any()


def test_loss_takes_a_second_model_and_arrays_as_arguments():
    mesh, model, batch = make_problem(fsdp=8)

    def distil(model, batch, teacher, scale):
        y = model(batch["x"]) - teacher(batch["x"])
        return (y * scale).sum(), batch["weights"].sum()

    loss, grads = zoo.value_and_grad(distil, mesh)(model, batch, zoo.place(Scale(jnp.ones(16)), mesh), jnp.array(2.0))
    expected = (batch["x"] * (jnp.arange(16.0) - 1)).sum() * 2 / batch["weights"].sum()
    assert jnp.allclose(loss, expected, rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(model)


def test_keys_per_row_do_not_depend_on_the_mesh():
    def noisy(model, batch, key):
        noise = jax.vmap(lambda k: jax.random.normal(k, (16,)))(key)
        return (model(batch["x"]) * noise).sum(), batch["weights"].sum()

    losses = []
    for sizes, microbatches in (
        ({"data": 1, "tensor": 8}, 1),
        ({"data": 8}, 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
    ):
        mesh, model, batch = make_problem(8, **sizes)
        losses.append(zoo.value(noisy, mesh, microbatches=microbatches)(model, batch, key=KEY))
    assert jnp.allclose(losses[0], jnp.stack(losses), rtol=1e-5)


def test_value_and_grad_compiles_once_outside_jit():
    mesh, model, batch = make_problem(data=8)
    traces = []

    def counted(model, batch):
        traces.append(1)
        return loss_fn(model, batch)

    for _ in range(3):
        zoo.value_and_grad(counted, mesh)(model, batch)
    assert len(traces) == 1


def test_loss_that_still_varies_raises():
    mesh = zoo.make_mesh(data=2, tensor=4)
    up = zoo.place(Linear(16, 32, in_=Dim("embed"), out=Dim("vocab"), key=KEY), mesh)

    def naive(model, batch):
        return jax.nn.logsumexp(model(batch["x"]), axis=-1).sum(), batch["weights"].sum()

    with pytest.raises(ValueError, match=r"the total that naive returns still differs.*'tensor'.*zoo.cross_entropy"):
        zoo.value_and_grad(naive, mesh)(up, {"x": jnp.ones((8, 16)), "weights": jnp.ones(8)})


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"rows": 6},
            ValueError,
            "a batch of 6 rows does not divide evenly over data=4 x 2 microbatches: use a multiple of 8",
        ),
        ({"weights": jnp.ones(4)}, ValueError, "one number of rows, not"),
        ({"loss": lambda m, b: loss_fn(m, b)[0]}, ValueError, "has_aux=False a loss returns `total, count`"),
        (
            {"loss": lambda m, b: jnp.stack(loss_fn(m, b))},
            ValueError,
            r"<lambda> returned one array of shape \(2,\)\.",
        ),
        (
            {"loss": lambda m, b: (loss_fn(m, b), {})},
            ValueError,
            "the total that <lambda> returns is a scalar, not tuple",
        ),
        ({"loss": lambda m, b: None}, ValueError, "<lambda> returned NoneType"),
        ({"loss": lambda m, b: (b["x"], b["weights"].sum())}, ValueError, "is a scalar, not"),
        ({"model": eqx.nn.Linear(16, 1, key=KEY)}, TypeError, "Linear is a module whose annotations name no dims"),
        ({"key": 0}, TypeError, r"key: expected a PRNG key, as jax\.random\.key\(0\) makes it, got int"),
    ],
)
def test_value_and_grad_raises_on_bad_input(change, error, message):
    mesh, model, batch = make_problem(change.pop("rows", 8), data=4, tensor=2)
    loss, model = change.pop("loss", loss_fn), change.pop("model", model)
    key = change.pop("key", None)
    with pytest.raises(error, match=message):
        zoo.value_and_grad(loss, mesh, microbatches=2)(model, batch | change, key=key)
