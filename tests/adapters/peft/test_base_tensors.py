"""Adapters of models that score texts: PEFT's task SEQ_CLS, and the score that is trained with them in full."""

import json

import equinox as eqx
import jax
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.layers import Linear
from zoo.layers.quantized.linear import Int8Linear
from zoo.models import SequenceScore, Transformer

TOKENS = np.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def decoder():
    return Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=jax.random.key(0))


@pytest.fixture(scope="module")
def model(decoder):
    return SequenceScore.from_decoder(decoder, 3, key=jax.random.key(1))


@eqx.filter_jit
def run(model):
    return model(TOKENS)


def test_adapters_and_the_score_are_saved_as_peft_does(decoder, model, tmp_path):
    options = {"targets": "all-linear", "rank": 2, "modules_to_save": ("score",)}
    adapted = perturb(adapters.lora(model, **options, key=jax.random.key(2)))
    trained = [path.name for path in zoo.models.list_parameter_paths(zoo.trainable(adapted))]
    assert [name for name in trained if "score" in name] == ["score.weight.lora"]
    assert "layers.*.attention.out.lora.up.weight" in trained
    adapters.save(adapted, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    assert all("self_attn" in name or "mlp" in name for name in config["target_modules"])
    expected = run(adapted)
    assert np.abs(expected - run(model)).max() > 0.01
    np.testing.assert_allclose(run(adapters.merge(adapted)), expected, atol=1e-5)
    for names, targets in ((["score"], config["target_modules"]), (["classifier", "score"], "all-linear")):
        written = {**config, "modules_to_save": names, "target_modules": targets}  # PEFT names both heads
        (tmp_path / "adapter_config.json").write_text(json.dumps(written))
        np.testing.assert_allclose(run(adapters.load(model, tmp_path)), expected, atol=1e-6)
    with pytest.raises(zoo.CheckpointError, match="task_type = 'SEQ_CLS', and the model has no classes: load it onto"):
        adapters.load(decoder, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="the model has adapters"):
        zoo.save(adapted, tmp_path / "model")


def test_a_frozen_score_is_saved_with_its_adapter(decoder, model, tmp_path):
    """PEFT reads no file of SEQ_CLS without it, and the score that `from_decoder` drew would be in no file."""
    other = SequenceScore.from_decoder(decoder, 3, key=jax.random.key(3))
    adapted = perturb(adapters.ia3(model))
    adapters.save(adapted, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    np.testing.assert_allclose(run(adapters.load(other, tmp_path)), run(adapted), atol=1e-6)
    for broken, message in (
        (adapters.lora(model, targets="score", rank=2, key=jax.random.key(2)), "score has an adapter"),
        (adapters.ia3(adapters.quantize(model, "int8", targets="score")), "score is quantized"),
    ):
        with pytest.raises(zoo.CheckpointError, match=f"{message}, and PEFT trains .* modules_to_save=..score.,"):
            adapters.save(broken, tmp_path / "broken")


def test_quantization_leaves_the_score(model):
    quantized = adapters.quantize(model, "int8")
    assert type(quantized.score) is Linear
    query = quantized.decoder.stack.segments[0].blocks[0].mixer.query
    assert type(query) is Int8Linear
    np.testing.assert_allclose(run(quantized), run(model), atol=0.1)
    named = adapters.quantize(model, "int8", targets=("score",))
    assert type(named.score) is Int8Linear
