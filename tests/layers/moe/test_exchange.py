"""Experts on several devices equal experts on one, under any load, and send the bytes of the formula."""

import functools
import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import zoo
from tests.aot import imagine
from tests.quick import mark_slow
from zoo import Layout
from zoo.layers import BiasedRouter, GatedMLP, MixtureOfExperts
from zoo.layers.moe.exchange import EXPERT_EXCHANGE, SLACK
from zoo.parallel.layout import EXPERT_FORMS

EMBED, MLP_DIM, EXPERTS, TOP, ROWS, SEQ = 8, 4, 8, 3, 8, 6
FORMS = EXPERT_FORMS[1:3]
"""Those that a CPU runs."""
LOADS = {"balanced": 0, "on two devices": 2, "on one device": 3}
"""How many experts the bias makes every token choose."""


@functools.cache
def make_mixture(load, **options):
    router = partial(BiasedRouter, EMBED, EXPERTS, TOP)
    layer = MixtureOfExperts(router, partial(GatedMLP, EMBED, MLP_DIM), EXPERTS, key=jax.random.key(0), **options)
    favored = {0: [], 2: [1, 6], 3: [0, 1, 2]}[LOADS[load]]
    bias = layer.router.selection_bias.at[jnp.array(favored, int)].set(100.0)
    return eqx.tree_at(lambda layer: layer.router.selection_bias, layer, bias)


def make_batch():
    x, weights = jax.random.normal(jax.random.key(1), (2, ROWS, SEQ, EMBED))
    return {"tokens": x, "weights": weights}


def loss_fn(layer, batch):
    y, (routing,) = zoo.parallel.gather(layer)(batch["tokens"])
    chosen = (routing.chosen[..., None] == jnp.arange(routing.logits.shape[-1])).sum((0, 1, 2)).astype(jnp.float32)
    return ((y * batch["weights"]).sum(), jnp.float32(y.size)), chosen


def assert_equal_to_one_device(layer, mesh):
    one = zoo.make_mesh(devices=jax.devices()[:1])
    run = lambda mesh: jax.device_get(
        zoo.value_and_grad(loss_fn, mesh, has_aux=True)(zoo.place(layer, mesh), zoo.place_batch(make_batch(), mesh))
    )
    ((loss, loads), gradients), ((expected_loss, expected_loads), expected) = run(mesh), run(one)
    assert np.array_equal(loads, expected_loads)
    assert abs(loss - expected_loss) < 1e-5 * abs(expected_loss)
    for a, b in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


MESHES = ({"data": 1, "expert": 8}, {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "expert": 4})


QUICK = ("balanced",)


@pytest.mark.ci
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "load, sizes", mark_slow(zip(LOADS, MESHES, strict=True), but=QUICK, name=lambda pair: pair[0]), ids=[*LOADS]
)
def test_experts_on_devices_equal_one_device(form, load, sizes):
    """Loads of up to 8 / SLACK trips; tokens in several pieces where they are gathered."""
    assert_equal_to_one_device(make_mixture(load), zoo.make_mesh(**sizes, layout=Layout(expert=form)))


@pytest.mark.parametrize(
    "load, sizes",
    mark_slow(zip([*LOADS][1:], MESHES, strict=False), but=["on two devices"], name=lambda pair: pair[0]),
    ids=[*LOADS][1:],
)
def test_experts_with_a_capacity_equal_one_device(load, sizes):
    assert_equal_to_one_device(make_mixture(load, capacity_factor=1.0), zoo.make_mesh(**sizes))


WITHOUT_COMPUTATION = {"some tokens": [], "every token once": [9], "every token twice": [0, 8, 9]}


@pytest.mark.parametrize("form", [*FORMS, "capacity"])
@pytest.mark.parametrize("favored", WITHOUT_COMPUTATION.values(), ids=WITHOUT_COMPUTATION)
def test_experts_without_computation_stay_on_their_device(form, favored):
    """With the gradients of tokens, routers and experts as on one device: what is not sent adds nothing to them."""
    options = {"capacity_factor": 1.0} if form == "capacity" else {}
    router = partial(BiasedRouter, EMBED, EXPERTS + 3, TOP, score="softmax")
    layer = MixtureOfExperts(
        router, partial(GatedMLP, EMBED, MLP_DIM), EXPERTS, identities=3, key=jax.random.key(0), **options
    )
    bias = layer.router.selection_bias.at[jnp.array(favored, int)].set(100.0)
    layer = eqx.tree_at(lambda layer: layer.router.selection_bias, layer, bias)
    layout = {} if options else {"layout": Layout(expert=form)}
    assert_equal_to_one_device(Scaled(jnp.ones(EMBED), layer), zoo.make_mesh(data=1, expert=4, tensor=2, **layout))


