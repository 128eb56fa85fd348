"""OFT in PEFT's format: one block size for all modules."""

import json

import jax
import pytest

import zoo
from zoo import adapters


def test_oft_config_finds_one_block_size_for_all_modules(tmp_path):
    """PEFT has one block size, and takes the nearest divisor: 8 of 16 inputs, and 12 of 24."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=24, key=jax.random.key(0))
    adapters.save(adapters.oft(model, targets=("query", "down"), blocks=2), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["oft_block_size"]) == (0, 12)
    adapters.load(model, tmp_path)
    mixed = adapters.oft(adapters.oft(model, targets="query", block_size=16), targets="down", block_size=2)
    with pytest.raises(zoo.CheckpointError, match="one size of blocks, or one count"):
        adapters.save(mixed, tmp_path)
