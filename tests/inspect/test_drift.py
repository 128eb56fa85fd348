"""Rounding errors by layer: against float64, for a planted bad layer, and the same on a mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import zoo
from zoo.inspect import drift
from zoo.models.decoder import AbstractBlock, UnrolledStack
from zoo.models.stack import swap_stack
from zoo.parallel import SEQUENCE, named_by_class

KEY = jax.random.key(0)


@eqx.filter_jit
def make(layers=3):
    return zoo.models.Transformer(vocab=32, embed=32, layers=layers, heads=2, mlp=32, key=KEY)


@eqx.filter_jit
def states_and_loss(model, batch):
    return zoo.hidden_states(model, batch["tokens"]), zoo.cross_entropy(model, batch)


def make_batch():
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class CoarseBlock(AbstractBlock):
    """A block whose output has four significant bits, in place of the eight of bfloat16."""

    block: AbstractBlock = named_by_class()

    def init_state(self, batch, length, dtype=jnp.float32):
        return self.block.init_state(batch, length, dtype)

    def __call__(self, hidden, info, state=None):
        hidden, state = self.block(hidden, info, state)
        x = hidden.x.astype(jnp.float32)
        coarse = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
        return eqx.tree_at(lambda h: h.x, hidden, coarse.astype(hidden.x.dtype)), state


@pytest.mark.ci
def test_drift_equals_that_of_numpy():
    """The embedding's rounding in float64, the losses, and the accumulated output from hidden states."""
    model, batch = make(), make_batch()
    report = drift(model, batch)
    states, loss = jax.device_get(states_and_loss(model, batch))
    low, low_loss = jax.device_get(states_and_loss(zoo.cast(model, "bfloat16"), batch))
    error = lambda x, y: np.sqrt(np.mean((np.float64(x) - np.float64(y)) ** 2) / np.mean(np.float64(y) ** 2)) * 2**8
    rounded = np.asarray(states[0]).astype(ml_dtypes.bfloat16)
    assert report.layers[0].output == pytest.approx(error(rounded, states[0]), rel=1e-3)
    assert report.layers[0].output == report.layers[0].local_output
    for number in (1, 2):
        assert report.layers[number].output == pytest.approx(error(low[number], states[number]), rel=0.1)
    assert report.layers[-1].output == pytest.approx(error(low[-1], states[-1]), rel=0.1)
    for (total, count), found in ((loss, report.loss), (low_loss, report.low_loss)):
        assert found == pytest.approx(float(total / count), rel=1e-3)
    assert [layer.name for layer in report.layers] == ["embedding", "layers.0", "layers.1", "layers.2", "norm"]
    assert "units of the last place" in str(report) and "layers.2" in str(report)
    assert [len(values) for values in report.curves().values()] == [5, 5, 5, 4]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_planted_bad_layer_is_the_worst_one(sizes):
    model, mesh = make(), zoo.make_mesh(**sizes, devices=jax.devices()[: 8 if sizes else 1])
    blocks = list(zoo.cast(model, "bfloat16").stack.iter_blocks())
    blocks[1] = CoarseBlock(blocks[1])
    bad = swap_stack(zoo.cast(model, "bfloat16"), lambda stack: UnrolledStack(tuple(blocks)))
    report = drift(model, make_batch(), bad, mesh=mesh)
    assert report.worst_layer == "layers.1"
    errors = {layer.name: layer for layer in report.layers}
    assert errors["layers.1"].local_output > 5 * errors["layers.2"].local_output
    assert errors["layers.2"].output > 3 * errors["layers.2"].local_output  # it arrives, and is not made, in layer 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"fsdp": 2, "context": 2, "tensor": 2, "layout": SEQUENCE}, marks=pytest.mark.slow),
    ],
)
def test_drift_on_a_mesh_is_that_of_one_device(options):
    serial = drift(make(), make_batch())
    parallel = drift(make(), make_batch(), mesh=zoo.make_mesh(**options, devices=jax.devices()[:8]))
    for name, values in serial.curves().items():
        np.testing.assert_allclose(parallel.curves()[name], values, rtol=0.3, err_msg=name)  # sums round elsewhere
    assert parallel.loss == pytest.approx(serial.loss, rel=1e-5)


def test_edits_are_refused():
    model = make()
    edited = zoo.patch(model, {"norm": jnp.abs})
    for models in ((edited, "bfloat16"), (model, edited)):
        with pytest.raises(ValueError, match=r"drift takes .* an edit of norm .* pass zoo.unpatch\(model\)"):
            drift(models[0], make_batch(), models[1])


def test_precision_that_is_not_lower_raises():
    with pytest.raises(ValueError, match="bfloat16 or float16, or a model, not float32"):
        drift(make(), make_batch(), "float32")
