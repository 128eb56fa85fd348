"""Layers that share a table of relative positions: a scan on a mesh with packed rows, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.weights.test_families_on_meshes import FIXTURES, draw_texts
from zoo.layers import TokenInfo
from zoo.models import Hidden
from zoo.models.parameter_paths import list_parameter_paths
from zoo.models.scoring import unstack_blocks

FOLDER = FIXTURES / "encoders" / "deberta_masked"


def compare_scan_on_a_mesh(folder):
    """Compare packed rows in a scan on a mesh with rows alone: in value, and in the gradient of every parameter, of the
    table, too."""
    model, runs = zoo.configure(zoo.load(folder, dtype=jnp.float32), loop="plain"), []
    meshes = zoo.make_mesh(data=2, fsdp=2, tensor=2), zoo.make_mesh(devices=jax.devices()[:1])
    for mesh, loop, rows in zip(meshes, ("scan", "plain"), draw_texts(40), strict=True):
        placed = zoo.place(zoo.configure(model, loop=loop), mesh)
        with jax.default_matmul_precision("highest"):
            run = zoo.value_and_grad(zoo.cross_entropy, mesh)(placed, zoo.place_batch(rows, mesh))
        runs.append(jax.device_get(run))
    (loss, gradients), (wanted_loss, wanted) = runs
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    leaves = dict(zip(list_parameter_paths(wanted), jax.tree.leaves(wanted), strict=True))
    assert np.abs(wanted.relative_embedding.weight).max() > 0
    largest = max(np.abs(x).max() for x in leaves.values())
    for (name, y), x in zip(leaves.items(), jax.tree.leaves(gradients), strict=True):
        assert np.abs(x - y).max() <= 1e-4 * max(np.abs(y).max(), 0.01 * largest), name


@pytest.mark.slow
def test_packed_rows_in_a_scan_on_a_mesh_equal_rows_alone():
    compare_scan_on_a_mesh(FOLDER)


def test_relative_layers_refuse_to_run_without_a_table():
    block = unstack_blocks(zoo.load(FOLDER))[0]
    with pytest.raises(ValueError, match="the hidden states have none: run the layers in their zoo.models.Encoder"):
        block(Hidden(jnp.ones((1, 3, 16))), TokenInfo())
    with pytest.raises(ValueError, match="run it in a RelativeBlock"):
        block.mixer(jnp.ones((1, 3, 16)), TokenInfo())
