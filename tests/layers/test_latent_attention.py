"""Latent attention: its two forms agree, with a cache, packed, on a mesh; and what it remembers is small."""

import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from zoo.layers import Attention, LatentAttention, Linear, TokenInfo
from zoo.ops.attention import AttentionMask, reference_attention
from zoo.ops.rotary import DynamicScaling, LongRopeScaling, Rotary, YarnScaling
from zoo.parallel import Dim, Layout, gather, num_shards, reduce, shard_offset

KEY = jax.random.key(0)
EMBED, SEQ = 24, 7
SIZES = {
    "small": {"heads": 4, "latent": 16, "head_dim": 12, "value_dim": 10, "rotary": Rotary(8)},
    "one head, wide values": {"heads": 1, "latent": 6, "head_dim": 4, "value_dim": 9, "rotary": Rotary(2)},
    "compressed": {"heads": 2, "latent": 5, "head_dim": 8, "rotary": Rotary(6, interleaved=True), "query_latent": 9},
    "biased": {"heads": 4, "latent": 8, "head_dim": 4, "rotary": Rotary(4), "query_latent": 6, "bias": True},
}
EACH = pytest.mark.parametrize("name", SIZES)


def made(name, seed=0, **options):
    """With numpy's numbers, for which nothing is compiled: biases and scales of norms, too, are not those of birth."""
    shapes = eqx.filter_eval_shape(partial(LatentAttention, EMBED, **SIZES[name] | options), key=KEY)
    draw = np.random.default_rng(seed)
    number = lambda x: jnp.asarray(draw.normal(size=x.shape) * x.shape[-1] ** -0.5, x.dtype)
    return jax.tree.map(lambda x: number(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


def activations(seed=1, rows=2, seq=SEQ):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, seq, EMBED)), jnp.float32)


@eqx.filter_jit
def whole(layer, x, info=None):
    return layer(x, info or TokenInfo())[0]


def far(a, b):
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())


@eqx.filter_jit
def by_hand(layer, x):
    """The formulas of the docstring, one head after another."""
    cos, sin = layer.rotary(jnp.arange(x.shape[1]))
    turned = lambda b: layer.rotate(b[:, :, None], (cos, sin))[:, :, 0]
    c, r = layer.latent_norm(layer.latent(x)), turned(layer.rotary_key(x))
    read = x if layer.query is not None else layer.query_norm(layer.query_down(x))
    rows = (layer.query or layer.query_up).weight.reshape(-1, layer.head_dim + layer.rotary.dim, read.shape[-1])
    of_keys, of_values = (up.weight.reshape(len(rows), -1, c.shape[-1]) for up in (layer.key_up, layer.value_up))
    mixed = []
    for of_query, of_key, of_value in zip(rows, of_keys, of_values, strict=True):
        a, b = jnp.split(read @ of_query.T, [layer.head_dim], axis=-1)
        query = jnp.concatenate([a, turned(b)], -1)
        key, value = jnp.concatenate([c @ of_key.T, r], -1), c @ of_value.T
        scores = query @ key.swapaxes(1, 2) * (layer.head_dim + layer.rotary.dim) ** -0.5
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        mixed.append(jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ value)
    return layer.out(jnp.concatenate(mixed, -1))


@EACH
def test_it_is_its_formula(name):
    layer, x = made(name), activations()
    assert far(whole(layer, x), by_hand(layer, x)) < 1e-5
    if name == "small":
        assert far(whole(made(name, implementation=reference_attention), x), by_hand(layer, x)) < 1e-5


@eqx.filter_jit
def both_forms(layer, x, cotangent, segments):
    angles, sight = layer.rotary(jnp.arange(SEQ)), AttentionMask(True, None, segments, segments)

    def run(form, inputs):
        layer, x = inputs
        return getattr(layer, form)(layer.project_queries(x, angles), layer.project_features(x, angles), sight)

    def values_and_gradients(form):
        out, back = eqx.filter_vjp(partial(run, form), (layer, x))
        return out, back(cotangent)

    return values_and_gradients("attend_expanded"), values_and_gradients("attend_absorbed")


@given(name=st.sampled_from(sorted(SIZES)), seed=st.integers(0, 2**20), segmented=st.booleans())
def test_the_absorbed_form_is_the_expanded_one_in_values_and_gradients(name, seed, segmented):
    layer, x = made(name, seed), activations(seed + 1)
    heads, width = SIZES[name]["heads"], SIZES[name].get("value_dim", SIZES[name]["head_dim"])
    cotangent = np.random.default_rng(seed + 2).normal(size=(2, SEQ, heads, width)).astype(np.float32)
    segments = np.arange(SEQ)[None].repeat(2, 0) // (4 if segmented else SEQ)
    (values, gradients), (other, others) = both_forms(layer, x, cotangent, segments)
    assert far(other, values) < 1e-5
    for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(gradients), strict=True):
        assert float(jnp.abs(a - b).max()) <= 2e-5 * max(float(jnp.abs(b).max()), 0.1)


