"""A shared module has one adapter here, and one for each layer that calls it in PEFT's files."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.weights.safetensors import open_safetensors, write_safetensors

FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "zamba2"
"""Layers 1 and 4 call the first shared layer, and layer 2 calls the second."""
TOKENS = jnp.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def base():
    return zoo.load(FIXTURE, dtype=jnp.float32)


@pytest.fixture
def saved(base, tmp_path):
    targets = ("q_proj", "gate_up_proj", "gate_up_proj_adapter_list.0.0")
    wrapped = perturb(adapters.lora(base, targets=targets, rank=2, key=jax.random.key(1)))
    adapters.save(wrapped, tmp_path)
    return wrapped, tmp_path


def rewrite(directory, change):
    """Write the adapter's tensors again, changed."""
    path = directory / "adapter_model.safetensors"
    tensors = {name: np.array(tensor.read()) for name, tensor in open_safetensors(path).items()}
    change(tensors)
    write_safetensors(path, tensors)


@pytest.mark.ci
def test_it_is_written_under_each_caller_and_read_once(base, saved):
    wrapped, directory = saved
    names = open_safetensors(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    for module in ("self_attn.q_proj", "feed_forward.gate_up_proj", "feed_forward.gate_up_proj_adapter_list.0.0"):
        shared = [f"model.layers.{layer}.shared_transformer.{module}" for layer in (1, 2, 4)]
        shared = [name for name in shared if "list" not in name or ".2." not in name]
        assert all(f"base_model.model.{name}.lora_A.weight" in names for name in shared)
        assert set(shared) <= set(config["target_modules"])
    loaded = adapters.load(base, directory)
    np.testing.assert_allclose(loaded(TOKENS), wrapped(TOKENS), atol=1e-6)


@pytest.mark.ci
def test_adapters_that_differ_between_calls_are_refused(base, saved):
    _, directory = saved
    name = "base_model.model.model.layers.4.shared_transformer.self_attn.q_proj.lora_B.weight"
    message = (
        r"layers\.1\.shared_transformer and model\.layers\.4\.shared_transformer are one module, and self_attn\.q_"
    )

    def change(tensors):
        tensors[name] = tensors[name] + 1

    rewrite(directory, change)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(base, directory)
    rewrite(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(base, directory)
