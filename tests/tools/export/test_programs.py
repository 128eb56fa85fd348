"""An export for a mesh computes, bit for bit, what the model computes there, and `serve.py` runs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import zoo
from tests.processes import ROOT

from .serve_cases import import_serve


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("axes", "platforms"),
    [({"data": 2, "fsdp": 2, "tensor": 2}, None), ({"expert": 2, "tensor": 2, "fsdp": 2}, ("cpu", "cuda", "tpu"))],
)
def test_programs_of_a_mesh_equal_the_model(axes, platforms, model, tmp_path):
    mesh = zoo.make_mesh(**axes)
    placed = zoo.place(model, mesh)
    zoo.export(placed, tmp_path / "out", mesh=mesh, batch=4, seq_len=4, length=12, platforms=platforms)
    serve = import_serve(tmp_path / "out")
    about, programs, weights = serve.load_export()
    assert weights["layers.0.attention.query.weight"].sharding.spec == PartitionSpec("tensor", "fsdp")
    tokens = np.random.default_rng(0).integers(0, 32, (4, 6)).astype(np.int32)
    expected = zoo.spmd(lambda model, tokens: model(tokens), mesh, out="batch seq vocab")(
        zoo.configure(placed, loop="plain"), jnp.asarray(tokens[:, :4])
    )
    np.testing.assert_array_equal(programs["forward"](weights, tokens[:, :4]), expected)
    new = np.stack(list(serve.generate_tokens(about, programs, weights, tokens.tolist(), 3)), 1)
    np.testing.assert_array_equal(
        new, zoo.generate(placed, jnp.asarray(tokens), max_new_tokens=3, length=12, mesh=mesh)
    )


def test_mesh_refuses_a_symbolic_batch_and_other_axes(model, tmp_path):
    mesh = zoo.make_mesh(data=4, tensor=2)
    with pytest.raises(ValueError, match=r"batch=None is a symbolic batch.*a multiple of 4 on data 4 x tensor 2"):
        zoo.export(model, tmp_path, mesh=mesh)
    with pytest.raises(ValueError, match="batch=6 does not divide evenly over data 4 x tensor 2: use a multiple of 4"):
        zoo.export(model, tmp_path, mesh=mesh, batch=6)
    for axis in ("context", "pipe"):
        with pytest.raises(NotImplementedError, match=f"this mesh has {axis} above 1: use data, fsdp"):
            zoo.export(model, tmp_path, mesh=zoo.make_mesh(data=4, **{axis: 2}), batch=4)
    assert not any(tmp_path.iterdir())


@pytest.mark.ci
def test_encoder_on_a_mesh_of_some_of_the_devices(tmp_path):
    mesh = zoo.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    model = zoo.load(ROOT / "tests/fixtures/encoders/bert_masked", dtype="float32")
    zoo.export(model, tmp_path, mesh=mesh, batch=2, seq_len=4)
    about, programs, weights = import_serve(tmp_path).load_export()
    assert about["devices"] == 4
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    mask = np.array([[True, True, True, True], [True, True, False, False]])
    logits = np.asarray(programs["forward"](weights, tokens, mask, np.zeros_like(tokens)))
    expected = np.asarray(model(jnp.asarray(tokens), mask=jnp.asarray(mask)))
    np.testing.assert_allclose(logits[mask], expected[mask], atol=2e-6 * np.abs(expected).max())
