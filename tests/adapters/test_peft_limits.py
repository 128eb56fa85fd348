"""Layers that PEFT has no adapter for are known when the adapter is made, and mixtures are saved as PEFT reads them."""

import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.adapters.peft_limits import is_taken_for_experts
from zoo.models import list_parameter_paths

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
KEY = jax.random.key(0)


def read_config(directory):
    return json.loads((directory / "adapter_config.json").read_text())


def list_adapted(model):
    return {path.name.partition(".lora.")[0] for path in list_parameter_paths(zoo.trainable(model))}


@eqx.filter_jit
def equal(a, b):
    """Compare the merged weights: parts of a fused module get one A, and layers of one stack one rank."""
    merged = [eqx.filter(adapters.merge(adapted), eqx.is_inexact_array) for adapted in (a, b)]
    return jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x, y: jnp.allclose(x, y, atol=1e-5), *merged))


@pytest.mark.one_case("slow")
@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("falcon_mamba", ["mamba.dt_up (no module of its own in PEFT's files)", "mamba.out (PEFT refuses out_proj"]),
        ("mamba2", ["mamba2.out (PEFT refuses out_proj of mamba2"]),
        ("jetmoe", ["mixture_of_attention.experts.*.query (no module of its own"]),
        ("zamba", ["x_proj_weight is a parameter that PEFT does not wrap"]),
    ],
)
def test_all_linear_leaves_out_what_peft_does_not_wrap(family, left_out, tmp_path, caplog):
    base = zoo.load(MODELS / family, dtype="float32")
    caplog.clear()
    adapted = perturb(adapters.lora(base, targets="all-linear", rank=2, key=KEY))
    [line] = caplog.messages
    assert line.startswith("LoRA: 'all-linear' leaves out ") and line.endswith("to train and merge them")
    assert all(words in line for words in left_out), line
    adapters.save(adapted, tmp_path)
    assert equal(adapters.load(base, tmp_path, adapter_name="lora"), adapted)


def test_named_layers_are_trained_and_their_limits_said(tmp_path, caplog):
    base = zoo.load(MODELS / "falcon_mamba", dtype="float32")
    caplog.clear()
    adapted = adapters.lora(base, targets=("dt_up", "dt_down"), rank=2, key=KEY)
    assert {name.rpartition(".")[2] for name in list_adapted(adapted)} == {"dt_up", "dt_down"}
    [line] = caplog.messages
    assert "cannot have layers.*.mamba.dt_up (no module of its own in PEFT's files). Targets that can: dt_down" in line
    adapters.merge(adapted)
    with pytest.raises(zoo.CheckpointError, match="dt_up has an adapter, and no module of its own in PEFT's files"):
        adapters.save(adapted, tmp_path)
    adapted = perturb(adapters.lora(base, targets="out_proj", rank=2, key=KEY))
    assert "PEFT refuses out_proj of falcon_mamba" in caplog.messages[-1]
    adapters.save(adapted, tmp_path)
    assert equal(adapters.load(base, tmp_path, adapter_name="lora"), adapted), "this library reads it"


def test_models_of_no_family_have_no_limits(caplog):
    model = zoo.layers.GatedMLP(8, 16, key=KEY)
    assert len(list_adapted(adapters.lora(model, targets="all-linear", rank=2, key=KEY))) == 3
    assert caplog.messages == []


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("family", ["glm4_moe", "afmoe"])
def test_lora_of_shared_experts_is_saved_by_parameter(family, tmp_path):
    """PEFT takes `target_modules` with names of experts for the experts, also shared ones and dense layers."""
    base = zoo.load(MODELS / family, dtype="float32")
    options = {"targets": "all-linear", "rank": 2, "rank_pattern": {"shared.up": 3}}
    adapted = perturb(adapters.lora(base, **options, key=KEY))
    adapters.save(adapted, tmp_path)
    config = read_config(tmp_path)
    assert not any(is_taken_for_experts(family, name) for name in config["target_modules"])
    shared = [name for name in config["target_parameters"] if "shared_experts.up_proj.weight" in name]
    assert shared and all(config["rank_pattern"][name] == 3 for name in shared)
    assert equal(adapters.load(base, tmp_path, adapter_name="lora"), adapted)


def test_lora_of_a_router_is_saved_by_parameter(tmp_path):
    """Routers are not a torch.nn.Linear in transformers 5, whether or not experts are targets too."""
    base = zoo.load(MODELS / "qwen2_moe")
    adapters.save(adapters.lora(base, targets="scores", rank=2, key=KEY), tmp_path)
    config = read_config(tmp_path)
    assert config["target_modules"] == []
    assert all(name.endswith(".mlp.gate.weight") for name in config["target_parameters"])


def test_lora_of_shared_experts_is_read_by_module(tmp_path):
    """As PEFT writes it for transformers 4, where experts are modules."""
    base = zoo.load(MODELS / "glm4_moe", dtype="float32")
    adapted = perturb(adapters.lora(base, targets=("query", "shared.down"), rank=2, key=KEY))
    adapters.save(adapted, tmp_path)
    config = read_config(tmp_path)
    names = [name.removesuffix(".weight") for name in config.pop("target_parameters")]
    config["target_modules"] += names
    assert names and all(name.endswith("mlp.shared_experts.down_proj") for name in names)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert equal(adapters.load(base, tmp_path, adapter_name="lora"), adapted)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize(
    ("make", "target", "message"),
    [
        (adapters.dora, "shared.down", "PEFT takes .*shared_experts.down_proj of glm4_moe for an expert"),
        (adapters.ia3, "experts.down_proj", "holds all experts, for which PEFT has LoRA only, not IA3"),
    ],
)
def test_other_methods_of_mixtures_are_refused_by_name(make, target, message, tmp_path, caplog):
    options = {} if make is adapters.ia3 else {"rank": 2}
    base = zoo.load(MODELS / "glm4_moe", dtype="float32")
    caplog.clear()
    adapted = make(base, targets=("query", target), **options, key=KEY)
    assert "cannot have layers." in caplog.messages[0] and caplog.messages[0].endswith("Targets that can: query")
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.save(adapted, tmp_path)
    caplog.clear()
    adapters.save(make(base, targets="all-linear", **options, key=KEY), tmp_path)
    [line] = caplog.messages
    assert "'all-linear' leaves out" in line
