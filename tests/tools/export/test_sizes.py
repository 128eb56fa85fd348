"""Sizes, platforms and folders of an export: what is fixed, what is any number, and what is refused before any file."""

import json
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.processes import ROOT
from zoo.ops.implementations import always_holds, find_kernel_obstacle
from zoo.ops.platform import for_export
from zoo.tools.export import serve
from zoo.tools.export.folder import MANIFEST, check_folder, write_folder

from .serve_cases import import_serve

ENCODERS = ROOT / "tests/fixtures/encoders"


def test_symbolic_length_takes_any_number_of_tokens(model, tmp_path, no_type_checks):
    zoo.export(model, tmp_path, seq_len="symbolic")
    about, programs, weights = import_serve(tmp_path).load_export()
    assert (about["batch"], about["seq_len"], list(programs)) == ("symbolic", "symbolic", ["forward"])
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
    expected = eqx.filter_jit(model)(jnp.asarray(tokens))
    np.testing.assert_allclose(programs["forward"](weights, tokens), expected, atol=2e-6 * np.abs(expected).max())


def test_folder_describes_itself_and_replaces_an_earlier_export(model, tmp_path, no_type_checks):
    """A tied embedding is one tensor. An export for fewer programs deletes the files of the others."""
    zoo.export(model, tmp_path, seq_len=4, length=8, batch=3)
    about = json.loads((tmp_path / MANIFEST).read_text())
    assert set(about["files"]) == {path.name for path in tmp_path.iterdir()}
    assert {name: about[name] for name in ("kind", "batch", "seq_len", "length", "vocabulary", "platforms")} == {
        "kind": "decoder",
        "batch": 3,
        "seq_len": 4,
        "length": 8,
        "vocabulary": 32,
        "platforms": ["cpu"],
    }
    assert about["programs"]["prefill"]["inputs"]["positions"] == {"shape": [3, 4], "dtype": "int32"}
    assert about["states"][0] == {"name": "states.0.key", "shape": [3, 2, 8, 8], "dtype": "float32"}
    stored = zoo.weights.safetensors.open_safetensors(tmp_path / "weights.safetensors")
    assert sum(x.read().size for x in stored.values()) == zoo.count(model)
    np.testing.assert_array_equal(
        stored["layers.1.attention.query.weight"].read(), model.stack.segments[0].blocks[0].mixer.query.weight[1]
    )
    assert "stablehlo.dot_general" in (tmp_path / "decode.mlir").read_text()

    zoo.export(model, tmp_path, seq_len="symbolic", batch=3)
    files = {"serve.py", "forward.jax_export", "forward.mlir", "weights.safetensors", MANIFEST}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_interrupted_write_leaves_no_export(tmp_path):
    class Broken:
        def serialize(self):
            return b""

        def mlir_module(self):
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path / "new", {"forward": Broken()}, {}, {})
    assert not (tmp_path / "new").exists()


def test_folder_with_other_files_is_refused(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty, and not an earlier export: pass another folder, or overwrite"):
        zoo.export(model, tmp_path)
    with pytest.raises(ValueError, match="notes.txt is a file: pass a folder"):
        zoo.export(model, tmp_path / "notes.txt")
    check_folder(tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"platforms": ("gpu",)}, ValueError, "platforms are cpu, cuda, rocm, tpu, not 'gpu'; a GPU is cuda or rocm"),
        ({"platforms": ()}, ValueError, "platforms is one of cpu, cuda, rocm, tpu or several"),
        ({"batch": 0}, ValueError, "batch is a whole number, at least 1, not 0"),
        ({"seq_len": "any"}, ValueError, "seq_len is a whole number, at least 1, not 'any'"),
        ({"seq_len": 8, "length": 4}, ValueError, "length=4: caches hold at least the seq_len=8 tokens"),
        ({"seq_len": "symbolic", "length": 4}, ValueError, "length=4 is for prefill and decode"),
        ({"image_size": 4}, ValueError, "image_size=4: Decoder has no such size, leave it out"),
    ],
)
def test_sizes_and_platforms_are_checked(options, error, message, model, tmp_path, no_type_checks):
    with pytest.raises(error, match=message):
        zoo.export(model, tmp_path, **options)
    assert not any(tmp_path.iterdir())


def test_models_that_cannot_be_exported_are_refused(model, tmp_path, no_type_checks):
    with pytest.raises(TypeError, match="a Decoder, an Encoder or an ImageEncoder is exported, not a MLP"):
        zoo.export(eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0)), tmp_path)
    with pytest.raises(ValueError, match="length=4: Encoder has no such size"):
        zoo.export(zoo.load(ENCODERS / "bert_texts"), tmp_path, length=4)
    with pytest.raises(ValueError, match=r"'splash' cannot compute this, because an exported program holds only XLA"):
        zoo.export(zoo.set_implementations(model, attention="splash"), tmp_path, seq_len=4)
    mamba = zoo.models.Mamba(vocab=32, embed=16, layers=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="seq_len='symbolic' is for attention only, and Mamba reads tokens in chunks"):
        zoo.export(mamba, tmp_path, seq_len="symbolic")
    adapted = zoo.adapters.lora(model, rank=2, targets="query", key=jax.random.key(0))
    per_row = zoo.adapters.select_per_row(adapted, ["lora", None])
    with pytest.raises(ValueError, match="has a row for each row of the batch: pass batch, their number"):
        zoo.export(per_row, tmp_path)

    def print_scores(*args, **options):
        jax.debug.print("{}", args[0].sum())
        return zoo.ops.attention.reference_attention(*args, **options)

    with pytest.raises(NotImplementedError, match="the model calls a Python function"):
        zoo.export(zoo.set_implementations(model, attention=print_scores), tmp_path, seq_len=4, batch=1)

    def loop_over_rows(query, *args, **options):
        return jnp.stack([query[row] for row in range(len(query))])

    with pytest.raises(ValueError, match="symbolic ones do not allow: pass batch and seq_len as numbers"):
        zoo.export(zoo.set_implementations(model, attention=loop_over_rows), tmp_path, seq_len=4)
    assert not any(tmp_path.iterdir())


def test_missing_flatbuffers_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "flatbuffers", raising=False)
    with pytest.raises(ImportError, match=r"flatbuffers cannot be found: pip install 'equizoo\[export\]'"):
        zoo.export(model, tmp_path)


def test_comparisons_of_symbolic_sizes():
    rows, columns = jax.export.symbolic_shape("rows, columns")
    assert always_holds(lambda: 2 * rows >= 2)
    assert not always_holds(lambda: rows >= 2)
    assert not always_holds(lambda: rows == columns)
    assert always_holds(lambda: 3 > 2)


def test_kernels_have_an_obstacle_while_exporting():
    assert find_kernel_obstacle("cpu") is None
    with for_export(True):
        assert "holds only XLA's own operations" in (find_kernel_obstacle("cpu") or "")


def test_serve_names_text_for_token_ids():
    with pytest.raises(SystemExit, match="^a row is token ids in quotes, as in '5 17 3', not text, which is tokenized"):
        serve.read_rows({"batch": "symbolic", "vocabulary": 9}, ["hello"])
