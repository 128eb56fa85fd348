"""The reference of preference losses: computed once, kept by model, rows and dtype, and equal to the model's log p."""

import dataclasses
import socket
import subprocess
import sys

import equinox as eqx
import jax
import numpy as np
import pytest

import zoo
from tests.processes import ROOT, make_environment
from zoo import train
from zoo.layers.rotary import Rotary
from zoo.text.batches import OrderedBatches
from zoo.text.tokenizers import ByteTokenizer
from zoo.train import stored_arrays


def make_pairs(count=40, sign="+"):
    return [{"prompt": f"{n} {sign} 1 = ", "chosen": str(n + 1), "rejected": str(n - 1)} for n in range(count)]


def make_model(seed=0, **options):
    sizes = {"vocab": 256, "embed": 16, "layers": 2, "heads": 4, "mlp": 32}
    return zoo.models.Transformer(**sizes, **options, key=jax.random.key(seed))


MODEL = make_model()
MESH = zoo.make_mesh(devices=jax.devices()[:1])


@pytest.fixture
def load(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "seq_len": 64, "cache": tmp_path / "records", "processes": 1}
    return lambda source=None, **more: train.load_records(source or make_pairs(), **options | more)


@pytest.fixture
def precompute(tmp_path):
    """Precompute into a cache of the test's own."""

    def precompute(data, model=MODEL, mesh=MESH, **options):
        options = {"batch_size": 8, "cache": tmp_path / "cache"} | options
        return train.precompute_reference(zoo.place(model, mesh), data, mesh, **options)

    return precompute


def list_stores(tmp_path):
    return {path.name for path in (tmp_path / "cache").iterdir()}


