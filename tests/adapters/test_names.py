"""Targets by PEFT's names, for models that have a family."""

from functools import cache, partial
from pathlib import Path

import equinox as eqx
import jax
import pytest

import zoo
from zoo import adapters
from zoo.adapters import names
from zoo.adapters.names import translate_patterns, translate_targets
from zoo.models.targets import find_linears, match_targets

MODELS = Path(__file__).parents[1] / "fixtures/models"
load = cache(lambda name: zoo.load(MODELS / name, dtype="float32"))


@pytest.mark.parametrize(
    ("base", "targets", "ours"),
    [
        ("llama", ["q_proj", "v_proj"], ("query", "value")),
        ("llama", r"model\.layers\.1\..*\.gate_proj", r"layers\.1\..*\.gate"),
        ("llama", ["q_proj", "down"], ("query", "down")),
        ("gpt2", "c_attn", ("query", "key", "value")),
        ("gpt_oss", "experts.gate_up_proj", (r".*\.experts\.\d+\.gate", r".*\.experts\.\d+\.up")),
    ],
)
def test_names_of_checkpoints_are_targets(base, targets, ours):
    model = eqx.filter_eval_shape(lambda: load(base))
    sites = find_linears(model, include_embeddings=True)
    paths = [name for site in sites for name in site.list_names().values()]
    found = match_targets(translate_targets(model, targets, sites), sites)
    expected = match_targets(ours, sites)
    assert [name for name in paths if found(name)] == [name for name in paths if expected(name)]
    assert set(translate_patterns(model, {"q_proj": 3, "value": 4} if base == "llama" else {}, sites).values()) <= {
        3,
        4,
    }


def test_lora_by_peft_names_is_that_by_ours():
    model, key = load("llama"), jax.random.key(0)
    options = {"rank": 2, "bias": "none", "key": key}
    first = adapters.lora(model, targets=["q_proj", "v_proj"], rank_pattern={"layers.1.self_attn.v_proj": 1}, **options)
    second = adapters.lora(model, rank_pattern={"layers.1.attention.value": 1}, **options)
    assert eqx.tree_equal(first, second)


@pytest.mark.parametrize(("method", "options"), [("lora", {"bias": "lora_only"}), ("vera", {"rank": 2}), ("ia3", {})])
def test_names_of_targets_are_translated_once(method, options, monkeypatch):
    calls = []
    list_names = names._list_checkpoint_names
    monkeypatch.setattr(names, "_list_checkpoint_names", lambda model: calls.append(model) or list_names(model))
    adapt = partial(getattr(adapters, method), targets=["c_attn"], key=jax.random.key(0), **options)
    eqx.filter_eval_shape(adapt, load("gpt2"))
    assert len(calls) == 1


def test_names_of_an_adapted_model_are_those_of_its_base():
    """Adapters, merged ones too, trained copies and quantized layers have the names of the layers beneath them."""
    model, key = load("llama"), jax.random.key(0)
    adapted = adapters.dora(adapters.lora(model, init="pissa", modules_to_save=["norm"], key=key), key=key)
    merged = adapters.merge(adapters.lora(adapters.quantize(model, "int8"), key=key), keep=True, quantized="round")
    expected = names.get_name_table(model)
    assert names.get_name_table(adapted) == expected
    assert names.get_name_table(merged) == expected


def test_unknown_names_list_those_of_both():
    with pytest.raises(ValueError, match=r"'q_prj'\. Is it q_proj .*query, .*v_proj, or 'all-linear'"):
        adapters.lora(load("llama"), targets=["query", "q_prj"], key=jax.random.key(0))


def test_model_of_no_family_lists_its_own_names():
    class Other(zoo.layers.Attention):
        pass

    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=24, key=jax.random.key(0))
    mixer = lambda model: model.stack.segments[0].blocks[0].mixer
    other = jax.tree.map(lambda x: x, mixer(model))
    object.__setattr__(other, "__class__", Other)
    with pytest.raises(
        ValueError, match="There are down, .*The model is of no family, so that it has no names of PEFT's"
    ):
        adapters.lora(eqx.tree_at(mixer, model, other), targets="q_proj", key=jax.random.key(0))
