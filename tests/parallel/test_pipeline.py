"""A stack on a mesh with `pipe` pipelines itself, under any loss, and equals one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.parallel.any_mesh import make_any_mesh
from tests.parallel.pipeline_problem import (
    assert_equal_to_one_device,
    loss_fn,
    make_batch,
    make_mixtures,
    make_model,
    make_transformer,
)
from zoo import Layout
from zoo.models.layer_inputs import EmbeddingInputs
from zoo.parallel.pipeline import Pipelining, active_pipelining, find_microbatch, forward_step, run_stages
from zoo.parallel.schedule import Schedule


def contrastive_loss(model, batch, key=None):
    """Calls the model twice."""
    (total, count), loads = loss_fn(model, batch)
    other, _ = zoo.cross_entropy(model, batch | {"targets": batch["tokens"]})
    return (total + 0.3 * jax.nn.softplus(other - total), count), loads


GPIPES = [
    pytest.param(make_transformer, Schedule("gpipe"), 2, id="in rounds"),
    pytest.param(make_mixtures, Schedule("gpipe"), 2, id="experts", marks=pytest.mark.slow),
    pytest.param(make_mixtures, Schedule("gpipe", "residuals"), 1, id="residuals", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("make, schedule, rounds", GPIPES)
def test_gpipe_of_any_loss_equals_one_device(make, schedule, rounds):
    """Of mixtures of experts also with a layer before the stages that has a router."""
    mesh = make_any_mesh(Layout(rounds=rounds), pipe=2, expert=2, tensor=2)
    options = {"microbatches": 4, "schedule": schedule}
    assert_equal_to_one_device(make, mesh, loss=contrastive_loss, **options)


@pytest.mark.slow
def test_scores_and_validation_loss_equal_one_device():
    """No number of micro-batches is given, and the rows of a device are prime."""
    mesh, model = make_any_mesh(pipe=2, tensor=2), make_model(make_transformer)
    batch = jax.tree.map(lambda x: x[:7], make_batch(make_transformer))
    score = zoo.spmd(lambda model, tokens: zoo.score(model, tokens), mesh, out="batch seq")
    scores = score(zoo.place(model, mesh), batch["tokens"])
    np.testing.assert_allclose(scores, zoo.score(model, batch["tokens"]), rtol=2e-6)
    loss = zoo.value(zoo.cross_entropy, mesh, microbatches=7)(zoo.place(model, mesh), batch)
    assert loss == pytest.approx(float(jnp.divide(*zoo.cross_entropy(model, batch))), rel=1e-5)


@pytest.mark.parametrize("rounds", [1, 2])
def test_each_stage_reads_the_rows_of_its_micro_batch(rounds):
    """A stage doubles the stream and adds its rows."""
    mesh = make_any_mesh(Layout(rounds=rounds), pipe=2)
    stream, rows = np.arange(24.0).reshape(2, 4, 3)

    def run(stream, rows):
        with active_pipelining(Pipelining(microbatches=4)):
            return run_stages(lambda x, rows, _: 2 * x + rows, stream, rows)

    expected = stream
    for _ in range(2 * rounds):
        expected = 2 * expected + rows
    np.testing.assert_array_equal(zoo.spmd(run, mesh, out="batch seq")(stream, rows), expected)


def test_microbatches_go_around_in_groups():
    for stages, rounds in ((4, 1), (4, 3), (1, 1)):
        steps = {forward_step(i, v, stages, rounds): (i, v) for i in range(3 * stages) for v in range(rounds)}
        assert sorted(steps) == list(range(3 * stages * rounds))
        assert all(find_microbatch(step, stages, rounds) == place for step, place in steps.items())


def test_what_a_pipeline_cannot_do_raises_by_name():
    mesh, model = make_any_mesh(pipe=2), make_model(make_transformer)
    tokens = make_batch(make_transformer)["tokens"]

    def run(fn, layout=None):
        mesh = make_any_mesh(layout, pipe=2)
        return zoo.spmd(fn, mesh, out="batch seq embed")(model, tokens)

    with pytest.raises(NotImplementedError, match="generate does not shard layers, .* pipe=2"):
        zoo.generate(zoo.place(model, mesh), tokens[:, :4], max_new_tokens=2, mesh=mesh)
    with pytest.raises(NotImplementedError, match="hidden states of each, .* place the model on a mesh with pipe=1"):
        run(lambda model, tokens: zoo.hidden_states(model, tokens)[0])
    with pytest.raises(NotImplementedError, match="routing='tokens' .* do not travel through a pipeline"):
        run(lambda model, tokens: zoo.configure(model, routing="tokens")(tokens))
    with pytest.raises(
        NotImplementedError, match="EmbeddedHidden has more than the residual stream.* use a mesh with pipe=1"
    ):
        run(lambda model, tokens: dataclasses.replace(model, layer_inputs=EmbeddingInputs())(tokens))
    with pytest.raises(ValueError, match=r"rounds=2, and the layers .* dealt out in 1: .* zoo.place\(model, mesh\)"):
        run(lambda model, tokens: model(tokens), Layout(rounds=2))
    model = zoo.parallel.rounds.split_rounds(model, 2)
    with pytest.raises(ValueError, match="rounds=4, and the layers of this model are dealt out in 2"):
        run(lambda model, tokens: model(tokens), Layout(rounds=4))