class Scaled(zoo.parallel.Module):
    """A mixture of scaled tokens, whose gradient is that of the scale."""

    scale: Float[Array, "embed"]
    layer: MixtureOfExperts

    def __call__(self, x):
        return self.layer(x * self.scale)


def test_all_tokens_on_one_device_take_more_trips():
    """The loop runs as often as the fullest box needs. Of two experts on a device, the second is in the later trips."""
    sizes = {"data": 2, "expert": 4}
    mesh = zoo.make_mesh(**sizes, layout=Layout(expert="boxes"))
    assert_equal_to_one_device(make_mixture("on two devices"), mesh)
    assert_equal_to_one_device(make_mixture("on one device"), mesh)


@pytest.mark.one_case
@pytest.mark.parametrize("form", FORMS)
def test_exchange_sends_the_bytes_of_its_formula(form):
    """One round, and where gathered one piece for as many rows as the boxes of all devices have."""
    n, seq, top = 4, 40, 2
    mesh = zoo.make_mesh(data=1, expert=n, devices=jax.devices()[:n], layout=Layout(expert=form))
    router = partial(BiasedRouter, EMBED, EXPERTS, top)
    layer = MixtureOfExperts(router, partial(GatedMLP, EMBED, MLP_DIM), EXPERTS, key=jax.random.key(0))
    x = zoo.place_batch(jnp.zeros((n, seq, EMBED)), mesh)
    run = zoo.spmd(lambda layer, x: layer(x)[0], mesh, out="batch seq embed")
    program = zoo.inspect.compiled(eqx.filter_jit(run), zoo.place(layer, mesh), x)
    moved = {row.kind: row.bytes for row in program.collectives if row.axes == ("expert",)}
    vector, room = 4 * EMBED, math.ceil(SLACK * seq * top / n)
    if form == "boxes":
        assert moved["all-to-all"] == 2 * n * room * vector + 4 * EXPERTS  # and the numbers of rows
    else:
        pieces = math.ceil(seq * top / room)
        size = math.ceil(seq / pieces)
        assert moved["reduce-scatter"] == n * pieces * size * vector
        assert moved["all-gather"] == n * pieces * size * (vector + 2 * top * 4)  # with weights and choices


@pytest.mark.parametrize("form", mark_slow(FORMS, but=FORMS[:1]))
def test_memory_is_that_of_a_balanced_load(form):
    """There is one program for every load. Room for the worst one would be five times as much."""
    seq = 64
    mesh = zoo.make_mesh(data=1, expert=8, layout=Layout(expert=form))
    layer = zoo.place(make_mixture("balanced"), mesh)
    batch = {name: jax.ShapeDtypeStruct((ROWS, seq, EMBED), "float32") for name in ("tokens", "weights")}
    step = eqx.filter_jit(zoo.value_and_grad(loss_fn, mesh, has_aux=True))
    program = zoo.inspect.compiled(step, layer, zoo.place_batch(batch, mesh))
    rows = ROWS // 8 * seq * TOP
    assert program.memory.temporaries < 16 * rows * 4 * EMBED  # 15: rows, their gradients, and those in boxes


@pytest.mark.slow
def test_frozen_experts_have_no_gradient_and_no_sums():
    """Where only tokens are differentiated, the backward pass holds no float32 sums of experts' gradients."""
    mesh = zoo.make_mesh(data=1, expert=8, layout=Layout(expert="boxes"))
    args = zoo.place(make_mixture("balanced"), mesh), zoo.place_batch(make_batch(), mesh)

    def input_gradient(layer, batch):
        return jax.grad(lambda x: loss_fn(layer, batch | {"tokens": x})[0][0])(batch["tokens"])

    run = zoo.spmd(input_gradient, mesh, out="batch seq embed")
    found, expected = run(*args), eqx.filter_jit(input_gradient)(make_mixture("balanced"), make_batch())
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    sums = f"f32[{EXPERTS // 8},{MLP_DIM},{EMBED}]{{V:expert}} = add"
    assert sums not in str(jax.make_jaxpr(run)(*args))
    assert sums in str(jax.make_jaxpr(zoo.value_and_grad(loss_fn, mesh, has_aux=True))(*args))