@eqx.filter_jit
def follow(layer, state, x, positions):
    return layer(x, TokenInfo(positions), state)


@EACH
def test_a_cache_gives_what_the_whole_pass_does(name):
    """Token by token, and in unequal pieces; one row is padded on the left."""
    layer, x = made(name), activations()
    expected = np.array(whole(layer, x))
    expected[1, 2:] = whole(layer, x[1:, 2:])[0]
    positions = jnp.stack([jnp.arange(SEQ), jnp.arange(SEQ) - 2])
    for pieces in ([1] * SEQ, [3, 1, 1, 2]):
        state, start = layer.init_state(2, 9), 0
        for size in pieces:
            now = slice(start, start + size)
            y, state = follow(layer, state, x[:, now], jnp.maximum(positions[:, now], -1))
            real = np.asarray(positions[:, now]) >= 0
            assert np.abs(np.asarray(y) - expected[:, now])[real].max() < 1e-5 * np.abs(expected).max()
            start += size
        assert state.positions[1].tolist() == [-1, -1, *range(SEQ - 2), -1, -1]


def test_packed_documents_are_those_of_rows_of_their_own():
    layer, x = made("compressed"), activations(seq=8)
    segments = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2]] * 2)
    packed = whole(layer, x, TokenInfo(zoo.models.pack_positions(segments), segments))
    for now in (slice(0, 5), slice(5, 8)):
        assert far(packed[:, now], whole(layer, x[:, now])) < 1e-5


def test_nothing_flows_from_later_tokens():
    layer, x = made("compressed"), activations(rows=1)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x, TokenInfo())[0][0].sum(-1)))(x)[:, 0]
    felt = jnp.abs(jacobian).max(-1) > 0
    assert (felt == jnp.tril(jnp.ones((SEQ, SEQ), bool))).all()


def total(layer, batch):
    return (gather(layer)(batch["x"], TokenInfo())[0] * batch["weights"]).sum(), jnp.float32(batch["x"].size)


def decoded(layer, x):
    """Three tokens as a prompt, then one after another."""
    layer = gather(layer)
    state, outputs = layer.init_state(x.shape[0], SEQ), []
    for start, stop in ((0, 3), *((i, i + 1) for i in range(3, SEQ))):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (x.shape[0], stop - start))
        y, state = layer(x[:, start:stop], TokenInfo(positions), state)
        outputs.append(y)
    return jnp.concatenate(outputs, 1)


@pytest.mark.parametrize(("name", "at_rest"), [("small", ["embed"]), ("biased", ["embed", "latent"])])
def test_a_mesh_gives_what_one_device_does(name, at_rest):
    layout = Layout(parameters=dict.fromkeys(at_rest, ("fsdp",)))
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2, layout=layout)
    layer, x = made(name), activations(rows=8)
    batch = {"x": x, "weights": activations(2, rows=8)}
    placed = zoo.place(layer, mesh)
    rows, columns = placed.key_up.weight.addressable_shards[0].data.shape
    assert (2 * rows, columns * len(at_rest)) == layer.key_up.weight.shape
    loss, grads = zoo.value_and_grad(total, mesh)(placed, batch)
    alone, expected = eqx.filter_jit(eqx.filter_value_and_grad(lambda layer: total(layer, batch)[0] / x.size))(layer)
    assert abs(loss - alone) < 1e-5 * abs(alone)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()
    on_mesh = zoo.spmd(decoded, mesh, out="batch seq embed")(placed, x)
    assert far(on_mesh, whole(layer, x)) < 1e-5


