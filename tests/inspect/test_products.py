"""FLOPs of a compiled program are those of the products that it executes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import zoo
from zoo.inspect.executions import list_executions
from zoo.inspect.hlo import parse_module
from zoo.inspect.products import count_compiled_flops, count_product_flops

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


def test_products_are_counted_if_the_text_says_their_sizes():
    text = """HloModule jit_f

ENTRY %main (x: f32[16,32], w: f32[32,32]) -> f32[16,32] {
  %x = f32[16,32]{1,0} parameter(0)
  %w = f32[32,32]{1,0} parameter(1)
  ROOT %product = f32[16,32]{1,0} OPCODE
}
"""
    for opcode, flops in (
        ("convolution(%x, %w), dim_labels=bf_io->bf", ONE),
        ("convolution(%x, %w)", None),
        ('custom-call(%x, %w), custom_call_target="__cublas$gemm"', None),
    ):
        module = parse_module(text.replace("OPCODE", opcode))
        assert count_compiled_flops(module, list_executions(module)[0]) == flops


@pytest.mark.parametrize(
    "options",
    [
        {"padding": [(2, 1), (0, 3)]},
        {"padding": "SAME", "window_strides": (2, 3)},
        {"padding": [(3, 3), (1, 1)], "lhs_dilation": (3, 2), "rhs_dilation": (1, 2)},
        {"padding": "VALID", "features": 2, "feature_group_count": 2},
        {"padding": "VALID", "batch_group_count": 3},
    ],
)
def test_flops_of_a_convolution_leave_out_its_padding(options):
    """Of ones with ones, the sum of the results is the number of multiply-adds of data."""
    options = dict(options)
    images, kernel = jnp.ones((6, 4, 7, 9)), jnp.ones((6, options.pop("features", 4), 3, 5))
    options.setdefault("window_strides", (1, 1))
    convolve = lambda x, w: lax.conv_general_dilated(x, w, **options)
    module = parse_module(jax.jit(convolve).lower(images, kernel).as_text("hlo"))
    computation = module.computations[module.entry]
    (found,) = [x for x in computation.values() if x.opcode == "convolution"]
    assert count_product_flops(found, computation) == 2 * convolve(images, kernel).sum()


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # As TPUs multiply a matrix by one for each of 4 heads: a window over an input of one position.
        ("f32[16,4,8] convolution(%a, %b), window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0oi->b0f", 4 * 8),
        ("f32[16,32] convolution(%x, %w), dim_labels=bf_io->bf", 32),
        (
            '(f32[16,32], s8[64]) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", backend_config='
            '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
            '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}',
            32,
        ),
        ('f32[16,32] custom-call(%x, %w), custom_call_target="tpu_custom_call"', None),
    ],
)
def test_flops_of_other_products_than_dots(line, flops):
    """`flops` in units of 2 x 16 x 32."""
    text = f"""HloModule jit_f

ENTRY %main (x: f32[16,32], w: f32[32,32]) -> f32[16,32] {{
  %x = f32[16,32]{{1,0}} parameter(0)
  %w = f32[32,32]{{1,0}} parameter(1)
  %a = f32[16,32,1] bitcast(%x)
  %b = f32[4,8,32] bitcast(%w)
  ROOT %product = {line}
}}
"""
    computation = parse_module(text).computations["main"]
    expected = None if flops is None else 2 * 16 * 32 * flops
    assert count_product_flops(computation["product"], computation) == expected
