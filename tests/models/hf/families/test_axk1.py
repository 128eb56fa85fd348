"""A.X K1 as it was published: without a selection bias, and with norms that dense layers do not use."""

import json
from pathlib import Path

import numpy as np
import pytest

import zoo
from tests.models.hf.families.respelled import check_respelled_files
from zoo.weights.safetensors import open_tensors, write_safetensors

FIXTURE = Path(__file__).parents[3] / "fixtures" / "models" / "axk1"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
UNUSED = "model.layers.0.post_mlp_layernorm.weight"


def write(directory, tensors, **changes):
    directory.mkdir()
    config = json.loads((FIXTURE / "config.json").read_text()) | changes
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return directory


@pytest.mark.parametrize("model_type", ["axk1", "AXK1"])
def test_published_files_are_read_and_written(tmp_path, model_type):
    tensors = {name: x.read() for name, x in open_tensors(FIXTURE).items()}
    unbiased = write(tmp_path / "unbiased", tensors | {BIAS: np.zeros_like(tensors[BIAS])})
    del tensors[BIAS]
    norm = np.ones_like(tensors["model.norm.weight"])
    changes = {"model_type": model_type, "first_k_dense_replace": 1, "mlp_layer_types": None}
    published = write(tmp_path / "published", tensors | {UNUSED: norm}, **changes)
    assert zoo.load(published).origin.left_aside.startswith("1 tensor (32 bytes), model.layers.0.")
    check_respelled_files(published, unbiased)
