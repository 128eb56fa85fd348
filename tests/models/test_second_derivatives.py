"""Second derivatives: each cell of the table in docs/second-derivatives.md is right, or raises by name."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo import layers
from zoo.layers import TokenInfo
from zoo.layers.quantized.fp8 import FP8Linear
from zoo.layers.quantized.linear import Int8Linear
from zoo.models.loss import cross_entropy
from zoo.ops.attention import AttentionMask, attention
from zoo.ops.moe.grouped_matmul import grouped_matmul, grouped_matmul_implementation
from zoo.ops.quantized.int8 import dequantize_int8, quantize_int8
from zoo.ops.quantized.packed_matmul import grouped_packed_matmul

KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(1), (4, 8), 0, 16)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}
MODES = ("reverse over reverse", "forward over reverse", "forward")
SPAN = 1e-2
"""Distance of the points of finite differences, in units of the direction."""
PAGE = Path(__file__).parents[2] / "docs/second-derivatives.md"


def draw(shape, seed=2, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


def inner(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def attend(name, seq=8, **options):
    key, value = (draw((1, seq, 1, 4), seed) for seed in (3, 4))
    run = partial(attention, attention_mask=AttentionMask(causal=True), implementation=name, **options)
    return lambda query: jnp.square(run(query, key, value)).sum(), draw((1, seq, 2, 4))


def mix(make, dtype=jnp.float32):
    """Return the sum of squares of a mixer's outputs, as a function of its inputs."""
    layer = zoo.cast(make(key=KEY), dtype)
    run = lambda x: layer(x.astype(dtype), TokenInfo())[0].astype(jnp.float32)
    return lambda x: jnp.square(run(x)).sum(), draw((1, 8, 8))


def round_to_bfloat16(make):
    """Return the function in bfloat16, a point, and the function in float32."""
    return *mix(make, jnp.bfloat16), mix(make)[0]


def multiply_by_expert(name):
    """Return a function of rows and matrices, so that the second derivative mixes both."""
    sizes = jnp.array([5, 0, 1])

    def loss(operands):
        x, weight = operands
        with grouped_matmul_implementation(name):
            return jnp.sin(grouped_matmul(x, weight, sizes)).sum()

    return loss, (draw((7, 3)), draw((3, 4, 3), 3))


def score(model, **options):
    """Return the mean loss as a function of the parameters."""
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(parameters):
        total, count = cross_entropy(eqx.combine(parameters, rest), BATCH, **options)
        return total / count

    return loss, parameters


def make_transformer(**options):
    return zoo.models.Transformer(vocab=16, embed=8, layers=1, heads=2, mlp=8, **options, key=KEY)


def make_mixture(**options):
    options = {"vocab": 16, "embed": 8, "layers": 1, "heads": 2, "mlp": 8, "experts": 4, "top": 2, **options}
    return zoo.models.MixtureOfExperts(**options, key=KEY)


def score_transformer(implementation, **options):
    return score(make_transformer(**options), implementation=implementation)


def apply_frozen(make):
    """Return a function of the inputs of a frozen layer."""
    layer = make(layers.Linear(32, 8, key=KEY))
    return lambda x: jnp.square(layer(jnp.sin(x))).sum(), draw((2, 3, 32))


def make_packed(linear):
    return Int8Linear(linear.dense_weight, None, in_=linear.in_, out=linear.out)


def apply_packed_experts():
    weight = draw((3, 4, 32))
    packed = quantize_int8(weight)
    sizes = jnp.array([5, 0, 1])
    run = lambda x: grouped_packed_matmul(x, packed, dequantize_int8, sizes)
    return lambda x: jnp.sin(run(x)).sum(), draw((7, 32))


@dataclasses.dataclass
class Row:
    """A row of the table: which derivatives its cases have, reverse over reverse, forward over reverse and forward."""

    verdicts: str
    cases: dict[str, Callable[[], tuple]]
    """Functions that return a loss, a point, and for a loss in low precision the one to compare with."""
    error: str = ""
    """What the error of a missing derivative says."""
    tolerance: float = 3e-3


