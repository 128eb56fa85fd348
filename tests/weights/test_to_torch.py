"""State dicts for PyTorch: names and numbers without it; with it, modules of transformers that compute the same."""

import dataclasses
import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.weights.safetensors import open_tensors, read_json
from zoo.weights.save import NoFamilyError
from zoo.weights.to_torch import list_state

from .damage import GPT2, LLAMA

FIXTURES = Path(__file__).parents[1] / "fixtures"
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}


def list_specs(state):
    return {name: (x.shape, x.dtype) for name, x in state.tensors.items()}


@pytest.mark.parametrize("family, config", [("llama", LLAMA), ("gpt2", GPT2), ("mixtral", MIXTRAL)])
def test_names_of_files_are_those_that_save_writes(make, family, config, tmp_path):
    model = make(family, config)
    zoo.save(model, tmp_path)
    state = list_state(model, None, "files")
    stored = open_tensors(tmp_path)
    assert not state.copies
    assert list_specs(state) == {name: (x.shape, x.dtype) for name, x in stored.items()}
    for name, x in stored.items():
        np.testing.assert_array_equal(state.tensors[name].read(), x.read())


def test_names_of_modules_are_those_of_transformers(make):
    model = make("mixtral", MIXTRAL)
    files, state = list_state(model, None, "files"), list_state(model, None, "module")
    assert state.copies == {"lm_head.weight": "model.embed_tokens.weight"}
    experts = "model.layers.0.mlp.experts"
    assert {name: x.shape for name, x in state.tensors.items() if experts in name} == {
        f"{experts}.gate_up_proj": (4, 24, 8),
        f"{experts}.down_proj": (4, 8, 12),
    }
    in_file = "model.layers.0.block_sparse_moe.experts.2.{}.weight"
    gate_up = np.concatenate([files.tensors[in_file.format(name)].read() for name in ("w1", "w3")])
    np.testing.assert_array_equal(state.tensors[f"{experts}.gate_up_proj"].read()[2], gate_up)
    assert not list_state(make("llama", LLAMA), None, "module").copies  # its head is a matrix of its own
    assert list_state(make("gpt2", GPT2), None, "module").tensors["transformer.h.1.attn.c_attn.weight"].shape == (8, 24)


def test_what_is_one_array_is_shared_on_one_cpu(make):
    model = jax.tree.map(jnp.asarray, make("llama", LLAMA))
    state = list_state(model, None, "module")
    assert state.whole.keys() == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert state.whole["lm_head.weight"] is model.head.weight
    placed = list_state(zoo.place(model, zoo.make_mesh(tensor=2, data=4)), None, "module")
    assert not placed.whole and list_specs(placed) == list_specs(state)
    for name, x in state.tensors.items():
        np.testing.assert_array_equal(placed.tensors[name].read(), x.read())


