"""Captured values equal what the model computes, for every loop and mesh; edits do what they say, and nothing else."""

import dataclasses
import itertools
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import TokenInfo
from zoo.models import Hidden
from zoo.models.targets import find_linears
from zoo.parallel import SEQUENCE
from zoo.parallel.activation import Activation

KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(1), (8, 8), 0, 32)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}
NAMES = (
    *("layers.*", "layers.2", "layers.*.attention.out", "layers.1.attention.queries", "layers.*.attention.keys"),
    *("layers.*.gated_mlp.down.input", "layers.*.ffn_norm.input", "norm"),
)
PROBABILITIES = ("layers.*.attention.probabilities", "layers.1.attention.probabilities")


def make(**options):
    options = {"layers": 4, "heads": 4, "kv_heads": 2, "mlp": 24, **options}
    return zoo.models.Transformer(vocab=32, embed=16, **options, key=KEY)


def forward(model, tokens):
    return model(tokens)


def jit_and_run(function, tokens=TOKENS):
    """Compile and run a function of tokens: operation by operation, captured layers take ten times as long."""
    return eqx.filter_jit(function)(tokens)


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def expected(model):
    """Logits and all values by the plain loop."""
    plain = zoo.configure(model, loop="plain")
    return eqx.filter_jit(zoo.capture(plain, *NAMES, *PROBABILITIES))(TOKENS)


LOOPS = [("scan", "none"), ("scan", "full"), (2, "dots"), ("plain", "full")]


@pytest.mark.parametrize(("loop", "remat"), LOOPS)
def test_values_are_those_of_the_plain_loop(model, expected, loop, remat):
    other = zoo.configure(model, loop=loop, remat=remat)
    logits, seen = eqx.filter_jit(zoo.capture(other, *NAMES, *PROBABILITIES))(TOKENS)
    np.testing.assert_allclose(logits, expected[0], atol=2e-6)
    assert set(seen) == {*NAMES, *PROBABILITIES}
    for name, value in seen.items():
        np.testing.assert_allclose(value, expected[1][name], atol=2e-6, err_msg=name)


def test_probabilities_are_the_softmax_of_queries_and_keys(expected):
    _, seen = expected
    query, key = seen["layers.1.attention.queries"], jnp.repeat(seen["layers.*.attention.keys"][1], 2, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2
    wanted = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -jnp.inf))
    np.testing.assert_allclose(seen["layers.1.attention.probabilities"], wanted, atol=2e-6)
    np.testing.assert_array_equal(seen["layers.*.attention.probabilities"][1], seen[PROBABILITIES[1]])


MODELS = {
    "transformer": make,
    "local and global": partial(make, layers=5, windows=(4, 4, None, 4, 4)),
    "mixture": lambda: zoo.models.MixtureOfExperts(
        vocab=32, embed=16, layers=3, heads=2, mlp=24, experts=4, top=2, key=KEY
    ),
    "mamba": lambda: zoo.models.Mamba(vocab=32, embed=16, layers=2, key=KEY),
    "hybrid": lambda: zoo.models.Griffin(vocab=32, embed=16, layers=3, heads=2, mlp=24, window=4, key=KEY),
    "encoder": lambda: zoo.models.ModernBERT(vocab=32, embed=16, layers=3, heads=2, mlp=24, key=KEY),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("transformer", "mixture") else pytest.param(name, marks=pytest.mark.ci) for name in MODELS],
)
def test_layers_are_the_hidden_states(name):
    model = MODELS[name]()
    states = zoo.hidden_states(model, TOKENS)
    _, seen = eqx.filter_jit(zoo.capture(model, "layers.*", "layers.*.input", "norm"))(TOKENS)
    np.testing.assert_allclose(seen["norm"], states[-1], atol=2e-5)
    inputs = [*seen["layers.*.input"], seen["layers.*"][-1]]
    for own, (before, after) in enumerate(itertools.pairwise(inputs)):
        np.testing.assert_array_equal(seen["layers.*"][own], after)
        assert jnp.abs(before - after).max() > 1e-3
    # hidden_states of Mamba begin with the first output, others with the embedding
    skipped = int(model.hidden_states_skip_embedding)
    for value, state in zip(inputs[skipped:-1], states, strict=False):
        np.testing.assert_allclose(value, state, atol=2e-5)


