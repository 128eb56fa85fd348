"""Training on mixtures of all axes: ten steps equal those of one device, and a checkpoint goes on on any other mesh."""

import contextlib
import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from zoo import Layout
from zoo.layers import Attention, GatedDeltaNet, GatedMLP, MixtureOfExperts, SoftmaxRouter
from zoo.layers.token_info import pack_positions
from zoo.ops.rotary import Rotary
from zoo.parallel import SEQUENCE, ZERO2, Schedule
from zoo.parallel.rounds import merge_rounds
from zoo.train import Run, RunOptions, decay_mask

ROWS, SEQ, VOCAB, STEPS = 16, 16, 32, 10
MESHES = {
    "one device": ({}, None, 1),
    "data x context": ({"data": 2, "context": 4}, None, 1),
    "fsdp x context x tensor": ({"fsdp": 2, "context": 2, "tensor": 2}, None, 1),
    "SEQUENCE": (
        {"data": 2, "context": 2, "tensor": 2},
        Layout(context="heads").with_dims(tokens=SEQUENCE.axes("tokens")),
        1,
    ),
    "ZERO2": ({"data": 2, "fsdp": 4}, ZERO2, 2),
    "expert x context x tensor": ({"expert": 2, "context": 2, "tensor": 2}, Layout(expert="boxes"), 1),
    "fsdp x expert": ({"fsdp": 2, "expert": 4}, None, 2),
    "pipe x expert": ({"pipe": 2, "expert": 2}, None, 4),
    "pipe x fsdp x tensor in rounds": ({"pipe": 2, "fsdp": 2, "tensor": 2}, Layout(rounds=2), 4),
}
"""Sizes, layout and micro-batches, which pipelines take by 1F1B."""
SLOW = (
    *("data x context", "fsdp x context x tensor", "SEQUENCE", "ZERO2", "fsdp x expert"),
    *("pipe x expert", "pipe x fsdp x tensor in rounds"),
)
TOLERANCE = 2e-5
"""On one device, parameters that differ in their last place change these losses by 2e-5; the meshes by up to 5e-6."""
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3, weight_decay=0.1, mask=decay_mask))


def make(key):
    """A gated delta rule, attention in a window and a mixture of experts, and attention to all tokens; four heads."""
    rotary = Rotary(4)
    pattern = [
        partial(GatedDeltaNet, heads=4),
        partial(Attention, heads=4, rotary=rotary, window=6),
        partial(Attention, heads=4, rotary=rotary),
    ]
    ffns = [None, make_mixture, None]
    return zoo.models.Hybrid(vocab=VOCAB, embed=16, layers=3, pattern=pattern, ffns=ffns, key=key)


def make_repeated(key):
    """Four equal layers, which the stages of a pipeline share."""
    pattern = [partial(Attention, heads=4, rotary=Rotary(4), window=6)]
    return zoo.models.Hybrid(vocab=VOCAB, embed=16, layers=4, pattern=pattern, ffns=[make_mixture], key=key)


def choose_model(*names):
    return make_repeated if any("pipe" in name for name in names) else make


def make_mixture(embed, *, out_scale, key):
    """Every token has all experts: rounding would change a choice within ten steps, on one processor or another."""
    router, expert = partial(SoftmaxRouter, embed, 4, 4), partial(GatedMLP, embed, 16, out_scale=out_scale)
    return MixtureOfExperts(router, expert, 4, key=key)


def loss_fn(model, batch):
    return zoo.cross_entropy(model, batch)


@functools.cache
def make_mesh(name):
    sizes, layout, microbatches = MESHES[name]
    sizes = {"data": 1} | sizes
    return zoo.make_mesh(**sizes, devices=jax.devices()[: np.prod(list(sizes.values()))], layout=layout), microbatches


def make_batch(seed, often=0.15):
    """Documents of any length, which begin and end on any device, and padding."""
    draw = np.random.default_rng(seed)
    text = draw.integers(0, VOCAB, (ROWS, SEQ + 1))
    lengths = draw.integers(1, SEQ + 1, (ROWS, 1))
    segment_ids = (1 + (draw.random((ROWS, SEQ)) < often).cumsum(1)) * (np.arange(SEQ) < lengths)
    return {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "weights": np.float32(segment_ids > 0),
        "segment_ids": segment_ids,
        "positions": np.asarray(pack_positions(jnp.asarray(segment_ids))),
    }


class Batches:
    """An iterator over batches, two by turns, whose position is saved."""

    state = 0

    def __next__(self):
        self.state += 1
        return make_batch(self.state % 2)

    def restore(self, state):
        self.state = state