class Prompt(zoo.parallel.Module):
    """One prompt, which all devices have."""

    x: Float[Array, "1 seq embed"]


@pytest.mark.one_case
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_tokens_that_all_devices_share_stay_where_they_are(capacity_factor):
    """Nothing is gathered, and the sums are all-reduced."""
    mesh = zoo.make_mesh(data=1, expert=8)
    layer = make_mixture("balanced", capacity_factor=capacity_factor)
    prompt = Prompt(make_batch()["tokens"][:1])
    run = lambda layer, prompt: layer(prompt.x)[0]
    y = zoo.spmd(run, mesh, out="1 seq embed")(zoo.place(layer, mesh), zoo.place(prompt, mesh))
    assert np.abs(y - eqx.filter_jit(run)(layer, prompt)).max() < 1e-5 * np.abs(y).max()
    if capacity_factor is None:
        boxes = zoo.make_mesh(data=1, expert=8, layout=Layout(expert="boxes"))
        with pytest.raises(ValueError, match="'boxes' cannot compute this, because expert shard the experts, but not"):
            zoo.spmd(run, boxes, out="1 seq embed")(zoo.place(layer, boxes), zoo.place(prompt, boxes))


def emulate_ragged(x, into, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all`, which XLA does not have on CPUs, by all-gathers and a loop over the senders' rows."""
    here, rows = jax.lax.axis_index(axis_name), jnp.arange(len(x))
    sent = [jax.lax.all_gather(a, axis_name) for a in (x, input_offsets, send_sizes, output_offsets)]
    for sender in range(jax.lax.axis_size(axis_name)):
        x, start, size, place = (sent[0][sender], *(a[sender, here] for a in sent[1:]))
        is_sent = (rows >= start) & (rows < start + size)
        into = into.at[jnp.where(is_sent, rows - start + place, len(into))].set(x, mode="drop")
        into = jnp.where(recv_sizes[sender] == size, into, jnp.nan)  # both sides have to agree
    return into


@pytest.mark.slow
def test_ragged_exchange_equals_one_device(monkeypatch):
    sizes = {"data": 1, "expert": 4, "tensor": 2}
    mesh, layer = zoo.make_mesh(**sizes, layout=Layout(expert="ragged")), make_mixture("on two devices")
    with pytest.raises(ValueError, match="'ragged' cannot compute this, because it runs on TPU and GPU"):
        assert_equal_to_one_device(layer, mesh)
    monkeypatch.setattr("zoo.layers.moe.exchange.refuse_other_platforms", lambda *platforms: None)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulate_ragged)
    assert_equal_to_one_device(layer, mesh)


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
@pytest.mark.parametrize("form", EXPERT_FORMS[1:])
def test_exchange_compiles_for_accelerators(form, topology):
    mesh = zoo.make_mesh(data=1, expert=4, tensor=2, devices=imagine(topology), layout=Layout(expert=form))
    layer = zoo.place(jax.eval_shape(lambda layer: layer, make_mixture("balanced")), mesh)
    batch = {name: jax.ShapeDtypeStruct((ROWS, SEQ, EMBED), "float32") for name in ("tokens", "weights")}
    step = eqx.filter_jit(zoo.value_and_grad(loss_fn, mesh, has_aux=True))
    program = zoo.inspect.compiled(step, layer, zoo.place_batch(batch, mesh))
    kinds = {row.kind for row in program.collectives if row.axes == ("expert",)}
    assert kinds >= {"gathered": {"all-gather"}, "boxes": {"all-to-all"}, "ragged": {"ragged-all-to-all"}}[form]


def test_layouts_and_forms_have_the_same_names():
    assert set(EXPERT_EXCHANGE.names) == set(EXPERT_FORMS)
    with pytest.raises(ValueError, match="one of auto, gathered, boxes, ragged, not 'sparse'"):
        Layout(expert="sparse")
    with pytest.raises(ValueError, match="8 experts do not divide evenly over expert=3"):
        zoo.place(make_mixture("balanced"), zoo.make_mesh(data=1, expert=3, devices=jax.devices()[:3]))
