"""The contract of the one `shard_map`, and the errors of those who break it."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import zoo
from zoo.layers import Linear
from zoo.parallel import Dim, Module, reduce, scan, shard_offset, varying
from zoo.parallel.collectives import all_gather

KEY = jax.random.key(0)
GLOBAL = jnp.ones(3)


class Scale(Module):
    weight: Float[Array, "embed"]

    def __call__(self, x):
        return x * zoo.parallel.gather(self).weight


def loss_fn(model, batch, key=None):
    y = model(batch["x"])
    return (y * batch["weights"][:, None]).sum(), batch["weights"].sum()


def setup(rows=8, **sizes):
    mesh = zoo.make_mesh(**sizes)
    x = jax.random.normal(KEY, (rows, 16))
    return mesh, zoo.place(Scale(jnp.arange(16.0)), mesh), {"x": x, "weights": jnp.arange(rows) / 4}


@pytest.mark.parametrize("sizes", [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_totals_and_counts_are_summed_and_divided_once(sizes, microbatches):
    mesh, model, batch = setup(16, **sizes)
    loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)(model, batch)
    weights = batch["weights"][:, None]
    assert jnp.allclose(loss, (batch["x"] * jnp.arange(16.0) * weights).sum() / weights.sum(), rtol=1e-5)
    assert jnp.allclose(grads.weight, (batch["x"] * weights).sum(0) / weights.sum(), rtol=1e-4, atol=1e-6)
    assert grads.weight.sharding == model.weight.sharding
    assert jnp.allclose(zoo.value(loss_fn, mesh)(model, batch), loss, rtol=1e-6)


def test_aux_is_summed_over_devices_and_microbatches():
    mesh, model, batch = setup(16, data=4, tensor=2)

    def with_aux(model, batch):
        return loss_fn(model, batch), {"rows": jnp.ones(()), "sums": batch["x"].sum(0)}

    (loss, aux), _ = zoo.value_and_grad(with_aux, mesh, has_aux=True, microbatches=2)(model, batch)
    assert aux["rows"] == 4 * 2
    assert jnp.allclose(aux["sums"], batch["x"].sum(0), rtol=1e-5, atol=1e-5)
    assert jnp.allclose(zoo.value(with_aux, mesh, has_aux=True)(model, batch)[0], loss, rtol=1e-6)


def test_nothing_that_counts_is_zero_and_not_nan():
    mesh, model, batch = setup(data=8)
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch | {"weights": jnp.zeros(8)})
    assert loss == 0 and not grads.weight.any()


def test_a_second_model_and_more_batches_come_as_arguments():
    mesh, model, batch = setup(fsdp=8)

    def distil(model, batch, teacher, scale):
        y = model(batch["x"]) - teacher(batch["x"])
        return (y * scale).sum(), batch["weights"].sum()

    loss, grads = zoo.value_and_grad(distil, mesh)(model, batch, zoo.place(Scale(jnp.ones(16)), mesh), jnp.array(2.0))
    expected = (batch["x"] * (jnp.arange(16.0) - 1)).sum() * 2 / batch["weights"].sum()
    assert jnp.allclose(loss, expected, rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(model)


def test_keys_are_one_a_row_whatever_the_mesh():
    def noisy(model, batch, key):
        noise = jax.vmap(lambda k: jax.random.normal(k, (16,)))(key)
        return (model(batch["x"]) * noise).sum(), batch["weights"].sum()

    losses = []
    for sizes, microbatches in (
        ({"data": 1, "tensor": 8}, 1),
        ({"data": 8}, 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
    ):
        mesh, model, batch = setup(8, **sizes)
        losses.append(zoo.value(noisy, mesh, microbatches=microbatches)(model, batch, key=KEY))
    assert jnp.allclose(losses[0], jnp.stack(losses), rtol=1e-5)


def test_spmd_names_what_it_returns():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    up = zoo.place(Linear(16, 32, in_=Dim("embed"), out=Dim("mlp"), key=KEY), mesh)
    x = jax.random.normal(KEY, (8, 5, 16))

    def run(up, x):
        y = zoo.parallel.gather(up)(x)
        return y, {"first": shard_offset(y, "batch", len(y)) + jnp.arange(len(y)), "total": reduce(y.sum(), over="mlp")}

    with pytest.raises(ValueError, match=r"a result named '' differs between devices along \['data', 'fsdp'\]"):
        zoo.spmd(run, mesh, out=("batch seq mlp", {"first": "batch", "total": ""}))(up, x)
    y = zoo.spmd(lambda up, x: run(up, x)[0], mesh, out="batch seq mlp")(up, x)
    assert jnp.allclose(y, x @ jnp.asarray(up.weight).T, atol=1e-5)
    rows = zoo.spmd(lambda up, x: run(up, x)[1]["first"], mesh, out="batch")(up, x)
    assert rows.tolist() == list(range(8))


class Rows(Module):
    """What a program may hand on to the next: rows, a number that all devices share, a dim that is split."""

    x: Float[Array, "batch embed"]
    wide: Float[Array, "batch mlp"]
    count: Float[Array, ""]


def test_a_module_in_a_result_lies_as_its_annotations_say():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    up = zoo.place(Linear(16, 32, in_=Dim("embed"), out=Dim("mlp"), key=KEY), mesh)
    x = jax.random.normal(KEY, (8, 16))

    def run(up, x):
        return up, [Rows(x, zoo.parallel.gather(up)(x), jnp.ones(()))], x.sum(1)

    same, (rows,), sums = zoo.spmd(run, mesh, out=("", "", "batch"))(up, x)
    assert same.weight.sharding == up.weight.sharding and jnp.array_equal(same.weight, up.weight)
    assert jnp.allclose(rows.wide, x @ jnp.asarray(up.weight).T, atol=1e-5) and rows.count == 1
    for array, sharding in zip(jax.tree.leaves(rows), jax.tree.leaves(mesh.shardings(rows)), strict=True):
        assert array.sharding == sharding
    assert jnp.allclose(sums, x.sum(1), atol=1e-5)
    partial = lambda up, x: Rows(x, zoo.parallel.gather(up)(x), x.sum())
    with pytest.raises(ValueError, match=r"a result count differs between devices along \['data', 'fsdp'\]"):
        zoo.spmd(partial, mesh, out="")(up, x)


def test_the_whole_of_a_split_dim_is_on_every_device():
    mesh = zoo.make_mesh(data=2, tensor=4)
    up = zoo.place(Linear(16, 32, in_=Dim("embed"), out=Dim("vocab"), key=KEY), mesh)
    x = jax.random.normal(KEY, (8, 16))

    def logits(up, x):
        y = all_gather(up(x), "vocab", axis=1)
        assert y.shape == (4, 32) and varying(y) == varying(x) and all_gather(y, "vocab", axis=1) is y
        return y

    y = zoo.spmd(logits, mesh, out="batch vocab")(up, x)
    assert jnp.allclose(y, x @ jnp.asarray(up.weight).T, atol=1e-5)
    assert y.sharding.spec == jax.sharding.PartitionSpec(("data",))


def test_scan_finds_what_its_carry_varies_over():
    mesh = zoo.make_mesh(data=8)

    def sums(x):
        return scan(lambda total, row: (total + row.sum(), None), jnp.zeros(()), x.T)[0][None]

    x = jnp.arange(16.0).reshape(8, 2)
    assert jnp.allclose(zoo.spmd(sums, mesh, out="batch")(x), x.sum(1))


def test_it_compiles_once_even_where_it_is_called_bare():
    mesh, model, batch = setup(data=8)
    traces = []

    def counted(model, batch):
        traces.append(1)
        return loss_fn(model, batch)

    for _ in range(3):
        zoo.value_and_grad(counted, mesh)(model, batch)
    assert len(traces) == 1


def reads_a_global(model, batch):
    return (model(batch["x"]) * GLOBAL.sum()).sum(), batch["weights"].sum()


def calls_one_that_does(model, batch):
    return reads_a_global(model, batch)


class Losses(eqx.Module):
    weight: Array

    def loss(self, model, batch):
        return (model(batch["x"]) * self.weight.sum()).sum(), batch["weights"].sum()


@pytest.mark.parametrize("where", ["closure", "global", "helper", "partial", "method"])
def test_an_array_that_is_closed_over_raises_by_name(where):
    mesh, model, batch = setup(data=8)
    teacher = model

    def closure(model, batch):
        return teacher(batch["x"]).sum(), batch["weights"].sum()

    def free(model, batch, extra):
        return loss_fn(model, batch)

    fns = {
        "closure": (closure, "closure closes over 'teacher' \\(Scale\\)"),
        "global": (reads_a_global, "reads_a_global closes over 'GLOBAL' \\(array\\)"),
        "helper": (calls_one_that_does, "closes over 'GLOBAL'"),
        "partial": (functools.partial(free, extra=jnp.ones(3)), "closes over 'partial'"),
        "method": (Losses(jnp.ones(3)).loss, "closes over 'self' \\(Losses\\)"),
    }
    fn, message = fns[where]
    with pytest.raises(ValueError, match=message + ".*Pass it as an argument"):
        zoo.value_and_grad(fn, mesh)(model, batch)


x = jnp.ones(3)


def test_an_attribute_is_not_a_global_of_its_name():
    mesh, model, batch = setup(data=8)

    def attribute(model, batch):
        return Bag(model(batch["x"])).x.sum(), batch["weights"].sum()

    zoo.value(attribute, mesh)(model, batch)


class Bag:
    def __init__(self, value):
        self.x = value


def test_a_loss_that_still_varies_raises_by_name():
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
            "a batch of 6 rows does not share out over data=4 x 2 microbatches: use a multiple of 8",
        ),
        ({"weights": jnp.ones(4)}, ValueError, "one number of rows, not"),
        ({"loss": lambda m, b: loss_fn(m, b)[0]}, ValueError, "has_aux=False a loss returns `total, count`"),
        ({"loss": lambda m, b: (b["x"], b["weights"].sum())}, ValueError, "is a scalar, not"),
        ({"model": eqx.nn.Linear(16, 1, key=KEY)}, TypeError, "Linear is a module whose annotations name no dims"),
        ({"key": jax.random.PRNGKey(0)}, ValueError, r"a typed PRNG key, made by jax.random.key"),
    ],
)
def test_bad_input_raises_before_it_compiles(change, error, message):
    mesh, model, batch = setup(change.pop("rows", 8), data=4, tensor=2)
    loss, model = change.pop("loss", loss_fn), change.pop("model", model)
    key = change.pop("key", None)
    with pytest.raises(error, match=message):
        zoo.value_and_grad(loss, mesh, microbatches=2)(model, batch | change, key=key)
