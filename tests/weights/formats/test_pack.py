"""Quantized files held packed: exact numbers, bytes written back, meshes, adapters, what is refused."""

import json
import os
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from zoo.layers import Linear
from zoo.layers.quantized.groups import AbstractGroupLinear
from zoo.tools.parity.checkpoint import compare_checkpoint, read_expectations
from zoo.weights.safetensors import open_tensors

from .encoders import CONFIG, FORMATS, SIZES, write_quantized

PARITY = os.environ.get("ZOO_PARITY")
CASES = ("fp8_block_llama", "fp8_block_deepseek_v3", "fp8_block_qwen3_moe", "fp8_channel_llama", "gptq_llama")
CASES += ("awq_qwen2", "packed_int4_llama")
PACKED = [name for name in FORMATS if name not in ("nf4", "nf4 of one level")]
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.skipif(not PARITY, reason="the cases are in ZOO_PARITY")
@pytest.mark.parametrize("case", mark_slow(CASES, but=("gptq_llama",)))
def test_packed_model_matches_pytorch(case):
    folder = Path(PARITY or "") / "models_more" / case
    expected, meta = read_expectations(folder / "expected.safetensors"), json.loads((folder / "meta.json").read_text())
    expected = {name: x for name, x in expected.items() if not name.startswith("bfloat16.")}
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] in zoo.families()[config["model_type"]].quantized
    report = compare_checkpoint(folder, expected, gradient_norms=meta["grad_norm"], packed=True)
    assert report.passed, report.first_failure
    compared = {line.name.rpartition(" ")[2] for line in report.comparisons}
    assert {f"{name}.weight" for name in ("model.embed_tokens", "lm_head", "model.norm")} <= compared
    assert not any("_proj" in name for name in compared if name.endswith("weight"))


@pytest.mark.one_case
@pytest.mark.parametrize("name", PACKED)
def test_packed_numbers_and_bytes_are_those_of_the_file(name, make, tmp_path):
    dense = write_quantized(tmp_path / "in", make, name)
    model = zoo.load(tmp_path / "in", packed=True, dtype=jnp.bfloat16)
    block = model.stack.segments[0].blocks[0]
    assert isinstance(block.ffn.down, AbstractGroupLinear) and isinstance(model.head, Linear)
    wanted = [dense[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(2)]
    np.testing.assert_array_equal(eqx.filter_vmap(lambda layer: layer.dense_weight)(block.ffn.down), np.stack(wanted))
    zoo.save(jax.tree.map(np.asarray, model), tmp_path / "out", shard_bytes=4000)
    ours, theirs = open_tensors(tmp_path / "out"), open_tensors(tmp_path / "in")
    assert {name: (x.dtype, x.shape) for name, x in ours.items()} == {
        name: (x.dtype, x.shape) for name, x in theirs.items()
    }
    for key, x in theirs.items():
        assert ours[key].read().tobytes() == x.read().tobytes(), key
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "in" / "config.json").read_bytes()


