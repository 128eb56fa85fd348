"""The scan over repeating patterns equals the plain loop over layers, and compiles few blocks."""

import re
from collections import Counter
from functools import partial
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import zoo
from tests.jaxprs import arrays, equations
from tests.parallel.any_mesh import make_any_mesh
from zoo import Layout
from zoo.layers import TokenInfo
from zoo.layers.token_info import pack_positions
from zoo.models import Hidden, Stack
from zoo.models.decoder import AbstractBlock, AbstractStack, SharedBlock
from zoo.models.parameter_paths import find_differences
from zoo.models.segment import find_patterns
from zoo.models.stack import describe_loop, swap_stack
from zoo.ops.platform import target_platform
from zoo.parallel import leaves

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 24}


@eqx.filter_jit
def run(model, tokens):
    return model(tokens)


def test_stack_scan_equals_unrolled_loop():
    model = zoo.models.Transformer(**SIZES, windows=(4, None), qk_norm=True, key=KEY)
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, SIZES["vocab"])
    unrolled = swap_stack(model, lambda stack: stack.unstack())
    for other in (unrolled, zoo.configure(model, loop="plain"), zoo.configure(model, loop=2)):
        assert jnp.allclose(run(other, tokens), run(model, tokens), atol=1e-5)
    assert zoo.count(unrolled) == zoo.count(model)
    with pytest.raises(ValueError, match="Embedding has no stack"):
        swap_stack(model.embedding, lambda stack: stack)


@pytest.mark.parametrize(
    "items, expected",
    [
        ("a" * 12, [(1, 12)]),
        ("aab" * 3, [(3, 3)]),
        ("lllllg" * 10 + "ll", [(6, 10), (1, 2)]),
        ("abbb", [(1, 1), (1, 3)]),
        ("a", [(1, 1)]),
        ("mmmmmammmm" * 4, [(10, 4)]),
        ("dddg" * 12, [(4, 12)]),
        ("M-M-M-M-M*-" * 4, [(11, 4)]),
        ("aabb", [(1, 2), (1, 2)]),
    ],
)
def test_find_patterns_compiles_few_blocks(items, expected):
    assert sorted(find_patterns(items)) == sorted(expected)
    assert sum(period * repeats for period, repeats in find_patterns(items)) == len(items)


@pytest.mark.ci
def test_stack_patterns_do_not_change_parameters():
    repeated = zoo.models.Transformer(**SIZES, windows=(4, 4), key=KEY)
    single = zoo.models.Transformer(**SIZES, windows=(4,), key=KEY)
    assert eqx.tree_equal(repeated, single)


TOKENS = jax.random.randint(jax.random.key(1), (4, 8), 0, SIZES["vocab"])
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def assert_close(tree, other):
    for x, y in zip(jax.tree.leaves(jax.device_get(tree)), jax.tree.leaves(jax.device_get(other)), strict=True):
        assert np.allclose(x, y, rtol=1e-4, atol=1e-5)


def loss_and_choices(model, batch, key):
    """Return the loss with dropout, and how many tokens chose each expert, per layer."""
    loss, routing = zoo.models.cross_entropy_and_routing(model, batch, key=key)
    return loss, [zoo.models.tokens_per_expert(layer) for layer in routing]


@pytest.mark.slow  # results and states of both loops are compared above and below
def test_an_unknown_remat_is_refused_when_the_model_is_made():
    """It was accepted, and raised at the first loss."""
    with pytest.raises(ValueError, match="remat is one of none, .* not 'all'"):
        zoo.models.Transformer(**SIZES, remat="all", key=KEY)
    with pytest.raises(ValueError, match="remat is one of none, .* not 'all'"):
        zoo.configure(zoo.models.Transformer(**SIZES, key=KEY), remat="all")


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("remat", ["none", pytest.param("elementwise", marks=pytest.mark.slow)])
def test_loops_equal_in_gradients_dropout_and_routing(remat):
    options = {"experts": 4, "top": 2, "dense_layers": 1, "dropout": 0.2, "remat": remat}
    mesh = zoo.make_mesh(fsdp=2, devices=jax.devices()[:2])
    model = zoo.init(lambda key: zoo.models.MixtureOfExperts(**SIZES, **options, key=key), KEY, mesh)
    differentiate = eqx.filter_jit(zoo.value_and_grad(loss_and_choices, mesh, has_aux=True))
    found = [differentiate(zoo.configure(model, loop=loop), BATCH, key=KEY) for loop in ("scan", "plain")]
    scanned, plain = jax.device_get([(loss, jax.tree.leaves(gradients)) for loss, gradients in found])
    (_, choices), gradients = scanned
    assert len(choices) == 2 and all(choice.sum() == 2 * TOKENS.size for choice in choices)
    assert all(np.abs(x).max() > 0 for x in gradients)
    assert_close(scanned, plain)


