"""A saved model keeps its tokenizer."""

import shutil

import equinox as eqx
import jax
import pytest

import zoo
from zoo import adapters

NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


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
    return sorted(path.name for path in folder.iterdir() if path.name not in ("config.json", "model.safetensors"))


def test_saved_model_has_the_tokenizer_of_its_checkpoint(checkpoint, tmp_path):
    model = adapters.merge(adapters.lora(zoo.load(checkpoint), targets="query", rank=2, key=jax.random.key(1)))
    zoo.save(model, tmp_path / "tuned")
    assert list_copied(tmp_path / "tuned") == sorted(NAMES)
    assert (tmp_path / "tuned" / "tokenizer.json").read_text() == "tokenizer.json\n"


def test_source_comes_before_the_directory_of_the_model(checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (other / "tokenizer.json").write_text("other\n")
    zoo.save(zoo.load(checkpoint), tmp_path / "tuned", source=other)
    assert (tmp_path / "tuned" / "tokenizer.json").read_text() == "other\n"


def test_saving_in_place_keeps_the_tokenizer(checkpoint):
    before = list_copied(checkpoint)
    zoo.save(zoo.load(checkpoint), checkpoint)
    assert list_copied(checkpoint) == before
    assert (checkpoint / "tokenizer.json").read_text() == "tokenizer.json\n"


def test_a_model_without_a_checkpoint_has_no_tokenizer(tmp_path, caplog):
    zoo.save(make_model(), tmp_path / "new")
    assert list_copied(tmp_path / "new") == [] and not caplog.records


def test_a_directory_that_is_gone_is_one_line(checkpoint, tmp_path, caplog):
    model = zoo.load(checkpoint)
    shutil.rmtree(checkpoint)
    zoo.save(model, tmp_path / "tuned")
    (record,) = caplog.records
    assert "wrote no tokenizer" in record.message and "pass source=" in record.message


def test_links_out_of_the_directory_are_left_out(checkpoint, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").symlink_to(secret)
    zoo.save(zoo.load(checkpoint), tmp_path / "tuned")
    assert "tokenizer.json" not in list_copied(tmp_path / "tuned")


def test_models_of_two_directories_are_trees_of_one_structure(checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    first, second = zoo.load(checkpoint), zoo.load(other)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert eqx.tree_equal(first, second)
