"""T5's buckets of distances, and layers that share their biases: a scan on a mesh with packed rows, and refusals."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.hf.families.test_deberta_v2_layers import compare_scan_on_a_mesh
from tests.weights.test_families_on_meshes import FIXTURES
from zoo.layers import TokenInfo
from zoo.layers.attention.relative_bias import compute_bucket_index
from zoo.models.scoring import unstack_blocks

FOLDER = FIXTURES / "encoders" / "mpnet_masked"
FIRST_DISTANCES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)
"""The first distance of each bucket, as PyTorch's class computes them with 32 buckets and a maximum of 128."""


def test_buckets_are_those_of_pytorch():
    distances = np.arange(-600, 601)
    buckets = np.asarray(compute_bucket_index(jnp.asarray(distances)[None], buckets=32, max_distance=128))[0]
    wanted = np.searchsorted(FIRST_DISTANCES, np.abs(distances), side="right") - 1
    np.testing.assert_array_equal(buckets, wanted + 16 * (distances > 0))


@pytest.mark.slow
def test_packed_rows_in_a_scan_on_a_mesh_equal_rows_alone():
    compare_scan_on_a_mesh(FOLDER)


def test_attention_refuses_to_run_without_a_table():
    block: Any = unstack_blocks(zoo.load(FOLDER))[0]
    with pytest.raises(ValueError, match="RelativeBiasAttention reads a table of distances: run it in a RelativeBlock"):
        block.mixer(jnp.ones((1, 3, 16)), TokenInfo())
    with pytest.raises(NotImplementedError, match="a token attends to those after it"):
        block.init_state(1, 8)
