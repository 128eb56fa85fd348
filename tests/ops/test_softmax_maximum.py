import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import mark_slow
from zoo.ops.normalization import max_last_dim
from zoo.ops.platform import target_platform


@pytest.mark.parametrize("size", mark_slow([1, 32, 33, 77, 256, 1001], but=[1, 77, 256]))
def test_max_last_dim_equals_max(size):
    x = jax.random.normal(jax.random.key(size), (3, 5, size)).at[0, 0].set(-jnp.inf).at[1, 1, size // 2].set(jnp.nan)
    np.testing.assert_array_equal(max_last_dim(x), np.max(np.asarray(x), axis=-1, keepdims=True))


def test_max_last_dim_compares_halves_on_cpus_alone():
    count = lambda: str(jax.make_jaxpr(lambda x: max_last_dim(x))(jnp.zeros((2, 4096)))).count(" max ")
    with target_platform("tpu"):
        assert count() == 0
    assert count() == 3
