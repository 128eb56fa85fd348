"""`zoo convert`: same numbers, another dtype and shards; no executable files are copied."""

import importlib
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np

import zoo


def test_convert_dtype_and_shards(run, text_model, tmp_path):
    out, _ = run("convert", text_model, tmp_path / "new", "--dtype", "bfloat16", "--shard-bytes", "4e3")
    before, after = zoo.load(text_model), zoo.load(tmp_path / "new")
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x.astype(jnp.bfloat16), y)
    shards = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(shards) > 1 and all(str(shard) in out for shard in shards)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (text_model / name).read_bytes() and name in out


def test_convert_copies_known_files_only(run, bytes_model, tmp_path):
    source = tmp_path / "old"
    run("convert", bytes_model, source)
    copied = {"LICENSE.txt", "README.md", "chat_template.jinja", "merges.txt", "tokenizer.model", "vocab.txt"}
    left = {"pytorch_model.bin", "tokenizer.pkl", "modeling.py", "other.safetensors"}
    for name in copied | left | {".hidden"}:
        (source / name).write_text(name)
    (source / "onnx").mkdir()
    out, _ = run("convert", source, tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == copied | {"config.json", "model.safetensors"}
    told = out.partition("skipped")[2]
    assert all(name in told for name in (*left, "onnx (directory)", "pytorch_model.bin (pickled)"))
    assert (
        ".hidden" not in out
        and (tmp_path / "new" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    )


def test_convert_refuses_output_directories(refused, run, bytes_model, tmp_path):
    (tmp_path / "notes").write_text("mine")
    again = bytes_model.parent / "." / bytes_model.name
    assert "is the checkpoint itself" in refused("convert", bytes_model, again, "--overwrite")
    assert "or --overwrite" in refused("convert", bytes_model, tmp_path)
    assert "is a file" in refused("convert", bytes_model, tmp_path / "notes")
    assert "--shard-bytes" in refused("convert", bytes_model, tmp_path / "new", "--shard-bytes", "0")
    run("convert", bytes_model, tmp_path, "--overwrite")
    assert (tmp_path / "notes").read_text() == "mine" and (tmp_path / "model.safetensors").exists()


def test_convert_that_fails_leaves_no_partial_files(bytes_model, tmp_path, monkeypatch, refused):
    def full(file, *_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importlib.import_module("zoo.weights.save"), "write_tensors", full)
    assert "No space left" in refused("convert", bytes_model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_convert_copies_no_link_that_leaves_the_directory(run, bytes_model, tmp_path):
    (tmp_path / "secret").write_text("precious")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "c0ffee", tmp_path / "hub" / "blobs"
    shutil.copytree(bytes_model, snapshot)
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "1")
    (blobs / "2").write_text("license")
    links = {"model.safetensors": "../../blobs/1", "LICENSE": "../../blobs/2", "vocab.txt": "LICENSE"}
    (blobs / "3").symlink_to(tmp_path / "secret")
    outside = {
        "README.md": str(tmp_path / "secret"),
        "tokenizer.model": "../../../secret",
        "merges.txt": "../../blobs/3",
    }
    special = {"chat_template.json": "chat_template.json", "vocab.json": "/dev/zero"}
    (snapshot / "README.md").unlink()  # its model card
    for name, target in (links | outside | special).items():
        (snapshot / name).symlink_to(target)
    os.mkfifo(snapshot / "generation_config.json")
    told = run("convert", snapshot, tmp_path / "new")[0].partition("skipped")[2]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {*links, "README.md", "config.json"}
    assert "equizoo" in (tmp_path / "new" / "README.md").read_text()
    assert all(f"{name} (link that leaves the directory)" in told for name in outside)
    assert all(f"{name} (not a file)" in told for name in (*special, "generation_config.json"))
    shutil.move(snapshot, tmp_path / "plain")  # here the links to blobs leave the directory
    (tmp_path / "plain" / "model.safetensors").unlink()
    shutil.copy(blobs / "1", tmp_path / "plain" / "model.safetensors")
    run("convert", tmp_path / "plain", tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_convert_overwrites_links_not_their_targets(run, bytes_model, tmp_path):
    (tmp_path / "secret").write_text("precious")
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(bytes_model, source)
    (source / "README.md").write_text("about")
    out.mkdir()
    for name in ("README.md", "config.json", "model.safetensors", "model.safetensors.partial", "config.json.partial"):
        (out / name).symlink_to(tmp_path / "secret")
    run("convert", source, out, "--overwrite")
    assert (tmp_path / "secret").read_text() == "precious" and (out / "README.md").read_text() == "about"
    zoo.load(out)