def stack(split):
    (batch,) = OrderedBatches(split.rows, -(-len(split.rows) // 8) * 8, process=(0, 1))
    return batch


def test_reference_is_log_p_of_every_target(load, precompute, capfd):
    data = precompute(load())
    assert f"the reference has read 0 of {len(data.train.rows)} rows" in capfd.readouterr().out
    for split in (data.train, data.validation):
        batch = stack(split)
        expected = eqx.filter_jit(zoo.log_probs)(MODEL, batch)
        assert batch["reference"].dtype == np.float32
        np.testing.assert_allclose(batch["reference"], expected, atol=1e-5)
        assert (batch["reference"][batch["targets"] < 0] == 0).all() and (batch["reference"] < 0).any()
    shuffled = data.train.batches(8, seed=1)
    batch = next(shuffled)
    shuffled.close()
    np.testing.assert_allclose(batch["reference"], eqx.filter_jit(zoo.log_probs)(MODEL, batch), atol=1e-5)


@pytest.mark.ci
def test_reference_is_the_same_on_a_mesh(load, precompute):
    """Where the batch has `reference` sharded along the sequence, as the tokens are."""
    one = stack(precompute(load()).train)["reference"]
    mesh = zoo.make_mesh(data=2, context=2, tensor=2)
    data = precompute(load(), mesh=mesh, dtype="float32", cache=None)
    batch = stack(data.train)
    np.testing.assert_allclose(batch["reference"], one, atol=1e-5)
    placed = zoo.place_batch(batch, mesh)
    assert placed["reference"].sharding == placed["tokens"].sharding
    loss = zoo.value(zoo.cross_entropy, mesh)  # which does not read it
    without = {name: x for name, x in placed.items() if name != "reference"}
    model = zoo.place(MODEL, mesh)
    assert float(loss(model, placed)) == float(loss(model, without))


def test_another_model_or_other_data_are_another_store(load, precompute, tmp_path, capfd):
    first = stack(precompute(load()).train)["reference"]
    stores = list_stores(tmp_path)
    assert len(stores) == 2 and "the reference has read" in capfd.readouterr().out  # of training and validation
    again = stack(precompute(load(), batch_size=4).train)["reference"]
    assert list_stores(tmp_path) == stores and "the reference has read" not in capfd.readouterr().out
    np.testing.assert_array_equal(again, first)
    others = {
        "parameters": {"model": make_model(1)},
        "settings": {"model": make_model(rotary=Rotary(4, base=100.0))},
        "dtype": {"dtype": "bfloat16"},
        "rows": {"data": load(seq_len=48)},
        "texts": {"data": load(make_pairs(sign="-"))},
    }
    for number, (name, options) in enumerate(others.items(), start=2):
        other = stack(precompute(**{"data": load()} | options).train)["reference"]
        assert len(list_stores(tmp_path)) == 2 * number, name
        assert other.shape != first.shape or np.abs(other - first).max() > 1e-4, name


def test_rows_of_another_plan_are_another_store(load, precompute, tmp_path):
    """Of equal digests, as where a later version packs the same texts in another order."""
    data = load()
    reordered = dataclasses.replace(data.train, rows=[data.train.rows[n] for n in range(len(data.train.rows))][::-1])
    precompute(data)
    batch = stack(precompute(dataclasses.replace(data, train=reordered)).train)
    assert len(list_stores(tmp_path)) == 3  # the validation rows are the same
    np.testing.assert_allclose(batch["reference"], eqx.filter_jit(zoo.log_probs)(MODEL, batch), atol=1e-5)


def test_an_interrupted_pass_leaves_nothing_to_train_on(load, precompute, tmp_path, monkeypatch):
    data = load()
    placed = []

    def interrupt(batch, mesh):
        if placed:  # the second of two batches
            raise KeyboardInterrupt
        placed.append(batch)
        return zoo.place_batch(batch, mesh)

    with monkeypatch.context() as patch:
        patch.setattr(stored_arrays, "place_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            precompute(data)
    assert not list((tmp_path / "cache").rglob("*.npy"))
    assert len(precompute(data).train.rows) == len(data.train.rows)


def test_a_damaged_store_is_computed_again(load, precompute, tmp_path):
    first = stack(precompute(load()).train)["reference"]
    for path in (tmp_path / "cache").glob("*/reference.npy"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    np.testing.assert_array_equal(stack(precompute(load()).train)["reference"], first)


def test_mixtures_have_a_reference_of_each_part(load, precompute):
    parts = {"plus": load(), "minus": load(make_pairs(sign="-"))}
    data = precompute(train.mix(parts, {"plus": 0.5, "minus": 0.5}))
    batches = data.train.batches(8, seed=0)
    batch = next(batches)
    batches.close()
    np.testing.assert_allclose(batch["reference"], eqx.filter_jit(zoo.log_probs)(MODEL, batch), atol=1e-5)
    batch = stack(data.validation)
    np.testing.assert_allclose(batch["reference"], eqx.filter_jit(zoo.log_probs)(MODEL, batch), atol=1e-5)


def test_a_reference_has_no_adapters(load, precompute):
    model = zoo.adapters.lora(MODEL, rank=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"take zoo\.adapters\.remove\(model\) inside the loss"):
        precompute(load(), model)


def test_splits_without_rows_stay_without(load, precompute):
    data = precompute(load(validation=0.0))
    assert not len(data.validation.rows) and "reference" in data.train.rows[0]


IN_TWO_PROCESSES = """
import sys
from pathlib import Path
from zoo._processes import initialize
initialize()
import jax, numpy as np, zoo
from tests.train.test_reference import ByteTokenizer, MODEL, make_pairs, stack, train
folder, mesh = Path(sys.argv[1]), zoo.make_mesh()
data = train.load_records(make_pairs(), tokenizer=ByteTokenizer(), seq_len=64, cache=folder / "records", processes=1)
for _ in range(2):
    found = train.precompute_reference(zoo.place(MODEL, mesh), data, mesh, batch_size=8, cache=folder / "cache")
np.save(folder / f"{jax.process_index()}.npy", stack(found.train)["reference"])
"""


@pytest.mark.ci
def test_two_processes_compute_one_store(load, precompute, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder = tmp_path / "two"
    started = []
    for index in range(2):
        place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
        command = [sys.executable, "-c", IN_TWO_PROCESSES, str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=make_environment(1) | place, **pipes))
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    expected = stack(precompute(load()).train)["reference"]
    for index in range(2):
        np.testing.assert_allclose(np.load(folder / f"{index}.npy"), expected, atol=1e-5)
    assert len(list((folder / "cache").iterdir())) == 2
    assert outputs[0].count("the reference has read 0 of") == 2 and "the reference has read" not in outputs[1]
