"""Quantized files decoded on load: exact numbers, shards read alone, saving, damage."""

import dataclasses
import json
import tracemalloc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.weights.formats.base import read_in_chunks
from zoo.weights.load import read_parameters
from zoo.weights.resolve import open_checkpoint
from zoo.weights.safetensors import open_tensors, write_safetensors

from .encoders import FORMATS, write_quantized

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_numbers_equal_the_formula_bit_for_bit(name, make, tmp_path):
    dense = write_quantized(tmp_path / "in", make, name)
    model = zoo.load(tmp_path / "in", dtype=jnp.float32)
    zoo.save(jax.tree.map(np.asarray, model), tmp_path / "out")
    saved = open_tensors(tmp_path / "out")
    assert saved.keys() == dense.keys()
    for key, x in dense.items():
        np.testing.assert_array_equal(saved[key].read(), x, err_msg=key)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq reordered", "awq", "int4 with zeros", "nf4"])
def test_each_device_decodes_its_shards_once(name, make, tmp_path, monkeypatch):
    dense = write_quantized(tmp_path, make, name)
    whole = jax.tree.leaves(zoo.load(tmp_path))
    sizes = []
    count = lambda *arguments: sizes.append((x := read_in_chunks(*arguments)).size) or x
    monkeypatch.setattr("zoo.weights.formats.lazy.read_in_chunks", count)
    model = zoo.load(tmp_path, mesh=zoo.make_mesh(data=2, fsdp=2, tensor=2))
    for ours, expected in zip(jax.tree.leaves(model), whole, strict=True):
        assert ours.dtype == expected.dtype == jnp.bfloat16, "as the tensors that are not quantized"
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected)[shard.index])
    assert sum(sizes) == sum(x.size for key, x in dense.items() if "_proj." in key)
    assert max(sizes) == 32 * 48 // 4


def test_rows_are_decoded_in_chunks(make, tmp_path, monkeypatch):
    write_quantized(tmp_path, make, "gptq")
    whole = jax.tree.leaves(zoo.load(tmp_path))
    monkeypatch.setattr("zoo.weights.formats.base._CHUNK_ELEMENTS", 100)
    for ours, expected in zip(jax.tree.leaves(zoo.load(tmp_path)), whole, strict=True):
        np.testing.assert_array_equal(ours, expected)


