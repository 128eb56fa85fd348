"""Layers that run several times have one set of parameters, and each pass a number, dropout and a state of its own."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.jaxprs import equations
from tests.parallel.any_mesh import assert_same_step, differentiate, make_any_mesh
from zoo.models import Looped, Transformer, stack
from zoo.models.decoder import UnrolledStack, insert_shared
from zoo.models.stack import swap_stack
from zoo.parallel import SEQUENCE
from zoo.tools.plan.work import count_work
from zoo.tools.report.parameters import describe_model

KEY = jax.random.key(0)
SIZES = {"vocab": 11, "embed": 16, "heads": 2, "mlp": 20, "dropout": 0.1}
TOKENS = jax.random.randint(jax.random.key(1), (4, 8), 0, SIZES["vocab"])
BATCH = {"tokens": TOKENS, "targets": TOKENS}
ORDER = [0, 1, 2, 1, 2, 3]
"""One layer, two passes of two layers, one layer."""


@functools.cache
def make_looped() -> Any:
    return eqx.filter_jit(lambda: Looped(**SIZES, prelude=1, core=2, loops=2, coda=1, key=KEY))()


def unshare(layers):
    """Give each pass a copy of its own."""
    return UnrolledStack(tuple(layers.iter_blocks()))


def differentiate_looped(model, mesh=None):
    return differentiate(model, BATCH, mesh, jax.random.key(2))


@functools.cache
def expected():
    """The loss, and the gradients of the four layers: of the two in the middle the sums over their passes."""
    loss, gradient = differentiate_looped(swap_stack(make_looped(), unshare))
    by_layer = [
        [block for block, n in zip(gradient.stack.blocks, ORDER, strict=True) if n == layer] for layer in range(4)
    ]
    return loss, [jax.tree.map(lambda *x: sum(x), *blocks) for blocks in by_layer]


def assert_equal(result, tolerance=2e-5):
    loss, gradient = result
    first, last = (gradient.stack.segments[i].blocks[0] for i in (0, -1))
    layers = [jax.tree.map(lambda x: x[0], first), *gradient.stack.shared, jax.tree.map(lambda x: x[0], last)]
    assert_same_step((loss, layers), expected(), tolerance)


@pytest.mark.parametrize("loop", ["scan", pytest.param("plain", marks=pytest.mark.ci)])
def test_gradient_is_the_sum_over_the_passes(loop):
    """With dropout, whose masks differ from pass to pass."""
    assert_equal(differentiate_looped(zoo.configure(make_looped(), loop=loop)))


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (None, {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param(SEQUENCE, {"fsdp": 2, "tensor": 2}, marks=pytest.mark.ci),
        pytest.param(None, {"data": 2, "context": 2, "tensor": 2}, marks=pytest.mark.ci),
    ],
)
def test_meshes_equal_one_device(layout, sizes):
    model = zoo.configure(make_looped(), loop="scan", remat="full")
    assert_equal(differentiate_looped(model, make_any_mesh(layout, **sizes)), 5e-5)


def test_names_and_shapes_do_not_depend_on_the_passes():
    model = make_looped()
    longer = eqx.filter_eval_shape(lambda: Looped(**SIZES, prelude=1, core=2, loops=5, coda=1, key=KEY))
    shapes = [[x.shape for x in jax.tree.leaves(each)] for each in (model, longer)]
    assert shapes[0] == shapes[1]
    names = [[path.name for path in zoo.models.list_parameter_paths(each)] for each in (model, longer)]
    assert names[0] == names[1] and "shared.1.attention.query.weight" in names[0]
    sizes = zoo.inspect.measure_size(longer)
    plain = eqx.filter_eval_shape(lambda: Transformer(**SIZES, layers=4, key=KEY))
    assert sizes.num_parameters == zoo.count(longer) == zoo.count(plain) and sizes.bytes == 4 * zoo.count(plain)
    assert "12 layers of Attention and GatedMLP" in describe_model(longer)
    assert "12, scanned as" in str(zoo.summary(longer))


def test_work_is_counted_per_pass():
    flops = []
    for model in (make_looped(), swap_stack(make_looped(), unshare)):
        model = model if isinstance(model.stack, UnrolledStack) else zoo.configure(model, loop="scan")
        flops.append(count_work(jax.make_jaxpr(lambda model: model(TOKENS))(model).jaxpr, {}).total_flops)
    assert flops[0] == flops[1] > 0


def test_decoding_has_a_state_per_pass():
    model = make_looped()
    new = zoo.generate(model, TOKENS, max_new_tokens=3)
    longer = jnp.concatenate([TOKENS, new], axis=1)
    np.testing.assert_array_equal(jnp.argmax(eqx.filter_jit(model)(longer), -1)[:, TOKENS.shape[1] - 1 : -1], new)
    assert len(model.init_state(1, 4)) == len(ORDER)


def test_values_are_named_by_the_pass():
    model = zoo.configure(make_looped(), loop="scan")
    run = lambda model: eqx.filter_jit(zoo.capture(model, "layers.*", "layers.3.attention"))(TOKENS)[1]
    seen = run(model)
    states = zoo.hidden_states(model, TOKENS)
    np.testing.assert_allclose(seen["layers.*"][:-1], jnp.stack(states[1:-1]), atol=1e-5)
    steered = run(zoo.patch(model, {"layers.3.attention": jnp.zeros_like}))
    changed = np.abs(np.asarray(steered["layers.*"]) - np.asarray(seen["layers.*"])).max((1, 2, 3)) > 1e-4
    assert changed.tolist() == [False] * 3 + [True] * 3, "the second pass of the core's first layer, and what follows"


def test_a_deep_core_is_compiled_once_for_all_loops(monkeypatch):
    traced = []
    monkeypatch.setattr(stack, "insert_shared", lambda *args: traced.append(args) or insert_shared(*args))
    model = eqx.filter_eval_shape(lambda: Looped(**SIZES, core=8, loops=3, prelude=1, key=KEY))
    model = zoo.configure(model, loop="scan")
    eqx.filter_eval_shape(lambda model: model(TOKENS), model)
    assert len(traced) == 9, "the prelude and the layers of the core"


def test_passes_save_no_copy_of_the_parameters():
    """The core is stacked for its inner loop, once and not once per pass."""
    model = zoo.configure(make_looped(), loop="scan")
    jaxpr = jax.make_jaxpr(eqx.filter_grad(lambda model: zoo.cross_entropy(model, BATCH)[0]))(model)
    shapes = [x.aval.shape for eqn in equations(jaxpr) if eqn.primitive.name == "scan" for x in eqn.outvars]
    weight = model.stack.shared[0].ffn.up.weight.shape
    assert max(len(shape) for shape in shapes if shape[-2:] == weight) == 3, "gradients of the two layers"


@pytest.mark.ci
def test_any_order_runs():
    """As layers with these parameters one after the other."""
    order = (0, 1, 0, 2, 2)
    model: Any = eqx.filter_jit(lambda: Transformer(**SIZES, layers=3, order=order, key=KEY))()
    plain = swap_stack(model, unshare)
    logits, wanted = (eqx.filter_jit(each)(TOKENS) for each in (model, plain))
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert [block.number for block in model.stack.unstack().blocks if hasattr(block, "number")] == [0, 0, 1, 1]


def test_what_is_not_supported_is_refused_by_name():
    for order, message in (
        ((0, 1, 3), "order names layer 3, and there are layers 0 to 2"),
        ((0, 1), "leaves out layer 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Transformer(**SIZES, layers=3, order=order, key=KEY)
    with pytest.raises(ValueError, match="runs once or more: prelude=1, core=0"):
        Looped(**SIZES, core=0, loops=2, prelude=1, key=KEY)
    model = make_looped()
    with pytest.raises(
        NotImplementedError, match="several layers share Block, and a pipeline .* use a mesh with pipe=1"
    ):
        eqx.filter_eval_shape(zoo.value_and_grad(zoo.cross_entropy, make_any_mesh(pipe=2)), model, BATCH)
    with pytest.raises(NotImplementedError, match='loop="ahead" with modules that several layers share'):
        zoo.configure(model, loop="ahead", remat="full")(TOKENS)
    with pytest.raises(NotImplementedError, match="layers of this model depend on one another"):
        zoo.models.keep_layers(model, [0, 1])
