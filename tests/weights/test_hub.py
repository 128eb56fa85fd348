"""Models by name: first load, cached, offline, new revisions, broken downloads, and each refusal in one line."""

import os
import shutil
import subprocess
import sys

import equinox as eqx
import huggingface_hub
import jax
import jax.numpy as jnp
import pytest
from huggingface_hub import constants

import zoo
from tests.loopback_hub import Repository, serve_hub
from zoo.text.tokenizers import ByteTokenizer
from zoo.weights import resolve_directory
from zoo.weights.hub import download, is_hub_name

SIZES = {"vocab": 256, "embed": 16, "layers": 2, "heads": 2, "mlp": 32}


def make(seed=0):
    return zoo.models.Transformer(**SIZES, key=jax.random.key(seed))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model in shards, with a tokenizer, and with files that no one should download."""
    path = tmp_path_factory.mktemp("hub") / "model"
    zoo.save(make(), path, shard_bytes=10_000)
    ByteTokenizer().save(path)
    for name in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "modeling_tiny.py",
        "tokenizer_tiny.py",
        "tokenizer.pkl",
        "model.gguf",
    ):
        (path / name).write_bytes(b"not to be read")
    return path


@pytest.fixture
def hub(directory, tmp_path, monkeypatch):
    """A hub with `tiny/llama`, an empty cache, and a network."""
    tiny = Repository({"main": directory})
    with serve_hub({"tiny/llama": tiny}) as served:
        served.tiny = tiny
        connect(monkeypatch, served.endpoint, tmp_path / "cache")
        yield served


def connect(monkeypatch, endpoint, cache):
    """Point `huggingface_hub`, which reads its environment when it is imported, at an endpoint and a cache."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(cache.parent)


def refusal(name, **options):
    with pytest.raises(zoo.CheckpointError) as info:
        zoo.load(name, **options)
    return str(info.value)


def test_names_of_the_hub_and_paths():
    names = ["Qwen/Qwen3-0.6B", "a/b@main", "a/b@refs/pr/1", "meta-llama/Llama-3.2-1B@0e9e39f"]
    assert all(map(is_hub_name, names))
    assert not any(map(is_hub_name, ["gpt2", "./a", "/a/b", "a/b/c", "../a", "~/a", "a/b@", "a/", "runs/x/export"]))