@pytest.mark.ci
def test_training_step_holds_no_logits_of_all_routers():
    model = zoo.models.MixtureOfExperts(**SIZES, experts=5, top=2, remat="full", loop="scan", key=KEY)

    def find_shapes(model):
        loss = lambda model: zoo.cross_entropy(model, BATCH, balance=0.1, router_z=0.1)[0]
        return {x.shape for x in arrays(jax.make_jaxpr(eqx.filter_grad(loss))(model))}

    logits, sums = (3, *TOKENS.shape, 5), (3, len(TOKENS), 5)
    assert logits not in (shapes := find_shapes(model)) and sums in shapes
    assert logits in find_shapes(zoo.configure(model, routing="tokens"))


class FirstLayer(AbstractStack):
    """A stack of somebody else's."""

    block: AbstractBlock

    def __call__(self, hidden, info, states=None):
        return self.block(hidden, info)

    def init_state(self, batch, length, dtype=jnp.float32):
        return ()


def test_routing_refuses_other_names_and_stacks(no_type_checks):
    model = zoo.models.Transformer(**SIZES, key=KEY)
    with pytest.raises(ValueError, match="routing is one of rows, tokens, not 'all'"):
        zoo.configure(model, routing="all")
    with pytest.raises(ValueError, match="FirstLayer has no choice of its routing"):
        zoo.configure(swap_stack(model, lambda stack: FirstLayer(next(stack.iter_blocks()))), routing="tokens")


@pytest.mark.ci
def test_only_the_longest_segment_is_sharded_over_pipe():
    sizes = SIZES | {"layers": 5, "experts": 4, "top": 2}
    model = zoo.models.MixtureOfExperts(**sizes, dense_layers=1, key=KEY)
    mesh = make_any_mesh(pipe=4)
    first, second = zoo.place(model, mesh).stack.segments
    for segment, dim, spec in ((first, "ends", P()), (second, "layers", P("pipe"))):
        assert {leaf.dims[0].name for leaf in leaves(segment)} == {dim}
        assert {x.sharding.spec for x in jax.tree.leaves(segment)} == {spec}


class NumberedInfo(TokenInfo):
    """Fold a layer's number into positions, where a test can read it."""

    def fold_keys(self, number):
        return TokenInfo(jnp.full_like(self.positions, number))


class NumberedBlock(AbstractBlock):
    """A block that appends its layer's number to the octal digits of the hidden states."""

    weight: Float[Array, "embed"]

    def __call__(self, hidden, info, state=None):
        return Hidden(8 * hidden.x + info.positions[..., None]), state

    def init_state(self, batch, length, dtype=jnp.float32):
        return None


@pytest.mark.one_case
@pytest.mark.parametrize("loop, rounds", [("scan", 1), ("plain", 1), ("scan", 2)])
def test_layers_run_in_order_under_pipe(loop, rounds):
    """The layers of two segments around the stages, too, and the rows of six micro-batches."""
    factories = {name: lambda key: NumberedBlock(jnp.ones(3)) for name in "abc"}
    stack = Stack([factories[name] for name in "abbbbcc"], loop=loop, key=KEY)
    assert [segment.num_repeats for segment in stack.segments] == [1, 4, 2]
    mesh = make_any_mesh(Layout(rounds=rounds), pipe=2)

    def run(stack, x):
        return stack(Hidden(x), NumberedInfo(jnp.zeros(x.shape[:2], int)))[0].x

    x = jnp.arange(6.0)[:, None, None] * jnp.ones(3)
    y = zoo.spmd(run, mesh, out="batch seq embed")(zoo.place(stack, mesh), x)
    assert [f"{int(row):o}" for row in y[:, 0, 0]] == ["123456", *(f"{row}0123456" for row in range(1, 6))]


class ExtendedHidden(Hidden):
    """Hidden states with the sum of the residual stream before the last layer."""

    before: Float[Array, ""] | None = None


class TracedBlock(AbstractBlock):
    """A block that counts how often it is traced."""

    weight: Float[Array, "embed"]
    traces: Counter = eqx.field(static=True)

    def __call__(self, hidden, info, state=None):
        self.traces[type(self).__name__] += 1
        return hidden.add_residual(self.weight * hidden.x), state

    def init_state(self, batch, length, dtype=jnp.float32):
        return None


