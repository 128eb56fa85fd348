"""A folder that holds no model, given for one: the error says what it is and where to look, at every entrance."""

import shutil

import pytest

import zoo
from zoo import train


@pytest.fixture
def folders(checkpoint, tmp_path):
    """A run with an exported model and an adapter, one without, and an adapter."""
    for run in (tmp_path / "runs" / "mine", tmp_path / "short"):
        run.mkdir(parents=True)
        (run / "config.json").write_text('{"steps": 300}')
        (run / "env.json").write_text("{}")
    shutil.copytree(checkpoint, tmp_path / "runs" / "mine" / "export")
    for adapter in (tmp_path / "runs" / "mine" / "adapter", tmp_path / "adapter"):
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return tmp_path


@pytest.mark.parametrize("read", [zoo.load, zoo.weights.resolve_directory, train.read_tokenizer])
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("runs/mine", "runs/mine is a run's folder: its model is in {}/runs/mine/export"),
        ("short", "short is a run's folder, and has no export/ with a model"),
        ("adapter", "adapter is an adapter and not a model: load its base, then zoo.adapters.load"),
        ("runs", "runs has no config.json, which a model has; did you mean {}/runs/mine/export?"),
    ],
)
def test_other_folders_are_named(folders, read, folder, message):
    with pytest.raises((zoo.CheckpointError, FileNotFoundError)) as raised:
        read(folders / folder)
    assert str(raised.value).startswith(f"{folders}/{message}".format(folders))


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("runs/mine", "runs/mine is a run's folder: its adapter is in {}/runs/mine/adapter"),
        ("runs/mine/export", "runs/mine/export is a model and not an adapter: it has no adapter_config.json"),
        ("runs", "runs has no adapter_config.json, which an adapter has; did you mean {}/runs/mine/adapter?"),
    ],
)
def test_folders_without_an_adapter_are_named(folders, checkpoint, folder, message):
    with pytest.raises(zoo.CheckpointError) as raised:
        zoo.adapters.load(zoo.load(checkpoint), folders / folder)
    assert str(raised.value) == f"{folders}/{message}".format(folders)


def test_a_model_saved_over_a_run_is_loaded(folders, checkpoint):
    shutil.copytree(checkpoint, folders / "short", dirs_exist_ok=True)
    assert zoo.load(folders / "short")
    with pytest.raises(zoo.CheckpointError, match="config.json has no model_type. `zoo families` lists what is read$"):
        (folders / "short" / "config.json").write_text("{}")
        zoo.load(folders / "short")
