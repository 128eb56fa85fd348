"""A module that several layers call has one set of parameters, and its gradient is the sum over the calls."""

import json
import math
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.jaxprs import equations
from tests.parallel.any_mesh import make_any_mesh
from zoo.layers import Attention, Dropout, GatedMLP, RMSNorm, TokenInfo
from zoo.models import Stack, list_parameter_paths, stack
from zoo.models.build import build_decoder
from zoo.models.decoder import Block, SharedBlock, SharedModule, UnrolledStack, insert_shared
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.families.zamba_layers import SharingBlock
from zoo.models.layer_inputs import EmbeddedHidden
from zoo.models.stack import swap_stack
from zoo.parallel import SEQUENCE, leaves
from zoo.tools.plan.inlining import Scan
from zoo.tools.plan.work import count_work
from zoo.weights.safetensors import open_tensors

KEY = jax.random.key(0)
FIXTURE = Path(__file__).parents[1] / "fixtures" / "models" / "zamba2"
SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "n_mamba_heads": 4,
    "mamba_d_state": 4,
    "adapter_rank": 2,
    "rms_norm_eps": 1e-3,
}
TOKENS = jax.random.randint(jax.random.key(1), (4, 8), 0, SIZES["vocab_size"])
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def make(types, blocks=1, **more):
    """Build a Zamba 2 whose layers are m for Mamba-2 and h for one that calls a shared Transformer layer."""
    types = ["hybrid" if letter == "h" else "mamba" for letter in types]
    config = {**SIZES, "layers_block_type": types, "num_hidden_layers": len(types), "num_mem_blocks": blocks, **more}
    family = FAMILIES["zamba2"]
    return partial(family.build, read_config(family, config))


def differentiate(model, mesh=None):
    mesh = zoo.make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    with jax.default_matmul_precision("highest"):
        step = eqx.filter_jit(zoo.value_and_grad(zoo.cross_entropy, mesh))
        return jax.device_get(step(zoo.place(model, mesh), zoo.place_batch(BATCH, mesh)))