@pytest.mark.ci
def test_names_are_all_captured(model):
    names = zoo.capture_names(model, TOKENS)
    _, seen = jit_and_run(zoo.capture(model, *names))
    assert {name: value.shape for name, value in seen.items()} == {name: value.shape for name, value in names.items()}
    attention = "layers.*.attention"
    assert names[attention].array_dims == ("layers", "batch", "tokens", "embed")
    assert names[f"{attention}.keys"].array_dims == ("layers", "batch", "seq", "kv_heads", "head_dim")
    assert names[f"{attention}.probabilities"].shape == (4, 8, 4, 8, 8)
    paths = {path.name.rpartition(".")[0] for path in zoo.models.list_parameter_paths(model)}
    assert paths <= set(names)


FAMILIES = ("gptj", "gemma2", "zamba2", "gemma4_text", "rwkv", "mimo_v2_flash")


@pytest.mark.parametrize("name", [*FAMILIES[:2], *(pytest.param(name, marks=pytest.mark.ci) for name in FAMILIES[2:])])
def test_linear_layers_of_families_have_names(name):
    model = zoo.load(Path(__file__).parents[1] / "fixtures" / "models" / name)
    names = set(zoo.capture_names(model, jnp.arange(8)[None]))
    for site in find_linears(model):
        # experts compute rows of all tokens, sorted; of a shared layer the names are those of its callers
        if site.name != "head" and not site.name.startswith("shared") and ".experts." not in site.name:
            assert site.name in names or names.issuperset(site.list_names().values()), site.name


def test_layers_of_several_shapes_are_asked_for_by_number():
    model = zoo.load(Path(__file__).parents[1] / "fixtures" / "models" / "mimo_v2_flash")
    name = "layers.*.value_scaled_attention.key"
    with pytest.raises(ValueError, match="no array stacks them: ask for layers by their numbers"):
        trace(zoo.capture(model, name))
    first = name.replace("*", "0")
    assert trace(zoo.capture(model, first))[1][first].shape == zoo.capture_names(model, TOKENS)[first].shape


def test_a_star_stacks_the_layers_that_have_the_value():
    model = MODELS["hybrid"]()
    names = zoo.capture_names(model, TOKENS)
    (attention,) = [name for name in names if name.endswith("attention")]
    assert names[attention].shape[0] == 1 and names["layers.*"].shape[0] == 3
    capture = eqx.filter_jit(zoo.capture(forward, attention, attention.replace("*", "2")))
    logits, seen = capture(model, TOKENS)
    np.testing.assert_array_equal(seen[attention][0], seen[attention.replace("*", "2")])
    patched = zoo.patch(model, {attention: seen[attention]})
    np.testing.assert_array_equal(capture(patched, TOKENS)[0], logits)
    with pytest.raises(ValueError, match=r"a row for each of the layers 2, .* has the shape \[3, 8, 8, 16\]"):
        trace(zoo.patch(model, {attention: jnp.zeros((3, 8, 8, 16))}))


@pytest.mark.parametrize("loop", ["scan", "plain"])
def test_a_row_of_an_edit_is_of_the_layer_at_its_place(loop):
    """Of the layers that have the value, here 1 and 3."""
    pattern = [partial(zoo.layers.GatedConvolution, conv_width=2), partial(zoo.layers.Attention, heads=2)]
    model = zoo.models.Hybrid(vocab=32, embed=16, layers=4, pattern=pattern, mlp=16, key=KEY)
    model = zoo.configure(model, loop=loop)
    rows = jax.random.normal(jax.random.key(5), (2, 16))
    name = "layers.*.attention.out"
    names = (name, f"{name}.input")
    _, seen = eqx.filter_jit(zoo.capture(zoo.patch(model, {name: (jnp.add, rows)}), *names))(TOKENS)
    for place, layer in enumerate((1, 3)):
        block = list(model.stack.iter_blocks())[layer]
        expected = block.mixer.out(seen[f"{name}.input"][place]) + rows[place]
        np.testing.assert_allclose(seen[name][place], expected, atol=2e-6)