class NamedBlock(TracedBlock):
    name: str = eqx.field(static=True)


class UndeclaredBlock(TracedBlock):
    def __call__(self, hidden, info, state=None):
        hidden, state = TracedBlock.__call__(self, hidden, info, state)
        return ExtendedHidden(hidden.x, before=hidden.x.sum()), state


class DeclaredBlock(UndeclaredBlock):
    extends_hidden = True


def test_scan_traces_a_block_once_unless_it_extends_hidden():
    def trace(make, loop):
        traces = Counter()
        stack = Stack([partial(make_block, make, traces)] * 3, loop=loop, key=KEY)
        hidden, _ = eqx.filter_eval_shape(stack, Hidden(jnp.zeros((1, 2, 3))), TokenInfo())
        return type(hidden), traces.total()

    make_block = lambda make, traces, key: make(jnp.ones(3), traces)
    assert trace(TracedBlock, "scan") == (Hidden, 1)
    assert trace(DeclaredBlock, "scan") == (ExtendedHidden, 2)
    assert trace(DeclaredBlock, "plain") == (ExtendedHidden, 3)
    for loop in ("scan", "plain"):
        with pytest.raises(TypeError, match="UndeclaredBlock was given Hidden and returns ExtendedHidden: .*extends_h"):
            trace(UndeclaredBlock, loop)


@pytest.mark.parametrize(
    ("period", "compiled"),
    [("mmmmmammmm", 10), ("dddg", 4), ("M-M-M-M-M*-", 11), ("mmmmmh", 6), ("ab", 2)],
)
def test_a_hybrid_compiles_the_blocks_of_its_period(period, compiled):
    """Granite 4, Qwen3-Next, Nemotron-H and Zamba2: as many layers as reach 48."""
    traces = Counter()

    def trace(letters):
        traces.clear()
        make = {name: partial(make_named_block, name, traces) for name in set(letters)}
        stack = Stack([make[name] for name in letters], loop="scan", key=KEY)
        eqx.filter_eval_shape(stack, Hidden(jnp.zeros((1, 2, 3))), TokenInfo())
        return traces.total()

    assert trace(period * -(-48 // len(period))) == compiled == trace(period * 8)


def make_named_block(name, traces, key):
    return NamedBlock(jnp.ones(3), traces, name)


@pytest.mark.ci
def test_a_pattern_with_equal_layers_equals_the_plain_loop():
    """In values, gradients, dropout, routing, states and the order of layers, on one device and on a mesh."""
    sizes = {**SIZES, "layers": 6, "windows": (4, 4, None)}
    options = {"experts": 4, "top": 2, "dropout": 0.2, "loop": "scan"}
    make = lambda key: zoo.models.MixtureOfExperts(**sizes, **options, key=key)
    mesh = zoo.make_mesh(fsdp=2, devices=jax.devices()[:2])
    model = zoo.init(make, KEY, mesh)
    (segment,) = model.stack.segments
    assert segment.num_repeats == 2
    differentiate = eqx.filter_jit(zoo.value_and_grad(loss_and_choices, mesh, has_aux=True))
    found = [differentiate(zoo.configure(model, loop=loop), BATCH, key=KEY) for loop in ("scan", "plain")]
    scanned, plain = jax.device_get([(loss, jax.tree.leaves(gradients)) for loss, gradients in found])
    assert len(scanned[0][1]) == 6 and all(np.abs(x).max() > 0 for x in scanned[1])
    assert_close(scanned, plain)

    @eqx.filter_jit
    def prefill(model):
        hidden, states = model.hidden(TOKENS, TokenInfo(jnp.indices(TOKENS.shape)[1]), model.init_state(4, 12))
        return hidden.x, states

    model = make(KEY)
    assert_close(*(prefill(zoo.configure(model, loop=loop)) for loop in ("scan", "plain")))


def test_auto_loop_counts_the_layers_of_all_segments():
    """More layers than a plain loop compiles, in two segments that have fewer."""
    factories = {name: lambda key: NumberedBlock(jnp.ones(3)) for name in "ab"}
    hidden, info = Hidden(jnp.zeros((2, 2**14, 3))), NumberedInfo(jnp.zeros((2, 2**14), int))
    for layers, has_scan in ((12, False), (13, True)):
        stack = Stack([factories[name] for name in "a" * layers + "b" * layers], key=KEY)
        assert (" scan[" in str(eqx.filter_make_jaxpr(stack)(hidden, info)[0])) == has_scan


def test_loop_outside_a_scan_keeps_recomputation_apart():
    model = zoo.models.Transformer(**SIZES, remat="full", key=KEY)

    def has_barriers(loop):
        arrays, static = eqx.partition(zoo.configure(model, loop=loop), eqx.is_array)
        loss = lambda arrays: eqx.combine(arrays, static)(TOKENS).sum()
        barriers = re.findall(r"optimization_barrier (.*?) :", jax.jit(jax.grad(loss)).lower(arrays).as_text())
        return any(operands.count("%") > 2 for operands in barriers)  # attention has one of two, in every loop

    assert [has_barriers(loop) for loop in ("scan", 2, "plain", 3)] == [False, False, True, True]


def test_plain_loop_stacks_gradients_once():
    model = zoo.configure(zoo.models.Transformer(**SIZES, key=KEY), loop="plain")
    arrays, static = eqx.partition(model, eqx.is_array)
    total = lambda arrays: eqx.combine(arrays, static)(TOKENS).sum()
    gradient = jax.make_jaxpr(jax.grad(total))(arrays).jaxpr
    made = Counter(eqn.primitive.name for eqn in gradient.eqns for x in eqn.outvars if x.aval.shape[:1] == (3,))
    assert made == {"stack": len(jax.tree.leaves(model.stack))}


def test_loops_equal_in_states():
    model = zoo.models.Transformer(**SIZES, windows=(4, None), key=KEY)

    @eqx.filter_jit
    def prefill(model):
        hidden, states = model.hidden(TOKENS, TokenInfo(jnp.indices(TOKENS.shape)[1]), model.init_state(4, 12))
        return hidden.x, states

    assert_close(*(prefill(zoo.configure(model, loop=loop)) for loop in ("scan", "plain")))


def test_loop_changes_no_parameters():
    model = zoo.models.Transformer(**SIZES, key=KEY)
    plain = zoo.configure(model, loop="plain")
    assert (model.stack.loop, plain.stack.loop) == ("auto", "plain")
    assert not list(find_differences(model, plain))
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(plain), strict=True))
    with pytest.raises(ValueError, match="UnrolledStack has no choice of its loop"):
        zoo.configure(swap_stack(model, Stack.unstack), loop="scan")