def assert_close(tree, other, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert np.abs(x - y).max() <= tolerance * max(1, np.abs(y).max())


def unshare(layers):
    """Give each call a copy of its own."""
    calls, blocks = [], []
    for block in layers.blocks:
        if isinstance(block, SharingBlock):
            calls.append(layers.shared[block.shared.number])
            block = eqx.tree_at(lambda block: block.shared, block, SharedModule(len(calls) - 1))
        blocks.append(block)
    return UnrolledStack(tuple(blocks), tuple(calls))


@pytest.mark.ci
def test_gradient_is_the_sum_over_the_calls():
    model = eqx.filter_jit(make("mhhmhh", blocks=2, use_shared_attention_adapter=True))(key=KEY)
    plain = zoo.configure(model, loop="plain")
    copies = swap_stack(model, lambda layers: unshare(layers.unstack()))
    assert zoo.count(copies) - zoo.count(model) == zoo.count(model.stack.shared)
    loss, gradient = differentiate(plain)
    wanted, separate = differentiate(copies)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for number, shared in enumerate(gradient.stack.shared):
        assert_close(shared, jax.tree.map(lambda x, y: x + y, *separate.stack.shared[number::2]))
    blocks = gradient.stack.unstack().blocks
    assert_close(blocks, separate.stack.blocks)

    scanned, stacked = differentiate(zoo.configure(model, loop="scan"))
    np.testing.assert_allclose(scanned, loss, rtol=1e-6)
    assert_close(stacked.stack.shared, gradient.stack.shared)
    assert_close(stacked.stack.unstack().blocks, blocks)


@pytest.mark.ci
def test_sequence_parallelism_equals_one_device():
    """The gradients of shared norms and of updates are parts of a sum over `tensor`."""
    model = eqx.filter_jit(make("mhmh", use_mem_rope=True))(key=KEY)
    model = zoo.configure(model, loop="scan", remat="full")
    loss, gradient = differentiate(model, make_any_mesh(SEQUENCE, fsdp=2, tensor=2))
    wanted, wanted_gradient = differentiate(model)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert_close(gradient, wanted_gradient)


def test_a_pipeline_is_refused_by_name():
    model = eqx.filter_eval_shape(make("mh" * 4), key=KEY)
    mesh = make_any_mesh(pipe=2)
    with pytest.raises(
        NotImplementedError, match="layers share SharedTransformer, and a pipeline .*: use a mesh with p"
    ):
        eqx.filter_eval_shape(zoo.value_and_grad(zoo.cross_entropy, mesh), model, BATCH)


def test_stack_refuses_a_shared_module_that_is_missing():
    block = lambda key: SharingBlock(SharedModule(1), None, None, None)
    with pytest.raises(ValueError, match="a layer calls the shared module 1, and there are 0"):
        Stack([block], key=KEY)


def test_a_block_outside_of_its_stack_says_what_it_lacks():
    model = eqx.filter_jit(make("hm"))(key=KEY)
    block = next(model.stack.iter_blocks())
    hidden = model.embed(TOKENS, TokenInfo())
    with pytest.raises(TypeError, match="SharingBlock reads the embedding again, which Hidden has not"):
        block(zoo.models.Hidden(hidden.x), TokenInfo())
    with pytest.raises(TypeError, match=r"the layer that this block shares is in Stack\.shared"):
        model.stack.unstack().blocks[0](hidden, TokenInfo())


@pytest.mark.parametrize(("blocks", "compiled"), [(1, 6), (2, 12)])
def test_a_deep_model_compiles_the_blocks_of_its_period(blocks, compiled, monkeypatch):
    """48 layers: every sixth calls a shared layer, or one of two in turns."""
    traced = []
    monkeypatch.setattr(stack, "insert_shared", lambda *args: traced.append(args) or insert_shared(*args))

    def trace(types):
        traced.clear()
        model = zoo.configure(eqx.filter_eval_shape(make(types, blocks), key=KEY), loop="scan")
        eqx.filter_eval_shape(lambda model: model(TOKENS), model)
        return len(traced)

    period = "mmmmmh" * blocks
    assert trace("mmmmmh" * 8) == compiled == trace(period * 6)


@pytest.mark.parametrize("carried", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_remat_saves_one_stream_per_layer(carried, monkeypatch):
    """Layers read the embedding from outside of the loop. In the carry of a scan it would be saved with each."""
    if carried:
        monkeypatch.setattr(EmbeddedHidden, "constant_fields", ())
    model = zoo.configure(eqx.filter_jit(make("mmmh" * 3))(key=KEY), loop="scan", remat="full")
    loss = lambda model: zoo.cross_entropy(model, BATCH)[0]
    jaxpr = jax.make_jaxpr(eqx.filter_grad(loss))(model)
    forward = next(equation for equation in equations(jaxpr) if equation.primitive.name == "scan")
    shapes = [x.aval.shape for x in forward.outvars[Scan.of(forward).carries :]]
    stream = (*TOKENS.shape, SIZES["hidden_size"])
    streams = sum(math.prod(shape[: -len(stream)]) for shape in shapes if shape[-len(stream) :] == stream)
    assert streams == (12 + 3 if carried else 12), "and the layers that read it save it"


def test_it_is_counted_once():
    model = zoo.load(FIXTURE, dtype=jnp.float32)
    parameters = json.loads((FIXTURE / "meta.json").read_text())["parameters"]
    sizes = zoo.inspect.measure_size(model)
    assert zoo.count(model) == sizes.num_parameters == parameters and sizes.bytes == 4 * parameters
    summary = zoo.summary(model)
    assert summary.count == summary.num_parameters == parameters
    assert summary.bytes == sizes.bytes
    rows = {row.name: row for row in summary.rows}
    assert rows["shared.1.attention.query.weight"].shape == (32, 32)
    assert rows["shared.0.updates.*.down.weight"].layers == (0, 2)
    assert rows["shared.1.updates.*.down.weight"].layers == (1,)
    assert str(model).count("SharedTransformer(") == 1 == str(model).count("shared x 2: SharedTransformer(")

    mask = zoo.train.decay_mask(model)
    names = [path.name for path in list_parameter_paths(model)]
    decayed = [name for name, chosen in zip(names, jax.tree.leaves(mask), strict=True) if chosen]
    assert decayed.count("shared.0.attention.query.weight") == 1 and "shared.0.mixer_norm.weight" not in decayed
    assert not any("layers" in [dim.name for dim in leaf.dims] for leaf in leaves(model.stack.shared))


def test_lora_wraps_a_shared_matrix_once():
    model = zoo.load(FIXTURE, dtype=jnp.float32)
    adapted = zoo.adapters.lora(model, targets="q_proj", rank=2, key=KEY)
    names = [path.name for path in list_parameter_paths(zoo.trainable(adapted))]
    assert names == [f"shared.{i}.attention.query.lora.{word}.weight" for i in (0, 1) for word in ("down", "up")]


def test_paths_of_updates_count_the_calls():
    """Over all layers that call a shared one, whichever they call, and across segments."""
    model = eqx.filter_eval_shape(make("mhmh" * 2 + "hh" + "m" * 3, blocks=2), key=KEY)
    found = {}
    for path in list_parameter_paths(model):
        if path.name.endswith("updates.*.down.weight"):
            found.setdefault(path.name[:8], []).extend(path.ranges[0])
    assert {name: sorted(numbers) for name, numbers in found.items()} == {"shared.0": [0, 2, 4], "shared.1": [1, 3, 5]}


@pytest.mark.ci
def test_from_scratch_it_is_saved_and_read(tmp_path):
    model = eqx.filter_jit(make("mhhh", blocks=2, use_mem_rope=True, use_shared_attention_adapter=True))(key=KEY)
    zoo.save(model, tmp_path / "first")
    loaded = zoo.load(tmp_path / "first")
    assert loaded.origin.family.name == "zamba2"
    assert eqx.tree_equal(jax.tree.leaves(model), jax.tree.leaves(loaded))
    zoo.save(loaded, tmp_path / "second")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]
    with pytest.raises(zoo.CheckpointError, match="none of its layers calls a shared one"):
        zoo.save(zoo.models.Mamba2(vocab=11, embed=16, layers=2, head_dim=8, key=KEY), tmp_path / "other", "zamba2")


def test_a_file_may_repeat_a_shared_module(tmp_path):
    """Under each layer that calls it, as a state dict of PyTorch does. Other tensors there are refused."""
    model = zoo.load(FIXTURE)
    config = json.loads((FIXTURE / "config.json").read_text())
    tensors = {name: tensor.read() for name, tensor in open_tensors(FIXTURE).items()}
    again = {name.replace("layers.1.", "layers.4."): x for name, x in tensors.items() if "layers.1.shared" in name}
    loaded = zoo.from_torch({**tensors, **again}, config=config)
    assert len(again) > 10 and eqx.tree_equal(jax.tree.leaves(model), jax.tree.leaves(loaded))
    stray = {"model.layers.4.shared_transformer.self_attn.linear_q_adapter_list.9.0.weight": np.zeros((3, 32))}
    with pytest.raises(zoo.CheckpointError, match=r"linear_q_adapter_list\.9\.0\.weight .* has no place in the model"):
        zoo.from_torch({**tensors, **stray}, config=config)


def test_work_is_counted_per_call():
    """As the work of copies; memory and parameters are those of one."""
    model = zoo.load(FIXTURE, dtype=jnp.float32)
    copies = swap_stack(model, lambda layers: unshare(layers.unstack()))
    counted = [
        count_work(jax.make_jaxpr(lambda model: model(TOKENS))(model).jaxpr, {}).total_flops
        for model in (zoo.configure(model, loop="scan"), copies)
    ]
    assert counted[0] == counted[1] > 0
    assert zoo.count(copies) > zoo.count(model)


def make_repeating(numbers):
    """Build a decoder whose layers are these blocks of two."""
    norm = partial(RMSNorm, 16)

    def make_block(key):
        keys = jax.random.split(key)
        mixer, ffn = Attention(16, 4, key=keys[0]), GatedMLP(16, 20, key=keys[1])
        return Block(mixer_norm=norm(), mixer=mixer, ffn_norm=norm(), ffn=ffn, dropout=Dropout(0.0))

    stand_ins = [lambda key: SharedBlock(0), lambda key: SharedBlock(1)]
    layers = [stand_ins[number] for number in numbers]
    options = {"norm": norm, "tied": True, "shared": [make_block] * 2}
    return partial(build_decoder, vocab=SIZES["vocab_size"], embed=16, layers=layers, **options)


@pytest.mark.ci
def test_layers_that_are_one_block_equal_copies():
    model = eqx.filter_jit(make_repeating([0, 1] * 3 + [1]))(key=KEY)
    copies = swap_stack(model, lambda layers: UnrolledStack(tuple(layers.iter_blocks())))
    wanted, separate = differentiate(copies)
    sums = [jax.tree.map(lambda *x: sum(x), *(separate.stack.blocks[i] for i in layers)) for layers in CALLS]
    for changed in (zoo.configure(model, loop="scan"), zoo.configure(model, loop="plain", remat="full")):
        loss, gradient = differentiate(changed)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)
        assert_close(gradient.stack.shared, tuple(sums))
    many = differentiate(zoo.configure(model, loop="scan"), make_any_mesh(SEQUENCE, fsdp=2, tensor=2))
    np.testing.assert_allclose(many[0], wanted, rtol=1e-6)
    assert_close(many[1].stack.shared, tuple(sums), 5e-5)