@pytest.mark.ci
def test_patterns_name_several_fields(model):
    seen = trace(zoo.capture(model, "layers.*.*_norm", "layers.0.gated_mlp.*"))[1]
    mlp = {f"layers.0.gated_mlp.{name}" for name in ("input", "gate", "up", "down")}
    assert set(seen) == {"layers.*.mixer_norm", "layers.*.ffn_norm", *mlp}


@pytest.mark.parametrize("loop", ["scan", "plain"])
def test_replacing_values_by_themselves_changes_no_bit(model, loop):
    model = zoo.configure(model, loop=loop)
    run = eqx.filter_jit(forward)
    # of the same program: to read a value may change what XLA fuses, and so a rounding
    capture = eqx.filter_jit(zoo.capture(forward, *NAMES))
    logits, seen = capture(model, TOKENS)
    for names in (NAMES, ("layers.2",)):
        patched = zoo.patch(model, {name: seen[name] for name in names})
        np.testing.assert_array_equal(capture(patched, TOKENS)[0], logits)
        np.testing.assert_allclose(run(patched, TOKENS), logits, atol=2e-6)
    np.testing.assert_array_equal(run(zoo.unpatch(patched), TOKENS), run(model, TOKENS))


def test_edits_change_the_layers_after_them(model, expected):
    vector = jax.random.normal(jax.random.key(5), (16,))
    names = ("layers.*.input", "layers.*")
    for loop in ("scan", "plain"):
        steered = zoo.patch(zoo.configure(model, loop=loop), {"layers.1": (jnp.add, vector)})
        _, seen = eqx.filter_jit(zoo.capture(steered, *names))(TOKENS)
        _, before = eqx.filter_jit(zoo.capture(zoo.configure(model, loop=loop), *names))(TOKENS)
        np.testing.assert_allclose(seen["layers.*"][1], before["layers.*"][1] + vector, atol=2e-6)
        np.testing.assert_allclose(seen["layers.*"][0], before["layers.*"][0], atol=2e-6)
        assert jnp.abs(seen["layers.*"][2] - before["layers.*"][2]).max() > 0.1


@pytest.mark.ci
def test_an_ablated_head_gives_nothing(model):
    name = "layers.1.attention"
    ablated = zoo.patch(model, {f"{name}.probabilities": lambda p: p.at[:, 2].set(0)})
    _, seen = jit_and_run(
        zoo.capture(ablated, f"{name}.out.input", f"{name}.probabilities", "layers.0.attention.out.input")
    )
    heads = seen[f"{name}.out.input"].reshape(8, 8, 4, 4)
    assert (heads[:, :, 2] == 0).all() and (heads[:, :, [0, 1, 3]] != 0).all()
    assert (seen[f"{name}.probabilities"][:, 2] == 0).all()
    assert (seen["layers.0.attention.out.input"] != 0).all()


def test_edits_are_made_in_order_and_keep_the_dtype(model):
    edited = zoo.patch(model, {"embedding": lambda x: x + 1})
    edited = zoo.patch(edited, {"embedding": lambda x: (2 * x).astype(jnp.float16)})
    _, seen = jit_and_run(zoo.capture(edited, "embedding", "layers.0.input"))
    np.testing.assert_allclose(seen["embedding"], 2 * (model.embedding(TOKENS) + 1), atol=2e-3)
    assert seen["layers.0.input"].dtype == jnp.float32


def test_an_edited_model_generates_what_it_predicts(model):
    vector = 4 * jax.random.normal(jax.random.key(5), (16,))
    steered = zoo.patch(model, {"layers.2": (jnp.add, vector), "layers.*.attention.keys": lambda k: 0.5 * k})
    new = zoo.generate(steered, TOKENS[:2], max_new_tokens=6)
    text = jnp.concatenate([TOKENS[:2], new], axis=1)
    np.testing.assert_array_equal(jit_and_run(steered, text)[:, 7:-1].argmax(-1), new)
    assert (zoo.generate(model, TOKENS[:2], max_new_tokens=6) != new).any()


