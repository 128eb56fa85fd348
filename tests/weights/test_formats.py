"""Every quantization_config is read by a format, or refused by name."""

import pytest

from zoo.models.hf.errors import ConfigError
from zoo.weights.formats import split_quantization

from .formats.encoders import BITSANDBYTES, FLOATS, FORMATS, FOUR_BITS, FP8, GPTQ, INTEGERS, compressed

AWQ = FORMATS["awq"][0]


def test_mxfp4_and_no_quantization_are_left_to_the_family():
    for config in ({}, {"quantization_config": None}, {"quantization_config": {"quant_method": "mxfp4"}}):
        assert split_quantization(config) == (config, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "hqq"}, "'hqq' is not read. Formats that are: fp8, .*gptq, awq, bitsandbytes .*, mxfp4"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size = \[128\] should be two whole numbers above 0"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2', and 'e4m3' or .* is read"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype = 'fp4', and 'fp8' is read"),
        (FP8 | {"rotation": "hadamard"}, "rotation = 'hadamard' is not a key of 'fp8' that we know"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head' should be null or a list"),
        (GPTQ | {"bits": 3}, "bits = 3, and 4 or 8 is read"),
        (GPTQ, "bits is missing"),
        (GPTQ | {"bits": 4, "group_size": 0}, "group_size = 0 should be a whole number above 0, or -1"),
        (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (GPTQ | {"bits": 4, "dynamic": {"-:.*": {}}}, "dynamic = .*, and {} is read"),
        (AWQ | {"version": "gemv"}, "version = 'gemv', and 'gemm' or 'GEMM' is read"),
        (AWQ | {"zero_point": False}, "zero_point = False, and True is read"),
        (BITSANDBYTES | {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type = 'fp4'"),
        (BITSANDBYTES, "one of load_in_4bit and load_in_8bit should be true"),
        (compressed("mxfp4-pack-quantized", **FLOATS), "format = 'mxfp4-pack-quantized', and 'float-quantized' or"),
        (compressed("nvfp4-pack-quantized", **FOUR_BITS | {"group_size": 32}), "group_size = 32, and 16 is read"),
        (compressed("float-quantized", **FLOATS, strategy="group"), "strategy = 'group', and 'tensor' or 'channel'"),
        (compressed("float-quantized", **FLOATS, strategy="channel", symmetric=False), "symmetric = False, and True"),
        (compressed("pack-quantized", **INTEGERS | {"num_bits": 2}), "num_bits = 2, and 4 or 8 is read"),
        (compressed("pack-quantized", **INTEGERS) | {"config_groups": {}}, "config_groups should have one scheme"),
        (compressed("pack-quantized", **INTEGERS) | {"ignore": ["re:("]}, "'re:\\(' is not a regular expression"),
        (
            compressed("pack-quantized", **INTEGERS) | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config = .*, and the format 'dense' is read",
        ),
        (compressed("pack-quantized", **INTEGERS) | {"kv_cache_scheme": {}}, "kv_cache_scheme = {}, and None is read"),
    ],
)
def test_uncovered_quantization_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=f"quantization_config: .*{message}"):
        split_quantization({"quantization_config": given})


def test_groups_of_another_format_are_refused():
    given = compressed("pack-quantized", **INTEGERS)
    given["config_groups"]["group_0"]["format"] = "float-quantized"
    with pytest.raises(ConfigError, match="a group has the format 'float-quantized', and the file 'pack-quantized'"):
        split_quantization({"quantization_config": given})


def test_keys_of_published_files_are_known():
    """As quantizers write them, with keys that change no number."""
    nulls = ("dataset", "tokenizer", "pad_token_id", "model_seqlen", "max_input_length", "block_name_to_quantize")
    nulls += ("module_name_preceding_first_block", "modules_in_block_to_quantize")
    optimum = dict.fromkeys(nulls) | {"damp_percent": 0.01, "true_sequential": True, "use_exllama": True}
    optimum |= {"batch_size": 1, "cache_block_outputs": True, "exllama_config": {"version": 1}, "use_cuda_fp16": False}
    gptqmodel = {"lm_head": False, "hyb_act": False, "pack_dtype": "int32", "dynamic": None, "meta": {"uri": "x"}}
    bitsandbytes = {"_load_in_4bit": True, "_load_in_8bit": False, "load_in_8bit": False, "llm_int8_threshold": 6.0}
    bitsandbytes |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"}
    bitsandbytes |= {"llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False}
    scheme = {"scale_dtype": None, "zp_dtype": "torch.int8", "observer_kwargs": {}, "block_structure": None}
    llm_compressor = {"global_compression_ratio": 1.9, "version": "0.12", "transform_config": {}}
    llm_compressor |= {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "targets": []}}
    for given in (
        GPTQ | optimum | {"bits": 4},
        GPTQ | gptqmodel | {"bits": 8},
        AWQ | {"modules_to_not_convert": ["gate"], "backend": "autoawq", "do_fuse": False, "exllama_config": None},
        AWQ | optimum | {"sym": True, "format": "gemm"},
        FP8 | {"weight_block_size": [128, 128], "ignored_layers": ["gate"], "scale_fmt": "ue8m0"},
        FP8 | {"activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        BITSANDBYTES | bitsandbytes | {"load_in_4bit": True},
        compressed("pack-quantized", **INTEGERS | scheme) | llm_compressor,
    ):
        assert split_quantization({"quantization_config": given})[1] is not None, given


def test_unnamed_method_of_2023_is_bitsandbytes():
    _, quantized = split_quantization({"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}})
    assert quantized is not None and quantized.kind == "int8"


def test_defaults_are_those_of_transformers():
    read = lambda **given: split_quantization({"quantization_config": given})[1]
    assert read(quant_method="fp8").block == (128, 128)
    assert read(quant_method="awq", bits=4, format="gemm", sym=True).group_size == 128
    assert read(**compressed("pack-quantized", **INTEGERS | {"actorder": "dynamic"})).reordered


@pytest.mark.parametrize("name", FORMATS)
def test_covered_quantization_leaves_the_other_keys(name):
    config, quantized = split_quantization({"model_type": "llama", "quantization_config": FORMATS[name][0]})
    assert config == {"model_type": "llama"} and quantized is not None


def test_modules_left_out_are_named_by_whole_words_or_patterns():
    def is_left_out(entry, module):
        given = compressed("pack-quantized", **INTEGERS) | {"ignore": [entry]}
        return split_quantization({"quantization_config": given})[1].is_left_out(module)

    assert is_left_out("model.layers.1", "model.layers.1.mlp.gate")
    assert is_left_out("mlp.gate", "model.layers.1.mlp.gate")
    assert is_left_out("re:.*mlp.gate$", "model.layers.1.mlp.gate")
    assert not is_left_out("model.layers.1", "model.layers.11.mlp.gate")
    assert not is_left_out("gate", "model.layers.1.mlp.gate_proj")
