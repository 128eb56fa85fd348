"""Fields that are `observed()`: statistics of the backward pass, as maxima over devices and micro-batches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import zoo
from zoo import make_mesh
from zoo.parallel import Module, gather, leaves
from zoo.parallel.collectives import vary, varying
from zoo.parallel.fields import observed

KEY = jax.random.key(0)


@jax.custom_vjp
def watch(x, largest):
    return x


def _watch_bwd(largest, gradient):
    return gradient, vary(jnp.abs(gradient).max()[None], varying(largest))


watch.defvjp(lambda x, largest: (x, largest), _watch_bwd)


class Watched(Module):
    """Scale rows, and observe the largest gradient of the result."""

    weight: Float[Array, "embed"]
    largest: Float[Array, "history"] = observed()

    def __call__(self, x):
        own = gather(self)
        return watch(x * own.weight, own.largest)


def loss_fn(model, batch):
    y = model(batch["x"])
    return (y * batch["weights"][:, None]).sum(), jnp.float32(len(y))


def make_problem(**sizes):
    mesh = make_mesh(**sizes)
    weights = jnp.array([0.5, -1, 2, 1, 7, -3, 0, 1.5])
    batch = {"x": jax.random.normal(KEY, (8, 16)), "weights": weights}
    return mesh, zoo.place(Watched(jnp.arange(16.0), jnp.zeros(1)), mesh), batch


@pytest.mark.parametrize(
    "sizes", [pytest.param({"data": 1}, marks=pytest.mark.slow), {"data": 2, "fsdp": 2, "tensor": 2}]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_observation_is_a_maximum_over_all_rows(sizes, microbatches):
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    mesh, model, batch = make_problem(**sizes, devices=devices)
    grad = partial(zoo.value_and_grad(loss_fn, mesh, observe=True, microbatches=microbatches), model, batch)
    loss, gradients, observations = grad()
    assert observations.largest.tolist() == [7]  # the largest weight of a row: neither summed nor divided
    assert (observations.weight, gradients.largest) == (None, None)
    expected = (batch["weights"][:, None] * batch["x"]).mean(0)
    assert jnp.allclose(gradients.weight, expected, rtol=1e-5, atol=1e-6)
    scaled_loss, scaled, observations = grad(loss_scale=1024.0)
    assert scaled_loss == loss
    assert (scaled.weight == gradients.weight).all()  # a power of two changes no bit
    assert observations.largest.tolist() == [7 * 1024]  # the gradient that the backward pass has seen


def test_trainable_and_cast_leave_observed_fields_out():
    model = Watched(jnp.arange(16.0), jnp.zeros(1))
    assert zoo.trainable(model).largest is None
    assert zoo.count(model) == 16
    assert zoo.cast(model, jnp.bfloat16).largest.dtype == jnp.float32
    assert [leaf.observed for leaf in leaves(model)] == [False, True]


def test_observations_are_not_lost_unasked():
    mesh, model, batch = make_problem()
    with pytest.raises(ValueError, match="the model observes largest: take what it has seen.*observe=True"):
        zoo.value_and_grad(loss_fn, mesh)(model, batch)
    assert zoo.value(loss_fn, mesh)(model, batch).shape == ()  # no backward pass that could see anything


def test_pipeline_refuses_observed_fields():
    mesh, model, batch = make_problem(pipe=2, data=4)
    with pytest.raises(NotImplementedError, match="largest is a maximum over calls.*pipe=1"):
        zoo.value_and_grad(loss_fn, mesh, observe=True)(model, batch)