def test_without_names_the_program_is_unchanged(model):
    lower = lambda function: eqx.filter_jit(function).lower(model, TOKENS).as_text()
    plain = lower(lambda model, tokens: model(tokens))
    assert lower(lambda model, tokens: zoo.capture(model)(tokens)[0]) == plain
    assert lower(lambda model, tokens: zoo.unpatch(zoo.patch(model, {"norm": jnp.abs}))(tokens)) == plain
    assert lower(lambda model, tokens: zoo.capture(model, "norm")(tokens)[0]) == plain


@pytest.mark.ci
def test_a_captured_layer_adds_one_activation():
    model = make(layers=12, loop="plain")
    sizes = []
    for names in ((), ("layers.2",), ("layers.*",)):
        compiled = eqx.filter_jit(lambda model, names=names: zoo.capture(model, *names)(TOKENS)).lower(model).compile()
        memory = compiled.compiled.memory_analysis()
        sizes.append((memory.output_size_in_bytes, memory.temp_size_in_bytes))
    one = 8 * 8 * 16 * 4
    assert sizes[1][0] - sizes[0][0] < 1.1 * one  # with the pointers of a tuple
    assert sizes[1][1] - sizes[0][1] < 1.1 * one
    assert sizes[2][0] - sizes[0][0] > 11.9 * one


def loss_fn(model, batch):
    return zoo.cross_entropy(model, batch)


@pytest.fixture(scope="module")
def gradients(model):
    return eqx.filter_jit(zoo.capture_gradients(loss_fn, *NAMES))(model, BATCH)


def test_gradients_are_those_of_the_layers_that_follow(model, gradients):
    loss, seen, found = gradients
    blocks = list(model.stack.iter_blocks())

    @partial(jax.jit, static_argnums=1)
    @partial(jax.value_and_grad, argnums=0)
    def differentiate(x, first):
        hidden = Hidden(x)
        for block in blocks[first:]:
            hidden, _ = block(hidden, TokenInfo())
        logits = model.logits(model.norm(hidden.x))
        return zoo.models.token_losses(logits, BATCH["targets"]).mean()

    for layer, (x, gradient) in enumerate(zip(seen["layers.*"], found["layers.*"], strict=True)):
        value, wanted = differentiate(x, layer + 1)
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        np.testing.assert_allclose(gradient, wanted, atol=2e-6 * jnp.abs(wanted).max())
    np.testing.assert_allclose(found["layers.2"], found["layers.*"][2], atol=1e-8)


def test_gradients_of_probabilities_through_scan_and_remat(model):
    results = []
    for loop, remat in (("plain", "none"), ("scan", "full")):
        other = zoo.configure(model, loop=loop, remat=remat)
        results.append(eqx.filter_jit(zoo.capture_gradients(loss_fn, *PROBABILITIES))(other, BATCH)[2])
    for name in PROBABILITIES:
        np.testing.assert_allclose(results[0][name], results[1][name], atol=1e-7)
        assert jnp.abs(results[0][name]).max() > 1e-4


MESHES = {
    "fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "context": {"data": 2, "context": 2, "tensor": 2},
    "sequence": {"fsdp": 4, "tensor": 2, "layout": SEQUENCE},
    "few KV heads": {"data": 2, "tensor": 4},
    "data": {"data": 8},
}


