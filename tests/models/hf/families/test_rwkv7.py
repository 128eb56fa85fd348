"""RWKV-7: older names of its token shifts, values of the first layer, and configs that cannot be read."""

import json
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.hf.families.respelled import check_respelled_files
from zoo.layers import TokenInfo
from zoo.models.decoder import Hidden
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.tools.testing import check_mixer
from zoo.weights.safetensors import open_tensors, write_safetensors

FIXTURE = Path(__file__).parents[3] / "fixtures" / "models" / "rwkv7"
SMALL = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 3, "head_dim": 8, "intermediate_size": 12}
SMALL |= {f"{name}_low_rank_dim": rank for rank, name in enumerate(("a", "decay", "gate", "v"), start=2)}


def build(**more):
    config = read_config(FAMILIES["rwkv7"], SMALL | more)
    return partial(FAMILIES["rwkv7"].build, config)


def test_files_with_all_shifts_in_one_tensor(tmp_path):
    tensors = {name: np.array(x.read()) for name, x in open_tensors(FIXTURE).items()}
    for layer in range(2):
        names = [f"model.layers.{layer}.attn.x_{letter}" for letter in "rwkvag"]
        tensors[f"model.layers.{layer}.attn.x_x"] = np.stack([tensors.pop(name)[0, 0] for name in names])
    write_safetensors(tmp_path / "model.safetensors", tensors)
    config = json.loads((FIXTURE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    check_respelled_files(tmp_path, FIXTURE)


@pytest.mark.slow
def test_the_model_keeps_the_promises_of_a_mixer():
    """Also on meshes, and where a document goes on from one device to the next."""
    meshes = [zoo.make_mesh(data=2, fsdp=2, tensor=2), zoo.make_mesh(data=2, context=2, tensor=2)]
    assert check_mixer(build(), meshes=meshes).passed


def test_scanned_layers_read_the_values_of_the_first():
    """Also of the layers after the second."""
    model = build(num_hidden_layers=4)(key=jax.random.key(0))
    tokens = jnp.arange(6).reshape(1, 6)
    run = eqx.filter_jit(lambda model: model(tokens))
    value = lambda model: model.stack.segments[0].blocks[0].mixer.value.weight
    out = lambda model: model.stack.segments[0].blocks[0].mixer.out.weight
    residual = lambda model: model.stack.segments[1].blocks[0].mixer.value_residual.up.bias
    silent = eqx.tree_at(out, model, replace_fn=jnp.zeros_like)  # the first layer acts by its values alone
    one_layer = eqx.tree_at(residual, silent, replace_fn=lambda x: x.at[jnp.array([0, 1])].set(-1e9))
    for changed in (silent, one_layer):
        other = eqx.tree_at(value, changed, replace_fn=jnp.negative)
        for loop in ("plain", "scan"):
            logits = [run(zoo.configure(x, loop=loop)) for x in (changed, other)]
            assert np.abs(logits[0] - logits[1]).max() > 1e-3


def test_a_layer_by_itself_names_what_it_lacks():
    _, later, _ = build()(key=jax.random.key(0)).stack.iter_blocks()
    x = jnp.zeros((1, 2, 16))
    with pytest.raises(ValueError, match="no layer before it has handed them on"):
        later(Hidden(x), TokenInfo())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads = 3 heads of head_dim = 8 are not 16 wide"),
        ({"value_dim": [32] * 3}, "values are hidden_size = 16 wide"),
        ({"attn": {"layers": [1]}}, "attn = .* would change the result"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' would change the result"),
    ],
)
def test_configs_that_cannot_be_read_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)(key=jax.random.key(0))


def test_models_from_scratch_are_saved_or_refused(tmp_path):
    model = build(norm_first=False, norm_bias=False, tie_word_embeddings=True)(key=jax.random.key(0))
    zoo.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "rwkv7"
    for ours, wanted in zip(jax.tree.leaves(zoo.load(tmp_path)), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    sizes = {"vocab": 11, "embed": 16, "layers": 2, "mlp": 12, "heads": 2}
    with pytest.raises(zoo.CheckpointError, match="rwkv7: its ffn is GatedMLP, not RWKVChannelMixing"):
        zoo.save(zoo.models.RWKV7(**sizes, key=jax.random.key(0)), tmp_path)
