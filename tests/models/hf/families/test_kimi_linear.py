"""Kimi Linear in the spelling of Moonshot's own files, which transformers rewrites on saving."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.hf.families.respelled import check_respelled_files
from zoo.weights.safetensors import open_tensors, write_safetensors

FIXTURE = Path(__file__).parents[3] / "fixtures" / "models" / "kimi_linear"
LINEAR = {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 6, "num_heads": 2, "short_conv_kernel_size": 3}
RESPELLED = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")


def respell(directory: Path, **changes) -> Path:
    """Write the fixture as Moonshot spells it: a table of linear attention, and dense layers called mlp."""
    config = json.loads((FIXTURE / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in RESPELLED}
    config |= {"linear_attn_config": {**LINEAR, **changes}, "first_k_dense_replace": 1, "mla_use_nope": True}
    config |= {
        "moe_router_activation_func": "sigmoid",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "moe_layer_freq": 1,
    }
    tensors = {
        name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): x.read() for name, x in open_tensors(FIXTURE).items()
    }
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return directory


def test_files_of_moonshot_are_read_and_written(tmp_path):
    check_respelled_files(respell(tmp_path), FIXTURE)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kda_layers": [1, 2]}, "should name each of the layers 1 to 2 once"),
        ({"full_attn_layers": [1], "kda_layers": [0]}, "should name each of the layers 1 to 2 once"),
        ({"gate": 1}, "gate = 1 is not a key of kimi_linear's linear_attn_config"),
    ],
)
def test_tables_that_do_not_say_what_each_layer_is_raise(tmp_path, changes, message):
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.load(respell(tmp_path, **changes))


def test_positions_do_not_change_the_result():
    """Neither attention nor the recurrence has positions: texts in another place of a row are the same texts."""
    model = zoo.load(FIXTURE, dtype="float32")
    tokens = jnp.arange(3, 11)[None]
    later = model(tokens, positions=jnp.arange(5, 13)[None])
    np.testing.assert_array_equal(later, model(tokens))
