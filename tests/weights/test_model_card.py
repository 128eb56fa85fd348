"""Saved directories have a model card that the hub reads; one that is there already stays."""

import dataclasses
from pathlib import Path

import huggingface_hub
import jax
import pytest

import zoo
from zoo import adapters
from zoo.adapters.peft.write import write_adapter
from zoo.weights.model_card import Training
from zoo.weights.save import write_model

CACHED = "models--tiny--llama/snapshots/0123456789abcdef0123456789abcdef01234567"


def make_model():
    return zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(0))


@pytest.fixture
def cached(tmp_path):
    """A checkpoint where the hub's cache has it."""
    zoo.save(make_model(), tmp_path / CACHED)
    return tmp_path / CACHED


def read(directory):
    return huggingface_hub.ModelCard.load(directory / "README.md")


def test_card_of_a_model(cached, tmp_path):
    zoo.save(make_model(), tmp_path / "mine")
    card = read(tmp_path / "mine")
    assert card.data.library_name == "transformers" and card.data.base_model is None
    assert "# A llama model" in card.text
    zoo.save(zoo.load(cached), tmp_path / "tuned", source=cached)
    card = read(tmp_path / "tuned")
    assert card.data.base_model == "tiny/llama" and "made from `tiny/llama`" in card.text
    assert 'model = transformers.AutoModelForCausalLM.from_pretrained("DIRECTORY")\n' in card.text


@pytest.mark.parametrize(("name", "reader"), [("t5_relu_tied", "Seq2SeqLM"), ("whisper_base", "SpeechSeq2Seq")])
def test_card_of_an_encoder_decoder_names_its_class(name, reader, tmp_path):
    folder = Path(__file__).parents[1] / "fixtures" / "encoder_decoders" / name
    zoo.save(zoo.load(folder), tmp_path, source=folder)
    assert f"transformers.AutoModelFor{reader}.from_pretrained(" in read(tmp_path).text


def test_card_of_a_training(tmp_path):
    facts = {"steps": 120, "lora": 16}
    training = Training("tiny/llama", ["trl-lib/chats"], facts)
    write_model(make_model(), tmp_path, training=training)
    card = read(tmp_path)
    assert card.data.base_model == "tiny/llama" and card.data.datasets == ["trl-lib/chats"]
    assert "## Training\n" in card.text and "| lora | 16 |" in card.text
    write_model(make_model(), tmp_path, training=dataclasses.replace(training, facts=facts | {"steps": 600}))
    longer = (tmp_path / "README.md").read_text()
    assert "| steps | 600 |" in longer and "120" not in longer
    edited = longer.replace("Saved by", "Made by")
    (tmp_path / "README.md").write_text(edited)
    write_model(make_model(), tmp_path, training=training)
    assert (tmp_path / "README.md").read_text() == edited


def test_card_of_an_adapter(cached, tmp_path):
    model = adapters.lora(zoo.load(cached), key=jax.random.key(1))
    adapters.save(model, tmp_path / "adapter", base="tiny/llama")
    card = read(tmp_path / "adapter")
    assert card.data.library_name == "peft" and card.data.base_model == "tiny/llama" and "lora" in card.data.tags
    assert 'transformers.AutoModelForCausalLM.from_pretrained("tiny/llama")' in card.text
    assert 'peft.PeftModel.from_pretrained(base, "DIRECTORY")' in card.text and "## Training" not in card.text
    adapters.save(model, tmp_path / "private", base=cached)
    assert str(tmp_path) not in (tmp_path / "private" / "README.md").read_text()
    assert read(tmp_path / "private").data.base_model is None


def test_card_of_a_trained_adapter(cached, tmp_path):
    model = adapters.lora(zoo.load(cached), key=jax.random.key(1))
    training = Training("tiny/llama", ["trl-lib/chats"], {"learning_rate": 1e-3, "rank": 8})
    write_adapter(model, tmp_path / "adapter", base=cached, training=training)
    card = read(tmp_path / "adapter")
    assert card.data.base_model == "tiny/llama" and card.data.datasets == ["trl-lib/chats"]
    assert "| learning_rate | 0.001 |\n| rank | 8 |\n" in card.text.partition("## Training")[2]


def test_a_card_that_is_there_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine\n")
    zoo.save(make_model(), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine\n"
