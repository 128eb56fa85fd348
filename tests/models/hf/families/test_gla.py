"""Files of flash-linear-attention without a delta rule: models from scratch that have a file, and refusals by name."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.hf.configs import small
from zoo.layers import GatedLinearAttention
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES

SIZES = {"vocab": 11, "embed": 16, "layers": 2, "mlp": 12, "heads": 2, "key": jax.random.key(0)}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(zoo.models.GLA, kv_heads=1, conv_width=3, min_log_decay=-2.0), "gla"),
        (partial(zoo.models.RetNet, feature_map=jax.nn.relu, gate=False), "retnet"),
    ],
)
def test_models_from_scratch_have_a_file(make, name, tmp_path):
    model = make(**SIZES)
    zoo.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name
    for ours, wanted in zip(jax.tree.leaves(zoo.load(tmp_path)), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(zoo.models.GLA, temperature=8), "gla: .*temperature"),
        (partial(zoo.models.GLA, feature_map=jnp.tanh), "gla: its mixer has no word in configs"),
        (partial(zoo.models.RetNet, rotary=zoo.ops.rotary.Rotary(8, 500.0)), "retnet: .*rotary"),
        (zoo.models.HGRN2, "hgrn2: its norm of all heads is HeadNorm, not RMSNorm"),
        (zoo.models.LinearTransformer, "linear_attn: its mixer has no norm of each head's output"),
        (zoo.models.RWKV6, "rwkv6: its ffn is GatedMLP, not RWKVChannelMixing"),
        (partial(zoo.models.Mamba3, head_dim=8), "mamba3: its block is Block, not MixerBlock"),
    ],
    ids=["temperature", "feature_map", "rotary", "hgrn2", "linear_attn", "rwkv6", "mamba3"],
)
def test_models_without_a_file_are_refused_by_name(make, message, tmp_path):
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.save(make(**SIZES), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gla", {"num_kv_heads": 3}, "do not divide evenly over num_kv_heads = 3"),
        ("gla", {"expand_k": 0.6}, "expand_k = 0.6: times 32 it should be a whole number"),
        ("gla", {"expand_v": 0.8125}, "expand_v makes 26 features, which do not divide"),
        ("gla", {"feature_map": "t2r"}, "feature_map = 't2r' should be one of null, swish"),
        ("gla", {"attnres_block_size": 2}, "attnres_block_size = 2 would change the result"),
        ("gsa", {"expand_v": 2.0}, "exapnd_v = 2.0: the norm is over hidden_size features"),
        ("gsa", {"feature_map": "t2r"}, "feature_map = 't2r' should be one of swish, relu"),
        ("linear_attn", {"feature_map": "hedgehog"}, "feature_map = 'hedgehog' should be one of"),
        ("linear_attn", {"tie_feature_map_qk": True}, "tie_feature_map_qk = True would change the result"),
        ("hgrn2", {"expand_ratio": 12}, "expand_ratio = 12, num_heads = 4: they should divide hidden_size = 32"),
        ("rwkv6", {"expand_v": 0.8}, "expand_v makes 25 features, not a whole number"),
        ("mamba3", {"is_mimo": True}, "is_mimo = True would change the result"),
        ("mamba2", {"norm_eps": 1e-5, "layer_norm_epsilon": 1e-5}, "layer_norm_epsilon = .* is not a key of mamba2"),
    ],
)
def test_configs_that_cannot_be_read_raise(name, changes, message):
    given = {**small(FAMILIES[name]), **changes}
    family = FAMILIES[name].choose(given, ())
    with pytest.raises(ValueError, match=message):
        family.build(read_config(family, given), key=jax.random.key(0))


def test_mixers_refuse_kv_heads_that_divide_no_heads():
    with pytest.raises(ValueError, match="4 heads do not divide evenly over 3 KV heads"):
        GatedLinearAttention(16, 4, kv_heads=3, key=jax.random.key(0))
