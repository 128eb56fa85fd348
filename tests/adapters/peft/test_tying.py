"""Adapters of an embedding that is tied to the head: written, read, refused. test_parity.py has PEFT's own files."""

import json
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.weights.safetensors import open_safetensors, write_safetensors

FIXTURES = Path(__file__).parents[2] / "fixtures"
LORA, SAVED = (FIXTURES / "adapters" / f"lora_tied_{name}" for name in ("embedding", "saved_embedding"))
KEY = jax.random.key(0)
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"

run = eqx.filter_jit(lambda model: model(jnp.arange(12).reshape(2, 6)))


@pytest.fixture(scope="module")
def llama():
    return zoo.load(FIXTURES / "models/llama", dtype="float32")


def read(directory):
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = {
        name: np.array(tensor.read())
        for name, tensor in open_safetensors(directory / "adapter_model.safetensors").items()
    }
    return config, tensors


def write(directory, config, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def test_saved_config_ties_the_head(llama, tmp_path):
    """PEFT ties modules that are named embed_tokens or lm_head, so lm_head is named beside a `wte`. Ranks and alphas of
    the embedding are the head's too."""
    options = {"rank": 2, "alpha": 4, "rank_pattern": {"embedding": 3}, "alpha_pattern": {"embedding": 6}}
    gpt2 = zoo.load(FIXTURES / "models/gpt2", dtype="float32")
    for model, names in ((llama, {"model.embed_tokens"}), (gpt2, {"transformer.wte", "lm_head"})):
        wrapped = perturb(adapters.lora(model, targets=("embedding", "query"), **options, key=KEY))
        adapters.save(wrapped, tmp_path)
        config, tensors = read(tmp_path)
        assert config["ensure_weight_tying"] and names <= set(config["target_modules"])
        assert config["rank_pattern"]["lm_head"] == 3 and config["alpha_pattern"]["lm_head"] == 6
        assert tensors[f"{HEAD}.lora_A.weight"].shape[0] == 3
        np.testing.assert_array_equal(run(adapters.load(model, tmp_path)), run(wrapped))

        wrapped = perturb(adapters.lora(model, targets="query", modules_to_save=["embedding"], rank=2, key=KEY))
        adapters.save(wrapped, tmp_path)
        config, tensors = read(tmp_path)
        assert config["ensure_weight_tying"] and names == set(config["modules_to_save"])
        np.testing.assert_array_equal(run(adapters.load(model, tmp_path)), run(wrapped))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", r".*(q_proj|embed_tokens)", r"(.*q_proj|lm_head)"])
def test_load_takes_the_head_for_the_embedding(target, llama, tmp_path):
    """As PEFT does, which adapts the embedding, whichever of the two is named."""
    config, tensors = read(LORA)
    named = target if "(" in target else [target, "q_proj"]
    loaded = adapters.load(llama, write(tmp_path, {**config, "target_modules": named}, tensors))
    assert eqx.tree_equal(loaded, adapters.load(llama, LORA))


def change(name, value):
    return lambda config, tensors: tensors.update({name: tensors[name] + value})


def set_option(**options):
    return lambda config, tensors: config.update(options)


@pytest.mark.parametrize(
    ("source", "alter", "message"),
    [
        (LORA, change(f"{HEAD}.lora_A.weight", 1), r"lm_head\.lora_A\.weight differs from .*lora_embedding_B"),
        (LORA, change(f"{HEAD}.base_layer.weight", 1), r"lm_head\.base_layer\.weight differs"),
        (SAVED, change(f"{HEAD}.weight", 1), r"lm_head\.weight differs from .*embed_tokens\.weight"),
        (LORA, set_option(alpha_pattern={"lm_head": 8}), "scale model.embed_tokens by 2 and lm_head by 4"),
        (LORA, set_option(ensure_weight_tying=False), "trains model.embed_tokens, which is tied to lm_head"),
        (SAVED, set_option(ensure_weight_tying=False), "trains model.embed_tokens, which is tied to lm_head"),
        (
            LORA,
            set_option(ensure_weight_tying=False, target_modules=["q_proj", "lm_head"]),
            "trains model.embed_tokens|trains lm_head, which is tied to model.embed_tokens",
        ),
        (
            LORA,
            set_option(target_modules=r"model\.(.*q_proj|embed_tokens)"),
            "sets ensure_weight_tying, which PEFT follows for .* that name embed_tokens or lm_head",
        ),
    ],
)
def test_load_refuses_head_and_embedding_that_differ(source, alter, message, llama, tmp_path):
    config, tensors = read(source)
    alter(config, tensors)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(llama, write(tmp_path, config, tensors))


@pytest.mark.parametrize("option", ["target_modules", "modules_to_save"])
def test_load_refuses_an_adapter_of_a_tied_head_alone(option, llama, tmp_path):
    """It speaks of the tie, not of a module that is missing."""
    config, tensors = read(FIXTURES / "adapters/lora")
    name = f"{HEAD}.weight" if option == "modules_to_save" else f"{HEAD}.lora_A.weight"
    tensors[name] = np.zeros((2, 2), np.float32)
    config[option] = [*(config[option] or []), "lm_head"]
    message = "trains lm_head, which is tied to model.embed_tokens .* set tie_word_embeddings to false"
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(llama, write(tmp_path, config, tensors))


def test_save_refuses_what_peft_does_not_tie(llama, tmp_path):
    """Other methods beside an embedding that is trained in full, and names that PEFT does not know."""
    ia3 = adapters.unfreeze(adapters.ia3(llama, targets="value", inputs=None), "embedding", adapter_name="ia3")
    masked = zoo.load(FIXTURES / "encoders/bert_masked", dtype="float32")
    bert = adapters.lora(masked, targets="embedding", rank=2, key=KEY)
    for model, names in ((ia3, "model.embed_tokens"), (bert, "bert.embeddings.word_embeddings")):
        with pytest.raises(zoo.CheckpointError, match=rf"{names} is trained, and tied to .* merge the adapter"):
            adapters.save(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_untied_model_has_no_tensors_of_the_head(tmp_path):
    make = partial(zoo.models.Transformer, vocab=16, embed=8, layers=1, heads=2, mlp=8, tied=False)
    model = make(key=KEY)
    adapters.save(adapters.lora(model, targets="embedding", rank=2, key=KEY), tmp_path)
    config, tensors = read(tmp_path)
    assert "ensure_weight_tying" not in config and not any(name.startswith(HEAD) for name in tensors)
    write(tmp_path, {**config, "ensure_weight_tying": True}, tensors)  # PEFT finds nothing to tie
    np.testing.assert_allclose(run(adapters.load(model, tmp_path)), run(model), atol=1e-6)