def test_describe_loop_gives_the_reason():
    model = zoo.models.Transformer(**SIZES, key=KEY)
    described = [describe_loop(zoo.configure(model, loop=loop).stack) for loop in ("scan", "plain", 2)]
    assert described == ["scan", "plain", "scan, 2 repeats per iteration"]
    assert describe_loop(model.stack) == "plain (scan under 65,536 elements of the hidden states)"
    assert describe_loop(zoo.configure(model, remat="full").stack) == "scan (remat=full)"
    with target_platform("tpu"):
        assert describe_loop(model.stack) == "scan (compiled for a tpu)"


def check_loops(make, layout=None, loss_options=None, dtype="float32", adapt=None, **sizes):
    """A scan that gathers ahead has the loss and the gradients of a scan, with dropout and packed texts."""
    mesh = make_any_mesh(layout, **sizes)
    model = zoo.init(make, KEY, mesh)
    if adapt is not None:
        model = zoo.place(adapt(model), mesh)
    tokens = jax.random.randint(jax.random.key(1), (4, 16), 0, SIZES["vocab"])
    segment_ids = jnp.broadcast_to(jnp.array([1] * 6 + [2] * 8 + [0] * 2), tokens.shape)
    batch = {
        "tokens": tokens,
        "targets": jnp.where(segment_ids > 0, jnp.roll(tokens, -1, axis=1), -1),
        "segment_ids": segment_ids,
        "positions": pack_positions(segment_ids),
    }

    def loss_fn(model, batch, key):
        return zoo.cross_entropy(zoo.cast(model, dtype), batch, key=key, **(loss_options or {}))

    differentiate = eqx.filter_jit(zoo.value_and_grad(loss_fn, mesh))
    batch = zoo.place_batch(batch, mesh)
    found = [differentiate(zoo.configure(model, loop=loop), batch, key=KEY) for loop in ("scan", "ahead")]
    scanned, ahead = jax.device_get(found)
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(scanned))
    assert_close(scanned, ahead)


