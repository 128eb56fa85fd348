"""A saved model gets the tokenizer of its source."""

import jax
import pytest

import zoo
from zoo import adapters

NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
WRITTEN = ("README.md", "config.json", "model.safetensors")


def make_model(seed=0):
    return zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(seed))


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with the files of a tokenizer, and others."""
    folder = tmp_path / "checkpoint"
    zoo.save(make_model(), folder)
    for name in (*NAMES, "README.md", "notes.txt"):
        (folder / name).write_text(f"{name}\n")
    return folder


def list_copied(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in WRITTEN)


def test_a_merged_model_gets_the_tokenizer_of_its_source(checkpoint, tmp_path, caplog):
    model = adapters.merge(adapters.lora(zoo.load(checkpoint), targets="query", rank=2, key=jax.random.key(1)))
    zoo.save(model, tmp_path / "tuned", source=checkpoint)
    assert list_copied(tmp_path / "tuned") == sorted(NAMES)
    assert (tmp_path / "tuned" / "tokenizer.json").read_text() == "tokenizer.json\n"
    assert not caplog.records


def test_saving_in_place_keeps_the_tokenizer(checkpoint, caplog):
    before = list_copied(checkpoint)
    zoo.save(zoo.load(checkpoint), checkpoint)
    zoo.save(zoo.load(checkpoint), checkpoint, source=checkpoint)
    assert list_copied(checkpoint) == before
    assert (checkpoint / "tokenizer.json").read_text() == "tokenizer.json\n"
    assert not caplog.records


def test_a_loaded_model_without_a_source_says_so(checkpoint, tmp_path, caplog):
    zoo.save(zoo.load(checkpoint), tmp_path / "tuned")
    (record,) = caplog.records
    assert "has no tokenizer" in record.message and "source=" in record.message
    caplog.clear()
    zoo.save(make_model(), tmp_path / "new")
    assert list_copied(tmp_path / "new") == [] and not caplog.records


def test_links_out_of_the_source_are_left_out(checkpoint, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").symlink_to(secret)
    zoo.save(zoo.load(checkpoint), tmp_path / "tuned", source=checkpoint)
    assert "tokenizer.json" not in list_copied(tmp_path / "tuned")