def make_mixers(*names):
    return {name: partial(mix, partial(getattr(layers, name), 8, 2)) for name in names}


ROWS = {
    "attention `grouped`, `reference`": Row(
        "yes yes yes", {f"{name} attention": partial(attend, name) for name in ("grouped", "reference")}
    ),
    "attention `blockwise`": Row(
        "no yes no", {"blockwise": partial(attend, "blockwise")}, "blockwise attention has no"
    ),
    "attention `splash`, `cudnn`": Row(
        "no no no", {"splash": partial(attend, "splash", 128)}, "splash attention has no"
    ),
    "gated linear attention, HGRN2, RWKV-6, retention": Row(
        "yes yes yes", make_mixers("GatedLinearAttention", "HGRN2", "RWKV6", "Retention")
    ),
    "convolutions, Mamba, Mamba-2, delta rules, MesaNet, RG-LRU, RWKV-4, RWKV-7, mLSTM": Row(
        "yes yes no",
        {
            "Mamba": partial(mix, partial(layers.Mamba, 8)),
            "GatedConvolution": partial(mix, partial(layers.GatedConvolution, 8)),
            "RWKV4": partial(mix, partial(layers.RWKV4, 8)),
            **make_mixers("Mamba2", "RGLRU", "DeltaNet", "GatedDeltaNet", "KimiDeltaAttention", "RWKV7", "MLSTM"),
            **make_mixers("GatedDeltaNet2", "Comba", "MesaNet"),
        },
        "has no forward-mode derivative: take two reverse ones",
    ),
    "recurrences `pallas`": Row(
        "no no no",
        {
            f"{name} by a kernel": partial(mix, partial(getattr(layers, name), 8, 2, implementation="pallas"))
            for name in ("GatedDeltaNet", "GatedLinearAttention")
        },
        "has no",
    ),
    "grouped matmul `masked`, `reference`": Row(
        "yes yes yes", {f"{name} matmul": partial(multiply_by_expert, name) for name in ("masked", "reference")}
    ),
    "grouped matmul `padded`": Row(
        "no yes no", {"padded": partial(multiply_by_expert, "padded")}, "the padded grouped matmul has no"
    ),
    "grouped matmul `ragged`": Row(
        "no yes yes", {"ragged": partial(multiply_by_expert, "ragged")}, "ragged dot general"
    ),
    "mixtures of experts after `zoo.twice_differentiable`": Row(
        "yes yes no",
        {"mixture": lambda: score(zoo.twice_differentiable(make_mixture()), implementation="reference")},
        "the dispatch of tokens to experts has no|the sum of a token's experts has no",
    ),
    "`zoo.cross_entropy` `reference`": Row("yes yes yes", {"reference loss": partial(score_transformer, "reference")}),
    "`zoo.cross_entropy` `chunked`": Row(
        "yes yes no", {"chunked": partial(score_transformer, "chunked")}, "chunked cross-entropy has no forward"
    ),
    "products in bfloat16 and float16": Row(
        "yes yes no",
        {
            "Attention in bfloat16": partial(round_to_bfloat16, partial(layers.Attention, 8, 2)),
            "GatedDeltaNet in bfloat16": partial(round_to_bfloat16, partial(layers.GatedDeltaNet, 8, 2)),
        },
        "has no forward-mode derivative",
        tolerance=0.05,
    ),
    "frozen weights of 4 and 8 bits": Row(
        "yes yes no", {"packed": partial(apply_frozen, make_packed)}, "packed matrix has"
    ),
    "experts of 4 and 8 bits": Row("no yes no", {"packed experts": apply_packed_experts}, "packed matrices has no"),
    "products in FP8 and FP4": Row(
        "no no no",
        {"FP8": partial(apply_frozen, lambda linear: FP8Linear(linear, zoo.precision.CurrentScaling()))},
        "a product in the formats of CurrentScaling has no",
    ),
}
QUICK = (
    *("reference attention", "blockwise", "GatedLinearAttention", "GatedConvolution", "masked matmul", "padded"),
    *("chunked", "FP8", "packed"),
)
"""Cases that every run has."""
FURTHER = (
    *("HGRN2", "RWKV6", "RWKV4", "RGLRU", "DeltaNet", "KimiDeltaAttention", "MLSTM"),
    *("GatedLinearAttention by a kernel", "reference matmul"),
)
"""Cases of rows that have others: the weekly tests have them."""


