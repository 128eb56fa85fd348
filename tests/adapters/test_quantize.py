"""Adapters of quantized bases: losses and gradients are those of the dequantized base."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from tests.jaxprs import arrays
from tests.quick import mark_slow
from zoo import Layout, adapters
from zoo.layers import Linear
from zoo.layers.quantized.linear import Int8Linear, MXFP4Linear, NF4Linear
from zoo.models.parameter_paths import list_parameter_paths
from zoo.models.targets import find_linears
from zoo.parallel import SEQUENCE

KEY = jax.random.key(0)
SIZES = {"vocab": 16, "embed": 128, "layers": 2, "heads": 2, "mlp": 128, "key": KEY}
MIXTURE = partial(zoo.models.MixtureOfExperts, **SIZES, experts=4, top=2)
MODELS = {
    "transformer": (partial(zoo.models.Transformer, **SIZES), "all-linear", ("query", "value", "down")),
    "mixture": (MIXTURE, r".*\.(query|experts\.\d+\.down)", r".*\.experts\.\d+\.down"),
}
"""Factory, target modules of `quantize`, and target modules of the adapter."""
METHODS = {"lora": partial(adapters.lora, rank=3, alpha=6), "dora": partial(adapters.dora, rank=2)}
CLASSES = {"nf4": NF4Linear, "int8": Int8Linear}
TOKENS = jax.random.randint(KEY, (8, 4), 0, 16)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}


@cache
def wrap(format, method, model="transformer"):
    make, quantized_targets, targets = MODELS[model]

    @eqx.filter_jit
    def wrap():
        quantized = adapters.quantize(make(), format, targets=quantized_targets)
        return perturb(METHODS[method](quantized, targets=targets, key=jax.random.key(1)))

    return wrap()


def value_and_grad(trainable, model):
    def mean(trainable):
        total, count = zoo.cross_entropy(eqx.combine(trainable, model), BATCH)
        return total / count

    return jax.value_and_grad(mean)(trainable)


def find_classes(model, classes=(Linear, NF4Linear, Int8Linear, MXFP4Linear)):
    """Map each module path to the classes of the linear layers there, beneath adapters too."""
    is_linear = lambda node: isinstance(node, classes)
    return {
        site.name: {type(x) for x in jax.tree.leaves(site.module, is_leaf=is_linear) if is_linear(x)}
        for site in find_linears(model)
    }


@pytest.mark.ci
@pytest.mark.parametrize(
    ("format", "method", "model", "layouts"),
    [
        ("nf4", "lora", "transformer", (None,)),
        pytest.param("nf4", "lora", "transformer", (None, SEQUENCE), marks=pytest.mark.slow),
        pytest.param("nf4", "dora", "mixture", (), marks=pytest.mark.slow),
        pytest.param("int8", "dora", "transformer", (), marks=pytest.mark.slow),
        pytest.param("int8", "lora", "mixture", (None,), marks=pytest.mark.slow),
    ],
)
def test_quantized_base_gradients_match_dequantized_base(format, method, model, layouts):
    """Also on meshes of these layouts, the last of which shards tokens over context and tensor."""
    adapted = wrap(format, method, model)
    dequantized = adapters.dequantize(adapted)
    assert any(CLASSES[format] in classes for classes in find_classes(adapted).values())
    assert all(classes == {Linear} for classes in find_classes(dequantized).values())

    trainable = zoo.trainable(adapted)
    assert all(f".{method}." in path.name for path in list_parameter_paths(trainable))
    loss, gradients = jax.jit(value_and_grad)(trainable, adapted)
    assert jax.tree.structure(gradients) == jax.tree.structure(trainable)
    references = [jax.jit(value_and_grad)(zoo.trainable(dequantized), dequantized)]
    for layout in layouts:
        sizes = {"data": 2} if layout is None else {"data": 1, "context": 2}
        mesh = zoo.make_mesh(**sizes, fsdp=2, tensor=2, layout=layout)
        references += [
            zoo.value_and_grad(zoo.cross_entropy, mesh)(zoo.place(adapted, mesh), zoo.place_batch(BATCH, mesh))
        ]
    for other_loss, others in references:
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
            np.testing.assert_allclose(y, x, atol=5e-5 * max(1e-3, float(jnp.abs(x).max())))


def test_quantize_excludes_layers_in_full_precision():
    shapes = eqx.filter_eval_shape(MIXTURE)
    for targets, is_quantized in (("all-linear", False), (("all-linear", "scores"), True)):
        classes = find_classes(eqx.filter_eval_shape(partial(adapters.quantize, targets=targets), shapes))
        assert classes.pop("layers.*.mixture_of_experts.router.scores") == {NF4Linear if is_quantized else Linear}
        assert len(classes) == 7 and all(found == {NF4Linear} for found in classes.values())


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_quantize_on_a_mesh_keeps_the_sharding(rounds):
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2, layout=Layout(rounds=rounds))
    make, *_ = MODELS["transformer"]
    model = eqx.filter_jit(make)()
    for format in CLASSES:
        expected = zoo.place(adapters.quantize(model, format), mesh)
        quantized = adapters.quantize(zoo.place(model, mesh), format)
        assert jax.tree.structure(quantized) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(quantized), jax.tree.leaves(expected), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
            np.testing.assert_array_equal(x, y)


def test_step_of_quantized_base_holds_no_dequantized_copy():
    """No floating-point array, forward or backward, is as large as one weight of all stacked layers."""
    adapted = wrap("nf4", "lora")
    largest = {}
    for name, model in (("packed", adapted), ("dequantized", adapters.dequantize(adapted))):
        program = jax.make_jaxpr(value_and_grad)(zoo.trainable(model), model)
        shapes = [*arrays(program), *program.in_avals]
        largest[name] = max(x.size for x in shapes if jnp.issubdtype(x.dtype, jnp.floating))
    assert largest["packed"] < 2 * 128 * 128 <= largest["dequantized"]


@pytest.mark.one_case
@pytest.mark.parametrize("format", CLASSES)
def test_merge_into_quantized_base_decodes_or_rounds(format):
    adapted = wrap(format, "lora")
    with pytest.raises(ValueError, match=r"into layers\.\*\.attention\.query, .*\.down, .*'decode'.*'round'"):
        adapters.merge(adapted)

    loras = {site.name: site.module for site in find_linears(adapted) if isinstance(site.module, adapters.LoRA)}
    exact = {name: jax.vmap(lambda lora: lora.dense_weight)(lora) for name, lora in loras.items()}
    for option, expected_class in (("decode", Linear), ("round", CLASSES[format])):
        merged = adapters.merge(adapted, quantized=option)
        kept = adapters.merge(adapted, keep=True, quantized=option)
        assert eqx.tree_equal(adapters.unmerge(kept), adapted)
        for (name, _, module), (_, _, kept_module) in zip(find_linears(merged), find_linears(kept), strict=True):
            if name not in exact:
                assert type(module) is CLASSES[format], "it has no adapter"
                continue
            assert type(module) is expected_class and eqx.tree_equal(module, kept_module.base)
            weight = jax.vmap(lambda module: module.dense_weight)(module)
            if option == "decode":
                np.testing.assert_array_equal(weight, exact[name])
                continue
            largest = jnp.abs(exact[name]).max(-1, keepdims=True)
            bound = largest / 254 if format == "int8" else 0.152 * blockwise_max(exact[name]) + largest / 510
            errors = jnp.abs(weight - exact[name])
            assert (errors <= bound * (1 + 1e-5)).all() and errors.max() > 0


def blockwise_max(matrix):
    """The largest magnitude in the block of each element."""
    blocks = jnp.abs(matrix).reshape(*matrix.shape[:-1], -1, 64)
    return jnp.broadcast_to(blocks.max(-1, keepdims=True), blocks.shape).reshape(matrix.shape)


@pytest.mark.ci
@pytest.mark.parametrize("method", mark_slow(METHODS, but=["dora"]))
def test_quantize_beneath_adapters(method):
    """The base is quantized, the adapters do not change, and a DoRA stores the row norms of its new base."""
    make, _, targets = MODELS["transformer"]
    adapted = METHODS[method](eqx.filter_jit(make)(), targets=targets, key=jax.random.key(1))
    adapted = perturb(adapters.ia3(adapted, targets="value", inputs=None))
    quantized = adapters.quantize(adapted, "int8", targets=targets)
    trainable = jax.tree.leaves(zoo.trainable(quantized)), jax.tree.leaves(zoo.trainable(adapted))
    assert all(np.array_equal(x, y) for x, y in zip(*trainable, strict=True))
    classes = find_classes(quantized)
    assert {name for name, found in classes.items() if Int8Linear in found} == {
        *("layers.*.attention.query", "layers.*.attention.value", "layers.*.gated_mlp.down")
    }
    run = jax.jit(lambda model: model(TOKENS))
    expected = run(adapters.merge(quantized, quantized="decode"))
    np.testing.assert_allclose(run(quantized), expected, atol=2e-5 * float(jnp.abs(expected).max()))
    assert 0 < jnp.abs(run(adapted) - expected).max() < 0.2 * jnp.abs(expected).max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "querry"}, "'querry'. Is it query"),
        ({"targets": r"layers\.1\..*\.query"}, r"layers\.\*\.attention\.query: targets mean 1 of the 2"),
        (
            {},
            r"to nf4:\n  layers\.\*\.attention\.out: NF4 packs .* 128, 32 to each of heads, are not whole blocks: take "
            r"int8.*\n  layers\.\*\.gated_mlp\.down: .* 96 are no",
        ),
    ],
)
def test_quantize_lists_all_errors_before_computing(options, message):
    model = eqx.filter_eval_shape(partial(zoo.models.Transformer, **SIZES | {"heads": 4, "mlp": 96}))
    with pytest.raises(ValueError, match=message):
        adapters.quantize(model, **options)


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("int5", {}, "matrices are quantized to nf4 or .* or int2, not 'int5'"),
        ("int4", {"group_size": 12}, "group_size=12: expected a multiple of 8, the codes of a word"),
        ("int4", {"group_size": 64}, r"down: int4 has groups of 64 inputs, and 72 are not whole groups"),
        ("nvfp4", {}, r"down: nvfp4 has groups of 16 inputs, and 72 are not whole groups"),
    ],
)
def test_quantize_refuses_sizes_of_groups(format, options, message):
    model = eqx.filter_eval_shape(partial(zoo.models.Transformer, **SIZES | {"heads": 16, "mlp": 72}))
    with pytest.raises(ValueError, match=message):
        adapters.quantize(model, format, **options)


def test_quantize_refuses_quantized_layers():
    model = MXFP4Linear(128, 8, key=KEY), Linear(128, 8, key=KEY)
    with pytest.raises(ValueError, match="0: it is MXFP4Linear, and no Linear"):
        adapters.quantize(model)
    once = adapters.quantize(model, targets="1")
    with pytest.raises(ValueError, match="1: it is NF4Linear"):
        adapters.quantize(once, "int8", targets="1")
    assert [type(x) for x in adapters.dequantize(once)] == [MXFP4Linear, Linear]


def test_lora_init_from_a_quantized_base_raises():
    model = adapters.quantize((Linear(64, 8, key=KEY),), "nf4")
    for init in ("pissa", "olora"):
        with pytest.raises(NotImplementedError, match="NF4 is rounded.*'pissa' or 'olora'"):
            adapters.lora(model, targets="0", rank=2, init=init, key=KEY)


@pytest.mark.slow  # recipes/test_lora.py saves and loads such an adapter
def test_peft_files_of_a_quantized_base_match_dequantized(tmp_path):
    """The files are equal, and load onto either base."""
    adapted = wrap("nf4", "dora")
    dequantized = adapters.dequantize(adapted)
    for name, model in (("quantized", adapted), ("dequantized", dequantized)):
        adapters.save(model, tmp_path / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "quantized" / file).read_bytes() == (tmp_path / "dequantized" / file).read_bytes()
    loaded = adapters.load(adapters.remove(adapted), tmp_path / "dequantized", adapter_name="dora")
    assert eqx.tree_equal(zoo.trainable(loaded), zoo.trainable(adapted))
