"""Checkpoints that hold more than the model: what is left aside on loading is written back bit for bit."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import zoo
from zoo.cli.info import info
from zoo.layers.quantized.groups import GroupQuantizedLinear
from zoo.models.hf.wrappers import WRAPPERS
from zoo.weights.safetensors import open_safetensors, open_tensors, write_safetensors

from .damage import CONFIG, INDEX, LLAMA, WHOLE, catch_error
from .formats.encoders import write_quantized

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
VISION = {
    "vision_tower.patch.weight": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "vision_tower.layers.0.scale": np.float32(3).reshape(()),
    "vision_tower.layers.0.empty": np.zeros((0, 2), np.float16),
    "multi_modal_projector.weight": np.array([[0.5, np.nan]], ml_dtypes.bfloat16),
}
OLD = lambda name: f"language_model.{name}"
RENAMED = lambda name: name.replace("model.", "model.language_model.", 1)
LAYOUTS = {"old": (OLD, OLD), "renamed": (RENAMED, lambda name: name), "head at the top": (OLD, lambda name: name)}


def store(directory, tensors, config):
    directory.mkdir(exist_ok=True)
    write_safetensors(directory / WHOLE, tensors)
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read(directory):
    return {name: np.array(x.read()) for name, x in open_tensors(directory).items()}


def config_of(directory):
    return json.loads((directory / CONFIG).read_text())


def bits(model):
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(model)]


def wrap(plain, directory, layout="old", **keys):
    """Write the LLaMA in `plain` into a multimodal checkpoint, of which it is the language model."""
    rename, rename_head = LAYOUTS[layout]
    text = {(rename_head if name.startswith("lm_head") else rename)(name): x for name, x in read(plain).items()}
    inner = {key: x for key, x in config_of(plain).items() if key not in ("architectures", "dtype")}
    around = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_token_index": 5,
    }
    around |= {"vision_config": {"hidden_size": 3, "model_type": "clip_vision_model"}, "torch_dtype": "float32"}
    store(directory, text | VISION, around | {"text_config": inner} | keys)
    return directory


@pytest.fixture
def plain(make, tmp_path):
    zoo.save(make("llama", LLAMA), tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapper_round_trip_is_bitwise(plain, tmp_path, caplog, layout):
    source, out = wrap(plain, tmp_path / "in", layout), tmp_path / "out"
    model = zoo.load(source)
    assert bits(model) == bits(zoo.load(plain))
    [line] = caplog.messages
    assert re.search(r"left aside.* 4 tensors \(14 bytes\), multi_modal_projector\.\*, vision_tower\.\*", line), line
    zoo.save(model, out, source=source)
    assert len(caplog.messages) == 1
    assert {file.name for file in out.iterdir()} == {CONFIG, WHOLE, "README.md"}
    for name in (CONFIG, WHOLE):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    zoo.save(model, source, source=source)  # over the very files that are read
    assert (out / WHOLE).read_bytes() == (source / WHOLE).read_bytes()


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe"])
def test_wrapped_fixture_opens_as_its_language_model(tmp_path, name):
    plain = MODELS / WRAPPERS[name].text
    config, tensors = (
        config_of(plain),
        {RENAMED(key) if "lm_head" not in key else key: x for key, x in read(plain).items()},
    )
    tie = {"tie_word_embeddings": config.pop("tie_word_embeddings", WRAPPERS[name].tied)}
    around = {"model_type": name, "dtype": config.pop("dtype"), "text_config": config, "vision_config": None} | tie
    store(tmp_path / "in", tensors | VISION, around)
    model = zoo.load(tmp_path / "in", images=False)
    assert bits(model) == bits(zoo.load(plain))
    zoo.save(jax.tree.map(np.asarray, model), tmp_path / "out", source=tmp_path / "in")
    for file in (CONFIG, WHOLE):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "in" / file).read_bytes(), file


def test_wrapper_saves_in_shards_with_an_index(plain, tmp_path):
    source, out = wrap(plain, tmp_path / "in"), tmp_path / "out"
    zoo.save(zoo.load(source), out, source=source, shard_bytes=700)
    before, index = read(source), json.loads((out / INDEX).read_text())
    assert index["weight_map"].keys() == before.keys() and len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in before.values())
    after = read(out)
    assert {name: x.tobytes() for name, x in after.items()} == {name: x.tobytes() for name, x in before.items()}


def test_save_without_source_says_what_is_lacking(plain, tmp_path, caplog):
    model = zoo.load(wrap(plain, tmp_path / "in"))
    caplog.clear()
    zoo.save(model, tmp_path / "out")
    [line] = caplog.messages
    assert "out lacks" in line and "vision_tower.*" in line and "source=" in line
    assert caplog.records[0].levelno == logging.WARNING
    assert read(tmp_path / "out").keys() == read(tmp_path / "in").keys() - VISION.keys()
    assert config_of(tmp_path / "out") == config_of(tmp_path / "in")
    caplog.clear()
    assert bits(zoo.load(tmp_path / "out")) == bits(model) and not caplog.messages
    zoo.save(model, tmp_path / "alone", family="llama")
    assert read(tmp_path / "alone").keys() == read(plain).keys()
    assert config_of(tmp_path / "alone")["model_type"] == "llama" and bits(zoo.load(tmp_path / "alone")) == bits(model)


def test_save_writes_changes_into_the_wrapper(plain, tmp_path):
    source = wrap(plain, tmp_path / "in")
    model = zoo.load(source, dtype="bfloat16")
    zoo.save(model, tmp_path / "out", source=source, config={"eos_token_id": 7})
    before, after = config_of(source), config_of(tmp_path / "out")
    assert after == before | {
        "torch_dtype": "bfloat16",
        "text_config": before["text_config"] | {"eos_token_id": 7},
    }
    assert bits(zoo.load(tmp_path / "out")) == bits(model)
    after = read(tmp_path / "out")
    assert all(after[name].tobytes() == x.tobytes() and after[name].dtype == x.dtype for name, x in VISION.items())


def test_multi_token_prediction_layer_round_trip_is_bitwise(make, tmp_path, caplog):
    sizes = {"moe_intermediate_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    zoo.save(make("glm4_moe", {**LLAMA, **sizes, "hidden_size": 16}), tmp_path / "in")
    tensors, config = read(tmp_path / "in"), config_of(tmp_path / "in")
    last = {name: x + 1 for name, x in tensors.items() if name.startswith("model.layers.1.")}
    more = {name.replace(".1.", ".2.", 1): x for name, x in last.items()}
    more["model.layers.2.eh_proj.weight"] = np.ones((16, 32), np.float32)
    store(tmp_path / "in", tensors | more, config | {"num_nextn_predict_layers": 1})
    model = zoo.load(tmp_path / "in")
    assert f"{len(more)} tensors (" in caplog.messages[0] and "model.layers.2.*" in caplog.messages[0]
    zoo.save(model, tmp_path / "out", source=tmp_path / "in")
    for name in (CONFIG, WHOLE):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes(), name
    zoo.save(cast_to(model, ml_dtypes.bfloat16), tmp_path / "cast", source=tmp_path / "in")
    assert len(caplog.messages) == 1, "a body that was only cast is the source's"
    trained = dataclasses.replace(model, norm=jax.tree.map(lambda x: x + 1, model.norm))
    zoo.save(trained, tmp_path / "trained", source=tmp_path / "in")
    [_, line] = caplog.messages
    assert f"{tmp_path / 'trained'}: the model is not the one in {tmp_path / 'in'} any more, model.norm.weight" in line
    assert f"{len(more)} tensors (" in line and "model.layers.2.*" in line and "do not draft with them" in line
    zoo.save(model, tmp_path / "less")
    assert "less lacks" in caplog.messages[-1] and read(tmp_path / "less").keys() == tensors.keys()


def cast_to(model, dtype):
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), model)


def test_save_refuses_a_source_of_another_model(make, plain, tmp_path):
    source = wrap(plain, tmp_path / "in")
    model, alone = zoo.load(source), zoo.load(plain)
    refusal = lambda model, source: catch_error(lambda: zoo.save(model, tmp_path / "out", source=source))
    assert "holds only a language model" in refusal(model, plain)
    assert "is multimodal" in refusal(alone, source)
    assert "there is no directory" in refusal(model, tmp_path / "nowhere")
    zoo.save(make("llama", {**LLAMA, "intermediate_size": 16}), tmp_path / "wide")
    assert "has another model" in refusal(model, wrap(tmp_path / "wide", tmp_path / "other"))
    zoo.save(make("gpt2", {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2}), tmp_path / "gpt2")
    assert "has no tensor named lm_head.weight" in refusal(alone, tmp_path / "gpt2")
    assert not (tmp_path / "out").exists()


def test_load_refuses_a_wrapper_that_is_not_read(plain, tmp_path):
    source = tmp_path / "in"
    refusal = lambda **keys: catch_error(lambda: zoo.load(wrap(plain, source, **keys)))
    assert "model_type 'mllama', which is not read: its language model reads images" in refusal(model_type="mllama")
    message = refusal(model_type="polygemma")
    assert "model_type 'polygemma'" in message and "Language models are read out of aya_vision, gemma3" in message
    assert "wraps a language model that has the model_type 'rwkv5'" in refusal(text_config={"model_type": "rwkv5"})
    assert "text_config = 3 should be a table" in refusal(text_config=3)
    tensors, config = read(wrap(plain, source)), config_of(source)
    store(source, {f"text.{name}": x for name, x in tensors.items()}, config)
    assert "should begin with model.language_model. or language_model.model." in catch_error(lambda: zoo.load(source))
    del tensors["language_model.model.norm.weight"]
    store(source, tensors, config)
    assert "language_model.model.norm.weight [8] is missing" in catch_error(lambda: zoo.load(source))


def test_tie_is_read_at_the_top_unless_a_head_is_stored(plain, tmp_path):
    tensors, config = read(wrap(plain, tmp_path / "in")), config_of(tmp_path / "in") | {"model_type": "gemma3"}
    headless = {name: x for name, x in tensors.items() if "lm_head" not in name}

    def is_tied(tensors, **keys):
        store(tmp_path / "in", tensors, config | keys)
        return zoo.load(tmp_path / "in", images=False).head is None

    inner = config["text_config"] | {"tie_word_embeddings": True}
    assert is_tied(headless) and not is_tied(tensors)  # gemma3 ties by default
    assert is_tied(headless, tie_word_embeddings=True, text_config=inner | {"tie_word_embeddings": False})
    assert not is_tied(tensors, tie_word_embeddings=False, text_config=inner)
    for keys in ({"tie_word_embeddings": False}, {"model_type": "llama4"}):
        store(tmp_path / "in", headless, config | {"text_config": inner} | keys)
        assert "lm_head.weight [11, 8] is missing" in catch_error(lambda: zoo.load(tmp_path / "in", images=False))
    assert is_tied(headless, model_type="llava_next", text_config=inner)
    equal = tensors | {"language_model.lm_head.weight": tensors["language_model.model.embed_tokens.weight"]}
    assert is_tied(equal, tie_word_embeddings=True)
    store(tmp_path / "in", tensors, config | {"tie_word_embeddings": True})
    assert "says that they are tied" in catch_error(lambda: zoo.load(tmp_path / "in", images=False))


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq", "int4 with zeros"])
def test_quantized_wrapper_is_written_packed_or_decoded(make, tmp_path, name):
    dense, plain = write_quantized(tmp_path / "plain", make, name), tmp_path / "plain"
    top = {"quantization_config": config_of(plain)["quantization_config"], "torch_dtype": "bfloat16"}
    source = wrap(plain, tmp_path / "in", **top)
    tensors, config = read(source), config_of(source)
    del config["text_config"]["quantization_config"]
    layer = {x: y for x, y in tensors.items() if x.startswith("language_model.model.layers.0.mlp.up_proj.")}
    projector = {f"multi_modal_projector.up.{x.rpartition('.')[2]}": y for x, y in layer.items()}
    store(source, tensors | projector, config)

    model = zoo.load(source, packed=True)
    is_packed = lambda x: isinstance(x, GroupQuantizedLinear)
    assert any(map(is_packed, jax.tree.leaves(model, is_leaf=is_packed)))
    zoo.save(jax.tree.map(np.asarray, model), tmp_path / "packed", source=source)
    for file in (CONFIG, WHOLE):
        assert (tmp_path / "packed" / file).read_bytes() == (source / file).read_bytes(), file

    decoded = zoo.load(source)
    assert bits(decoded) == bits(zoo.load(plain))
    zoo.save(jax.tree.map(np.asarray, decoded), tmp_path / "decoded", source=source)
    after, config = read(tmp_path / "decoded"), config_of(tmp_path / "decoded")
    assert "quantization_config" not in config and "quantization_config" not in config["text_config"]
    expected = dense["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(after.pop("multi_modal_projector.up.weight"), expected.astype(ml_dtypes.bfloat16))
    assert not any(x.startswith("multi_modal_projector.up.") for x in after)
    assert all(after[x].tobytes() == y.tobytes() for x, y in VISION.items())
    assert bits(zoo.load(tmp_path / "decoded")) == bits(decoded)
    message = catch_error(lambda: zoo.save(model, tmp_path / "mixed", source=tmp_path / "decoded"))
    assert "has the quantization_config None, and the model {" in message


def test_decoded_nf4_is_of_its_own_source(make, tmp_path):
    """bitsandbytes stores a matrix under its own name, as one column of bytes."""
    write_quantized(tmp_path / "in", make, "nf4")
    model = zoo.load(tmp_path / "in")
    zoo.save(model, tmp_path / "out", source=tmp_path / "in")
    assert bits(zoo.load(tmp_path / "out")) == bits(model)
    write_quantized(tmp_path / "other", make, "nf4", sizes={"intermediate_size": 64})
    message = catch_error(lambda: zoo.save(model, tmp_path / "out", source=tmp_path / "other"))
    assert (
        "other has another model: model.layers.0.mlp.down_proj.weight is [32, 64] there, and [32, 48] here" in message
    )


def test_adapters_of_a_wrapper_are_named_as_its_classes(plain, tmp_path):
    base = zoo.load(wrap(plain, tmp_path / "in"))
    model = zoo.adapters.lora(base, rank=2, targets=("query",), key=jax.random.key(0))
    zoo.adapters.save(model, tmp_path / "peft")
    names = open_safetensors(tmp_path / "peft" / "adapter_model.safetensors")
    assert "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in names and len(names) == 4
    assert bits(zoo.adapters.load(base, tmp_path / "peft")) == bits(model)


def test_info_lists_what_is_left_aside(plain, tmp_path, capsys):
    info(wrap(plain, tmp_path / "in"))
    assert re.search(r"left aside +4 tensors \(14 bytes\), multi_modal_projector", capsys.readouterr().out)
    info(plain)
    assert "left aside" not in capsys.readouterr().out
