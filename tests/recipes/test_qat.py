"""The recipe end to end: from a model trained on the spot on a mesh, and from a directory, against a loop by hand."""

import xml.etree.ElementTree as ET
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from recipes import qat
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import adapters, train
from zoo.layers.quantized.groups import GroupQuantizedLinear, NVFP4Linear

pytestmark = pytest.mark.ci

TINY = {
    "formats": ("int2",), "embed": 32, "layers": 2, "heads": 2, "mlp_dim": 64, "seq_len": 16, "batch_size": 8,
    "start_steps": 2, "steps": 4, "warmup_steps": 1, "eval_every": 2, "learning_rate": 0.02, "fsdp": 2, "tensor": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """Groups of 32 inputs, of which a device has 16."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(qat.main, data=(text,), out=out, **TINY)
    return out


def read_table(page):
    """Return the rows of a report's results, each by the heads of its columns."""
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>"))
    section = next(x for x in root.iter("section") if x.findtext("h2") == "Results")
    head, *rows = [[cell.text or "" for cell in row] for row in section.iter("tr")]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_qat_runs_and_report(unbroken):
    lines = {name: train.read_metrics(unbroken / name / "metrics.jsonl") for name in ("start", "float", "int2")}
    assert [[line["step"] for line in lines[name] if "validation" in line] for name in lines] == [[2], [2, 4], [2, 4]]
    check_optimization(unbroken, "float", "int2")
    report = (unbroken / "report.html").read_text()
    plain, rounded = read_table(report)
    assert (plain["run"], rounded["run"]) == ("float", "int2")
    assert float(plain["bits per weight"]) == 32 and float(rounded["bits per weight"]) == 4.5
    assert float(plain["trained in float"]) == pytest.approx(lines["float"][-1]["validation"], abs=1e-3)
    assert float(rounded["before"]) == pytest.approx(lines["start"][-1]["rounded_int2"], abs=1e-3)
    assert float(rounded["trained in float"]) == pytest.approx(lines["float"][-1]["rounded_int2"], abs=1e-3)
    assert float(rounded["trained rounded"]) == pytest.approx(lines["int2"][-1]["validation"], abs=1e-3)
    assert rounded["read from the file"] == rounded["trained rounded"]
    assert lines["int2"][0]["loss"] != lines["float"][0]["loss"], "the first forward pass is rounded"
    assert abs(lines["float"][-1]["rounded_int2"] - lines["float"][-1]["validation"]) > 1e-3
    assert all(part in report for part in ("int2: loss of the rounded model", "trained in float", "float, not rounded"))
    assert "http" not in report


def test_qat_file_holds_the_levels_of_the_format(unbroken):
    read = zoo.load(unbroken / "int2" / "export", packed=True)
    decoded = zoo.load(unbroken / "int2" / "export")
    codes = next(read.stack.iter_blocks()).ffn.up.codes
    assert set(np.unique(codes & 15).tolist()) == set(np.unique(codes >> 4).tolist()) == {7, 8, 9}
    unpacked = jax.tree.leaves(adapters.dequantize(read)), jax.tree.leaves(decoded)
    assert all(np.array_equal(x, y) for x, y in zip(*unpacked, strict=True))


def round_by_hand(weight, size=16):
    """Round groups to multiples, from -7 to 7, of a scale in bfloat16."""
    groups = weight.reshape(*weight.shape[:-1], -1, size)
    scale = (jnp.abs(groups).max(-1, keepdims=True) / 7).astype(jnp.bfloat16).astype(jnp.float32)
    return (jnp.clip(jnp.round(groups / scale), -7, 7) * scale).reshape(weight.shape)


def test_qat_from_a_directory_equals_the_formula(text, start, tmp_path):
    """w + stop_gradient(round(w) - w) of the matrices of the blocks, in a loop of its own on one device."""
    options = {"steps": 4, "seq_len": 16, "batch_size": 8, "warmup_steps": 1, "eval_every": 2, "learning_rate": 0.02}
    options |= {"formats": ("int4", "nvfp4"), "group_size": 16}
    call(qat.main, start=start, data=(text,), out=tmp_path / "run", **options)
    lines = train.read_metrics(tmp_path / "run" / "int4" / "metrics.jsonl")
    for row in read_table((tmp_path / "run" / "report.html").read_text())[1:]:
        assert float(row["read from the file"]) == pytest.approx(float(row["trained rounded"]), abs=1.1e-3)
        export = tmp_path / "run" / row["run"] / "export"
        layer = next(zoo.load(export, packed=True).stack.iter_blocks()).ffn.up
        assert type(layer) is {"int4": GroupQuantizedLinear, "nvfp4": NVFP4Linear}[row["run"]]
        assert train.read_tokenizer(export).vocab == 256

    model = zoo.load(start, dtype="float32")
    schedule = train.warmup_cosine(0.02, 1, 4)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = optimizer.init(zoo.trainable(model))

    @eqx.filter_jit
    def step(model, opt_state, batch):
        def compute_loss(model):
            straight = lambda w: w + jax.lax.stop_gradient(round_by_hand(w) - w) if w.ndim == 3 else w
            total, count = zoo.cross_entropy(jax.tree.map(straight, model), batch)
            return total / count

        loss, grads = eqx.filter_value_and_grad(compute_loss)(model)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), opt_state, loss

    corpus = train.load_text((text,), tokenizer=train.read_tokenizer(start))
    batches = corpus.train.batches(16, 8, seed=0)
    for line in lines:
        model, opt_state, loss = step(model, opt_state, next(batches))
        assert line["loss"] == pytest.approx(float(loss), rel=2e-5)
    batches.close()


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_qat_rounds_on_a_mesh_as_on_one_device(name):
    """Bit for bit, and only the matrices of the blocks. A device has 16 inputs of a group of 32, or of the matrix."""
    config = qat.Config(group_size=32)
    model = zoo.models.Transformer(vocab=16, embed=32, layers=2, heads=2, mlp=64, qk_norm=True, key=jax.random.key(0))
    expected = qat.round_weights(config, name, model)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    rounded = eqx.filter_jit(partial(qat.round_weights, config, name))(zoo.place(model, mesh))
    assert jax.tree.structure(rounded) == jax.tree.structure(model)
    for x, y, before in zip(*map(jax.tree.leaves, (rounded, expected, model)), strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.array_equal(y, before) == (before.ndim < 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": ("int4", "int5")}, "name one or more of the formats int4, int3, int2, nvfp4, not int4, int5"),
        ({"formats": ()}, "name one or more of the formats int4, .*, not none"),
        ({"group_size": 12}, "group_size=12: expected a multiple of 8"),
        ({"group_size": 64}, "query: int2 has groups of 64 inputs, and 32 are not whole groups"),
        ({"start_steps": 0}, "start_steps=0: expected 1 or more"),
        ({"mlp_dim": 33}, "mlp"),
        ({"batch_size": 6}, "6 rows do not divide evenly"),
    ],
)
def test_qat_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(qat.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
