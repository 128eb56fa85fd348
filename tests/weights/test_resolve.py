"""Checkpoints whose config and tensors disagree: one clear error each, before anything is allocated."""

import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo._terminal import escape_controls
from zoo.weights.safetensors import DTYPES

from .damage import (
    CONFIG,
    GPT2,
    INDEX,
    LLAMA,
    NORM,
    ONE_LAYER,
    QUERY,
    WHOLE,
    alter,
    alter_tensors,
    bits_of,
    build_file,
    catch_error,
    labeled,
    parse_file,
    time_limit,
)


def rename(old, new):
    return lambda arrays: arrays.update({new: arrays.pop(old)})


def replace(name, change):
    return lambda arrays: arrays.update({name: change(arrays[name])})


@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["first", "second"])
def test_resolve_names_each_wrong_tensor(checkpoint, tmp_path, attempt, is_first):
    """Of the first layer and outside of layers, or of the second layer."""
    names = [name for name in parse_file(checkpoint / WHOLE)[0] if name != "__metadata__"]
    names = [name for name in names if (".layers.1." not in name) == is_first]
    assert len(names) > 8
    for name in names:
        message = attempt(
            f"{name} lacks", alter_tensors(checkpoint, tmp_path / "t", lambda arrays, name=name: arrays.pop(name))
        )
        assert f"{name} [" in message and "is missing" in message
        message = attempt(
            f"{name} misspelled", alter_tensors(checkpoint, tmp_path / "t", rename(name, name[:-2] + "tt"))
        )
        assert f"did you mean '{name[:-2]}tt'?" in message and "no place in the model" in message
        array = alter_tensors(checkpoint, tmp_path / "t", replace(name, lambda x: np.append(x, x[:1], axis=0)))
        message = attempt(f"{name} has a row too many", array)
        assert f"{name} is [" in message and "the config asks for [" in message
        message = attempt(f"{name} of integers", alter_tensors(checkpoint, tmp_path / "t", replace(name, to(np.int32))))
        assert name in message and "int32" in message


def test_resolve_names_wrong_tensors(checkpoint, tmp_path, attempt):
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight"):
        message = attempt(f"{name} transposed", alter_tensors(checkpoint, tmp_path / "t", replace(name, np.transpose)))
        assert f"{name} is [" in message
        for shape in ((-1,), (1, *np.shape([[0]]), -1)):
            flat = alter_tensors(checkpoint, tmp_path / "t", replace(name, lambda x, shape=shape: x.reshape(shape)))
            assert f"{name} is [" in attempt(f"{name} {shape}", flat)
    for dtype in ("int8", "int16", "int64", "uint8", "uint32", "bool", DTYPES["F8_E4M3"], DTYPES["F8_E5M2"]):
        everything = lambda arrays, dtype=dtype: arrays.update({k: to(dtype)(x) for k, x in arrays.items()})
        assert "quantized" in attempt(f"all {dtype}", alter_tensors(checkpoint, tmp_path / "t", everything))
        one = alter_tensors(checkpoint, tmp_path / "t", replace(NORM, to(dtype)))
        assert NORM in attempt(f"the norm {dtype}", one)
    for extra in ("model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "x", "", "a" * 9000):
        message = attempt(
            f"{extra[:50]} too many",
            alter_tensors(checkpoint, tmp_path / "t", lambda a, e=extra: a.update({e: np.ones(3, "f4")})),
        )
        assert f"{extra[:50]}" in message and WHOLE[:5] in message
    mixed = alter_tensors(checkpoint, tmp_path / "t", replace(QUERY, to(np.float16)))
    assert "pass dtype=" in attempt("layers of two dtypes", mixed)
    assert zoo.load(mixed, dtype=jnp.float32).norm.weight.dtype == jnp.float32


def to(dtype):
    return lambda x: x.astype(dtype)


def test_resolve_lists_few_of_many_wrong_tensors(make, tmp_path, attempt):
    """Eighty layers under other names: the message is short and quick to build."""
    zoo.save(make("llama", LLAMA | {"num_hidden_layers": 80}), tmp_path / "deep")

    def rename(arrays):
        for name in list(arrays):
            arrays[name.replace("self_attn", "attention").replace("layernorm", "norm")] = arrays.pop(name)

    message = attempt("all renamed", alter_tensors(tmp_path / "deep", tmp_path / "t", rename))
    assert "more" in message.splitlines()[-1]


def test_resolve_refuses_damaged_config(checkpoint, tmp_path, attempt):
    deep = 10 * sys.getrecursionlimit()
    texts = {
        "missing": None,
        "empty": b"",
        "no JSON": b"model_type: llama",
        "half": b'{"model_type": "llama"',
        "a list": b"[1]",
        "a word": b'"llama"',
        "null": b"null",
        "no text": b"\xff\xfe{}",
        "a mark of UTF-8": b"\xef\xbb\xbf" + (checkpoint / CONFIG).read_bytes(),
        "deep": b"[" * deep,
        "deep tables": b'{"model_type":' * deep,
        "a number of 5000 digits": b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}",
        "a key twice": b'{"model_type": "llama", "vocab_size": 11, "vocab_size": 12}',
    }
    for label, text in texts.items():
        assert CONFIG in attempt(label, alter(checkpoint, tmp_path / "config", CONFIG, text))
    for name in (None, 1, True, [], ["llama"], {}, {"llama": 1}, "", "lama", "llama ", "LLaMA", "llama\n", "x" * 10**5):
        config = json.loads((checkpoint / CONFIG).read_text()) | {"model_type": name}
        message = attempt(f"model_type {str(name)[:20]}", alter(checkpoint, tmp_path / "config", CONFIG, config))
        assert "model_type" in message and "`zoo families`" in message
    assert "did you mean 'llama'?" in attempt(
        "misspelled", alter(checkpoint, tmp_path / "config", CONFIG, {**config, "model_type": "lllama"})
    )
    assert "no model_type" in attempt("without", alter(checkpoint, tmp_path / "config", CONFIG, {"vocab_size": 11}))