@pytest.mark.parametrize(
    "name",
    [
        "fsdp x tensor",
        pytest.param("context", marks=pytest.mark.ci),
        *(pytest.param(name, marks=pytest.mark.slow) for name in list(MESHES)[2:]),
    ],
)
def test_a_mesh_changes_no_value(model, expected, gradients, name):
    mesh = zoo.make_mesh(**MESHES[name])
    placed = zoo.place(model, mesh)
    batch = zoo.place_batch(BATCH, mesh)
    plain = zoo.value_and_grad(loss_fn, mesh)(placed, batch)
    capture = zoo.value_and_grad(zoo.capture(loss_fn, *NAMES), mesh, has_aux=True)
    (loss, seen), grads = capture(placed, batch)
    assert float(loss) == float(plain[0])
    for own, other in zip(jax.tree.leaves(grads), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_array_equal(own, other)
    for key, value in seen.items():
        assert isinstance(value, Activation)
        np.testing.assert_allclose(np.asarray(value), expected[1][key], atol=5e-6, err_msg=key)
        assert value.array.sharding.spec == mesh.spec([*map(zoo.parallel.Dim, value.array_dims)], value.shape)
    _, _, found = zoo.capture_gradients(loss_fn, *NAMES, mesh=mesh)(placed, batch)
    for key, value in found.items():
        limit = 2e-6 * max(1, float(jnp.abs(gradients[2][key]).max()))
        np.testing.assert_allclose(np.asarray(value), gradients[2][key], atol=limit, err_msg=key)
    patched = zoo.place(zoo.patch(placed, seen), mesh)
    (again, _), grads = capture(patched, batch)
    assert float(again) == float(loss)


def test_gradients_of_a_sharded_sequence_are_means_over_tokens(model, gradients):
    mesh = zoo.make_mesh(data=1, context=2, devices=jax.devices()[:2])
    names = ("layers.*", "norm")
    run = zoo.capture_gradients(loss_fn, *names, mesh=mesh)
    loss, _, found = run(zoo.place(model, mesh), zoo.place_batch(BATCH, mesh))
    np.testing.assert_allclose(loss, gradients[0], rtol=1e-6)
    for name in names:
        np.testing.assert_allclose(np.asarray(found[name]), gradients[2][name], atol=2e-6, err_msg=name)


def test_probabilities_on_a_mesh(model, expected):
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    run = zoo.spmd(zoo.capture(forward, *PROBABILITIES), mesh, out=("batch seq vocab", ""))
    _, seen = run(zoo.place(model, mesh), TOKENS)
    for name in PROBABILITIES:
        np.testing.assert_allclose(np.asarray(seen[name]), expected[1][name], atol=5e-6)
    assert seen[PROBABILITIES[1]].array.sharding.spec == jax.sharding.PartitionSpec(("data", "fsdp"), "tensor")


def trace(function):
    """Trace a function of tokens, which compiles nothing."""
    return eqx.filter_eval_shape(function, TOKENS)


def test_what_cannot_be_captured_is_an_error(model):
    with pytest.raises(ValueError, match=r"no value is named layers.9: of layers.\* there are layers 0, 1, 2, 3"):
        trace(zoo.capture(model, "layers.9"))
    with pytest.raises(ValueError, match=r"no value is named 'layers.\*.attn.out'.* such as layers.\*.attention.out"):
        trace(zoo.capture(model, "layers.*.attn.out"))
    with pytest.raises(ValueError, match="no value is named 'layers.1.mlp'"):
        trace(zoo.patch(model, {"layers.1.mlp": jnp.abs}))
    with pytest.raises(ValueError, match=r"the edit of norm returns \[8, 8, 8\], and the value is \[8, 8, 16\]"):
        trace(zoo.patch(model, {"norm": lambda x: x[..., :8]}))
    with pytest.raises(ValueError, match="layers.2 is computed inside a transformation of its own"):
        trace(zoo.capture(jax.vmap(lambda row: model(row[None])), "layers.2"))
    with pytest.raises(ValueError, match="norm is computed inside a transformation of its own"):
        trace(zoo.capture(eqx.filter_jit(model), "norm"))
    own = jax.custom_vjp(lambda tokens: model(tokens).sum())
    own.defvjp(lambda tokens: (own(tokens), None), lambda _, gradient: (None,))
    with pytest.raises(ValueError, match="norm is computed inside a transformation of its own"):
        trace(zoo.capture(own, "norm"))
    for loop, name in itertools.product(("scan", "plain"), ("norm", "layers.*", "layers.2")):
        twice = zoo.configure(model, loop=loop)
        with pytest.raises(ValueError, match="has several values, since its module runs several times"):
            trace(zoo.capture(lambda tokens, model=twice: model(tokens) + model(tokens + 1), name))
    with pytest.raises(ValueError, match="captures another"):
        trace(zoo.capture(zoo.capture(model, "norm"), "layers.2"))
    with pytest.raises(TypeError, match="the name of a value is a string"):
        zoo.capture(model, 3)
    with pytest.raises(TypeError, match=r"an edit is a function, .* and that of norm is \(3,\)"):
        zoo.patch(model, {"norm": (3,)})
    with pytest.raises(TypeError, match="Linear takes no edits"):
        zoo.patch(model.stack.segments[0].blocks[0].mixer.query, {})


def test_what_does_not_travel_between_devices_is_an_error(model):
    layer, head = "layers.1", "layers.1.attention.probabilities"
    mesh = zoo.make_mesh(data=2, pipe=4)
    run = lambda mesh, *names: zoo.spmd(zoo.capture(forward, *names), mesh, out=("batch seq vocab", ""))
    assert run(mesh, "norm")(zoo.place(model, mesh), TOKENS)[1]["norm"].shape == (8, 8, 16)
    with pytest.raises(NotImplementedError, match="layers.1: values do not travel through the stages of a pipeline"):
        run(mesh, layer)(zoo.place(model, mesh), TOKENS)
    edited = zoo.place(zoo.patch(model, {layer: jnp.abs}), mesh)
    with pytest.raises(NotImplementedError, match="layers.1: values do not travel through the stages of a pipeline"):
        zoo.value_and_grad(loss_fn, mesh)(edited, BATCH)
    mesh = zoo.make_mesh(data=2, context=2, tensor=2)
    with pytest.raises(NotImplementedError, match="probabilities of attention: no device has them where context"):
        run(mesh, head)(zoo.place(model, mesh), TOKENS)
    mesh = zoo.make_mesh(data=4, tensor=2)
    placed = zoo.place(model, mesh)
    capture = zoo.capture(loss_fn, layer)
    with pytest.raises(NotImplementedError, match="values of micro-batches"):
        zoo.value_and_grad(capture, mesh, has_aux=True, microbatches=2)(placed, BATCH)
    with pytest.raises(ValueError, match="capture the loss itself"):
        zoo.value_and_grad(lambda model, batch: capture(model, batch), mesh, has_aux=True)(placed, BATCH)


def test_an_edited_model_is_not_saved(model, tmp_path):
    edited = zoo.patch(model, {"layers.1": (jnp.add, jnp.ones(16))})
    with pytest.raises(ValueError, match=r"has one of layers.1: save zoo.unpatch\(model\)"):
        zoo.save(edited, tmp_path)
    assert zoo.count(edited) == zoo.count(model)
    zoo.save(zoo.unpatch(edited), tmp_path)
    np.testing.assert_array_equal(jit_and_run(zoo.load(tmp_path)), jit_and_run(model))


def test_adapters_keep_the_names_of_what_they_wrap(model):
    adapted = zoo.adapters.lora(model, rank=2, key=jax.random.key(3))
    names = set(zoo.capture_names(adapted, TOKENS)) - set(zoo.capture_names(model, TOKENS))
    down = [f"layers.*.attention.{name}.lora.down" for name in ("query", "value")]
    assert names == {*down, *(f"{name}.input" for name in down)}
    assert set(down) <= {path.name.rpartition(".")[0] for path in zoo.models.list_parameter_paths(adapted)}
    name = "layers.*.attention.query"
    _, seen = jit_and_run(zoo.capture(adapted, name))
    np.testing.assert_allclose(seen[name], jit_and_run(zoo.capture(model, name))[1][name], atol=1e-6)


def test_activations_are_arrays_with_named_dims():
    value = Activation(jnp.arange(6.0).reshape(2, 3), ("batch", "embed"))
    np.testing.assert_array_equal(jnp.sin(value), jnp.sin(value.array))
    np.testing.assert_array_equal(np.asarray(value), value.array)
    assert value[1, 2] == 5 and value.shape == (2, 3) and value.dtype == jnp.float32
    assert [leaf.dims for leaf in zoo.parallel.leaves(value)] == [tuple(map(zoo.parallel.Dim, value.array_dims))]
    with pytest.raises(ValueError, match="name 1 of 2 dims"):
        dataclasses.replace(value, array_dims=("batch",))
