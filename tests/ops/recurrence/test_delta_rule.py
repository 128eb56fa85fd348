"""Delta rules, and RWKV-7, against their papers' equations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import mark_slow
from tests.recurrences import BATCH, HEADS, VALUE_DIM, all_close, draw_delta
from zoo.ops.recurrence.delta_rule import (
    delta_rule,
    delta_rule_reference,
    gated_delta_product,
    gated_delta_product_reference,
    gated_delta_rule,
    gated_delta_rule_reference,
    kda,
    kda_reference,
)
from zoo.ops.recurrence.rwkv7 import rwkv7, rwkv7_reference


def equations_in_numpy(op, query, key, value, beta=None, log_decay=None, read=None, write=None, state=None):
    """Compute the equations in numpy, for one token, one head and one row at a time."""
    steps, outputs, last = key.shape[1] // query.shape[1], np.zeros((*query.shape[:3], value.shape[3])), state.copy()
    for b, t, h in np.ndindex(*query.shape[:3]):
        s = last[b, h]
        decay = np.ones((key.shape[3], 1)) if log_decay is None else np.exp(log_decay[b, t, h]).reshape(-1, 1)
        if op is rwkv7:
            s = decay * s + np.outer(write[b, t, h], read[b, t, h] @ s) + np.outer(key[b, t, h], value[b, t, h])
        else:
            s = decay * s
            for k, v, rate in zip(*(x[b, steps * t : steps * t + steps, h] for x in (key, value, beta)), strict=True):
                s = s + np.outer(k, rate * (v - k @ s))
        outputs[b, t, h] = query[b, t, h] @ s * (1 if op is rwkv7 else key.shape[3] ** -0.5)
        last[b, h] = s
    return outputs, last


REFERENCES = {
    delta_rule: delta_rule_reference,
    gated_delta_rule: gated_delta_rule_reference,
    kda: kda_reference,
    gated_delta_product: gated_delta_product_reference,
    rwkv7: rwkv7_reference,
}
OPS = {
    delta_rule: ("none", 1, ("beta",)),
    gated_delta_rule: ("number", 1, ("beta", "log_decay")),
    kda: ("vector", 1, ("beta", "log_decay")),
    gated_delta_product: ("number", 2, ("beta", "log_decay")),
    rwkv7: ("vector", 1, ("log_decay", "read", "write")),
}


def draw_with_equations(op):
    """Return inputs, and what the equations make of them."""
    decays, steps, names = OPS[op]
    inputs = draw_delta(5, decays, steps, seed=1)
    inputs["beta"] = jnp.abs(inputs["value"][..., 0])
    given = {name: inputs[name] for name in ("query", "key", "value", *names, "state")}
    return given, equations_in_numpy(op, **{name: np.asarray(x, np.float64) for name, x in given.items()})


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_references_equal_their_equations(op):
    given, expected = draw_with_equations(op)
    all_close(jax.jit(REFERENCES[op])(**given), expected, 5e-6)


@pytest.mark.slow  # test_parity.py compares both modes with float64 by default
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_delta_rules_equal_their_equations(op):
    given, expected = draw_with_equations(op)
    all_close(op(**given, implementation="recurrent"), expected, 5e-6)
    all_close(op(**given, implementation="chunked"), expected, 2e-5)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(op, inputs, cotangents):
    outputs, back = jax.vjp(lambda inputs: op(**inputs), inputs)
    return outputs, back(cotangents)[0]


QUICK = ((70, gated_delta_product),)
"""Several chunks of two rows per token; test_parity.py has all operations in one chunk."""


@pytest.mark.parametrize(
    ("seq", "op"),
    mark_slow([(seq, op) for seq in (1, 7, 70) for op in OPS], but=QUICK),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_delta_rules_equal_their_references_with_gradients(op, seq):
    decays, steps, names = OPS[op]
    inputs = draw_delta(seq, decays, steps, seed=5)
    inputs["beta"] = jnp.minimum(jnp.abs(inputs["value"][..., 0]), 2)
    if op is rwkv7:
        inputs["read"] = 0.5 * inputs["read"]
    given = {name: inputs[name] for name in ("query", "key", "value", *names, "state")}
    keys = jax.random.split(jax.random.key(0))
    cotangents = (
        jax.random.normal(keys[0], (BATCH, seq, HEADS, VALUE_DIM)),
        jax.random.normal(keys[1], given["state"].shape),
    )
    expected = value_and_gradients(REFERENCES[op], given, cotangents)
    for mode, value_bound, gradient_bound in (("recurrent", 5e-6, 2e-5), ("chunked", 2e-5, 1e-4)):
        values, gradients = value_and_gradients(MODES[op, mode], given, cotangents)
        all_close(values, expected[0], value_bound)
        all_close(gradients, expected[1], gradient_bound)


MODES = {(op, mode): partial(op, implementation=mode) for op in OPS for mode in ("recurrent", "chunked")}
