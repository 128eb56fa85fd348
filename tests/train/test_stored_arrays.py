"""Arrays of rows that are computed once: next to the tokens, in the order of the rows, whole or not there."""

import gc
from functools import partial

import equinox as eqx
import jax
import numpy as np
import pytest

import zoo
from zoo import train
from zoo.text.tokenizers import ByteTokenizer
from zoo.train.stored_arrays import RowsWithArrays, UnidentifiedError, identify_model, store_arrays

TEXTS = [{"text": chr(97 + number % 26) * (number + 2)} for number in range(20)]


class Compute:
    """Shifts targets, and counts batches; fails at one of them."""

    def __init__(self, fails_at=None):
        self.calls = 0
        self.fails_at = fails_at

    def __call__(self, batch):
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("killed")
        return {"shifted": batch["targets"] + 1, "pairs": np.stack([batch["tokens"]] * 2, -1).astype("float16")}


@pytest.fixture
def data(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "seq_len": 16, "processes": 1, "cache": tmp_path / "records"}
    return train.load_records(TEXTS, **options)


def check_rows(split):
    for index in range(len(split.rows)):
        row = split.rows[index]
        np.testing.assert_array_equal(row["shifted"], row["targets"] + 1)
        assert row["pairs"].shape == (16, 2) and row["pairs"].dtype == np.float16
        np.testing.assert_array_equal(row["pairs"][:, 1], row["tokens"])


def test_arrays_are_computed_once(data, tmp_path):
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    options = {"name": "teacher", "batch_size": 4, "folder": tmp_path / "stored"}
    compute = Compute()
    num_batches = -(-len(data.train.rows) // 4)
    stored = store_arrays(data, compute, mesh, identity="a", **options)
    assert compute.calls == num_batches and len(stored.train.rows) == len(data.train.rows)
    check_rows(stored.train)
    assert "shifted" not in stored.validation.rows[0]
    check_rows(store_arrays(data, compute, mesh, identity="a", **options).train)
    assert compute.calls == num_batches
    store_arrays(data, compute, mesh, identity="b", **options)
    assert compute.calls == 2 * num_batches
    path = next((tmp_path / "stored").glob("*/shifted.npy"))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    for identity in ("a", "b"):
        check_rows(store_arrays(data, compute, mesh, identity=identity, **options).train)
    assert compute.calls == 3 * num_batches


def test_a_pass_that_ends_early_leaves_nothing(data, tmp_path):
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    options = {"name": "teacher", "identity": "a", "batch_size": 4, "folder": tmp_path / "stored"}
    with pytest.raises(RuntimeError, match="killed"):
        store_arrays(data, Compute(fails_at=2), mesh, **options)
    assert not list((tmp_path / "stored").iterdir())
    check_rows(store_arrays(data, Compute(), mesh, **options).train)


def test_parts_of_a_mixture_keep_their_arrays(data, tmp_path):
    mixed = train.mix({"a": data, "b": data}, {"a": 1.0, "b": 2.0})
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    options = {"name": "teacher", "identity": "a", "batch_size": 4, "folder": tmp_path / "stored"}
    stored = store_arrays(mixed, Compute(), mesh, **options)
    batch = next(stored.train.batches(8))
    np.testing.assert_array_equal(batch["shifted"], batch["targets"] + 1)


def test_arrays_of_other_rows_are_refused():
    with pytest.raises(ValueError, match="x has 2 rows for 3 rows"):
        RowsWithArrays([{}, {}, {}], {"x": np.zeros((2, 4))})


class Setting(zoo.parallel.Module):
    """A module from outside of the libraries."""


def test_models_are_told_apart_by_what_they_are():
    make = partial(zoo.models.Transformer, vocab=16, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(0))
    model = make()
    adapted = zoo.adapters.lora(model, rank=2, key=jax.random.key(0))
    ramp = np.arange(16, dtype=np.float32)
    others = [
        model,
        [model, jax.nn.relu],
        [model, partial(jax.nn.gelu, approximate=True)],
        [model, partial(jax.nn.gelu, approximate=False)],
        [model, ramp],
        [model, 2 * ramp],
        adapted,
        eqx.combine(jax.tree.map(lambda x: x + 1, zoo.trainable(adapted)), adapted),
    ]
    identities = [identify_model(other) for other in others]
    assert all(identities.count(identity) == 1 for identity in identities)
    assert identify_model([make(), jax.nn.relu]) == identities[1]
    for unknown in (lambda x: x, partial(lambda x: x), double, Setting(), "x".join):
        with pytest.raises(UnidentifiedError, match="which may change"):
            identify_model([model, unknown])


def double(x):
    return 2 * x


def test_arrays_of_an_unidentified_model_are_not_kept(data, tmp_path, caplog):
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    options = {"name": "teacher", "identity": "a", "batch_size": 4, "folder": tmp_path / "stored"}
    compute = Compute()
    for _ in range(2):
        stored = store_arrays(data, compute, mesh, model=[lambda x: x], **options)
        check_rows(stored.train)
    assert compute.calls == 2 * -(-len(data.train.rows) // 4)
    assert "<lambda> of tests.train.test_stored_arrays, which may change: the teacher reads all" in caplog.text
    del stored
    gc.collect()
    assert not list((tmp_path / "stored").iterdir())