SLOW = ("fp8 blocks", "gptq reordered", "int4 with zeros", "nvfp4", "awq", "llm.int8", "nf4 in rows of one level")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4 in rows", *SLOW])
def test_adapted_packed_model_equals_decoded_on_mesh(name, make, tmp_path):
    """Packed on a mesh, packed on one device, and decoded. Blocks of 12 inputs are cut by shards of 24 of the 48 that
    `down` has, and NF4's of 64 by shards of 96. The file is written from the mesh."""
    write_quantized(tmp_path / "in", make, name)
    tokens = np.random.default_rng(1).integers(0, 24, (8, 6))
    batch, results = {"tokens": tokens, "targets": tokens}, []
    mesh, serial = zoo.make_mesh(data=2, fsdp=2, tensor=2), zoo.make_mesh(devices=jax.devices()[:1])
    for packed, on in ((False, serial), (True, serial), (True, mesh)):
        model = zoo.load(tmp_path / "in", packed=packed, dtype=jnp.float32, mesh=on)
        adapted = zoo.adapters.lora(model, rank=5, targets=("query", "down"), init="gaussian", key=jax.random.key(0))
        adapted = jax.tree.map(lambda x: x + 0.1 if eqx.is_inexact_array(x) and x.shape[-1] == 5 else x, adapted)
        results.append(jax.device_get(zoo.value_and_grad(zoo.cross_entropy, on)(zoo.place(adapted, on), batch)))
    codes = model.stack.segments[0].blocks[0].ffn.down.codes
    assert codes.addressable_shards[0].data.size == codes.size // 4
    for expected, *given in zip(*map(jax.tree.leaves, results), strict=True):
        for x in given:
            assert np.abs(x - expected).max() <= 2e-5 * np.abs(expected).max() > 0
    zoo.save(zoo.load(tmp_path / "in", packed=True, mesh=mesh), tmp_path / "out")
    written, given = (tmp_path / folder / "model.safetensors" for folder in ("out", "in"))
    assert written.read_bytes() == given.read_bytes()


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["fp8 blocks", "gptq reordered", "nf4 in rows", "nvfp4"])
def test_fused_matrices_are_split_and_joined(name, make, tmp_path):
    """Phi-3 has query, key and value in one matrix: 32, 16 and 16 rows of blocks of 20. Each has the vectors of all."""
    sizes = (SIZES if name == "nf4 in rows" else {}) | {"head_dim": None, "pad_token_id": 0}
    dense = write_quantized(tmp_path / "in", make, name, family="phi3", sizes=sizes)
    model = zoo.load(tmp_path / "in", packed=True)
    attention = model.stack.segments[0].blocks[0].mixer
    rows = [jax.tree.map(lambda x: x[1], layer).dense_weight for layer in (attention.query, attention.key)]
    rows, matrix = np.concatenate(rows), dense["model.layers.1.self_attn.qkv_proj.weight"]
    np.testing.assert_array_equal(rows, matrix[: len(matrix) * 3 // 4])
    zoo.save(jax.tree.map(np.asarray, model), tmp_path / "out")
    written, given = (tmp_path / folder / "model.safetensors" for folder in ("out", "in"))
    assert written.read_bytes() == given.read_bytes()


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) for x in ("int4", "gptq reordered", "nf4 in rows", "nvfp4")]
)
def test_packed_experts_equal_decoded_ones_on_mesh(name, make, tmp_path):
    sizes = MIXTURE | {"hidden_size": 64, "head_dim": 16}
    write_quantized(tmp_path / "in", make, name, family="qwen3_moe", dtype=jnp.float32, sizes=sizes)
    tokens = np.random.default_rng(1).integers(0, 24, (8, 6))
    batch, results = {"tokens": tokens, "targets": tokens}, []
    serial, mesh = zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(fsdp=2, tensor=2, expert=2)
    for packed, on in ((False, serial), (True, serial), (True, mesh)):
        model = zoo.load(tmp_path / "in", packed=packed, mesh=on)
        loss, gradients = jax.device_get(zoo.value_and_grad(zoo.cross_entropy, on)(model, batch))
        results.append((loss, gradients.embedding, gradients.norm))
    up = model.stack.segments[0].blocks[0].ffn.experts.up
    assert isinstance(up, AbstractGroupLinear) and up.codes.addressable_shards[0].data.size == up.codes.size // 8
    for expected, *given in zip(*map(jax.tree.leaves, results), strict=True):
        for x in given:
            assert np.abs(x - expected).max() <= 2e-5 * np.abs(expected).max() > 0
    zoo.save(model, tmp_path / "out")
    ours, theirs = open_tensors(tmp_path / "out"), open_tensors(tmp_path / "in")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].read().tobytes() == x.read().tobytes() for key, x in theirs.items())