CHANGING = [
    ("llama", "is_encoder_decoder", True),
    ("llama", "add_cross_attention", True),
    ("llama", "pruned_heads", {"0": [1]}),
    ("llama", "chunk_size_feed_forward", 2),
    ("gemma", "use_bidirectional_attention", True),
    ("gemma", "hidden_activation", "silu"),
    ("mistral", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen2", "use_mrope", True),
    ("gpt2", "cross_attention_hidden_size", 8),
]


def test_resolve_refuses_unsupported_config_keys(make, tmp_path, attempt):
    for family, key, value in CHANGING:
        zoo.save(make(family, GPT2 if family == "gpt2" else LLAMA), tmp_path / family)
        config = json.loads((tmp_path / family / CONFIG).read_text())
        directory = alter(tmp_path / family, tmp_path / "t", CONFIG, config | {key: value})
        message = attempt(f"{family} {key}", directory)
        assert key in message and "would change the result" in message
        assert bits_of(zoo.load(directory, ignore=(key,))) == bits_of(zoo.load(tmp_path / family))


def test_resolve_refuses_unknown_config_keys(checkpoint, tmp_path, attempt):
    config = json.loads((checkpoint / CONFIG).read_text())
    for key, meant in (
        ("hiden_size", "hidden_size"),
        ("rms_norm_epsilon", "rms_norm_eps"),
        ("rope_thetas", "rope_theta"),
    ):
        message = attempt(key, alter(checkpoint, tmp_path / "t", CONFIG, config | {key: 4}))
        assert key in message and f"did you mean {meant!r}?" in message
    for key, value in (("no_such_thing", 1), ("", 1), ("x" * 10**5, [1]), ("sizes", list(range(10**5))), ("\ud800", 1)):
        assert CONFIG in attempt(key[:20], alter(checkpoint, tmp_path / "t", CONFIG, config | {key: value}))
    many = {f"no_such_thing_{i}": i for i in range(2000)}
    assert "no_such_thing_0" in attempt("many keys", alter(checkpoint, tmp_path / "t", CONFIG, config | many))
    attempt.harmless("a null", alter(checkpoint, tmp_path / "t", CONFIG, config | {"no_such_thing": None}))


BAD = ("1", "", -1, 0, 0.5, 1e300, 10**30, True, False, None, [], [1], {}, {"a": [{"b": None}]}, float("nan"), 1e999)


def test_resolve_refuses_config_values_of_wrong_type(checkpoint, tmp_path, attempt, bits):
    """Every config key with values of a wrong type: refused by name, or honored. NaN, infinity and wrong counts are
    never honored."""
    config = json.loads((checkpoint / CONFIG).read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    original = zoo.load(checkpoint)
    for key, value in itertools.product(config, BAD):
        if key in ("architectures", "dtype", "model_type"):
            continue
        directory = alter(checkpoint, tmp_path / "t", CONFIG, config | {key: value})
        with labeled(f"{key} = {value}"), time_limit():
            loaded = []
            message = catch_error(lambda directory=directory, loaded=loaded: loaded.append(zoo.load(directory)))
            if message is not None:
                assert str(directory) in message
                continue
            assert bits_of(loaded[0]) == bits and value == value
            honored = bool(next(zoo.models.parameter_paths.find_differences(original, loaded[0]), ""))
            absent = value is None or (not value and key == "rope_parameters")
            same = honored or absent or key in ("max_position_embeddings",) or value == config[key]
            assert same, f"not honored and not refused: {loaded[0]}"
            assert key not in sizes or absent


LARGE = (10**3, 10**12, 2**63, 10**300)
MORE_LARGE = (10**6, 10**9, 2**31, 2**32, 2**63 - 1, 2**64, 10**30)


@pytest.mark.parametrize(
    "large", [LARGE, pytest.param(MORE_LARGE, marks=pytest.mark.slow)], ids=["of each magnitude", "more"]
)
def test_resolve_refuses_config_sizes_unlike_the_tensors(checkpoint, make, tmp_path, attempt, large):
    """Wrong sizes, however large, are found from shapes alone."""
    config = json.loads((checkpoint / CONFIG).read_text())
    for key, near in {
        "num_hidden_layers": (1, 3, 20, 21, 22),
        "vocab_size": (1, 10, 12),
        "hidden_size": (1, 4, 7, 16),
        "intermediate_size": (1, 11, 13),
        "num_attention_heads": (1, 3, 4),
        "num_key_value_heads": (2, 3),
        "head_dim": (1, 2, 3, 8),
    }.items():
        for value in (*near, *large):
            message = attempt(f"{key} = {value}", alter(checkpoint, tmp_path / "t", CONFIG, config | {key: value}))
            assert str(tmp_path / "t") in message
    for change in (
        {"hidden_size": 10**12, "head_dim": 10**12, "num_attention_heads": 10**6, "vocab_size": 10**12},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"model_type": "gpt2"},
        {"model_type": "gpt_neox"},
        {"model_type": "qwen2"},
        {"hidden_act": "silly"},
        {"head_dim": None, "num_attention_heads": 3},
    ):
        assert str(tmp_path / "t") in attempt(str(change), alter(checkpoint, tmp_path / "t", CONFIG, config | change))
    zoo.save(make("gpt2", GPT2), tmp_path / "gpt2")
    config = json.loads((tmp_path / "gpt2" / CONFIG).read_text())
    for key, near in {
        "n_layer": (1, 3),
        "n_embd": (4, 9),
        "n_head": (3,),
        "n_positions": (5, 7),
        "n_inner": (8,),
    }.items():
        for value in (*near, *large):
            attempt(f"{key} = {value}", alter(tmp_path / "gpt2", tmp_path / "t", CONFIG, config | {key: value}))
    zoo.save(make("qwen2", LLAMA), tmp_path / "qwen2")
    config = json.loads((tmp_path / "qwen2" / CONFIG).read_text())
    for types in (
        *([], ["full_attention"], ["full_attention"] * 3, ["full", "full"], "full_attention", 2, {}, [1, 2]),
        *([None, None], [["full_attention"], []], [{}, {}], ["sliding_attention"] * 2, "ab", {"a": 1, "b": 2}),
    ):
        changed = alter(tmp_path / "qwen2", tmp_path / "t", CONFIG, config | {"layer_types": types})
        assert "layer_types" in attempt(f"layer_types {types}", changed)


ROPE = [
    {"rope_type": "su", "factor": 2.0},
    {"rope_type": "linaer", "factor": 2.0},
    {"rope_type": None},
    {"rope_type": ["linear"], "factor": 2.0},
    {"rope_type": {}, "factor": 2.0},
    {"rope_type": 3},
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": None},
    {"type": "linear", "factor": "2"},
    {"type": "linear", "factor": -1},
    {"type": "linear", "factor": 0},
    {"type": "linear", "factor": True},
    {"type": "linear", "factor": [2.0]},
    {"type": "linear", "factor": []},
    {"type": "linear", "factor": 1e300},
    {"type": "linear", "factor": {"a": 1}},
    {"type": "linear", "factor": float("nan")},
    {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0},
    {"type": "dynamic"},
    {"type": "llama3", "factor": 8.0},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": [4.0]},
    {"type": "yarn"},
    {"type": "yarn", "factor": 4.0, "beta_slow": "1"},
    {"type": "yarn", "factor": 4.0, "truncate": "yes"},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": [64]},
    {"type": "longrope", "short_factor": [1.0, 1.0]},
    {"type": "longrope", "short_factor": 1.0, "long_factor": 2.0},
    {"type": "longrope", "short_factor": [], "long_factor": []},
    {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    {"type": "longrope", "short_factor": ["1", "1"], "long_factor": [1.0, 1.0]},
    {"type": "longrope", "short_factor": [1.0, None], "long_factor": [1.0, 1.0]},
    {"type": "longrope", "short_factor": [[1.0, 1.0]], "long_factor": [1.0, 1.0]},
    {"type": "longrope", "short_factor": [1.0, -1.0], "long_factor": [1.0, 1.0]},
    {"rope_theta": "10000"},
    {"rope_theta": -1},
    {"rope_theta": 0},
    {"rope_theta": [10000.0]},
    {"rope_theta": True},
    {"rope_theta": 1e300},
    {"factor": 2.0},
    {"partial_rotary_factor": 0.1},
    {"partial_rotary_factor": 2.0},
    {"partial_rotary_factor": 1e20},
    {"partial_rotary_factor": "half"},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
    {"": 1},
    "linear",
    [["rope_type", "linear"]],
    1,
    True,
]


def test_resolve_refuses_invalid_rope_parameters(checkpoint, tmp_path, attempt):
    config = json.loads((checkpoint / CONFIG).read_text())
    for facts, key in itertools.product(ROPE, ("rope_parameters", "rope_scaling")):
        changed = {k: v for k, v in config.items() if k != "rope_parameters"} | {key: facts}
        message = attempt(f"{key} {facts}", alter(checkpoint, tmp_path / "t", CONFIG, changed))
        assert "rope" in message or "factor" in message or "rotary" in message
    for key, values in {
        "rope_theta": ("1", -1, 0, True, [1.0], {}, 1e300),
        "partial_rotary_factor": ("1", -1, True, [0.5], 4.0),
        "rotary_pct": (0.5,),
    }.items():
        changed = {k: v for k, v in config.items() if k != "rope_parameters"}
        for value in values:
            assert key in attempt(f"{key} {value}", alter(checkpoint, tmp_path / "t", CONFIG, changed | {key: value}))


def test_resolve_refuses_invalid_partial_rotary_factor(make, tmp_path, attempt):
    zoo.save(
        make("gpt_neox", {"vocab_size": 11, "hidden_size": 32, "num_attention_heads": 2} | ONE_LAYER), tmp_path / "a"
    )
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    for factor in (0.1, 1.5, 2.0, 1e20):
        changed = config | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": factor}}
        message = attempt(f"factor {factor}", alter(tmp_path / "a", tmp_path / "t", CONFIG, changed))
        assert "rotary" in message or "partial_rotary_factor" in message


def test_resolve_refuses_other_directories(checkpoint, tmp_path, attempt, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("meta-llama/Llama-3.2-1B", "openai-community/gpt2"):
        message = attempt("a name on a hub", name)  # the tests are offline: tests/weights/test_hub.py has a hub
        assert f"hf download {name} --local-dir" in message
    for place in ("nowhere", tmp_path / "no" / "where", "/no/where", "a/b/c", "a" * 300, "a" * 5000, "a/" * 3000):
        assert "no directory" in attempt(f"{str(place)[:30]} is not there", place)
    for name in (WHOLE, CONFIG):
        message = attempt("a file", checkpoint / name)
        assert name in message and "pass the directory" in message
        directory = alter(checkpoint, tmp_path / "t", name, None)
        assert name in attempt(f"{name} is not there", directory)
        (directory / name).mkdir()
        assert name in attempt(f"{name} is a directory", directory)
        (directory / name).rmdir()
        (directory / name).symlink_to(tmp_path / "nowhere")
        assert name in attempt(f"{name} is a link to nothing", directory)
        (directory / name).unlink()
        (directory / name).symlink_to(directory / name)
        assert name in attempt(f"{name} is a link to itself", directory)
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in attempt("an empty directory", tmp_path / "empty")
    with (tmp_path / "empty" / CONFIG).open("w") as file:
        json.dump({"model_type": "llama"}, file)
    assert "nothing" in attempt("a config alone", tmp_path / "empty") or CONFIG in attempt("again", tmp_path / "empty")
    (tmp_path / "empty" / "nan.safetensors").touch()
    assert "nan.safetensors" in attempt("a file of another name", tmp_path / "empty")
    with (tmp_path / "empty" / WHOLE).open("wb") as file:
        file.truncate(2**40)  # a terabyte that is not there
    assert WHOLE in attempt("a terabyte of nothing", tmp_path / "empty")


def test_resolve_refuses_a_billion_experts(tmp_path, attempt):
    source = Path(__file__).parents[1] / "fixtures" / "models" / "mixtral"
    config = json.loads((source / CONFIG).read_text())
    for experts in (2**30, 10**5):
        directory = alter(source, tmp_path / "t", CONFIG, config | {"num_local_experts": experts})
        message = attempt(f"{experts} experts", directory)
        assert f"the config asks for {2 * experts:,} tensors" in message and "experts.*" in message


def make_sparse(path):
    with path.open("wb") as file:
        file.truncate(2**31)


SPECIAL = {
    "is a pipe": os.mkfifo,
    "is a device": lambda path: path.symlink_to("/dev/zero"),
    "is a directory": lambda path: path.mkdir(),
    "2,147,483,648 bytes": make_sparse,
}


def test_resolve_refuses_special_files(checkpoint, sharded, tmp_path, attempt):
    shard = min(path.name for path in sharded.glob("*.safetensors"))
    for source, name in ((checkpoint, CONFIG), (checkpoint, WHOLE), (sharded, INDEX), (sharded, shard)):
        for words, make in SPECIAL.items():
            directory = alter(source, tmp_path / "special", name, None)
            make(directory / name)
            message = attempt(f"{name} {words}", directory)
            expected = "not a safetensors file" if make is make_sparse and name in (WHOLE, shard) else words
            assert name in message and expected in message


def test_resolve_loads_through_links(checkpoint, tmp_path, attempt):
    """A snapshot in the cache of the Hugging Face hub consists of links to `../../blobs`."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "commit"
    snapshot.mkdir(parents=True)
    for path in checkpoint.iterdir():
        shutil.copy(path, tmp_path / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    attempt.harmless("links", snapshot)


def test_resolve_escapes_control_characters_of_names(checkpoint, tmp_path, attempt):
    config, evil = json.loads((checkpoint / CONFIG).read_text()), "x\x1b[2J\n\u202e"
    for change in ({evil: 1}, {"model_type": evil}, {"hidden_act": evil}, {"rope_scaling": {evil: 1}}):
        message = attempt("config", alter(checkpoint, tmp_path / "t", CONFIG, config | change))
        assert "\\x1b" in message and escape_controls(message) == message
    header, data = parse_file(checkpoint / WHOLE)
    header[evil] = header.pop(NORM)
    message = attempt("header", alter(checkpoint, tmp_path / "t", WHOLE, build_file(header, data)))
    assert "\\x1b" in message and escape_controls(message, keep="\n") == message
