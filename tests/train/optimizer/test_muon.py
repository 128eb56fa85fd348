"""Muon: optax's updates, the same for stacked and for single matrices and on any mesh, its matrices and its traffic."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

import zoo
from tests.aot import compile_for, imagine
from zoo import Layout, models, train
from zoo.models import list_parameter_paths
from zoo.models.stack import swap_stack
from zoo.parallel import ZERO1, Module
from zoo.parallel.rounds import merge_rounds

MESHES = {
    "fsdp x tensor x expert": {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2},
    "data x fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp": {"data": 1, "fsdp": 8},
}
LAYOUTS = {
    "pipe x fsdp x tensor in rounds": {"pipe": 2, "fsdp": 2, "tensor": 2, "layout": Layout(rounds=2)},
    "ZERO1": {"fsdp": 4, "tensor": 2, "layout": ZERO1},
}
"""For four layers, which the stages of a pipeline have to divide."""
DION = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037))
PRESETS = {
    "Transformer": ("query key value out gate up down", "embedding"),
    "MixtureOfExperts": ("query key value out scores gate up down", "embedding"),
    "LinearTransformer": ("query key value out gate up down", "embedding"),
    "LightningTransformer": ("query key value gate out up down", "embedding"),
    "RetNet": ("query key value gate out up down", "embedding"),
    "GLA": ("query key value down up gate out", "embedding"),
    "HGRN2": ("query key value out gate up down", "embedding"),
    "XLSTM": ("query key value input_gate forget_gate gate out up down", "embedding"),
    "DeltaNet": ("query key value rate out gate up down", "embedding convolutions"),
    "GatedDeltaNet": ("query key value rate step gate out up down", "embedding convolutions"),
    "GatedDeltaProduct": ("query key value rate step gate out up down", "embedding convolutions"),
    "KimiLinear": ("query key value rate down up out gate", "embedding convolutions"),
    "Griffin": ("input gate recurrence_gate input_gate out up down query key value", "embedding convolution"),
    "Mamba": ("gate x dt_down B C dt_up out", "embedding convolution A_log"),
    "Mamba2": ("gate x B C dt out", "embedding x_convolution B_convolution C_convolution"),
    "RWKV6": ("down up query key value gate out", "embedding bonus"),
    "RWKV7": ("query key value down up out gate", "embedding removal replacement bonus"),
    "ModernBERT": ("query key value out gate up down linear", "embedding"),
}
"""Modules with the matrices that Muon takes, and modules or fields of other parameters with more than one dim."""


def make(key, layers=3):
    """Three layers, which two devices do not divide, and four experts, a shared one and a head."""
    sizes = {"vocab": 32, "embed": 16, "layers": layers, "heads": 4, "mlp": 32, "experts": 4, "shared": 16}
    return models.MixtureOfExperts(**sizes, top=2, tied=False, key=key)


def make_mesh(name):
    if name == "one device":
        return zoo.make_mesh(devices=jax.devices()[:1])
    return zoo.make_mesh(**(MESHES | LAYOUTS)[name])


@functools.cache
def run(name, *, layers=3, is_stacked=True, **options):
    """Return the model after three steps of a regression on a fixed target."""
    mesh = make_mesh(name)
    model, target = (zoo.init(functools.partial(make, layers=layers), jax.random.key(seed), mesh) for seed in (0, 1))
    if not is_stacked:
        model, target = (swap_stack(x, lambda stack: stack.unstack()) for x in (model, target))
    optimizer = train.muon(0.02, mesh=mesh, weight_decay=0.1, **options)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    @eqx.filter_jit
    def step(model, opt_state):
        gradients = jax.tree.map(lambda x, y: x - y, zoo.trainable(model), zoo.trainable(target))
        gradients = zoo.place(gradients, mesh.optimizer)
        updates, opt_state = optimizer.update(gradients, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state

    for _ in range(3):
        model, opt_state = step(model, opt_state)
    return model


def measure_gap(first, second):
    """Return the largest difference between two models."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return max(np.abs(np.asarray(x) - np.asarray(y)).max() for x, y in pairs)


