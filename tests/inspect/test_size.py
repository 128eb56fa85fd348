"""Parameters, bytes and bits per parameter of dense and quantized models."""

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.inspect import measure_size
from zoo.layers import Linear
from zoo.layers.quantized.linear import MXFP4Linear, NF4Linear
from zoo.parallel import Dim

KEY = jax.random.key(0)


def test_size_counts_parameters_bytes_and_bits():
    linear = Linear(64, 8, bias=True, key=KEY)
    assert measure_size(linear) == measure_size(eqx.filter_eval_shape(lambda: linear))
    assert (
        measure_size(linear).num_parameters,
        measure_size(linear).bytes,
        measure_size(linear).bits_per_parameter,
    ) == (520, 4 * 520, 32)
    with_integer = measure_size((linear, jnp.int32(1)))
    assert (with_integer.num_parameters, with_integer.bytes) == (520, 4 * 520 + 4)


def test_size_counts_quantized_matrices_decoded():
    packed = [MXFP4Linear(64, 8, key=KEY), NF4Linear(jnp.ones((8, 64)), jnp.ones(8), in_=Dim("in"), out=Dim("out"))]
    assert measure_size(packed[0]).bits_per_parameter == 4.25 and measure_size(packed[0]).num_parameters == 512
    assert measure_size(packed[1]).num_parameters == 512 + 8
    assert measure_size(packed[1]).bytes == 8 * (32 + 1 + 4 + 4) + 8 * 4
    stacked = eqx.filter_vmap(lambda key: MXFP4Linear(64, 8, key=key))(jax.random.split(KEY, 3))
    assert measure_size(stacked).num_parameters == 3 * 512
