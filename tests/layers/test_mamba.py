"""Mamba, Mamba-2 and RWKV-4 as layers: they are their formulas, a mesh is one device, and what a group's norm divides
by is all of the group. What they share with all recurrent mixers is in test_recurrent.py."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import RWKV4, GatedGroupNorm, Mamba, Mamba2, RMSNorm, RWKV4ChannelMixing, TokenInfo
from zoo.parallel import gather

KEY = jax.random.key(0)
EMBED, SEQ = 16, 7
LAYERS = {
    "mamba": partial(Mamba, state_dim=3, bias=True),
    "normed mamba": partial(Mamba, inner=24, state_dim=3, rank=2, norm=partial(RMSNorm, scaled=False)),
    "mamba2": partial(Mamba2, head_dim=8, groups=2, state_dim=3, bias=True),
    "bounded mamba2": partial(
        Mamba2, head_dim=4, state_dim=5, conv_width=2, dt_limit=(0.05, 0.5), norm_before_gate=True
    ),
    "rwkv4": partial(RWKV4, inner=24),
    "rwkv4 channels": partial(RWKV4ChannelMixing, mlp=24),
}
EACH = pytest.mark.parametrize("name", LAYERS)


def made(name, seed=0, **options):
    """With numpy's numbers, for which nothing is compiled: biases and scales of norms, too, are not those of birth."""
    shapes = eqx.filter_eval_shape(partial(LAYERS[name], EMBED, **options), key=KEY)
    draw = np.random.default_rng(seed)
    number = lambda x: jnp.asarray(draw.normal(size=x.shape) * x.shape[-1] ** -0.25, x.dtype)
    return jax.tree.map(lambda x: number(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


def activations(seed=1, rows=2, seq=SEQ):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, seq, EMBED)), jnp.float32)


@eqx.filter_jit
def whole(layer, x, info=None):
    return layer(x, info or TokenInfo())[0]


@eqx.filter_jit
def follow(layer, state, x, positions):
    return layer(x, TokenInfo(positions), state)


def far(a, b):
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())


def by_hand_mamba(layer, x):
    """The formulas of the docstring, one token after another."""
    silu, softplus = jax.nn.silu, jax.nn.softplus
    u = conv(layer.convolution, layer.x(x))
    normed = lambda y, norm: y if norm is None else y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    dt = softplus(layer.dt_up(normed(layer.dt_down(u), layer.dt_norm)) + layer.dt_bias)
    B, C = normed(layer.B(u), layer.B_norm), normed(layer.C(u), layer.C_norm)
    A, h, out = -jnp.exp(layer.A_log), jnp.zeros((len(x), *layer.A_log.shape)), []
    for t in range(x.shape[1]):
        h = jnp.exp(dt[:, t, :, None] * A) * h + (dt * u)[:, t, :, None] * B[:, t, None]
        out.append((h * C[:, t, None]).sum(-1) + layer.D * u[:, t])
    return layer.out(jnp.stack(out, 1) * silu(layer.gate(x)))


