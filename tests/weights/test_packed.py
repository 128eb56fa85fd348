"""MXFP4 checkpoints, packed and dequantized: parity with PyTorch, exact values, meshes, saving."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from zoo.layers import Linear
from zoo.layers.quantized.linear import MXFP4Linear
from zoo.models.parameter_paths import find_differences, list_parameter_paths
from zoo.ops.quantized.mxfp4 import dequantize_mxfp4, dequantize_mxfp4_numpy
from zoo.tools.parity.checkpoint import compare_checkpoint, read_expectations
from zoo.weights.safetensors import open_tensors, write_safetensors

FIXTURE = Path(__file__).parents[1] / "fixtures" / "models" / "gpt_oss_mxfp4"
PARITY = os.environ.get("ZOO_PARITY")
REFERENCES = [Path(PARITY) / "models" / FIXTURE.name] if PARITY else []
CASES = mark_slow([FIXTURE, *REFERENCES], but=[FIXTURE])
CONFIG, WHOLE = "config.json", "model.safetensors"
EXPERTS = "model.layers.1.mlp.experts"
KEY = jax.random.key(0)
SIZES = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
PACKED = {"quantization_config": {"quant_method": "mxfp4"}}


def read(path):
    return json.loads(path.read_text())


def packed_parts(model):
    return [x for x in jax.tree.leaves(model, is_leaf=is_packed) if is_packed(x)]


def is_packed(x):
    return isinstance(x, MXFP4Linear)


def bits(model):
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(model)]


def random_model(**sizes):
    """Build a model with random numpy bytes, and scales of 2^-6."""
    draw = np.random.default_rng(0)

    def fill(x):
        if not hasattr(x, "dtype"):
            return x
        if x.dtype == jnp.uint8:
            return draw.integers(0, 256, x.shape, np.uint8) if x.shape[-1] == 16 else np.full(x.shape, 121, np.uint8)
        return 0.2 * draw.normal(size=x.shape).astype(x.dtype)

    shapes = eqx.filter_eval_shape(lambda: zoo.models.preset("gpt-oss-20b", **SIZES | sizes, **PACKED, key=KEY))
    return jax.tree.map(fill, shapes)


@pytest.mark.ci
@pytest.mark.parametrize("folder", CASES, ids=["fixture", "reference"][: len(CASES)])
def test_packed_model_matches_pytorch(folder):
    expected, norms = read_expectations(folder / "expected.safetensors"), read(folder / "meta.json")["grad_norm"]
    expected = {name: x for name, x in expected.items() if not name.startswith("bfloat16.")}
    report = compare_checkpoint(folder, expected, gradient_norms=norms, packed=True)
    assert report.passed, report.first_failure
    compared = {line.name.rpartition(" ")[2] for line in report.comparisons}
    assert norms.keys() - compared == {name for name in norms if name.endswith("_blocks")}


@pytest.mark.slow  # the model is compared above, and test_parity.py holds decoding by default
@pytest.mark.parametrize("folder", [FIXTURE, *REFERENCES], ids=["fixture", "reference"][: len(CASES)])
def test_packed_model_decodes_as_pytorch(folder):
    expected = read_expectations(folder / "expected.safetensors")
    model = zoo.load(folder, packed=True, dtype=jnp.float32)
    length = expected["generate.prompt"].shape[1] + expected["generate.tokens"].shape[1]
    new = expected["generate.tokens"].shape[1]
    tokens = zoo.generate(model, jnp.asarray(expected["generate.prompt"]), max_new_tokens=new, length=length)
    np.testing.assert_array_equal(tokens, expected["generate.tokens"])


def test_dequantized_and_packed_weights_equal_the_file():
    tensors = open_tensors(FIXTURE)
    plain, packed = zoo.load(FIXTURE), zoo.load(FIXTURE, packed=True)
    numbers = {f"{EXPERTS}.{name}": tensors[f"{EXPERTS}.{name}_blocks"] for name in ("gate_up_proj", "down_proj")}
    numbers = {name: dequantize_mxfp4_numpy(x.read(), tensors[f"{name}_scales"].read()) for name, x in numbers.items()}
    both = numbers[f"{EXPERTS}.gate_up_proj"]
    wanted = {"gate": both[:, 0::2], "up": both[:, 1::2], "down": numbers[f"{EXPERTS}.down_proj"]}
    experts = [next(iter(model.stack.segments)).blocks[0].ffn.experts for model in (plain, packed)]
    for part, x in wanted.items():
        ours, theirs = (getattr(form, part) for form in experts)
        assert isinstance(ours, Linear) and isinstance(theirs, MXFP4Linear)
        assert ours.weight.dtype == jnp.bfloat16, "as the other tensors of the file"
        assert np.array_equal(np.asarray(ours.weight[1], np.float32), x)
        assert np.array_equal(dequantize_mxfp4(theirs.blocks, theirs.scales)[1], x)
    assert jax.tree.leaves(zoo.load(FIXTURE, dtype=jnp.float16))[0].dtype == jnp.float16
    wide = zoo.load(FIXTURE, dtype=jnp.float32, packed=True)
    assert {str(x.dtype) for x in jax.tree.leaves(wide)} == {"float32", "uint8"}


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["whole", "in shares"])
def test_dequantization_is_lazy_and_decodes_each_block_once(sizes, tmp_path, monkeypatch):
    """At most one device's shard of one layer's gate, up or down is dequantized at a time."""
    zoo.save(random_model(), tmp_path)
    decoded, mesh = [], zoo.make_mesh(**sizes)
    count = lambda *packed: decoded.append(dequantize_mxfp4_numpy(*packed)) or decoded[-1]
    monkeypatch.setattr("zoo.weights.packed.dequantize_mxfp4_numpy", count)
    zoo.load(tmp_path, mesh=mesh)
    one_part = 2 * 64 * 64 // (mesh.shape["fsdp"] * mesh.shape["tensor"])
    assert {x.size for x in decoded} == {one_part}
    assert sum(x.size for x in decoded) == 3 * 3 * 2 * 64 * 64


def test_dequantized_model_is_saved_as_plain_tensors(tmp_path):
    model = zoo.load(FIXTURE)
    zoo.save(model, tmp_path)
    assert read(tmp_path / CONFIG) == {k: v for k, v in read(FIXTURE / CONFIG).items() if k != "quantization_config"}
    tensors = open_tensors(tmp_path)
    assert {x.dtype for x in tensors.values()} == {np.dtype(jnp.bfloat16)}
    assert tensors[f"{EXPERTS}.gate_up_proj"].shape == (3, 32, 64)
    again = zoo.load(tmp_path)
    assert bits(again) == bits(model) and not [*find_differences(again, model), *find_differences(model, again)]


def test_packed_model_is_saved_byte_for_byte(tmp_path):
    model = zoo.load(FIXTURE, packed=True)
    zoo.save(model, tmp_path)
    assert (tmp_path / WHOLE).read_bytes() == (FIXTURE / WHOLE).read_bytes()
    assert read(tmp_path / CONFIG) == read(FIXTURE / CONFIG)
    zoo.save(model, tmp_path, shard_bytes=9000)
    assert bits(zoo.load(tmp_path, packed=True)) == bits(model)


@pytest.mark.slow  # layers/quantized has packed products on a mesh
def test_packed_model_on_mesh_equals_one_device(tmp_path):
    """Each device reads its shards, packed or dequantized. A packed model has the same loss and gradients on a mesh."""
    zoo.save(random_model(), tmp_path)
    mesh, one = zoo.make_mesh(data=2, fsdp=2, tensor=2), zoo.make_mesh(devices=jax.devices()[:1])
    for packed in (False, True):
        alone, model = zoo.load(tmp_path, packed=packed), zoo.load(tmp_path, packed=packed, mesh=mesh)
        for place, ours, whole, wanted in zip(
            list_parameter_paths(model), *map(jax.tree.leaves, (model, alone, mesh.shardings(model))), strict=True
        ):
            assert ours.sharding.is_equivalent_to(wanted, ours.ndim), place.name
            for shard in ours.addressable_shards:
                assert np.array_equal(np.asarray(shard.data), np.asarray(whole)[shard.index]), place.name
    tokens = np.random.default_rng(1).integers(0, 16, (8, 6))
    batch = {"tokens": tokens, "targets": tokens}
    results = [zoo.value_and_grad(zoo.cross_entropy, on)(x, batch) for on, x in ((one, alone), (mesh, model))]
    for a, b in zip(*map(jax.tree.leaves, jax.device_get(results)), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(a).max()


def test_gradient_dequantizes_one_layer_at_a_time():
    """A gradient through 12 layers of 96 matrices needs a small part of the memory of all of them, dequantized."""
    sizes = SIZES | {"num_hidden_layers": 12, "num_local_experts": 32, "layer_types": ["full_attention"] * 12}
    model = eqx.filter_eval_shape(lambda: zoo.models.preset("gpt-oss-20b", **sizes, **PACKED, key=KEY))
    decoded = sum(4 * 2 * x.blocks.size for x in packed_parts(model))
    params, fixed = eqx.partition(model, lambda x: hasattr(x, "dtype") and x.dtype == jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)

    def loss(params, fixed, tokens):
        return eqx.combine(params, fixed)(tokens).sum()

    arrays, static = eqx.partition((params, fixed), lambda x: hasattr(x, "dtype"))
    run = jax.jit(lambda arrays, tokens: jax.grad(loss)(*eqx.combine(arrays, static), tokens))
    assert run.lower(arrays, tokens).compile().memory_analysis().temp_size_in_bytes < decoded / 20


def altered(tmp_path, change, config=None):
    """Copy the fixture with other tensors."""
    shutil.copytree(FIXTURE, tmp_path / "altered", dirs_exist_ok=True)
    tensors = {name: np.array(x.read()) for name, x in open_tensors(FIXTURE).items()}
    tensors = change(tensors) or tensors
    write_safetensors(tmp_path / "altered" / WHOLE, tensors)
    given = read(FIXTURE / CONFIG) if config is None else config
    (tmp_path / "altered" / CONFIG).write_text(json.dumps(given))
    return tmp_path / "altered"


def without(*names):
    return lambda tensors: {name: x for name, x in tensors.items() if name not in names}


BLOCKS, SCALES = f"{EXPERTS}.down_proj_blocks", f"{EXPERTS}.down_proj_scales"


@pytest.mark.parametrize(
    ("change", "plain", "packed"),
    [
        (without(SCALES), f"{BLOCKS} lacks its {SCALES}", f"{SCALES} .* is missing"),
        (without(BLOCKS), f"{SCALES} lacks its {BLOCKS}", f"{BLOCKS} .* is missing"),
        (without(BLOCKS, SCALES), r"down_proj \[3, 32, 32\] is missing", f"{BLOCKS} .* is missing"),
        (
            lambda x: x | {SCALES: x[SCALES].astype(np.int8)},
            r"down_proj_scales int8\[3, 32, 1\], where uint8\[..., N, 16\] and uint8\[..., N\] were expected",
            f"{SCALES} is stored as int8: expected uint8",
        ),
        (
            lambda x: x | {BLOCKS: x[BLOCKS].reshape(3, 32, 2, 8)},
            r"down_proj_blocks is uint8\[3, 32, 2, 8\]",
            r"down_proj_blocks is \[3, 32, 2, 8\] in the file, and the config asks for \[3, 32, 1, 16\]",
        ),
        (
            lambda x: x | {BLOCKS: x[BLOCKS][:2], SCALES: x[SCALES][:2]},
            r"down_proj is \[2, 32, 32\] in the file, and the config asks for \[3, 32, 32\]",
            r"down_proj_blocks is \[2, 32, 1, 16\] in the file",
        ),
        (
            lambda x: x | {SCALES: np.full_like(x[SCALES], 255)},
            "down_proj has a number that is not finite",
            "down_proj_scales has the scale 255",
        ),
        (
            lambda x: without(BLOCKS, SCALES)(x) | {f"{EXPERTS}.down_proj": np.zeros((3, 32, 32), jnp.bfloat16)},
            None,
            f"{BLOCKS} .* is missing",
        ),
    ],
    ids=["no scales", "no blocks", "neither", "another dtype", "other blocks", "fewer experts", "no numbers", "plain"],
)
def test_packed_damage_is_named(tmp_path, change, plain, packed):
    where = altered(tmp_path, change)
    for message, form in ((plain, False), (packed, True)):
        if message is not None:
            with pytest.raises(zoo.CheckpointError, match=message):
                zoo.load(where, packed=form)


def test_packed_needs_a_quantized_checkpoint():
    with pytest.raises(
        zoo.CheckpointError, match="packed=True, and without a quantization_config nothing .* is packed"
    ):
        zoo.load(FIXTURE.parent / "gpt_oss", packed=True)


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "mxfp4", "bits": 4},
        {"modules_to_not_convert": []},
        {"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"},
        True,
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_quantization_other_than_mxfp4_is_refused(tmp_path, given, packed):
    where = altered(tmp_path, lambda x: x, read(FIXTURE / CONFIG) | {"quantization_config": given})
    with pytest.raises(zoo.CheckpointError, match="quantization_config"):
        zoo.load(where, packed=packed)


def test_mxfp4_is_refused_by_other_families(tmp_path):
    shutil.copytree(FIXTURE.parent / "mixtral", tmp_path / "m")
    given = read(tmp_path / "m" / CONFIG) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "m" / CONFIG).write_text(json.dumps(given))
    with pytest.raises(zoo.CheckpointError, match="quantization_config = .* would change the result"):
        zoo.load(tmp_path / "m")


def test_gradients_of_a_packed_model_are_saved_by_name(tmp_path):
    model = zoo.load(FIXTURE, packed=True, dtype=jnp.float32)
    zoo.save(zoo.trainable(model), tmp_path)
    written = open_tensors(tmp_path).keys()
    assert open_tensors(FIXTURE).keys() - written == {
        name for name in open_tensors(FIXTURE) if name.endswith(("_blocks", "_scales"))
    }


def test_preset_can_be_packed_from_scratch(tmp_path):
    sizes = SIZES | {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    model = zoo.models.preset("gpt-oss-20b", **sizes, **PACKED, key=KEY)
    zoo.save(model, tmp_path)
    same = zoo.load(tmp_path, packed=True)
    assert bits(same) == bits(model)
    forms = [dataclasses.replace(x, origin=None) for x in (same, model)]
    assert jax.tree.structure(forms[0]) == jax.tree.structure(forms[1])
