"""A function that closes over an array raises, naming the variable."""

import functools

import equinox as eqx
import jax.numpy as jnp
import pytest
from jaxtyping import Array

import zoo
from tests.parallel.scale_problem import loss_fn, make_problem

GLOBAL = jnp.ones(3)


def reads_a_global(model, batch):
    return (model(batch["x"]) * GLOBAL.sum()).sum(), batch["weights"].sum()


def calls_reads_a_global(model, batch):
    return reads_a_global(model, batch)


class Losses(eqx.Module):
    weight: Array

    def loss(self, model, batch):
        return (model(batch["x"]) * self.weight.sum()).sum(), batch["weights"].sum()


@pytest.mark.parametrize("where", ["closure", "global", "helper", "partial", "method"])
def test_closed_over_array_raises_by_name(where):
    mesh, model, batch = make_problem(data=8)
    teacher = model

    def closure(model, batch):
        return teacher(batch["x"]).sum(), batch["weights"].sum()

    def free(model, batch, extra):
        return loss_fn(model, batch)

    fns = {
        "closure": (closure, "closure closes over 'teacher' \\(Scale\\)"),
        "global": (reads_a_global, "reads_a_global closes over 'GLOBAL' \\(array\\)"),
        "helper": (calls_reads_a_global, "closes over 'GLOBAL'"),
        "partial": (functools.partial(free, extra=jnp.ones(3)), "closes over 'partial'"),
        "method": (Losses(jnp.ones(3)).loss, "closes over 'self' \\(Losses\\)"),
    }
    fn, message = fns[where]
    with pytest.raises(ValueError, match=message + ".*Pass it as an argument"):
        zoo.value_and_grad(fn, mesh)(model, batch)


x = jnp.ones(3)


def test_attribute_is_not_a_global_of_the_same_name():
    mesh, model, batch = make_problem(data=8)

    def attribute(model, batch):
        return Bag(model(batch["x"])).x.sum(), batch["weights"].sum()

    zoo.value(attribute, mesh)(model, batch)


class Bag:
    def __init__(self, value):
        self.x = value