def test_load_downloads_only_what_is_read_and_once(hub, directory):
    model = zoo.load("tiny/llama")
    assert eqx.tree_equal(jax.tree.leaves(model), jax.tree.leaves(zoo.load(directory)))
    shards = [path.name for path in directory.glob("model-*.safetensors")]
    small = ["README.md", "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    assert hub.list_downloads() == sorted([*small, *shards]) and len(shards) > 1
    zoo.load("tiny/llama")
    assert hub.list_downloads() == []


def test_one_file_is_enough_where_an_index_stands_beside_it(hub, directory, tmp_path):
    zoo.save(make(), tmp_path / "both")
    shutil.copy(directory / "model.safetensors.index.json", tmp_path / "both")
    hub.tiny.revisions = {"main": tmp_path / "both"}
    path = resolve_directory("tiny/llama")
    assert [name for name in hub.list_downloads() if name.endswith(".safetensors")] == ["model.safetensors"]
    assert (path / "model.safetensors").is_file()


def test_small_files_alone_are_enough_for_a_plan(hub):
    resolve_directory("tiny/llama", weights=False)
    assert not any(name.startswith("model-") for name in hub.list_downloads())
    zoo.load("tiny/llama")


def test_load_without_network_reads_the_cache(hub, monkeypatch, caplog):
    model = zoo.load("tiny/llama")
    (download("tiny/llama") / "README.md").unlink()  # as another library leaves it
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert eqx.tree_equal(jax.tree.leaves(zoo.load("tiny/llama")), jax.tree.leaves(model))
    assert "HF_HUB_OFFLINE is set): tiny/llama is read from the cache" in caplog.text
    message = refusal("tiny/other")
    assert "no directory tiny/other" in message and constants.HF_HUB_CACHE in message and "hf download" in message
    shard = next(iter(download("tiny/llama").glob("model-*.safetensors")))
    shard.unlink()
    assert f"{constants.HF_HUB_CACHE} does not have all of it" in refusal("tiny/llama")


def test_load_without_an_answer_reads_the_cache(hub, directory, tmp_path, monkeypatch, caplog):
    zoo.load("tiny/llama")
    connect(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    zoo.load("tiny/llama")
    assert "does not answer (ConnectError" in caplog.text
    assert "does not answer" in refusal("tiny/other")


def test_load_follows_revisions(hub, directory, tmp_path):
    zoo.load("tiny/llama")
    newer = tmp_path / "newer"
    shutil.copytree(directory, newer)
    zoo.save(make(1), newer, shard_bytes=10_000)
    hub.tiny.revisions = {"main": newer, "v1": directory}
    new, old = (jax.tree.leaves(zoo.load(path)) for path in (newer, directory))
    assert eqx.tree_equal(jax.tree.leaves(zoo.load("tiny/llama")), new)
    assert eqx.tree_equal(jax.tree.leaves(zoo.load("tiny/llama", revision="v1")), old)
    assert eqx.tree_equal(jax.tree.leaves(zoo.load("tiny/llama@v1")), old)
    assert refusal("tiny/llama@v2") == "tiny/llama has no revision 'v2' on the Hugging Face hub"
    with pytest.raises(ValueError, match="two revisions"):
        zoo.load("tiny/llama@v1", revision="main")


def test_broken_downloads_are_resumed(hub, directory, monkeypatch):
    """First `huggingface_hub` resumes by itself; then it gives up, and the next call resumes."""
    hub.tiny.break_after = 1000
    zoo.load("tiny/llama")
    whole = huggingface_hub.snapshot_download
    shutil.rmtree(constants.HF_HUB_CACHE)

    def break_off(*args, **options):
        whole(*args, **options | {"allow_patterns": ["config.json"]})
        raise OSError("the line is cut")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", break_off)
        message = refusal("tiny/llama")
    assert message == "the download of tiny/llama broke off: OSError: the line is cut. The same call resumes it"
    hub.requests.clear()
    zoo.load("tiny/llama")
    assert "config.json" not in hub.list_downloads()


def test_refusals_of_the_hub_say_what_to_do(hub, directory, tmp_path, monkeypatch):
    message = refusal("tiny/none")
    assert "no directory tiny/none, and no model tiny/none" in message and "hf auth login" in message
    assert "no model tiny/no..name" in refusal("tiny/no..name")
    hub.tiny.token = "hf_secret"
    message = refusal("tiny/llama")
    assert f"accept its license at {hub.endpoint}/tiny/llama" in message and "hf_secret" not in message
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    zoo.load("tiny/llama")
    (tmp_path / "pickled").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copy(directory / name, tmp_path / "pickled" / name)
    hub.tiny.revisions = {"main": tmp_path / "pickled"}
    assert "has neither model.safetensors nor" in refusal("tiny/llama")


def test_too_little_room_is_known_before_the_download(hub, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = refusal("tiny/llama")
    assert "has 20 kB free: set HF_HOME" in message
    assert not any(name.startswith("model-") for name in hub.list_downloads())


def test_a_directory_of_that_name_wins(hub, tmp_path):
    zoo.save(make(2), tmp_path / "tiny" / "llama")
    assert eqx.tree_equal(jax.tree.leaves(zoo.load("tiny/llama")), jax.tree.leaves(make(2)))
    assert hub.requests == []
    assert "which has no revision 'main'" in refusal("tiny/llama", revision="main")


def test_adapters_have_names_too(hub, directory, tmp_path):
    model = zoo.load("tiny/llama")
    adapted = zoo.adapters.lora(model, key=jax.random.key(1))
    adapted = jax.tree.map(lambda x: x + 0.01 if eqx.is_inexact_array(x) else x, adapted)
    zoo.adapters.save(adapted, tmp_path / "adapter", base="tiny/llama")
    hub.tiny.revisions = {"main": tmp_path / "adapter", "base": directory}
    hub.requests.clear()
    loaded = zoo.adapters.load(zoo.load("tiny/llama@base"), "tiny/llama")
    assert "adapter_model.safetensors" in hub.list_downloads()
    tokens = jnp.arange(8)[None]
    assert loaded(tokens).shape == (1, 8, 256)


@pytest.mark.ci
def test_commands_take_names(hub, tmp_path):
    """In a process of its own, which knows the hub by its environment only."""
    command = [sys.executable, "-m", "zoo.cli", "info", "tiny/llama"]
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "llama" in done.stdout
    assert (tmp_path / "home/hub/models--tiny--llama").exists()