def mark_case(name):
    if name in QUICK:
        return []
    return pytest.mark.slow if name in FURTHER else pytest.mark.ci


CASES = [
    pytest.param(row, make, id=name, marks=mark_case(name)) for row in ROWS.values() for name, make in row.cases.items()
]


def differentiate(mode, loss, point, direction):
    """Return the second derivative along a direction, or in forward mode the first."""
    gradient = jax.grad(loss)
    match mode:
        case "reverse over reverse":
            return inner(jax.grad(lambda x: inner(gradient(x), direction))(point), direction)
        case "forward over reverse":
            return inner(jax.jvp(gradient, (point,), (direction,))[1], direction)
    return jax.jvp(loss, (point,), (direction,))[1]


def differentiate_by_differences(loss, point, direction):
    """Return the first and second derivative along a direction: of gradients, and their differences of order 4."""

    def slope(step):
        return inner(jax.grad(loss)(jax.tree.map(lambda x, d: x + step * d, point, direction)), direction)

    before2, before, at, after, after2 = jax.lax.map(slope, SPAN * jnp.arange(-2.0, 3))
    return at, (8 * (after - before) - (after2 - before2)) / (12 * SPAN)


def check_derivatives(row, loss, point, expected_loss=None):
    # In units of the array: parameters of different size make differences inexact otherwise.
    direction = jax.tree.map(lambda x: draw(x.shape, 9, 0.3) * jnp.sqrt(jnp.square(x).mean()), point)
    has = dict(zip(MODES, row.verdicts.split(), strict=True))
    possible = [mode for mode in MODES if has[mode] == "yes"]

    @jax.jit
    def compute(point, direction):
        found = [differentiate(mode, loss, point, direction) for mode in possible]
        return found, differentiate_by_differences(expected_loss or loss, point, direction)

    found, (first, second) = compute(point, direction)
    for mode, value in zip(possible, found, strict=True):
        expected = first if mode == "forward" else second
        assert abs(value - expected) <= row.tolerance * (abs(first) + abs(second)), (mode, value, expected)
    for mode in set(MODES) - set(possible):
        with pytest.raises((TypeError, NotImplementedError), match=row.error):
            jax.jit(partial(differentiate, mode, loss)).lower(point, direction)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize(("row", "make"), CASES)
def test_each_derivative_is_right_or_raises_by_name(row, make):
    check_derivatives(row, *make())


def test_the_page_has_this_table():
    lines = PAGE.read_text().splitlines()
    start = lines.index("| operation | reverse over reverse | forward over reverse | forward |")
    table = [line.strip("| ").split(" | ") for line in lines[start + 2 : start + 2 + len(ROWS)]]
    assert {name: " ".join(cells) for name, *cells in table} == {name: row.verdicts for name, row in ROWS.items()}
    assert not lines[start + 2 + len(ROWS)]


def test_twice_differentiable_sets_implementations():
    mixers = [partial(layers.GatedDeltaNet, heads=2), partial(layers.Attention, heads=2)]
    make = partial(zoo.models.Hybrid, vocab=16, embed=8, layers=2, mlp=8, pattern=mixers)
    hybrid = eqx.filter_eval_shape(make, key=KEY)
    mixture = eqx.filter_eval_shape(make_mixture)
    models = hybrid, mixture, {"function": zoo.configure(mixture, attention=attention)}
    found = zoo.twice_differentiable(models)
    collect = lambda tree: [
        getattr(node, name)
        for node in jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "implementation"))
        for name in ("implementation",)
        if hasattr(node, name)
    ]
    assert collect(found[:2]) == ["chunked", "grouped", "grouped", "masked"]
    assert collect(found[2]) == [attention, "masked"]
    assert all(a is b for a, b in zip(jax.tree.leaves(models), jax.tree.leaves(found), strict=True))