def test_from_torch_takes_arrays_of_numpy_and_of_jax(make):
    model = jax.tree.map(jnp.asarray, make("llama", {**LLAMA, "vocab_size": 32, "hidden_size": 16}))
    state = list_state(model, None, "module")
    arrays = {name: x.read() for name, x in state.tensors.items()}
    shared = {**arrays, **state.whole}  # three JAX arrays, in memory that JAX has aligned
    config = json.loads(model.origin.config)
    for read in (zoo.from_torch(arrays, config), zoo.from_torch(shared, config)):
        for ours, wanted in zip(jax.tree.leaves(read), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(ours, wanted)
    assert read.embedding.weight.unsafe_buffer_pointer() == model.embedding.weight.unsafe_buffer_pointer()


@pytest.mark.parametrize("name", ["kimi_linear", "olmo_hybrid"])
def test_from_torch_reads_names_of_modules(name):
    model = zoo.load(FIXTURES / "models" / name)
    state = list_state(model, None, "module")
    read = zoo.from_torch({each: x.read() for each, x in state.tensors.items()}, FIXTURES / "models" / name)
    assert read.origin.older_names == () and eqx.tree_equal(jax.tree.leaves(read), jax.tree.leaves(model))


def test_what_has_no_place_in_a_state_dict_is_refused_by_name(make):
    model = jax.tree.map(jnp.asarray, make("llama", LLAMA))
    with pytest.raises(zoo.CheckpointError, match="the model has adapters, .*zoo.adapters.merge"):
        list_state(zoo.adapters.lora(model, rank=2, key=jax.random.key(0)), None, "module")
    with pytest.raises(ValueError, match="no place for edits, and the model has one of layers.1: save zoo.unpatch"):
        list_state(zoo.patch(model, {"layers.1": lambda x: 2 * x}), None, "module")
    with pytest.raises(zoo.CheckpointError, match="experts.*.gate is packed.* pass zoo.adapters.dequantize"):
        list_state(zoo.load(FIXTURES / "models" / "gpt_oss_mxfp4", packed=True), None, "module")
    with pytest.raises(NoFamilyError):
        list_state(dataclasses.replace(model, soft_cap=3.0), None, "module")
    with pytest.raises(ValueError, match="names is 'memory': expected 'module' or 'files'"):
        zoo.to_torch(model, names="memory")


def test_pytorch_is_imported_at_the_call(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="`torch` cannot be imported .*: pip install torch"):
        zoo.to_torch(make("llama", LLAMA))


def load_module(folder, model):
    """The module of a fixture's config, with the state dict of the model."""
    import torch
    import transformers

    kind = getattr(transformers, read_json(folder / "config.json")["architectures"][0])
    config = kind.config_class.from_pretrained(folder)
    config._attn_implementation = config._experts_implementation = "eager"
    config.quantization_config = None
    module = kind._from_config(config, dtype=torch.float32).eval()
    state = zoo.to_torch(model)
    is_whole = not model.origin.left_aside  # of MiniMax's files, buffers that follow from the config are left aside
    module.load_state_dict(state, strict=is_whole)
    return module, state


def list_folders():
    for folder in sorted((FIXTURES / "models").iterdir()):
        slow = folder.name not in ("llama", "mixtral", "gpt2")
        yield pytest.param(folder, id=folder.name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.neighbors("torch", "transformers")
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("folder", list(list_folders()))
def test_transformers_computes_the_same(folder):
    import torch

    model = zoo.load(folder, dtype=jnp.float32)
    module, _ = load_module(folder, model)
    tokens = np.random.default_rng(0).integers(3, 40, (2, 9))
    with torch.no_grad():
        wanted = module(torch.tensor(tokens)).logits.numpy()
    ours = np.asarray(eqx.filter_jit(model)(tokens))
    bound = 2e-6 if folder.name in ("llama", "mixtral", "gpt2") else 1e-4
    assert np.abs(ours - wanted).max() <= bound * np.abs(wanted).max()


@pytest.mark.neighbors("torch", "transformers")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folder", sorted((FIXTURES / "encoders").iterdir()), ids=lambda folder: folder.name)
def test_modules_of_encoders_take_the_state_dict(folder):
    load_module(folder, zoo.load(folder))


@pytest.mark.neighbors("torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_share_memory_with_the_model(dtype):
    import torch

    model = zoo.load(FIXTURES / "models" / "gpt2", dtype=dtype)
    state = zoo.to_torch(model)
    embedding = state["transformer.wte.weight"]
    assert embedding.dtype == getattr(torch, dtype)
    assert embedding.data_ptr() == model.embedding.weight.unsafe_buffer_pointer()
    assert state["lm_head.weight"] is embedding
    layer = state["transformer.h.0.attn.c_attn.weight"]
    query = model.stack.segments[0].blocks[0].mixer.query.weight[0]
    np.testing.assert_array_equal(layer.float().numpy()[:, : query.shape[0]], query.astype(jnp.float32).T)
    layer.zero_()  # a copy, which may be written to
    assert (query != 0).any()
    again = zoo.from_torch(zoo.to_torch(model), FIXTURES / "models" / "gpt2")
    assert eqx.tree_equal(jax.tree.leaves(again), jax.tree.leaves(model))
