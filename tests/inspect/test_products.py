"""FLOPs of a compiled program are those of the products that it executes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import zoo
from zoo.inspect.executions import list_executions
from zoo.inspect.hlo import parse_module
from zoo.inspect.products import count_compiled_flops

X, W = jnp.ones((16, 32)), jnp.ones((32, 32))
ONE = 2 * 16 * 32 * 32


def multiply_in_a_loop(x, w):
    return lax.scan(lambda x, _: (jax.nn.gelu(x @ w), None), x, length=5)[0]


def multiply_batches(x, w):
    return jnp.einsum("bij,bjk->bik", x.reshape(4, 4, 32), w.reshape(4, 32, 8))


def multiply_without_use(x, w):
    """A loop whose products nothing reads, one of unknown length, and the first of two chains."""
    unread = lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]
    endless = lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)
    return (x @ w, unread @ w, endless @ w)[0]


def multiply_twice_the_same(x, w):
    return x @ w + jnp.sin(x @ w)


CASES = {
    multiply_in_a_loop: 5 * ONE,
    multiply_batches: ONE // 4,
    multiply_without_use: ONE,
    multiply_twice_the_same: ONE,
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_flops_are_those_that_xla_compiles(function):
    assert zoo.inspect.compiled(jax.jit(function), X, W).compiled_flops == CASES[function]


def test_report_names_both_counts_where_they_differ():
    program = zoo.inspect.compiled(jax.jit(multiply_twice_the_same), X, W)
    assert program.flops.total == 2 * ONE and "32.8 kFLOP per device in the compiled program" in str(program)
    assert "compiled program" not in str(zoo.inspect.compiled(jax.jit(multiply_in_a_loop), X, W))


def test_products_of_kernels_are_not_counted():
    text = """HloModule jit_f

ENTRY %main (x: f32[16,32], w: f32[32,32]) -> f32[16,32] {
  %x = f32[16,32]{1,0} parameter(0)
  %w = f32[32,32]{1,0} parameter(1)
  ROOT %product = f32[16,32]{1,0} OPCODE
}
"""
    for opcode in (
        "convolution(%x, %w), dim_labels=bf_io->bf",
        'custom-call(%x, %w), custom_call_target="__cublas$gemm"',
    ):
        module = parse_module(text.replace("OPCODE", opcode))
        assert count_compiled_flops(module, list_executions(module)[0]) is None