CALLS = [(0, 2, 4), (1, 3, 5, 6)]


@pytest.mark.ci
def test_layers_that_are_one_block_are_observed_and_decoded():
    model = zoo.configure(eqx.filter_jit(make_repeating([0, 0, 1, 1]))(key=KEY), loop="scan")
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    step = eqx.filter_jit(zoo.value_and_grad(zoo.cross_entropy, mesh, observe=True))
    table = zoo.models.tabulate_observations(step(zoo.models.observe(model), BATCH)[2])
    outputs = zoo.hidden_states(swap_stack(model, Stack.unstack), TOKENS)
    largest = [float(jnp.abs(x).max()) for x in outputs[1:-1]]
    assert [*table] == ["layers.0", "layers.1", "layers.2", "layers.3", "logits"]
    np.testing.assert_allclose([table[f"layers.{i}"][0] for i in range(len(largest))], largest, rtol=1e-5)

    new = zoo.generate(model, TOKENS, max_new_tokens=3)
    longer = jnp.concatenate([TOKENS, new], axis=1)
    np.testing.assert_array_equal(jnp.argmax(model(longer), -1)[:, TOKENS.shape[1] - 1 : -1], new)
    cache = zoo.summary(model).cache
    assert cache is not None and cache["bytes_per_token"] == 4 * (2 * 16 + 1) * 4, "of four layers: keys, values, place"


def test_a_repeated_block_is_compiled_once(monkeypatch):
    traced = []
    monkeypatch.setattr(stack, "insert_shared", lambda *args: traced.append(args) or insert_shared(*args))
    model = zoo.configure(eqx.filter_eval_shape(make_repeating([0] * 24), key=KEY), loop="scan")
    eqx.filter_eval_shape(lambda model: model(TOKENS), model)
    assert len(traced) == 1


def test_a_stand_in_does_not_run_outside_of_its_stack():
    with pytest.raises(TypeError, match=r"the block that this layer shares is in Stack\.shared"):
        SharedBlock(0)(zoo.models.Hidden(jnp.zeros((1, 2, 16))), TokenInfo())
    with pytest.raises(TypeError, match=r"in Stack\.shared"):
        SharedBlock(0).init_state(1, 8)
