"""xLSTM's two layouts of weights: a tensor for each projection, or several in one."""

import json
from pathlib import Path

import numpy as np
import pytest

import zoo
from tests.models.hf.families.respelled import check_respelled_files
from zoo.weights.safetensors import open_tensors, write_safetensors

FIXTURE = Path(__file__).parents[3] / "fixtures" / "models" / "xlstm"
FUSED = {
    "mlstm_layer.qkv_opreact": [f"mlstm_layer.{name}" for name in ("q", "k", "v", "ogate_preact")],
    "mlstm_layer.ifgate_preact": ["mlstm_layer.igate_preact", "mlstm_layer.fgate_preact"],
    "ffn.proj_up_gate_z": ["ffn.proj_up_gate", "ffn.proj_up"],
}


def fuse(directory: Path) -> Path:
    """Write the fixture with `weight_mode: "fused"`, in the order in which its class splits the projections."""
    tensors = {name: np.array(x.read()) for name, x in open_tensors(FIXTURE).items()}
    for layer in range(2):
        for whole, parts in FUSED.items():
            for kind in ("weight", "bias"):
                names = [f"backbone.blocks.{layer}.{part}.{kind}" for part in parts]
                if names[0] in tensors:
                    joined = np.concatenate([tensors.pop(name) for name in names])
                    tensors[f"backbone.blocks.{layer}.{whole}.{kind}"] = joined
    write_safetensors(directory / "model.safetensors", tensors)
    config = json.loads((FIXTURE / "config.json").read_text()) | {"weight_mode": "fused"}
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return directory


def test_fused_weights_are_read_and_written(tmp_path):
    check_respelled_files(fuse(tmp_path), FIXTURE)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_heads": 5}, "qk_dim_factor makes 64 features, which do not divide evenly over 5 heads"),
        ({"weight_mode": "both"}, "weight_mode = 'both' should be"),
        ({"eps": 1e-5}, "eps = 1e-05 would change the result"),
        ({"num_blocks": 3}, "are two words for one thing and say different things"),
    ],
)
def test_configs_that_cannot_be_read_raise(tmp_path, changes, message):
    config = json.loads((FIXTURE / "config.json").read_text()) | changes
    (tmp_path / "model.safetensors").write_bytes((FIXTURE / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.load(tmp_path)