def test_dequantized_after_loading_is_saved_plain(make, tmp_path):
    dense = write_quantized(tmp_path / "in", make, "fp8 rows")
    model = zoo.load(tmp_path / "in", packed=True, dtype=jnp.float32)
    plain = zoo.adapters.dequantize(model)
    zoo.save(jax.tree.map(np.asarray, plain), tmp_path / "out")
    saved = open_tensors(tmp_path / "out")
    assert saved.keys() == dense.keys() and all(np.array_equal(saved[key].read(), x) for key, x in dense.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    where = lambda model: model.stack.segments[0].blocks[0].ffn.down
    mixed = eqx.tree_at(where, model, where(plain))
    with pytest.raises(zoo.CheckpointError, match="gated_mlp.down were packed in the file and are plain now"):
        zoo.save(mixed, tmp_path / "mixed")


@pytest.mark.one_case
@pytest.mark.parametrize("format", ["int4", "nvfp4"])
def test_model_quantized_here_is_saved_bit_for_bit(format, make, tmp_path):
    """A model from scratch, and one that was loaded plain. Other readers learn which modules are not quantized."""
    config = CONFIG | {"intermediate_size": 64, "tie_word_embeddings": False}
    loaded = jax.tree.map(jnp.asarray, make("llama", config))
    made = zoo.models.Transformer(vocab=24, embed=32, layers=1, heads=2, mlp=32, key=jax.random.key(0))
    for name, plain in (("loaded", loaded), ("made", made)):
        quantized = zoo.adapters.quantize(plain, format)
        zoo.save(quantized, tmp_path / name)
        read = zoo.load(tmp_path / name, packed=True)
        decoded = zoo.load(tmp_path / name)
        for ours, theirs in ((read, quantized), (decoded, zoo.adapters.dequantize(quantized))):
            for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
                assert x.dtype == y.dtype and np.array_equal(x, y)
        zoo.save(read, tmp_path / "again")
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / "again" / file).read_bytes() == (tmp_path / name / file).read_bytes()
        written = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert written["ignore"] == ["lm_head", "model.embed_tokens"]
    first = lambda model: next(model.stack.iter_blocks())
    assert type(first(decoded).ffn.up) is Linear and isinstance(first(read).ffn.up, AbstractGroupLinear)


def test_model_quantized_here_is_saved_with_what_its_source_has(make, tmp_path):
    zoo.save(make("llama", CONFIG), tmp_path / "plain")
    quantized = zoo.adapters.quantize(zoo.load(tmp_path / "plain"), "int4", group_size=16)
    zoo.save(quantized, tmp_path / "packed", source=tmp_path / "plain")
    with pytest.raises(zoo.CheckpointError, match="has the quantization_config None"):
        zoo.save(zoo.load(tmp_path / "packed", packed=True), tmp_path / "again", source=tmp_path / "plain")


def test_one_file_has_one_number_format(tmp_path):
    model = zoo.models.Transformer(vocab=24, embed=32, layers=1, heads=2, mlp=32, key=jax.random.key(0))
    mixed = zoo.adapters.quantize(zoo.adapters.quantize(model, "int4", targets="up"), "nvfp4", targets="down")
    with pytest.raises(zoo.CheckpointError, match="one number format for all packed matrices"):
        zoo.save(mixed, tmp_path / "mixed")


def test_gradients_of_a_packed_model_are_saved_by_name(make, tmp_path):
    write_quantized(tmp_path / "in", make, "awq")
    zoo.save(jax.tree.map(np.asarray, zoo.trainable(zoo.load(tmp_path / "in", packed=True))), tmp_path / "out")
    assert open_tensors(tmp_path / "out").keys() == {
        name for name in open_tensors(tmp_path / "in") if "_proj" not in name
    }