SLOW = ("gptq reordered", "awq", "nf4 in rows", "llm.int8")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["fp8 blocks", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
def test_peak_memory_is_one_matrix_above_the_model(name, packed, make, tmp_path, monkeypatch):
    """Of numpy's memory, in which the arrays lie; files are mapped. Of the matrix in float32 where it is decoded, and
    which of its numbers are finite: 1.35 of it as measured. All matrices would be 24 of it."""
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 32}
    write_quantized(tmp_path, make, name, sizes=sizes)
    monkeypatch.setattr("zoo.weights.formats.base._CHUNK_ELEMENTS", 1 << 11)
    checkpoint = open_checkpoint(tmp_path, packed=packed)
    tracemalloc.start()
    model = read_parameters(checkpoint, None, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size, largest = sum(x.nbytes for x in jax.tree.leaves(model)), 128 * 1024 * (1 if packed else 4)
    assert size < peak < size + 1.5 * largest + (1 << 18)


def drop(*names):
    return lambda tensors, config: [tensors.pop(name) for name in names]


def replace(name, value):
    return lambda tensors, config: tensors.update({name: value(tensors[name])})


def declare(**options):
    return lambda tensors, config: config["quantization_config"].update(options)


STATE = f"{QUERY}.weight.quant_state.bitsandbytes__nf4"
DAMAGE = {
    "no scales": ("fp8 blocks", drop(f"{DOWN}.weight_scale_inv"), f"{DOWN}.weight lacks its {DOWN}.weight_scale_inv"),
    "other blocks": (
        "fp8 blocks",
        replace(f"{DOWN}.weight_scale_inv", lambda x: x[:, :-1]),
        rf"{DOWN}.weight_scale_inv is \[2, 3\]: expected \[2, 4\] for a matrix of \[32, 48\]",
    ),
    "scales of a plain matrix": (
        "fp8 blocks",
        replace(f"{DOWN}.weight", np.float16),
        f"{DOWN}.weight is float16, beside its {DOWN}.weight_scale_inv",
    ),
    "integers for scales": (
        "gptq",
        replace(f"{QUERY}.scales", np.int32),
        f"{QUERY}.scales is int32: expected float16 or bfloat16 or float32",
    ),
    "another dtype word": (
        "gptq",
        replace(f"{QUERY}.scales", lambda x: x.view(np.uint16).view(jnp.bfloat16)),
        f"{QUERY}.scales is bfloat16, where 13 of 14 are float16",
    ),
    "no zero points": ("awq", drop(f"{QUERY}.qzeros"), f"{QUERY}.qweight lacks its {QUERY}.qzeros"),
    "no shape": ("int4", drop(f"{QUERY}.weight_shape"), f"lacks its {QUERY}.weight_shape"),
    "a huge shape": (
        "int4",
        replace(f"{QUERY}.weight_shape", lambda x: x * 10**12),
        rf"{QUERY}.weight_packed is \[32, 4\]: expected \[32000000000000, 4000000000000\]",
    ),
    "a negative shape": ("int4", replace(f"{QUERY}.weight_shape", lambda x: -x), r"weight_shape is \[-32, -32\]"),
    "fewer outputs": (
        "gptq",
        replace(f"{QUERY}.qweight", lambda x: x[:, :-8]),
        rf"{QUERY}.qzeros is \[2, 4\]: expected \[2, 3\]",
    ),
    "a vector": ("gptq", replace(f"{QUERY}.qweight", np.ravel), f"{QUERY} has .* which are not parts of a matrix"),
    "no JSON": ("nf4", replace(STATE, lambda x: x[:-3]), f"{QUERY}.weight.quant_state.* is damaged"),
    "no nested constants": (
        "nf4",
        drop(f"{QUERY}.weight.nested_absmax"),
        f"{QUERY} lacks its weight.nested_absmax, and its quant_state says otherwise",
    ),
    "listed": (
        "fp8 blocks",
        declare(modules_to_not_convert=["model.layers.0"]),
        f"{QUERY} is quantized, and the config declares that it is not",
    ),
    "a pattern": ("int4", declare(ignore=["re:.*q_proj"]), f"{QUERY} is quantized, and the config declares"),
}


@pytest.mark.parametrize("label", DAMAGE)
def test_damage_is_named_before_anything_is_allocated(label, make, tmp_path, allocations):
    name, change, message = DAMAGE[label]
    write_quantized(tmp_path, make, name, change=change)
    allocations.clear()
    for packed in (False, True):
        with pytest.raises(zoo.CheckpointError, match=message):
            zoo.load(tmp_path, packed=packed)
    assert not allocations


def replace_quantization(given, _, config):
    config.update(quantization_config=given)


@pytest.mark.parametrize("packed", [False, True])
def test_uncovered_formats_are_refused_unread(packed, make, tmp_path, monkeypatch):
    def refuse():
        raise AssertionError("a tensor was read")

    give = lambda directory: {key: dataclasses.replace(x, read=refuse) for key, x in open_tensors(directory).items()}
    monkeypatch.setattr("zoo.weights.resolve.open_tensors", give)
    for given, message in (
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not read. Formats that are: fp8, compressed-tensors .*, gptq"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3, and 4 or 8 is read"),
        ({"bits": 4}, "quant_method None is not read. Formats that are: fp8"),
    ):
        write_quantized(tmp_path, make, "awq", change=partial(replace_quantization, given))
        with pytest.raises(zoo.CheckpointError, match=message):
            zoo.load(tmp_path, packed=packed)


def test_numbers_that_are_not_finite_are_refused(make, tmp_path):
    write_quantized(tmp_path, make, "awq", change=replace(f"{QUERY}.scales", lambda x: np.full_like(x, np.inf)))
    with pytest.raises(zoo.CheckpointError, match=f"{QUERY}.weight has a number that is not finite"):
        zoo.load(tmp_path)


def test_modules_left_out_may_be_plain(make, tmp_path):
    """A matrix that is stored as it is, is read as it is."""
    stored = np.full((32, 32), 0.5, jnp.bfloat16)

    def change(tensors, config):
        for suffix in ("qweight", "qzeros", "scales"):
            del tensors[f"{QUERY}.{suffix}"]
        tensors[f"{QUERY}.weight"] = stored
        config["quantization_config"]["modules_to_not_convert"] = [QUERY]

    write_quantized(tmp_path, make, "awq", change=change)
    block = zoo.load(tmp_path).stack.segments[0].blocks[0]
    np.testing.assert_array_equal(block.mixer.query.weight[0], stored)


def test_matrices_stored_transposed_are_refused(make, tmp_path):
    """GPT-2 stores (in, out)."""
    zoo.save(make("gpt2", {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}), tmp_path)
    tensors = {key: np.array(x.read()) for key, x in open_tensors(tmp_path).items()}
    name = next(key for key in tensors if key.endswith("attn.c_proj.weight"))
    tensors[name] = tensors[name].astype(jnp.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(zoo.CheckpointError, match=r"only matrices stored as \(out, in\) are read"):
        zoo.load(tmp_path)
