"""PEFT's tensors of parts of a matrix whose rows the file has in another order."""

from pathlib import Path

import jax
import numpy as np

import zoo
from tests.adapters.perturb import perturb
from zoo.weights.safetensors import open_safetensors, open_tensors

FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "diffllama"


def test_adapters_have_the_rows_of_the_file(tmp_path):
    """PEFT's B A is added to the file's matrix, in which the first queries of all heads come first."""
    model = zoo.load(FIXTURE, dtype="float32")
    adapted = perturb(zoo.adapters.lora(model, targets=("q_proj", "v_proj"), rank=2, alpha=2, key=jax.random.key(0)))
    zoo.adapters.save(adapted, tmp_path / "adapter")
    zoo.save(zoo.adapters.merge(adapted), tmp_path / "merged")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    adapter = {name: x.read() for name, x in open_safetensors(file).items()}
    before, after = open_tensors(FIXTURE), open_tensors(tmp_path / "merged")
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"):
        down, up = (adapter[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
        expected = before[f"{name}.weight"].read().astype(np.float32) + up @ down
        np.testing.assert_allclose(after[f"{name}.weight"].read(), expected, rtol=1e-5, atol=1e-6)
    again = zoo.adapters.load(model, tmp_path / "adapter")
    for ours, wanted in zip(*(jax.tree.leaves(zoo.trainable(tree)) for tree in (again, adapted)), strict=True):
        np.testing.assert_array_equal(ours, wanted)