def head_by_head(linear, x, transposed):
    """The definition: each head's rows of W by themselves."""
    unit, parts = linear.out.unit, []
    for h in range(x.shape[-2]):
        rows = linear.weight[h * unit : (h + 1) * unit]
        bias = 0 if linear.bias is None else linear.bias[h * unit : (h + 1) * unit]
        parts.append(x[..., h, :] @ (rows if transposed else rows.T) + (0 if transposed else bias))
    return jnp.stack(parts, -2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_multiplies_head_by_head(transposed, bias):
    """Whole, and with heads that are split: in values and gradients."""
    linear = Linear(5, 4 * 3, in_=Dim("latent"), out=Dim("heads", 3), bias=bias, key=KEY)
    linear = eqx.tree_at(lambda x: x.bias, linear, jnp.arange(12.0)) if bias else linear
    x = jax.random.normal(KEY, (8, 2, 4, 3 if transposed else 5))
    weights = jax.random.normal(jax.random.key(1), (8, 2, 4, 5 if transposed else 3))

    def loss(linear, batch):
        heads = 4 // num_shards(linear.weight, "heads")
        start = shard_offset(linear.weight, "heads", heads)
        here = lambda values: jax.lax.dynamic_slice_in_dim(values, start, heads, axis=-2)
        multiply = linear.per_head_transposed if transposed else linear.per_head
        product = (multiply(here(batch["x"])) * here(batch["weights"])).sum()
        return reduce(product, over="heads"), jnp.float32(1)

    def expected(linear):
        return (head_by_head(linear, x, transposed) * weights).sum()

    alone, gradient = eqx.filter_value_and_grad(expected)(linear)
    batch = {"x": x, "weights": weights}
    for mesh in (zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(data=2, fsdp=2, tensor=2)):
        value, found = zoo.value_and_grad(loss, mesh)(zoo.place(linear, mesh), batch)
        count = mesh.shape["data"] * mesh.shape["fsdp"]  # each device counts one
        assert value * count == pytest.approx(float(alone), rel=1e-5)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
            assert np.abs(count * a - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3)


def test_a_matrix_of_another_kind_says_that_it_has_no_heads():
    class Diagonal(zoo.layers.AbstractLinear):
        scale: jax.Array

        def __call__(self, x):
            return self.scale * x

        def transposed(self, x):
            return self.scale * x

        @property
        def out_size(self):
            return 1

    for multiply in (Diagonal(None).per_head, Diagonal(None).per_head_transposed):
        with pytest.raises(NotImplementedError, match="a Diagonal multiplies no head by itself"):
            multiply(jnp.ones((1, 1, 1)))


@functools.cache
def step():
    return eqx.filter_jit(
        lambda fixed, state: fixed[0](fixed[1], TokenInfo(fixed[2]), state), donate="all-except-first"
    )


def test_what_is_remembered_of_a_token_is_its_latent_and_one_rotary_key():
    layer, length = made("small", heads=8), 512
    state = layer.init_state(2, length, jnp.bfloat16)
    assert state.features.nbytes == 2 * length * (16 + 8) * 2
    plain = Attention(EMBED, 8, head_dim=12, key=KEY).init_state(2, length, jnp.bfloat16)
    assert plain.key.nbytes + plain.value.nbytes == 2 * length * (2 * 8 * 12) * 2


def test_a_token_is_written_in_place_and_the_cache_is_not_copied():
    layer = made("small", heads=2)
    for rows in (1, 2):
        state = layer.init_state(rows, 4096)
        fixed = layer, activations(rows=rows, seq=1), jnp.zeros((rows, 1), int)
        memory = step().lower(fixed, state).compile().compiled.memory_analysis()
        held = sum(x.nbytes for x in jax.tree.leaves(state))
        assert memory.alias_size_in_bytes >= held
        assert memory.temp_size_in_bytes < held / 2
    _, after = step()(fixed, state)
    assert state.features.is_deleted() and after.written == 1


@pytest.mark.parametrize(
    "scaling", [DynamicScaling(2.0, 8), LongRopeScaling((1.0, 1.5), (2.0, 4.0), 8, 4.0)], ids=["dynamic", "long"]
)
def test_a_rotation_that_depends_on_the_length_is_that_of_the_cache(scaling):
    rotary = Rotary(4, scaling=scaling)
    layer = made("biased", rotary=rotary)
    assert layer.rope_stable_length == 8 and made("biased").rope_stable_length is None
    x = activations(seq=11)
    positions = jnp.broadcast_to(jnp.arange(11), (2, 11))
    expected = whole(layer, x)
    y, state = follow(layer, layer.init_state(2, 11), x[:, :10], positions[:, :10])
    assert far(y, expected[:, :10]) < 1e-5
    y, state = follow(layer, state, x[:, 10:], positions[:, 10:])
    assert far(y, expected[:, 10:]) < 1e-5


def test_yarn_stretches_the_scores_as_deepseek_does():
    layer = made("small", rotary=Rotary(8, scaling=YarnScaling(40, 4096, mscale=0.5, mscale_all_dim=0.7)))
    assert layer.scale == pytest.approx(20**-0.5 * (0.1 * 0.7 * np.log(40) + 1) ** 2)
    assert made("small", rotary=Rotary(8, scaling=YarnScaling(40, 4096))).scale == 20**-0.5
    assert made("small", scale=3).scale == 3.0


def test_what_cannot_be_is_told():
    for name in ("heads", "latent", "head_dim", "value_dim", "query_latent"):
        with pytest.raises(ValueError, match=f"{name} is 0, and a size is at least 1"):
            made("small", **{name: 0})
    layer = made("small")
    with pytest.raises(ValueError, match="give positions, -1 for padding"):
        layer(activations(), TokenInfo(), layer.init_state(2, SEQ))