def flatten_matrices(tree):
    """Return all numbers of the matrices that Muon takes."""
    matrices = eqx.filter(tree, train.linear_mask(tree))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(matrices)])


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {"consistent_rms": 0.2}),
        ({"nesterov": False, "consistent_rms": None, "beta": 0.9}, {"nesterov": False, "beta": 0.9}),
        ({"adaptive": True, "consistent_rms": None, "ns_steps": 3}, {"adaptive": True, "ns_steps": 3}),
        ({"ns_coeffs": DION, "ns_steps": 3, "consistent_rms": None}, {"ns_coeffs": DION, "ns_steps": 3}),
    ],
    ids=["default", "heavy ball", "adaptive", "coefficients"],
)
def test_updates_are_those_of_optax(options, theirs):
    """Of a wide and a tall matrix, for three steps. Optax has [in, out] matrices."""
    layers = [zoo.layers.Linear(*sizes, key=jax.random.key(0)) for sizes in ((8, 24), (24, 8))]
    weights = [layer.weight.T for layer in layers]
    ours, optax_muon = train.muon(0.1, **options), optax.contrib.muon(0.1, **theirs)
    state, optax_state = ours.init(layers), optax_muon.init(weights)
    for seed in range(3):
        gradients = jax.tree.map(lambda x, seed=seed: jax.random.normal(jax.random.key(seed), x.shape), layers)
        updates, state = ours.update(gradients, state, layers)
        expected, optax_state = optax_muon.update([layer.weight.T for layer in gradients], optax_state, weights)
        for update, wanted in zip(updates, expected, strict=True):
            # optax computes 1 - beta^t with a cancellation, which the adaptive scale shows
            np.testing.assert_allclose(update.weight, wanted.T, rtol=2e-5, atol=1e-6)


def test_weight_decay_leaves_norms_and_biases():
    """Gradients of 0: only the decay is left, of both optimizers."""
    layers = [
        zoo.layers.Linear(4, 8, bias=True, key=jax.random.key(0)),
        zoo.layers.Embedding(16, 8, key=jax.random.key(1)),
        zoo.layers.RMSNorm(8),
    ]
    layers = jax.tree.map(lambda x: x + 1, layers)  # no bias is 0
    optimizer = train.muon(0.5, weight_decay=0.1)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, layers), optimizer.init(layers), layers)
    linear, embedding, norm = eqx.apply_updates(layers, updates)
    assert (linear.bias == layers[0].bias).all() and (norm.weight == layers[2].weight).all()
    np.testing.assert_allclose(linear.weight, (1 - 0.1 * 0.5) * layers[0].weight, rtol=1e-6)
    np.testing.assert_allclose(embedding.weight, (1 - 0.1 * 0.5) * layers[1].weight, rtol=1e-6)


def test_stacked_matrices_are_updated_one_by_one():
    stacked = swap_stack(run("one device"), lambda stack: stack.unstack())
    assert measure_gap(stacked, run("one device", is_stacked=False)) < 1e-6


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_device(name):
    """Experts are sharded over `expert`, and three layers are divided by no mesh."""
    assert measure_gap(run("one device"), run(name)) < 4e-6


@pytest.mark.ci
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_device(name):
    assert measure_gap(run("one device", layers=4), merge_rounds(run(name, layers=4))) < 4e-6


@pytest.mark.ci
def test_bfloat16_iterations_differ_by_percents():
    """On a mesh, where bfloat16 travels, as on one device; updates stay float32."""
    one, mesh = (run(name, newton_schulz_dtype="bfloat16") for name in ("one device", "fsdp x tensor x expert"))
    exact, start = run("one device"), make(jax.random.key(0))
    moved, difference = (flatten_matrices(jax.tree.map(jnp.subtract, exact, x)) for x in (start, one))
    assert 0.005 < np.linalg.norm(difference) / np.linalg.norm(moved) < 0.1
    assert measure_gap(one, mesh) < 2e-3
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(zoo.trainable(mesh)))