def by_hand_mamba2(layer, x):
    heads = lambda y, size: y.reshape(*y.shape[:2], -1, size)
    u = heads(conv(layer.x_convolution, layer.x(x)), layer.head_dim)
    groups = layer.B.out_size // layer.state_dim
    B, C = (
        jnp.repeat(heads(conv(convolution, linear(x)), layer.state_dim), u.shape[2] // groups, axis=2)
        for convolution, linear in ((layer.B_convolution, layer.B), (layer.C_convolution, layer.C))
    )
    dt = jnp.clip(jax.nn.softplus(layer.dt(x) + layer.dt_bias), *layer.dt_limit)
    A, h, out = -jnp.exp(layer.A_log), jnp.zeros((len(x), *u.shape[2:], layer.state_dim)), []
    for t in range(x.shape[1]):
        h = jnp.exp(dt[:, t] * A)[..., None, None] * h
        h = h + dt[:, t, :, None, None] * u[:, t, :, :, None] * B[:, t, :, None]
        out.append((h * C[:, t, :, None]).sum(-1) + layer.D[:, None] * u[:, t])
    y, gate = jnp.stack(out, 1).reshape(*x.shape[:2], -1), jax.nn.silu(layer.gate(x))
    before = layer.norm.norm_before_gate
    y = heads(y if before else y * gate, y.shape[-1] // groups)
    y = (y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)).reshape(gate.shape) * layer.norm.weight
    return layer.out(y * gate if before else y)


def conv(convolution, x):
    width = convolution.weight.shape[1]
    padded = jnp.pad(x, [(0, 0), (width - 1, 0), (0, 0)])
    return jax.nn.silu(
        sum(convolution.weight[:, k] * padded[:, k : k + x.shape[1]] for k in range(width)) + convolution.bias
    )


def by_hand_rwkv4(layer, x):
    previous = jnp.pad(x, [(0, 0), (1, 0), (0, 0)])[:, :-1]
    mixed = lambda mix: mix * x + (1 - mix) * previous
    k, v = jnp.exp(layer.key(mixed(layer.key_mix))), layer.value(mixed(layer.value_mix))
    n, d, out = jnp.zeros_like(k[:, 0]), jnp.zeros_like(k[:, 0]), []
    for t in range(x.shape[1]):
        now = jnp.exp(layer.bonus) * k[:, t]
        out.append((n + now * v[:, t]) / (d + now))
        kept = jnp.exp(-jnp.exp(layer.decay))
        n, d = kept * n + k[:, t] * v[:, t], kept * d + k[:, t]
    return layer.out(jax.nn.sigmoid(layer.receptance(mixed(layer.receptance_mix))) * jnp.stack(out, 1))


def by_hand_channels(layer, x):
    previous = jnp.pad(x, [(0, 0), (1, 0), (0, 0)])[:, :-1]
    mixed = lambda mix: mix * x + (1 - mix) * previous
    value = layer.value(jax.nn.relu(layer.key(mixed(layer.key_mix))) ** 2)
    return jax.nn.sigmoid(layer.receptance(mixed(layer.receptance_mix))) * value


BY_HAND = {
    Mamba: by_hand_mamba,
    Mamba2: by_hand_mamba2,
    RWKV4: by_hand_rwkv4,
    RWKV4ChannelMixing: by_hand_channels,
}


@EACH
def test_it_is_its_formula_in_both_forms(name):
    layer, x = made(name), activations()
    expected = eqx.filter_jit(BY_HAND[type(layer)])(layer, x)
    assert far(whole(layer, x), expected) < 1e-5
    if hasattr(layer, "mode"):
        assert far(whole(made(name, mode="recurrent"), x), expected) < 1e-5


@pytest.mark.parametrize("name", ["rwkv4 channels"])
def test_a_state_gives_what_the_whole_pass_does(name):
    """Token by token, and in unequal pieces; one row is padded on the left, at first, and again later on."""
    layer, x = made(name), activations()
    rows = x.at[1, :2].set(7.0).at[1, 4].set(-5.0)  # padding, at which anything may stand
    real = np.ones((2, SEQ), bool)
    real[1, [0, 1, 4]] = False
    expected = np.zeros((2, SEQ, EMBED), np.float32)
    for row in range(2):
        expected[row, real[row]] = whole(layer, rows[row : row + 1, real[row]])[0]
    positions = jnp.asarray(np.where(real, real.cumsum(1) - 1, -1))
    for pieces in ([1] * SEQ, [4, 3]):
        state, start = layer.init_state(2, SEQ), 0
        kinds = [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
        for size in pieces:
            now = slice(start, start + size)
            y, state = follow(layer, state, rows[:, now], positions[:, now])
            assert np.abs(np.asarray(y) - expected[:, now])[real[:, now]].max() < 1e-5 * np.abs(expected).max()
            assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == kinds
            start += size


@pytest.mark.parametrize("name", ["rwkv4 channels"])
def test_packed_documents_are_those_of_rows_of_their_own(name):
    layer, x = made(name), activations()
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2]] * 2)
    packed = whole(layer, x, TokenInfo(zoo.models.pack_positions(segments), segments))
    for now in (slice(0, 4), slice(4, 7)):
        assert far(packed[:, now], whole(layer, x[:, now])) < 1e-5


@pytest.mark.parametrize("name", ["rwkv4 channels"])
def test_nothing_flows_from_later_tokens(name):
    layer, x = made(name), activations(rows=1)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x, TokenInfo())[0][0].sum(-1)))(x)[:, 0]
    felt = jnp.abs(jacobian).max(-1) > 0
    reach = 2 if isinstance(layer, RWKV4ChannelMixing) else SEQ
    seen = jnp.tril(jnp.ones((SEQ, SEQ), bool)) & ~jnp.tril(jnp.ones((SEQ, SEQ), bool), -reach)
    assert (felt == seen).all()


