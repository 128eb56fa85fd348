"""DiffLlama's constants, which no file holds, and its rows, which are in another order than ours."""

from pathlib import Path

import jax
import numpy as np
import pytest

import zoo
from tests.models.hf.families.respelled import check_respelled_files
from zoo.models.hf.config import read_config
from zoo.models.hf.families.diffllama import DIFFLLAMA
from zoo.models.hf.shapes import build_shapes
from zoo.models.parameter_paths import list_parameter_paths
from zoo.weights.safetensors import open_tensors, write_safetensors

FIXTURE = Path(__file__).parents[3] / "fixtures" / "models" / "diffllama"


def find_lambdas(model):
    names = [path.name.rpartition(".")[2] for path in list_parameter_paths(model)]
    return [x for name, x in zip(names, jax.tree.leaves(model), strict=True) if name == "lambda_init"]


@pytest.mark.parametrize("mesh", [None, {"tensor": 2, "fsdp": 2, "data": 2}], ids=["one device", "mesh"])
def test_lambda_init_follows_from_the_number_of_the_layer(mesh):
    model = zoo.load(FIXTURE, mesh=None if mesh is None else zoo.make_mesh(**mesh), dtype="bfloat16")
    (lambdas,) = find_lambdas(model)
    np.testing.assert_allclose(lambdas, 0.8 - 0.6 * np.exp(-0.3 * np.arange(2)), rtol=1e-6)
    assert lambdas.dtype == np.float32


def test_a_file_with_lambdas_is_read_and_written(tmp_path):
    """In files of others they may be stored."""
    tensors = {name: x.read() for name, x in open_tensors(FIXTURE).items()}
    for layer in range(2):
        lambda_init = np.array(0.8 - 0.6 * np.exp(-0.3 * layer), np.float32)
        tensors[f"model.layers.{layer}.self_attn.lambda_init"] = lambda_init
    write(tmp_path, tensors)
    check_respelled_files(tmp_path, FIXTURE)
    del tensors["model.layers.1.self_attn.lambda_init"]
    write(tmp_path, tensors)
    with pytest.raises(zoo.CheckpointError, match=r"layers\.1\.self_attn\.lambda_init \[\] is missing"):
        zoo.load(tmp_path)


def write(directory, tensors):
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_bytes((FIXTURE / "config.json").read_bytes())


def test_an_odd_number_of_key_heads_is_refused():
    given = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12}
    with pytest.raises(ValueError, match="num_key_value_heads = 3 heads do not divide evenly over two maps"):
        build_shapes(DIFFLLAMA, read_config(DIFFLLAMA, given))
