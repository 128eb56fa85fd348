"""ModernBERT from scratch: its parameters, the family that reads it, and natural mistakes."""

import json
from functools import partial

import equinox as eqx
import jax
import pytest

import zoo
from zoo.weights.save import resolve_origin

SIZES = {"vocab": 40, "embed": 16, "layers": 4, "heads": 4, "mlp": 24}
make = partial(zoo.models.ModernBERT, **SIZES, key=jax.random.key(0))


def test_modernbert_has_its_familys_parameters():
    model = eqx.filter_eval_shape(make)
    layers, norms = 4 * (4 * 16 * 16 + 3 * 16 * 24), 16 * (4 + 3 + 3)  # the first layer has one norm
    assert zoo.count(model) == 40 * 16 + layers + norms + 16 * 16 + 40
    assert model.stack.count_layers() == 4


@pytest.mark.parametrize(
    ("changes", "kinds", "local"),
    [({}, ["full"] * 4, 0), ({"windows": (None, 3, 3), "tied": False}, ["full", "sliding", "sliding", "full"], 4)],
)
def test_modernbert_is_saved_as_modernbert(changes, kinds, local):
    """Origins are verified: the config's model is built, and compared."""
    origin = resolve_origin(eqx.filter_eval_shape(lambda: make(**changes)), None, {})
    config = json.loads(origin.config)
    assert origin.family.name == config["model_type"] == "modernbert"
    assert config["layer_types"] == [f"{kind}_attention" for kind in kinds] and config["local_attention"] == local


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"layers": 0}, "has at least 1 layer, not 0"), ({"heads": 3}, "embed=16 does not divide evenly over 3 heads")],
)
def test_modernbert_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        eqx.filter_eval_shape(lambda: make(**changes))
