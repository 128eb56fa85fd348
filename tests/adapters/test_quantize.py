"""Adapters around bases in int8 and NF4: what is learnt is what would be learnt around the same numbers decoded."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.jaxprs import arrays
from zoo import adapters
from zoo.layers import Int8Linear, Linear, MXFP4Linear, NF4Linear
from zoo.models.parameter_paths import list_parameter_paths

KEY = jax.random.key(0)
SIZES = {"vocab": 16, "embed": 128, "layers": 2, "heads": 2, "mlp": 128, "key": KEY}
MIXTURE = partial(zoo.models.MixtureOfExperts, **SIZES, experts=4, top=2)
MODELS = {
    "transformer": (partial(zoo.models.Transformer, **SIZES), "all-linear", ("query", "value", "down")),
    "mixture": (MIXTURE, r".*\.(query|experts\.\d+\.down)", r".*\.experts\.\d+\.down"),
}
"""What makes it, what is quantized of it, and what has adapters."""
METHODS = {"lora": partial(adapters.lora, rank=3, alpha=6), "dora": partial(adapters.dora, rank=2)}
CLASSES = {"nf4": NF4Linear, "int8": Int8Linear}
TOKENS = jax.random.randint(KEY, (8, 4), 0, 16)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}


def learnt_a_little(model):
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)
    return eqx.combine(jax.tree.map(noise, zoo.trainable(model)), model)


def wrap(kind, method, model="transformer"):
    make, rounded, targets = MODELS[model]
    quantized = adapters.quantize(eqx.filter_jit(make)(), kind, targets=rounded)
    return learnt_a_little(METHODS[method](quantized, targets=targets, key=jax.random.key(1)))


def value_and_grad(tuned, model):
    def mean(tuned):
        total, count = zoo.cross_entropy(eqx.combine(tuned, model), BATCH)
        return total / count

    return jax.value_and_grad(mean)(tuned)


def forms(model, kinds=(Linear, NF4Linear, Int8Linear, MXFP4Linear)):
    """Name -> class of every matrix under its adapters."""
    is_one = lambda node: isinstance(node, kinds)
    found = adapters.find_linears(model)
    return {one.name: {type(x) for x in jax.tree.leaves(one.module, is_leaf=is_one) if is_one(x)} for one in found}


@pytest.mark.parametrize(
    ("kind", "method", "model", "on_a_mesh"),
    [
        ("nf4", "lora", "transformer", True),
        ("nf4", "dora", "mixture", False),
        ("int8", "dora", "transformer", False),
        ("int8", "lora", "mixture", True),
    ],
)
def test_learnt_as_around_what_it_stands_for(kind, method, model, on_a_mesh):
    tuned = wrap(kind, method, model)
    decoded = adapters.dequantize(tuned)
    assert any(CLASSES[kind] in classes for classes in forms(tuned).values())
    assert all(classes == {Linear} for classes in forms(decoded).values())

    learnt = zoo.trainable(tuned)
    assert all(f".{method}." in place.name for place in list_parameter_paths(learnt))
    loss, gradients = jax.jit(value_and_grad)(learnt, tuned)
    assert jax.tree.structure(gradients) == jax.tree.structure(learnt)
    same = [jax.jit(value_and_grad)(zoo.trainable(decoded), decoded)]
    if on_a_mesh:
        mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
        same += [zoo.value_and_grad(zoo.cross_entropy, mesh)(zoo.place(tuned, mesh), zoo.place_batch(BATCH, mesh))]
    for other_loss, others in same:
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        for ours, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
            np.testing.assert_allclose(other, ours, atol=5e-5 * max(1e-3, float(jnp.abs(ours).max())))


def test_all_but_what_keeps_full_precision():
    shapes = eqx.filter_eval_shape(MIXTURE)
    for targets, rounded in (("all-linear", False), (("all-linear", "scores"), True)):
        classes = forms(eqx.filter_eval_shape(partial(adapters.quantize, targets=targets), shapes))
        assert classes.pop("layers.*.mixture_of_experts.router.scores") == {NF4Linear if rounded else Linear}
        assert len(classes) == 7 and all(own == {NF4Linear} for own in classes.values())


def test_a_model_that_lies_on_a_mesh_stays_there():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    make, *_ = MODELS["transformer"]
    model = eqx.filter_jit(make)()
    for kind in CLASSES:
        expected = zoo.place(adapters.quantize(model, kind), mesh)
        found = adapters.quantize(zoo.place(model, mesh), kind)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
            np.testing.assert_array_equal(ours, theirs)


def test_no_step_holds_a_decoded_copy():
    """Neither forward nor backward is there a floating array as large as one matrix in all its layers."""
    tuned = wrap("nf4", "lora")
    largest = {}
    for name, model in (("packed", tuned), ("decoded", adapters.dequantize(tuned))):
        program = jax.make_jaxpr(value_and_grad)(zoo.trainable(model), model)
        held = [*arrays(program), *program.in_avals]
        largest[name] = max(x.size for x in held if jnp.issubdtype(x.dtype, jnp.floating))
    assert largest["packed"] < 2 * 128 * 128 <= largest["decoded"]


@pytest.mark.parametrize("kind", CLASSES)
def test_merged_as_is_asked(kind):
    tuned = wrap(kind, "lora")
    with pytest.raises(ValueError, match=r"into layers\.\*\.attention\.query, .*\.down, .*'decode'.*'round'"):
        adapters.merge(tuned)

    sums = {one.name: one.module for one in adapters.find_linears(tuned) if isinstance(one.module, adapters.LoRA)}
    exact = {name: jax.vmap(lambda lora: lora.dense_weight)(lora) for name, lora in sums.items()}
    for how, form in (("decode", Linear), ("round", CLASSES[kind])):
        plain = adapters.merge(tuned, quantized=how)
        kept = adapters.merge(tuned, keep=True, quantized=how)
        assert eqx.tree_equal(adapters.unmerge(kept), tuned)
        for (name, _, module), (_, _, beside) in zip(
            adapters.find_linears(plain), adapters.find_linears(kept), strict=True
        ):
            if name not in exact:
                assert type(module) is CLASSES[kind], "no adapter was there"
                continue
            assert type(module) is form and eqx.tree_equal(module, beside.base)
            found = jax.vmap(lambda module: module.dense_weight)(module)
            if how == "decode":
                np.testing.assert_array_equal(found, exact[name])
                continue
            largest = jnp.abs(exact[name]).max(-1, keepdims=True)
            bound = largest / 254 if kind == "int8" else 0.152 * blockwise(exact[name]) + largest / 510
            off = jnp.abs(found - exact[name])
            assert (off <= bound * (1 + 1e-5)).all() and off.max() > 0


def blockwise(matrix):
    """The largest magnitude of the block that each number is in."""
    blocks = jnp.abs(matrix).reshape(*matrix.shape[:-1], -1, 64)
    return jnp.broadcast_to(blocks.max(-1, keepdims=True), blocks.shape).reshape(matrix.shape)


@pytest.mark.parametrize("method", METHODS)
def test_beneath_adapters(method):
    """The base is rounded, the adapters stay, and a DoRA's lengths are those of what it now stands around."""
    make, _, targets = MODELS["transformer"]
    around = METHODS[method](eqx.filter_jit(make)(), targets=targets, key=jax.random.key(1))
    around = learnt_a_little(adapters.ia3(around, targets="value", inputs=None))
    found = adapters.quantize(around, "int8", targets=targets)
    learnt = jax.tree.leaves(zoo.trainable(found)), jax.tree.leaves(zoo.trainable(around))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(*learnt, strict=True))
    classes = forms(found)
    assert {name for name, own in classes.items() if Int8Linear in own} == {
        *("layers.*.attention.query", "layers.*.attention.value", "layers.*.gated_mlp.down")
    }
    run = jax.jit(lambda model: model(TOKENS))
    expected = run(adapters.merge(found, quantized="decode"))
    np.testing.assert_allclose(run(found), expected, atol=2e-5 * float(jnp.abs(expected).max()))
    assert 0 < jnp.abs(run(around) - expected).max() < 0.2 * jnp.abs(expected).max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "querry"}, "'querry'. Is it query"),
        ({"targets": r"layers\.1\..*\.query"}, r"layers\.\*\.attention\.query: targets mean 1 of the 2"),
        (
            {},
            r"to nf4:\n  layers\.\*\.attention\.out: NF4 packs .* 128, 32 to each of heads, are no whole blocks: take "
            r"int8.*\n  layers\.\*\.gated_mlp\.down: .* 96 are no",
        ),
    ],
)
def test_what_cannot_be_quantized_is_told_before_anything_is(options, message):
    model = eqx.filter_eval_shape(partial(zoo.models.Transformer, **SIZES | {"heads": 4, "mlp": 96}))
    with pytest.raises(ValueError, match=message):
        adapters.quantize(model, **options)