def total(layer, batch):
    return (gather(layer)(batch["x"], TokenInfo())[0] * batch["weights"]).sum(), jnp.float32(batch["x"].size)


def decoded(layer, x):
    """A prompt, then two tokens one after another."""
    layer = gather(layer)
    state, outputs = layer.init_state(x.shape[0], SEQ), []
    for start, stop in ((0, SEQ - 2), (SEQ - 2, SEQ - 1), (SEQ - 1, SEQ)):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (x.shape[0], stop - start))
        y, state = layer(x[:, start:stop], TokenInfo(positions), state)
        outputs.append(y)
    return jnp.concatenate(outputs, 1)


@pytest.mark.parametrize(
    ("name", "tensor"), [("normed mamba", 2), ("mamba2", 2), ("mamba2", 4), ("bounded mamba2", 4), ("rwkv4", 2)]
)
def test_a_mesh_gives_what_one_device_does(name, tensor):
    """Groups as many as devices along `tensor`, and fewer, one and two of them."""
    mesh = zoo.make_mesh(data=4 // tensor, fsdp=2, tensor=tensor)
    layer, x = made(name), activations(rows=4)
    batch = {"x": x, "weights": activations(2, rows=4)}
    placed = zoo.place(layer, mesh)
    loss, grads = zoo.value_and_grad(total, mesh)(placed, batch)
    alone, expected = eqx.filter_jit(eqx.filter_value_and_grad(lambda layer: total(layer, batch)[0] / x.size))(layer)
    terms = jnp.abs(whole(layer, x) * batch["weights"])  # of both signs: their sum is small beside its rounding
    assert abs(loss - alone) < 2e-7 * terms.mean()
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 3e-5 * max(np.abs(b).max(), 1e-3)
    on_mesh = zoo.spmd(decoded, mesh, out="batch seq embed")(placed, x)
    assert far(on_mesh, whole(layer, x)) < 1e-5


def test_activations_in_half_precision_keep_their_dtype_and_the_state_its_own():
    for name in ("mamba", "mamba2", "rwkv4"):
        layer = zoo.cast(made(name), jnp.bfloat16)
        x = activations().astype(jnp.bfloat16)
        y, state = follow(layer, layer.init_state(2, SEQ, jnp.bfloat16), x, jnp.arange(SEQ)[None].repeat(2, 0))
        assert y.dtype == jnp.bfloat16 and far(y.astype(jnp.float32), whole(made(name), activations())) < 0.1
        assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "bfloat16"}
        kept = layer.decay if name == "rwkv4" else layer.A_log
        assert kept.dtype == jnp.float32


def test_new_layers_start_as_their_papers_have_them():
    mamba, mamba2 = Mamba(EMBED, inner=512, key=KEY), Mamba2(256, key=KEY)
    for layer in (mamba, mamba2):
        steps = jax.nn.softplus(layer.dt_bias)
        assert 0.00099 < steps.min() < 0.01 < steps.max() < 0.101
        assert (layer.D == 1).all()
    assert jnp.allclose(jnp.exp(mamba.A_log), jnp.arange(1.0, 17.0))
    assert ((jnp.exp(mamba2.A_log) >= 1) & (jnp.exp(mamba2.A_log) <= 16)).all()
    assert (mamba2.dt.out_size, mamba2.out.out_size, mamba.dt_down.out_size) == (8, 256, 1)


def test_what_cannot_be_is_told():
    for make, told in (
        (partial(Mamba, state_dim=0), "state is 0, and a size is at least 1"),
        (partial(Mamba2, head_dim=7), "expand \\* embed = 32 does not share out over heads 7 wide"),
        (partial(Mamba2, heads=4, groups=3), "4 heads do not share out over 3 groups"),
        (partial(Mamba2, head_dim=8, state_dim=0), "state is 0, and a size is at least 1"),
        (partial(Mamba2, head_dim=8, dt_limit=(0.1, 0.1)), "the second limit is the larger"),
        (partial(RWKV4, inner=0), "inner is 0, and a size is at least 1"),
    ):
        with pytest.raises(ValueError, match=told):
            make(EMBED, key=KEY)
    with pytest.raises(ValueError, match="4 heads do not share out over 3 groups"):
        GatedGroupNorm(4, 2, 3)
