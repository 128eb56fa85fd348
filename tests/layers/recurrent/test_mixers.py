"""Every recurrent mixer: the promises of `zoo.tools.testing.check_mixer`, sizes of states and invalid sizes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.quick import mark_slow
from zoo.layers import (
    HGRN2,
    MLSTM,
    RGLRU,
    RWKV4,
    RWKV6,
    RWKV7,
    Comba,
    DeltaNet,
    DoubleGatedConvolution,
    GatedConvolution,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    GroupedGatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    LinearAttention,
    Mamba,
    Mamba2,
    Mamba3,
    MesaNet,
    Retention,
    RMSNorm,
)
from zoo.layers.recurrent.common import divide_by_sum, elu_plus_one
from zoo.models.hf.families.gsa_layers import GatedSlotAttention
from zoo.ops.rotary import DynamicScaling, Rotary
from zoo.parallel import Dim
from zoo.tools.testing import check_mixer

KEY = jax.random.key(0)
EMBED, HEADS = 12, 2
MIXERS_ON_A_MESH = {"gated_delta_net"}


def without_heads(mixer, **options):
    """Return a factory that ignores `heads`, for a mixer without heads."""
    return lambda embed, heads, **more: mixer(embed, **options, **more)


MIXERS = {
    "linear_attention": LinearAttention,
    "linear_attention, not normalized": partial(LinearAttention, normalized=False),
    "linear_attention, learned features": partial(
        LinearAttention,
        kv_heads=1,
        value_dim=4,
        feature_map=None,
        normalized=False,
        norm=partial(RMSNorm, 4, features=Dim("value_dim")),
    ),
    "linear_attention, divided features": partial(LinearAttention, normalized=False, divides=(True, True)),
    "retention": Retention,
    "retention, fewer KV heads": partial(Retention, kv_heads=1, feature_map=jax.nn.silu, gate=False),
    "lightning": partial(Lightning, depth=0.5),
    "lightning, slopes of its own": partial(Lightning, slopes=jnp.array([0.4, 0.03])),
    "gated_linear_attention": GatedLinearAttention,
    "gated_linear_attention, fewer KV heads": partial(
        GatedLinearAttention, kv_heads=1, conv_width=3, feature_map=jax.nn.relu, min_log_decay=-0.03, gate=False
    ),
    "hgrn2": partial(HGRN2, bound=0.25),
    "hgrn2, convolved": partial(HGRN2, conv_width=3, norm=partial(RMSNorm, 12, features=Dim("heads", 6))),
    "gated_slot_attention": partial(GatedSlotAttention, key_dim=3, value_dim=6, slots=4, kv_heads=1, conv_width=3),
    "mlstm": MLSTM,
    "delta_net": partial(DeltaNet, negative_eigenvalues=True),
    "delta_net, of positive keys": partial(
        DeltaNet, activation=elu_plus_one, normalize=divide_by_sum, conv_width=None, learned_beta=False, gate=True
    ),
    "gated_delta_net": partial(GatedDeltaNet, key_dim=4, value_dim=8),
    "gated_delta_net, grouped": partial(GatedDeltaNet, groups=1, conv_width=None, gate=False),
    "grouped_gated_delta_net": partial(GroupedGatedDeltaNet, key_dim=4, value_dim=8),
    "grouped_gated_delta_net, negative eigenvalues": partial(
        GroupedGatedDeltaNet, groups=2, key_dim=4, value_dim=4, negative_eigenvalues=True
    ),
    "kimi_delta_attention": KimiDeltaAttention,
    "kimi_delta_attention, full rank, bounded": partial(KimiDeltaAttention, rank="full", lower_bound=-3.0),
    "kimi_delta_attention, grouped": partial(KimiDeltaAttention, groups=1, gate_bias=True),
    "gated_delta_product": GatedDeltaProduct,
    "gated_delta_product, no decay": partial(GatedDeltaProduct, num_householder=3, decay=False, gate=False),
    "gated_delta_net_2": partial(GatedDeltaNet2, key_dim=4, value_dim=8),
    "gated_delta_net_2, full rank, negative eigenvalues": partial(
        GatedDeltaNet2, rank="full", lower_bound=-3.0, negative_eigenvalues=True
    ),
    "comba": partial(Comba, key_dim=4, value_dim=8),
    "comba, grouped, normalized last": partial(Comba, groups=1, normalize_last=True, gate=False),
    "mesa_net": partial(MesaNet, key_dim=4, value_dim=8),
    "mesa_net, gated": partial(MesaNet, gate=True),
    "rwkv6": partial(RWKV6, rank=3, decay_rank=5),
    "rwkv6, wide values": partial(RWKV6, head_dim=3, value_dim=4, rank=2, decay_rank=3),
    "rwkv7": partial(RWKV7, rank=3),
    "rg_lru": partial(RGLRU, inner=16),
    "rg_lru, biases": partial(RGLRU, bias=True, activation=jax.nn.silu),
    "mamba": without_heads(Mamba, state_dim=3, rank=2, norm=partial(RMSNorm, scaled=False), bias=True),
    "mamba2": partial(Mamba2, head_dim=8, groups=2, state_dim=3, bias=True),
    "mamba2, bounded": partial(
        Mamba2, head_dim=4, state_dim=5, conv_width=2, dt_limit=(0.05, 0.5), norm_before_gate=True
    ),
    "mamba2, a skip of each channel": partial(Mamba2, head_dim=8, state_dim=3, D_per_channel=True, norm=False),
    "mamba3": partial(Mamba3, head_dim=4, groups=2, state_dim=5),
    "mamba3, rank 2": partial(Mamba3, head_dim=4, state_dim=4, angles=2, rank=2, norm=True),
    "mamba3, softplus": partial(Mamba3, head_dim=4, state_dim=4, decay_rate=jax.nn.softplus, min_decay_rate=0.01),
    "rwkv4": without_heads(RWKV4, inner=16),
    "gated_convolution": without_heads(GatedConvolution, conv_width=4),
    "double_gated_convolution": without_heads(DoubleGatedConvolution, bias=True),
}


QUICK_MIXERS = MIXERS_ON_A_MESH | {"mamba2"}


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("name", mark_slow(MIXERS, but=QUICK_MIXERS))
def test_mixer_keeps_its_promises(name):
    """One mixer also on a mesh; presets of the others are compared on meshes by tests of models."""
    meshes = [zoo.make_mesh(data=2, fsdp=2, tensor=2)] if name in MIXERS_ON_A_MESH else ()
    report = check_mixer(partial(MIXERS[name], EMBED, HEADS), meshes=meshes)
    assert max(check.difference.error for check in report.checks if check.difference is not None) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MIXERS.keys() - MIXERS_ON_A_MESH))
def test_mixer_on_a_mesh_equals_one_device(name):
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    assert check_mixer(partial(MIXERS[name], EMBED, HEADS), meshes=[mesh]).passed


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_mixer_of_a_sharded_sequence_equals_one_device(name):
    """Documents that go on from one device to the next, and border on padding."""
    meshes = [
        zoo.make_mesh(1, context=4, devices=jax.devices()[:4]),
        zoo.make_mesh(data=2, context=2, tensor=2),
    ]
    check_mixer(partial(MIXERS[name], EMBED, HEADS), meshes=meshes)


def test_mixer_state_size_does_not_depend_on_length():
    for name in MIXERS:
        layer = eqx.filter_eval_shape(partial(MIXERS[name], EMBED, HEADS), key=KEY)
        states = [eqx.filter_eval_shape(layer.init_state, 2, length) for length in (1, 10**6)]
        assert jax.tree.leaves(states[0]) == jax.tree.leaves(states[1])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (partial(Retention, 12, 5), "embed=12 does not divide evenly over 5 heads: give key_dim"),
        (
            partial(Retention, 12, 2, rotary=Rotary(6, scaling=DynamicScaling(2.0, 8))),
            "cannot be turned again in a state",
        ),
        (partial(DeltaNet, 12, 2, key_dim=0), "key_dim is 0"),
        (partial(DeltaNet, 12, 2, conv_width=0), "a convolution is at least 1 token wide"),
        (partial(GatedDeltaProduct, 12, 2, num_householder=0), "num_householder is 0"),
        (partial(Lightning, 12, 2, depth=1.5), "a depth is 0 for the first layer"),
        (partial(Lightning, 12, 2, slopes=jnp.ones(3)), "3 slopes were given, and each of 2 heads has one"),
        (partial(HGRN2, 12, 2, bound=1.0), "at least 0 and below 1"),
        (partial(RGLRU, 12, 5), "inner=12 features do not divide evenly over 5 heads"),
    ],
)
def test_mixer_rejects_impossible_sizes(factory, message):
    with pytest.raises(ValueError, match=message):
        factory(key=KEY)
