"""Families of flash-linear-attention: models made from scratch, softmax layers by `attn`, and what is refused."""

import json
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.hf.configs import build, small
from zoo.layers import (
    Attention,
    Comba,
    DeltaNet,
    ForgettingAttention,
    GatedDeltaNet,
    GatedDeltaProduct,
    KimiDeltaAttention,
    MesaNet,
    MixtureOfBlockAttention,
    NativeSparseAttention,
    RMSNorm,
)
from zoo.layers.recurrent.common import divide_by_sum, elu_plus_one
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import FAMILIES
from zoo.models.parameter_paths import find_differences
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim
from zoo.weights.save import NoFamilyError

ROTARY = {"rotary": Rotary(8)}
LOCAL = partial(Attention, kv_heads=1, rotary=Rotary(8, base=500.0), bias=True, window=5)
BLOCKS = partial(NativeSparseAttention, block=4, top=3, window=5, average=True, keep_ends=True)
MOBA = partial(MixtureOfBlockAttention, block=4, top=2, norm=RMSNorm)
MIXERS = {
    "gated_deltanet": [GatedDeltaNet],
    "gated_deltanet, groups": [partial(GatedDeltaNet, groups=1, gate_activation=jax.nn.sigmoid)],
    "gated_deltanet, hybrid": [GatedDeltaNet, LOCAL, GatedDeltaNet, partial(Attention, **ROTARY)],
    "delta_net": [partial(DeltaNet, value_dim=3)],
    "delta_net, positive": [
        partial(DeltaNet, activation=elu_plus_one, normalize=divide_by_sum, gate=True, learned_beta=False)
    ],
    "gated_deltaproduct": [GatedDeltaProduct],
    "gated_deltaproduct, three": [partial(GatedDeltaProduct, num_householder=3, decay=False, conv_width=None)],
    "kda": [partial(KimiDeltaAttention, lower_bound=-5.0, gate_bias=True)],
    "comba": [partial(Comba, normalize_last=True)],
    "mesa_net": [partial(MesaNet, least_regularization=0.1, decode_steps=3)],
    "forgetting_transformer": [partial(ForgettingAttention, kv_heads=1, gate_per_head=True)],
    "nsa": [partial(BLOCKS, kv_heads=1, **ROTARY)],
    "moba": [partial(MOBA, qk_norm=partial(RMSNorm, 8, features=Dim("head_dim"), epsilon=1e-5), **ROTARY)],
}


def make_on_host(*pattern):
    """Make a model of numpy arrays: shapes suffice to describe it, and their slices compile nothing."""
    options = {"vocab": 11, "embed": 16, "layers": len(pattern), "mlp": 12}
    pattern = [partial(mixer, heads=2) for mixer in pattern]
    model = eqx.filter_eval_shape(lambda key: zoo.models.Hybrid(**options, pattern=pattern, key=key), jax.random.key(0))
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype) if hasattr(x, "shape") else x, model)


@pytest.mark.parametrize("name", MIXERS)
def test_models_made_from_scratch_are_written_and_read(tmp_path, name):
    model = make_on_host(*MIXERS[name])
    zoo.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name.partition(",")[0]
    card = (tmp_path / "README.md").read_text()
    assert "import fla  # registers the classes\nimport transformers\n" in card
    assert "model = transformers.AutoModelForCausalLM.from_pretrained(" in card
    loaded = zoo.load(tmp_path)
    assert not list(find_differences(loaded, model))
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(model)))


@pytest.mark.parametrize(
    ("mixers", "family", "reason"),
    [
        ([Comba], "comba", "normalize_last is False, not True"),
        ([partial(KimiDeltaAttention)], "kda", r"gate.up.bias is None"),
        ([partial(DeltaNet, activation=jnp.tanh)], "delta_net", "no config has a word for the activation"),
        ([GatedDeltaNet, Attention], "gated_deltanet", "rotary is None"),
        ([partial(ForgettingAttention, kv_heads=1)], "forgetting_transformer", "forget"),
        ([partial(MOBA, kv_heads=1, **ROTARY)], "moba", "num_kv_heads = 1"),
    ],
)
def test_what_no_file_has_is_refused_by_name(tmp_path, mixers, family, reason):
    with pytest.raises(NoFamilyError, match=reason):
        zoo.save(make_on_host(*mixers), tmp_path, family)


def build_small(family, **more):
    return build(FAMILIES[family], small(FAMILIES[family], **more))


def test_attn_names_the_softmax_layers():
    tables = [
        {"layers": [0], "num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
        {"layers": [2], "num_heads": 2, "window_size": 5, "rope_theta": 50.0, "qkv_bias": True},
    ]
    first, second, third = build_small("gated_deltanet", attn=tables).stack.iter_blocks()
    assert isinstance(second.mixer, GatedDeltaNet)
    assert (first.mixer.group, first.mixer.window, first.mixer.rotary) == (2, None, Rotary(8))
    assert first.mixer.query_norm is None, "fla keeps qk_norm in the file, and makes none"
    assert (third.mixer.group, third.mixer.window, third.mixer.rotary) == (1, 5, Rotary(16, 50.0))
    assert third.mixer.query.bias is not None and first.mixer.query.bias is None
    for layers in ([1, 1], [3]):
        with pytest.raises(ConfigError, match=f"attn lists layer {layers[-1]}"):
            build_small("gated_deltanet", attn={"layers": layers, "num_heads": 2})


def test_the_width_of_the_mlp_is_a_multiple_of_256():
    for ratio, width in ((None, 256), (30, 768)):
        model = build_small("gated_deltanet", intermediate_size=None, hidden_ratio=ratio)
        assert next(model.stack.iter_blocks()).ffn.gate.out_size == width


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("gated_deltanet", {"attnres_block_size": 2}, "attnres_block_size = 2 would change the result"),
        ("gated_deltanet", {"hidden_act": "powlu"}, "hidden_act = 'powlu' would change the result"),
        ("gated_deltanet", {"output_gate_activation": "relu"}, "output_gate_activation = 'relu'"),
        ("gated_deltanet", {"num_v_heads": 6}, "num_v_heads = 6"),
        ("gated_deltanet", {"expand_v": 0.3}, "expand_v = 0.3"),
        ("delta_net", {"qk_activation": "gelu"}, "qk_activation = 'gelu'"),
        ("delta_net", {"qk_norm": "l1"}, "qk_norm = 'l1'"),
        ("delta_net", {"expand_k": 0.125 / 2}, "expand_k"),
        ("kda", {"safe_gate": True}, "safe_gate = True needs a lower_bound"),
        ("forgetting_transformer", {"window_size": 4}, "window_size = 4 would change the result"),
        ("nsa", {"block_counts": 2}, "block_counts = 2"),
        ("moba", {"num_kv_heads": 2}, "num_kv_heads = 2"),
        ("moba", {"use_output_gate": True}, "use_output_gate = True would change the result"),
    ],
)
def test_keys_that_no_layer_has_are_refused_by_name(family, given, message):
    family = FAMILIES[family]
    with pytest.raises(ConfigError, match=message):
        build(family, {**small(family), **given})
