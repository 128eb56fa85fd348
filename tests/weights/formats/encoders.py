"""Encoders of quantized files in plain numpy: random codes and scales, and the float32 matrices that they stand for."""

import json

import jax.numpy as jnp
import numpy as np

import zoo
from zoo.ops.quantized.nf4 import CODEBOOK
from zoo.weights.safetensors import open_tensors, write_safetensors

CONFIG = {"model_type": "llama", "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE = 1 << 20
"""Rows or columns of a block that is the whole matrix."""
AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}
"""Number of an output in its word -> its place of four bits."""


def product(scale, integer):
    """Round the exact product of two arrays to float32 once."""
    return (np.asarray(scale, np.float64) * np.asarray(integer, np.float64)).astype(np.float32)


def pack(numbers, bits, place=lambda i: i):
    """Pack rows of numbers into int32 words, filling the last one up with zeros."""
    per_word = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // per_word)), np.uint64)
    for column, values in enumerate(numbers.T):
        words[:, column // per_word] |= values.astype(np.uint64) << np.uint64(bits * place(column % per_word))
    return words.astype(np.uint32).view(np.int32)


def fp8(draw, out, in_, rows, columns, suffix, scale_dtype, scalar=None, beside=()):
    """Encode a matrix in blocks. `scalar`: the shape of a single scale. `beside`: scales of activations."""
    codes = draw.normal(size=(out, in_)).astype(jnp.float8_e4m3fn)
    shape = (-(-out // rows), -(-in_ // columns))
    scales = np.abs(draw.normal(size=shape) / 8).astype(scale_dtype)
    dense = product(scales[np.arange(out)[:, None] // rows, np.arange(in_) // columns], codes)
    scales = scales if scalar is None else scales.reshape(scalar)
    beside = {name: np.abs(draw.normal(size=scalar)).astype(np.float32) for name in beside}
    return {"weight": codes, suffix: scales} | beside, dense


def grouped(draw, out, in_, size, bits, scale_dtype, zeros, groups=None):
    """Return codes, scales "out groups", and the dense matrix."""
    groups = np.arange(in_) // size if groups is None else groups
    codes = draw.integers(0, 2**bits, (out, in_))
    scales = np.abs(draw.normal(size=(out, -(-in_ // size))) / 2**bits).astype(scale_dtype)
    zeros = np.broadcast_to(zeros, scales.shape)
    return codes, scales, product(scales[:, groups], codes - zeros[:, groups])


def gptq(draw, out, in_, bits, reordered, offset, symmetric):
    groups = draw.permutation(np.arange(in_) // 16) if reordered else np.arange(in_) // 16
    shape = (out, -(-in_ // 16))
    zeros = np.full(shape, 2 ** (bits - 1)) if symmetric else draw.integers(1, 2**bits - 1, shape)
    codes, scales, dense = grouped(draw, out, in_, 16, bits, np.float16, zeros, groups)
    parts = {"qweight": pack(codes, bits).T, "qzeros": pack(zeros.T - offset, bits)}
    return parts | {"scales": scales.T, "g_idx": groups.astype(np.int32)}, dense


def awq(draw, out, in_):
    zeros = draw.integers(0, 16, (out, -(-in_ // 16)))
    codes, scales, dense = grouped(draw, out, in_, 16, 4, np.float16, zeros)
    words = [pack(numbers.T, 4, AWQ_PLACES.get) for numbers in (codes, zeros)]
    return {"qweight": words[0], "qzeros": words[1], "scales": scales.T}, dense


def packed_integers(draw, out, in_, bits, size, symmetric, reordered):
    size = in_ if size is None else size
    groups = draw.permutation(np.arange(in_) // size) if reordered else None
    shape = (out, -(-in_ // size))
    zeros = 2 ** (bits - 1) if symmetric else draw.integers(0, 2**bits, shape)
    codes, scales, dense = grouped(draw, out, in_, size, bits, jnp.bfloat16, zeros, groups)
    parts = {"weight_packed": pack(codes, bits), "weight_scale": scales, "weight_shape": np.array([out, in_])}
    parts |= {} if symmetric else {"weight_zero_point": pack(zeros.T, bits).T}
    return parts | ({"weight_g_idx": groups.astype(np.int32)} if groups is not None else {}), dense


def nf4(draw, out, in_, nested, levels=None):
    codes, block, offset = draw.integers(0, 16, out * in_), 64, np.float32(0.1)
    levels = np.sort(draw.normal(size=16)).astype(np.float32) if levels is None else levels
    count = -(-out * in_ // block)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [out, in_]}
    parts = {"weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": levels.copy()}
    constants = np.abs(draw.normal(size=count) / 8).astype(np.float32)
    if nested:
        constant_codes = draw.integers(0, 256, count).astype(np.uint8)
        steps = np.abs(draw.normal(size=-(-count // 256)) / 8).astype(np.float32)
        table = np.sort(draw.normal(size=256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        constants = product(table[constant_codes], steps[np.arange(count) // 256])
        constants = np.float32(constants.astype(np.float64) + np.float64(offset))
        parts |= {"weight.nested_absmax": steps, "weight.nested_quant_map": table}
    parts["weight.absmax"] = constant_codes if nested else constants
    parts["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts, product(levels[codes], constants[np.arange(len(codes)) // block]).reshape(out, in_)


def llm_int8(draw, out, in_):
    codes = draw.integers(-127, 128, (out, in_)).astype(np.int8)
    largest = np.abs(draw.normal(size=out)).astype(np.float32)
    dense = product(product(largest[:, None], codes), np.float32(1 / 127))
    return {"weight": codes, "SCB": largest, "weight_format": np.zeros((), np.uint8)}, dense


def nvfp4(draw, out, in_):
    codes = draw.integers(0, 16, (out, in_)).astype(np.uint8)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes > 7, -1, 1)
    scales = np.abs(100 * draw.normal(size=(out, in_ // 16))).astype(jnp.float8_e4m3fn)
    whole = np.float32([1234.5])
    dense = product(product(scales, 1 / whole)[:, np.arange(in_) // 16], levels)
    parts = {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scales}
    return parts | {"weight_global_scale": whole, "input_global_scale": np.float32([2.5])}, dense


def compressed(layout, **weights):
    scheme = {"dynamic": False, "symmetric": True, "group_size": None, "actorder": None, "observer": "minmax"} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": groups,
        "quantization_status": "compressed",
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
GPTQ = {"quant_method": "gptq", "group_size": 16, "sym": False, "checkpoint_format": "gptq"}
INTEGERS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}
FLOATS = {"type": "float", "num_bits": 8}
FOUR_BITS = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
NF4 = {"load_in_4bit": True}
BITSANDBYTES = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"], "bnb_4bit_quant_type": "nf4"}

FORMATS = {
    "fp8 blocks": (FP8 | {"weight_block_size": [20, 12]}, fp8, (20, 12, "weight_scale_inv", np.float32)),
    "fp8 tensors": (
        compressed("float-quantized", **FLOATS, strategy="tensor"),
        fp8,
        (LARGE, LARGE, "weight_scale", np.float32, (1,), ("input_scale",)),
    ),
    "fp8 static": (
        FP8 | {"weight_block_size": None, "activation_scheme": "static"},
        fp8,
        (LARGE, LARGE, "weight_scale_inv", jnp.bfloat16, (), ("activation_scale",)),
    ),
    "autofp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8,
        (LARGE, LARGE, "weight_scale", np.float32, (), ("input_scale",)),
    ),
    "fp8 blocks of llm-compressor": (
        compressed("float-quantized", **FLOATS, strategy="block", block_structure=[20, 12]),
        fp8,
        (20, 12, "weight_scale", jnp.bfloat16),
    ),
    "fp8 rows": (
        compressed("float-quantized", **FLOATS, strategy="channel"),
        fp8,
        (1, LARGE, "weight_scale", jnp.bfloat16),
    ),
    "gptq": (GPTQ | {"bits": 4, "desc_act": False}, gptq, (4, False, 1, False)),
    "gptq reordered": (GPTQ | {"bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"}, gptq, (8, True, 0, False)),
    "gptq symmetric": (GPTQ | {"bits": 4, "sym": True, "desc_act": True}, gptq, (4, True, 1, True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, awq, ()),
    "int4": (compressed("pack-quantized", **INTEGERS), packed_integers, (4, 16, True, False)),
    "int4 with zeros": (
        compressed("pack-quantized", **INTEGERS | {"symmetric": False, "actorder": "group"}),
        packed_integers,
        (4, 16, False, True),
    ),
    "int8 rows": (
        compressed("pack-quantized", **INTEGERS | {"num_bits": 8, "strategy": "channel", "group_size": None}),
        packed_integers,
        (8, None, True, False),
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", **FOUR_BITS), nvfp4, ()),
    "nf4": (BITSANDBYTES | NF4 | {"bnb_4bit_use_double_quant": True}, nf4, (True,)),
    "nf4 of one level": (BITSANDBYTES | NF4, nf4, (False,)),
    "nf4 in rows": (BITSANDBYTES | NF4 | {"bnb_4bit_use_double_quant": True}, nf4, (True, CODEBOOK)),
    "nf4 in rows of one level": (BITSANDBYTES | NF4, nf4, (False, CODEBOOK)),
    "llm.int8": (BITSANDBYTES | {"load_in_8bit": True}, llm_int8, ()),
}
"""Name -> (quantization_config, encoder of a matrix, its arguments)."""
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
"""Of NF4 in rows: matrices have 384 blocks, two or three in a row, so that 256 of them end inside a row."""


def write_quantized(directory, make, name, *, family="llama", dtype=jnp.bfloat16, change=None, sizes=None):
    """Write a model whose linear layers are quantized, and return the float32 tensors that it stands for.

    `change(tensors, config)` damages both in place.
    """
    given, encode, options = FORMATS[name]
    sizes = SIZES if sizes is None and name.startswith("nf4 in rows") else sizes
    given_sizes = {key: x for key, x in (CONFIG | (sizes or {})).items() if x is not None}
    zoo.save(make(family, given_sizes | {"model_type": family}, dtype=dtype), directory)
    tensors = {key: np.array(x.read()) for key, x in open_tensors(directory).items()}
    dense, draw = {key: x.astype(np.float32) for key, x in tensors.items()}, np.random.default_rng(0)
    for key in [key for key in tensors if "_proj." in key]:
        parts, dense[key] = encode(draw, *tensors.pop(key).shape, *options)
        tensors |= {f"{key.removesuffix('weight')}{suffix}": x for suffix, x in parts.items()}
    config = json.loads((directory / "config.json").read_text()) | {
        "quantization_config": json.loads(json.dumps(given))
    }
    if change is not None:
        change(tensors, config)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_safetensors(directory / "model.safetensors", tensors)
    return dense
