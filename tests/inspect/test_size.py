"""What a model's arrays take in memory, packed or not."""

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.inspect import size
from zoo.layers import Linear, NF4Linear, PackedLinear
from zoo.parallel import Dim

KEY = jax.random.key(0)


def test_numbers_bytes_and_bits():
    linear = Linear(64, 8, bias=True, key=KEY)
    assert size(linear) == size(eqx.filter_eval_shape(lambda: linear))
    assert (size(linear).numbers, size(linear).bytes, size(linear).bits) == (520, 4 * 520, 32)
    beside = size((linear, jnp.int32(1)))
    assert (beside.numbers, beside.bytes) == (520, 4 * 520 + 4)


def test_what_is_packed_counts_as_what_it_stands_for():
    packed = [PackedLinear(64, 8, key=KEY), NF4Linear(jnp.ones((8, 64)), jnp.ones(8), in_=Dim("in"), out=Dim("out"))]
    assert size(packed[0]).bits == 4.25 and size(packed[0]).numbers == 512
    assert size(packed[1]).numbers == 512 + 8
    assert size(packed[1]).bytes == 8 * (32 + 1 + 4 + 4) + 8 * 4
    stacked = eqx.filter_vmap(lambda key: PackedLinear(64, 8, key=key))(jax.random.split(KEY, 3))
    assert size(stacked).numbers == 3 * 512