@pytest.mark.parametrize("preset", PRESETS)
def test_matrices_of_each_preset(preset):
    options = {"mlp": 32, "heads": 2} if preset not in ("Mamba", "Mamba2") else {}
    options |= {"experts": 4, "top": 2} if preset == "MixtureOfExperts" else {}
    build = lambda key: getattr(models, preset)(vocab=16, embed=32, layers=4, **options, key=key)
    params = zoo.trainable(eqx.filter_eval_shape(build, jax.random.key(0)))
    taken, others = [], []
    for path, is_taken in zip(list_parameter_paths(params), jax.tree.leaves(train.linear_mask(params)), strict=True):
        words = [word for word in path.name.split(".") if not word.isdigit() and word != "weight"]
        if is_taken:
            taken.append(words[-1])
        elif len(path.leaf.unstacked_dims) > 1:
            others.append(words[-1])
    assert (" ".join(dict.fromkeys(taken)), " ".join(dict.fromkeys(others))) == PRESETS[preset]


def test_matrices_of_ones_own():
    class Mix(Module):
        weight: Float[Array, "inner embed"]

    mix = Mix(jnp.ones((4, 8)))
    with pytest.raises(ValueError, match="Muon gets no matrix: .* pass matrices=train.matrix_mask"):
        train.muon(0.1).init(mix)
    optimizer = train.muon(0.1, matrices=train.matrix_mask)
    updates, _ = optimizer.update(mix, optimizer.init(mix), mix)
    assert jnp.linalg.matrix_rank(updates.weight) == 1 and not (updates.weight == -0.1).any()


def test_bad_options_raise():
    with pytest.raises(ValueError, match=r"three numbers, or three for each of ns_steps=4 steps .*, not \(\(4.0848"):
        train.muon(0.1, ns_coeffs=DION, ns_steps=4)
    with pytest.raises(ValueError, match=r"Muon takes matrices and stacks of them, not an array of shape \[8\]"):
        everything = lambda params: jax.tree.map(lambda _: True, params)
        train.muon(0.1, matrices=everything).init(zoo.layers.Linear(4, 8, bias=True, key=jax.random.key(0)))


def compile_update(mesh, build, compile_step=zoo.inspect.compiled, **options):
    """Compile an update; return the program and the bytes of a device's gradients."""
    model = zoo.place(eqx.filter_eval_shape(build, jax.random.key(0)), mesh)
    optimizer = train.muon(0.02, mesh=mesh, **options)
    gradients = zoo.place(zoo.trainable(model), mesh.optimizer)
    opt_state = zoo.place(eqx.filter_eval_shape(optimizer.init, gradients), mesh.optimizer)

    def update(gradients, opt_state, model):
        updates, opt_state = optimizer.update(gradients, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state

    program = compile_step(eqx.filter_jit(update), gradients, opt_state, model)
    shards = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(gradients)]
    return program, 4 * sum(map(np.prod, shards))


def test_an_update_sends_matrices_there_and_back():
    """Nothing else travels; three layers fill up to four matrices a device."""
    program, gradients = compile_update(make_mesh("fsdp x tensor x expert"), functools.partial(make, layers=4))
    assert {row.kind for row in program.collectives} == {"all-to-all"}
    assert 1.5 * gradients < sum(row.bytes for row in program.collectives) < 3 * gradients


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "share"), [("float32", 2), ("bfloat16", 1)])
def test_an_update_on_h100s_sends_matrices_there_and_back(dtype, share):
    mesh = zoo.make_mesh(data=1, fsdp=8, devices=imagine("h100:8"))
    sizes = {"vocab": 1024, "embed": 512, "layers": 8, "heads": 8, "mlp": 1408}
    compile_step = functools.partial(compile_for, "h100:8")
    options = {"compile_step": compile_step, "newton_schulz_dtype": dtype}
    program, gradients = compile_update(mesh, lambda key: models.Transformer(**sizes, key=key), **options)
    assert {row.kind for row in program.collectives} == {"all-to-all"}
    assert 0.8 * share * gradients < sum(row.bytes for row in program.collectives) <= 1.05 * share * gradients