def pop(*names):
    return lambda tensors, config: [tensors.pop(name) for name in names]


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["awq", "gptq", "fp8 rows"])
def test_layers_of_which_some_are_packed_are_stacked_apart(name, make, tmp_path):
    suffixes = {"awq": ("qweight", "qzeros", "scales"), "gptq": ("qweight", "qzeros", "scales", "g_idx")}
    suffixes = suffixes.get(name, ("weight", "weight_scale"))
    plain = np.linspace(-1, 1, 32 * 32).reshape(32, 32).astype(jnp.bfloat16)

    def change(tensors, config):
        for suffix in suffixes:
            del tensors[f"{QUERY}.{suffix}"]
        tensors[f"{QUERY}.weight"] = plain
        key = "ignore" if name == "fp8 rows" else "modules_to_not_convert"
        config["quantization_config"][key] = ["lm_head", QUERY]

    write_quantized(tmp_path / "in", make, name, change=change)
    decoded = zoo.load(tmp_path / "in", dtype=jnp.float32)
    model = zoo.load(tmp_path / "in", packed=True, dtype=jnp.float32)
    assert [layers for _, layers in decoded.stack.iter_stacked()] == [(0, 1)]
    assert [layers for _, layers in model.stack.iter_stacked()] == [(0,), (1,)]
    first, second = (block.mixer for block, _ in model.stack.iter_stacked())
    assert type(first.query) is Linear and isinstance(second.query, AbstractGroupLinear)
    assert isinstance(first.key, AbstractGroupLinear)
    tokens = jnp.arange(12).reshape(2, 6)
    np.testing.assert_allclose(model(tokens), decoded(tokens), atol=1e-5)
    paths = {path.name for path in zoo.models.list_parameter_paths(model)}
    assert {"layers.*.attention.query.weight", "layers.*.attention.query.codes"} <= paths
    zoo.save(zoo.load(tmp_path / "in", packed=True, dtype=jnp.bfloat16), tmp_path / "out")
    ours, theirs = open_tensors(tmp_path / "out"), open_tensors(tmp_path / "in")
    assert ours.keys() == theirs.keys()
    for key, x in theirs.items():
        assert ours[key].read().tobytes() == x.read().tobytes(), key


def fill(name, value):
    return lambda tensors, config: tensors[name].fill(value)


REFUSED = {
    "blocks across rows": ("nf4", None, r"is a matrix of \[32, 48\], and blocks of 64 numbers begin inside its rows"),
    "undeclared constants": (
        "nf4 in rows",
        lambda tensors, config: config["quantization_config"].update(bnb_4bit_use_double_quant=False),
        r"has blocksize and nested_blocksize \(64, 256\): expected \(64, None\)",
    ),
    "other levels": ("nf4 in rows", fill(f"{QUERY}.weight.quant_map", 1), "quant_map is not the codebook of NF4"),
    "no scales": ("fp8 blocks", pop(f"{QUERY}.weight_scale_inv"), "lacks its .*weight_scale_inv"),
    "not a number": ("fp8 rows", fill(f"{QUERY}.weight", np.nan), f"{QUERY}.weight has a number that is not finite"),
    "scales of NaN": ("nvfp4", fill(f"{QUERY}.weight_scale", np.nan), "a weight_scale of .* is not a number"),
    "infinite scales": ("awq", fill(f"{QUERY}.scales", np.inf), f"{QUERY}.scales has a number that is not finite"),
    "no such group": ("gptq reordered", fill(f"{QUERY}.g_idx", 2), "groups that are not among the 2"),
    "undeclared order": (
        "gptq",
        fill(f"{QUERY}.g_idx", 1),
        "reorders the inputs, and the config says desc_act = false",
    ),
    "ambiguous zero points": ("gptq", fill(f"{QUERY}.qzeros", -1), "readers take for 16 and others for 0"),
}
ALSO_DECODED = ("scales of NaN", "no scales", "no such group", "undeclared order", "ambiguous zero points")


@pytest.mark.parametrize("label", REFUSED)
def test_files_that_cannot_be_packed_are_refused(label, make, tmp_path):
    name, change, message = REFUSED[label]
    write_quantized(tmp_path, make, name, change=change)
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.load(tmp_path, packed=True)
    if label in ALSO_DECODED:
        with pytest.raises(zoo.CheckpointError, match=message):
            zoo.load(tmp_path)
