"""A stored teacher: with all tokens its loss is the loss of the teacher itself, and another run reads it again."""

import equinox as eqx
import jax
import numpy as np

import zoo
from zoo import train
from zoo.text.tokenizers import ByteTokenizer
from zoo.train import objectives


def make(key, layers):
    return zoo.models.Transformer(vocab=256, embed=8, layers=layers, heads=2, mlp=8, key=key)


def test_a_stored_teacher_teaches_as_the_teacher_does(tmp_path, monkeypatch):
    mesh = zoo.make_mesh(fsdp=2, tensor=2)
    teacher, student = (zoo.init(lambda key, n=n: make(key, n), jax.random.key(n), mesh) for n in (2, 1))
    records = [{"text": f"{number} is a number"} for number in range(64)]
    data = train.load_records(records, tokenizer=ByteTokenizer(), seq_len=24, cache=tmp_path / "data", processes=1)

    def stored_loss(student, batch, top_k):
        losses = objectives.distillation_top_k(student, batch, top_k.ids, top_k.log_probs)
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    def whole_loss(student, batch, teacher):
        losses = objectives.distillation(student, teacher, batch)
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    measure = eqx.filter_jit(zoo.value(stored_loss, mesh))
    losses = {}
    for name, k in {"all": 256, "again": 256, "few": 8}.items():
        with monkeypatch.context() as patch:
            if name == "again":
                patch.setattr("zoo.train.stored_arrays._write", None)
            stored = train.store_top_k(teacher, data, k, mesh, batch_size=8, cache=tmp_path / "teachers")
        batch, top_k = train.split_top_k(next(stored.train.batches(8, mesh=mesh)))
        batch, top_k = zoo.place_batch((batch, top_k), mesh)
        losses[name] = float(measure(student, batch, top_k))
    whole = float(eqx.filter_jit(zoo.value(whole_loss, mesh))(student, batch, teacher))
    np.testing.assert_allclose(losses["all"], whole, rtol=5e-3)
    assert losses["again"] == losses["all"] and 0 <= losses["few"] < whole