def test_twice_differentiable_of_quantized_layers():
    mixture = make_mixture()
    packed = zoo.adapters.quantize(mixture, "int8", targets=["up", "down", "gate"])
    assert "masked" not in str(jax.tree.structure(zoo.twice_differentiable(packed)))
    assert "masked" in str(jax.tree.structure(zoo.twice_differentiable(mixture)))
    model = zoo.precision.fp8(make_transformer(), zoo.precision.CurrentScaling())
    with pytest.raises(ValueError, match=r"no second derivative. Give zoo.precision.remove_fp8\(model\)"):
        zoo.twice_differentiable(model)
    zoo.twice_differentiable(zoo.precision.remove_fp8(model))


@pytest.mark.ci
def test_a_hessian_maps_forward_derivatives_of_a_gradient():
    """`jax.hessian` is a vmap of forward over reverse, through the identities that raise in other modes."""
    loss, query = attend("blockwise")
    expected = jax.jit(jax.hessian(attend("reference")[0]))(query)
    assert jnp.allclose(jax.jit(jax.hessian(loss))(query), expected, atol=1e-4)


def multiply_by_hessian(mode, gradient, parameters, vector):
    if mode == "reverse over reverse":
        return jax.grad(lambda p: inner(gradient(p), vector))(parameters)
    return jax.jvp(gradient, (parameters,), (vector,))[1]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("mode", "make", "sizes", "layout"),
    [
        ("forward over reverse", lambda: zoo.twice_differentiable(make_mixture()), {"data": 2, "tensor": 2}, {}),
        ("reverse over reverse", lambda: zoo.twice_differentiable(make_mixture()), {"fsdp": 2, "tensor": 2}, {}),
        ("forward over reverse", make_mixture, {"fsdp": 2, "expert": 2}, {"expert": "boxes"}),
        ("forward over reverse", make_transformer, {"data": 2, "context": 2}, {}),
    ],
)
def test_hessian_vector_products_on_a_mesh(mode, make, sizes, layout):
    model = make()
    mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:4], layout=zoo.Layout(**layout))
    loss, parameters = score(model)
    vector = jax.tree.map(lambda x: draw(x.shape, 9, 0.3), parameters)
    expected = jax.jit(partial(multiply_by_hessian, mode, jax.grad(loss)))(parameters, vector)

    placed, placed_vector = (zoo.place(tree, mesh) for tree in (model, eqx.combine(vector, model)))
    is_parameter = eqx.is_inexact_array
    parameters, rest = eqx.partition(placed, is_parameter)
    compute = zoo.value_and_grad(cross_entropy, mesh)
    gradient = lambda p: eqx.filter(compute(eqx.combine(p, rest), BATCH)[1], is_parameter)
    vector = eqx.filter(placed_vector, is_parameter)
    found = jax.jit(partial(multiply_by_hessian, mode, gradient))(parameters, vector)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(jax.device_get(ours) - jax.device_get(theirs)).max() < 2e-5


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "sizes", "layout", "error"),
    [
        (make_mixture, {"expert": 4}, {"expert": "boxes"}, "the exchange of tokens and experts has no"),
        (make_transformer, {"context": 4}, {}, "ring attention has no"),
    ],
)
def test_loops_over_a_mesh_raise_by_name(make, sizes, layout, error):
    mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:4], layout=zoo.Layout(**layout))
    parameters, rest = eqx.partition(zoo.place(make(), mesh), eqx.is_inexact_array)
    compute = zoo.value_and_grad(cross_entropy, mesh)
    gradient = lambda p: eqx.filter(compute(eqx.combine(p, rest), BATCH)[1], eqx.is_inexact_array)
    with pytest.raises(TypeError, match=error):
        jax.eval_shape(partial(multiply_by_hessian, "reverse over reverse", gradient), parameters, parameters)
