"""Models of recurrent mixers: the same on a mesh as on one device, and generation from a recurrent state."""

import math
from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import (
    HGRN2,
    MLSTM,
    RGLRU,
    RWKV4,
    RWKV6,
    RWKV7,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    Lightning,
    LinearAttention,
    Mamba,
    Mamba2,
    Mamba3,
    Retention,
)
from zoo.layers.token_info import pack_positions
from zoo.models.presets import recurrent

KEY = jax.random.key(0)
ROWS, SEQ, VOCAB = 8, 12, 32


def without_heads(mixer, **options):
    """Return a factory that ignores `heads`, for a mixer without heads."""
    return lambda embed, *, heads, **more: mixer(embed, **options, **more)


PATTERNS = {
    "additive": (GatedLinearAttention, MLSTM),
    "delta rule": (GatedDeltaNet, partial(RWKV7, rank=4)),
    "token shift": (partial(RWKV6, rank=4, decay_rank=4), RGLRU),
    "additive, the others": (LinearAttention, Retention, Lightning, HGRN2),
    "delta rule, the others": (DeltaNet, KimiDeltaAttention, GatedDeltaProduct),
    "elementwise, the others": (without_heads(Mamba, state_dim=4), without_heads(RWKV4)),
    "state space, the others": (
        partial(Mamba2, head_dim=8, state_dim=4),
        partial(Mamba3, head_dim=8, state_dim=4, rank=2),
    ),
}
SLOW = [pytest.param(name, marks=() if name == "delta rule" else pytest.mark.slow) for name in PATTERNS]
"""One or two mixers per kind, since a kind has its code in common; the others by `pytest -m slow tests/models`."""
CONTEXT_MESHES = {
    "alone": {"data": 1, "context": 4},
    "x fsdp": {"data": 1, "fsdp": 2, "context": 4},
    "x data x tensor": {"data": 2, "context": 2, "tensor": 2},
}
FAST = {("delta rule", "x fsdp")}
SHARDED = [
    pytest.param(name, axes, marks=() if (name, axes) in FAST else pytest.mark.slow)
    for name in PATTERNS
    for axes in CONTEXT_MESHES
]


def make(name, key):
    pattern = [partial(mixer, heads=2) for mixer in PATTERNS[name]]
    return zoo.models.Hybrid(vocab=VOCAB, embed=16, layers=len(pattern), pattern=pattern, key=key)


def make_batch():
    """Two documents of different lengths per row, and padding."""
    draw = np.random.default_rng(0)
    text = jnp.asarray(draw.integers(0, VOCAB, (ROWS, SEQ + 1)))
    lengths = jnp.asarray(draw.integers(3, SEQ + 1, (ROWS, 1)))
    index = jnp.arange(SEQ)
    segment_ids = jnp.where(index < lengths // 2, 1, 2) * (index < lengths)
    return {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "weights": (index < lengths).astype(jnp.float32),
        "segment_ids": segment_ids,
        "positions": pack_positions(segment_ids),
    }


def loss_fn(model, batch, key=None):
    return zoo.cross_entropy(model, batch)


def serial(model):
    total, count = loss_fn(model, make_batch())
    return total / count


def perturb_last_place(model, seed):
    """Change every parameter by about one unit in the last place."""
    leaves, treedef = jax.tree.flatten(model)
    draw = np.random.default_rng(seed)
    moved = [x * (1 + 1.2e-7 * draw.choice([-1, 1], x.shape)) if eqx.is_inexact_array(x) else x for x in leaves]
    return jax.tree.unflatten(treedef, [jnp.asarray(x, old.dtype) for x, old in zip(moved, leaves, strict=True)])


@cache
def compute_on_one_device(name):
    """Return a model, its loss and gradients, and the gradients of perturbed models."""
    model = eqx.filter_jit(make)(name, KEY)
    on_one_device = eqx.filter_jit(eqx.filter_value_and_grad(serial))
    perturbed = [jax.tree.leaves(on_one_device(perturb_last_place(model, seed))[1]) for seed in range(3)]
    return model, *on_one_device(model), perturbed


def check_mesh(name, mesh):
    """Compare within rounding, which norms of heads with small outputs magnify: the bound is the change of the
    gradients on one device when parameters change by their last place."""
    model, expected, expected_gradients, perturbed = compute_on_one_device(name)
    loss, gradients = zoo.value_and_grad(loss_fn, mesh)(zoo.place(model, mesh), make_batch(), key=KEY)
    assert abs(loss - expected) < 1e-5 * abs(expected)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected_gradients))
    gradient_leaves = zip(
        jax.tree.leaves(jax.device_get(gradients)), jax.tree.leaves(expected_gradients), *perturbed, strict=True
    )
    for leaf, (a, b, *others) in zip(zoo.parallel.leaves(expected_gradients), gradient_leaves, strict=True):
        assert np.isfinite(a).all()
        rounding = max(float(jnp.abs(x - b).max()) for x in others)
        allowed = 2e-5 * max(float(jnp.abs(b).max()), 1e-3 * largest)
        assert np.abs(a - b).max() <= max(allowed, rounding), leaf.name


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_recurrent_models_are_the_same_on_a_mesh(name):
    check_mesh(name, zoo.make_mesh(data=2, fsdp=2, tensor=2))


@pytest.mark.slow  # test_mixers.py has mixers on a mesh, docs/ideas.md one with context
@pytest.mark.parametrize(("name", "axes"), SHARDED)
def test_recurrent_models_are_the_same_with_context(name, axes):
    """Documents of ragged lengths, and padding, begin and end on any device."""
    sizes = CONTEXT_MESHES[axes]
    check_mesh(name, zoo.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())]))


@pytest.mark.slow
def test_recurrent_generation_on_a_mesh_and_with_padding():
    """Rows of different lengths in one batch give the same tokens as row by row."""
    model = eqx.filter_jit(make)("token shift", KEY)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 9)))
    mask = jnp.arange(9) >= jnp.array([[0], [4]])
    text = zoo.generate(model, tokens, mask=mask, max_new_tokens=6)
    rows = [zoo.generate(model, tokens[:1], max_new_tokens=6), zoo.generate(model, tokens[1:, 4:], max_new_tokens=6)]
    assert text.tolist() == jnp.concatenate(rows).tolist()
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    assert zoo.generate(zoo.place(model, mesh), tokens, mask=mask, max_new_tokens=6).tolist() == text.tolist()


@pytest.mark.slow
def test_recurrent_presets_build_and_run():
    sizes = {"vocab": VOCAB, "embed": 16, "layers": 4, "heads": 2, "mlp": 24}
    names = {name for name in zoo.models.__all__ if getattr(zoo.models, name).__module__ == recurrent.__name__}
    assert len(names) == 14
    for name in names:
        model_of = getattr(zoo.models, name)
        model = eqx.filter_eval_shape(partial(model_of, **sizes), key=KEY)
        logits = eqx.filter_eval_shape(model, jnp.zeros((2, 5), int))
        assert logits.shape == (2, 5, VOCAB), name
        assert model_of.__doc__
    with pytest.raises(TypeError, match="nonsense"):
        zoo.models.RetNet(**sizes, nonsense=1, key=KEY)