def test_once_is_enough():
    model = MXFP4Linear(128, 8, key=KEY), Linear(128, 8, key=KEY)
    with pytest.raises(ValueError, match="0: it is a PackedLinear, and no Linear"):
        adapters.quantize(model)
    once = adapters.quantize(model, targets="1")
    with pytest.raises(ValueError, match="1: it is a NF4Linear"):
        adapters.quantize(once, "int8", targets="1")
    assert [type(x) for x in adapters.dequantize(once)] == [MXFP4Linear, Linear]


def test_a_part_of_what_is_rounded_is_not_given_up():
    model = adapters.quantize((Linear(64, 8, key=KEY),), "nf4")
    for start in ("pissa", "olora"):
        with pytest.raises(NotImplementedError, match="NF4 is rounded.*'pissa' or 'olora'"):
            adapters.lora(model, targets="0", rank=2, init=start, key=KEY)


def test_peft_files_of_what_was_learnt_around_it(tmp_path):
    """They are those of the same adapter around plain matrices, and are read around either."""
    tuned = wrap("nf4", "dora")
    decoded = adapters.dequantize(tuned)
    for name, model in (("ours", tuned), ("plain", decoded)):
        adapters.save(model, tmp_path / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    again = adapters.load(adapters.remove(tuned), tmp_path / "plain", adapter_name="dora")
    assert eqx.tree_equal(zoo.trainable(again), zoo.trainable(tuned))