def compute_gradient(name, model, batch):
    mesh, microbatches = make_mesh(name)
    schedule = Schedule("1f1b" if mesh.shape["pipe"] > 1 else "gpipe")
    run = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches, schedule=schedule)
    return run(model, zoo.place_batch(batch, mesh))


@eqx.filter_jit
def update(mesh, gradients, model, opt_state):
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, zoo.trainable(model))
    return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state


@functools.cache
def make_unsharded(make=make):
    return eqx.filter_jit(make)(jax.random.key(0))


def init_state(name, make):
    """Return a model and its optimizer state on a mesh."""
    mesh, _ = make_mesh(name)
    model = zoo.place(make_unsharded(make), mesh)
    return model, zoo.place(OPTIMIZER.init(zoo.trainable(model)), mesh.optimizer)


def train(name, steps, out=None, *, make=make, resume=False):
    """Train until this step; return the restored or initial state and the losses. With `out`, resume from its last
    checkpoint, and save the last state there."""
    batches, losses, initial = Batches(), [], init_state(name, make)
    state = initial
    with Run(RunOptions(out, resume=resume), config={}) if out else contextlib.nullcontext() as run:
        if run is not None:
            initial = state = run.restore(state, batches)
        for batch in run.steps(batches, steps) if run is not None else (next(batches) for _ in range(steps)):
            loss, gradients = compute_gradient(name, state[0], batch)
            state = update(make_mesh(name)[0], gradients, *state)
            losses.append(float(loss))
        if run is not None:
            run.save(state, batches)
    return initial, state, losses


@functools.cache
def expected_losses(make):
    *_, losses = train("one device", STEPS, make=make)
    assert losses[0] - losses[-1] > 0.5
    return losses


@pytest.mark.slow  # models/test_parallel_equals_serial.py takes ten steps on data x fsdp x tensor
@pytest.mark.parametrize(
    "name",
    [
        "expert x context x tensor",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_ten_steps_equal_one_device(name):
    make = choose_model(name)
    *_, losses = train(name, STEPS, make=make)
    np.testing.assert_allclose(losses, expected_losses(make), rtol=TOLERANCE)


@pytest.mark.slow  # test_checkpoint.py restores in the rounds of any mesh
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("fsdp x context x tensor", ("one device", "SEQUENCE"), marks=pytest.mark.slow),
        ("pipe x fsdp x tensor in rounds", ("one device",)),
        pytest.param("one device", ("pipe x fsdp x tensor in rounds", "pipe x expert"), marks=pytest.mark.slow),
        pytest.param("pipe x expert", ("fsdp x expert", "pipe x fsdp x tensor in rounds"), marks=pytest.mark.slow),
        pytest.param("SEQUENCE", ("ZERO2", "data x context"), marks=pytest.mark.slow),
        pytest.param("ZERO2", ("fsdp x expert", "expert x context x tensor"), marks=pytest.mark.slow),
    ],
)
def test_checkpoint_of_a_mesh_goes_on_on_others(first, then, tmp_path):
    """Each run goes on from the bits of the one before, over the axes of its own mesh. All losses are those of ten
    steps on one device."""
    make = choose_model(first, *then)
    _, saved, losses = train(first, 4, tmp_path, make=make)
    for name, steps in zip(then, (7, STEPS), strict=False):
        restored, state, more = train(name, steps, tmp_path, make=make, resume=True)
        for x, like in zip(*map(jax.tree.leaves, (restored, init_state(name, make))), strict=True):
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
        for x, y in zip(*(jax.tree.leaves(merge_rounds(jax.device_get(s))) for s in (restored, saved)), strict=True):
            assert np.array_equal(x, y)
        saved, losses = state, losses + more
    np.testing.assert_allclose(losses, expected_losses(make)[: len(losses)], rtol=TOLERANCE)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    seed=st.integers(0, 999),
    often=st.sampled_from([0.0, 0.1, 0.5]),
    strength=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_any_documents_and_decays_equal_one_device(seed, often, strength):
    """Documents of any length that begin and end on any device; decays that forget nothing, or all within a token.

    Parameters that differ in their last place change gradients of the delta rule by up to 2e-4 on one device, the mesh
    by up to 3e-5.
    """
    scale = lambda model: model.stack.segments[0].blocks[0].mixer.decay.A_log
    model, batch = make_unsharded(), make_batch(seed, often)
    model = eqx.tree_at(scale, model, replace_fn=lambda x: x + np.log(strength))
    (expected_loss, expected), (loss, gradients) = (
        jax.device_get(compute_gradient(name, zoo.place(model, make_mesh(name)[0]), batch))
        for name in ("one device", "fsdp x context x tensor")
    )
    assert abs(loss - expected_loss) < 1e-5 * expected_loss
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(x - y).max() <= 1e-4 * max(np.abs(y).max(), 1e-3 * largest)