DENSE = {"windows": (4, None), "dropout": 0.2, "remat": "full"}
RECURRENT = {"vocab": 32, "embed": 16, "layers": 3, "heads": 2, "mlp": 24}
ADAPTERS = {"targets": "all-linear", "rank": 2, "dropout": 0.1}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (partial(zoo.models.Transformer, **SIZES | {"layers": 4}, **DENSE), {"fsdp": 2, "tensor": 2}),
        pytest.param(
            partial(zoo.models.MixtureOfExperts, **SIZES, experts=4, top=2, dense_layers=1, remat="full"),
            {"fsdp": 2, "expert": 2, "loss_options": {"balance": 0.1}},
            marks=pytest.mark.ci,
        ),
        pytest.param(
            partial(zoo.models.Transformer, **SIZES, **DENSE),
            {"fsdp": 2, "context": 2, "layout": zoo.parallel.ZERO2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            partial(zoo.models.Transformer, **SIZES, **DENSE),
            {"fsdp": 4, "adapt": lambda model: zoo.adapters.lora(model, **ADAPTERS, key=KEY), "dtype": "bfloat16"},
            marks=pytest.mark.slow,
        ),
        pytest.param(partial(zoo.models.GLA, **RECURRENT, remat="full"), {"fsdp": 2}, marks=pytest.mark.slow),
        pytest.param(
            partial(zoo.models.Transformer, **SIZES | {"layers": 1}, remat="full"), {"fsdp": 2}, marks=pytest.mark.ci
        ),
    ],
    ids=["transformer", "mixture", "ZeRO-2 and context", "LoRA in bfloat16", "GLA", "one layer"],
)
def test_gathering_ahead_equals_a_scan(make, options):
    check_loops(lambda key: make(key=key), **options)


def find_waiting(jaxpr):
    """Count the equations of the bodies of loops that gather parameters, and that compute a product of what was
    gathered in the same iteration."""
    gathering = 0
    waiting = 0
    for loop in equations(jaxpr):
        if loop.primitive.name != "scan":
            continue
        gathered = set()
        for equation in loop.params["jaxpr"].jaxpr.eqns:
            names = {inner.primitive.name for inner in equations(SimpleNamespace(eqns=[equation]))}
            inputs = {variable for variable in equation.invars if not hasattr(variable, "val")}
            if "dot_general" in names and inputs & gathered:
                waiting += 1
            if names & {"all_gather", "all_gather_invariant"}:
                gathering += 1
                gathered |= set(equation.outvars)
            elif inputs & gathered:
                gathered |= set(equation.outvars)
    return gathering, waiting


def test_gathering_ahead_leaves_no_product_to_wait():
    mesh = make_any_mesh(fsdp=4)
    model = zoo.init(lambda key: zoo.models.Transformer(**SIZES, remat="full", key=key), KEY, mesh)
    batch = zoo.place_batch(BATCH, mesh)
    counts = {}
    for loop in ("scan", "ahead"):
        differentiate = zoo.value_and_grad(lambda model, batch: zoo.cross_entropy(model, batch), mesh)
        jaxpr = eqx.filter_make_jaxpr(differentiate)(zoo.configure(model, loop=loop), batch)[0]
        counts[loop] = find_waiting(jaxpr)
    assert counts["scan"][1] > 0
    gathering, waiting = counts["ahead"]
    assert gathering > 0 and waiting == 0


def test_gathering_ahead_refuses_what_it_does_not_cover():
    def call(**options):
        return zoo.models.Transformer(**SIZES, loop="ahead", **options, key=KEY)(TOKENS)

    with pytest.raises(NotImplementedError, match="take remat=\"full\", not 'dots'"):
        call(remat="dots")
    model = zoo.models.Transformer(**SIZES, key=KEY)
    block = next(model.stack.iter_blocks())
    layers = [lambda key: SharedBlock(0)] * 2
    shared = Stack(layers, shared=[lambda key: block], remat="full", loop="ahead", key=KEY)
    with pytest.raises(NotImplementedError, match='modules that several layers share: take loop="scan"'):
        swap_stack(model, lambda stack: shared)(TOKENS)
    extending = Stack([lambda key: DeclaredBlock(jnp.ones(3), Counter())] * 2, remat="full", loop="ahead", key=KEY)
    with pytest.raises(NotImplementedError, match='DeclaredBlock, which extends the hidden states: take loop="scan"'):
        extending(Hidden(jnp.zeros((1, 2, 3))), TokenInfo())


@pytest.mark.ci
def test_gathering_ahead_is_a_scan_where_values_are_read():
    model = zoo.models.Transformer(**SIZES, loop="ahead", remat="full", key=KEY)
    logits, values = zoo.capture(model, "layers.*")(TOKENS)
    assert values["layers.*"].shape[0] == SIZES["layers"]
    np.testing.assert_allclose(logits, model(TOKENS), atol=1e-5)
