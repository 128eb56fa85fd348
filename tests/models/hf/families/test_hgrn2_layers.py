"""Lower bounds of HGRN2: the model keeps a mixer's promises, bounds grow with depth, and gradients are finite."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import TokenInfo
from zoo.models.decoder import Hidden
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.tools.testing import check_mixer

SMALL = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 3, "expand_ratio": 8, "intermediate_size": 12}
ATTENTION = {"attn": {"layers": [1], "num_heads": 2}}
BUILD, BUILD_HYBRID = (
    partial(FAMILIES["hgrn2"].build, read_config(FAMILIES["hgrn2"], SMALL | more)) for more in ({}, ATTENTION)
)


@pytest.mark.slow
@pytest.mark.parametrize("build", [BUILD, BUILD_HYBRID], ids=["recurrent", "hybrid"])
def test_the_model_keeps_the_promises_of_a_mixer(build):
    """Also on meshes, and with softmax attention in a layer between."""
    meshes = [zoo.make_mesh(data=2, fsdp=2, tensor=2), zoo.make_mesh(data=2, context=2, tensor=2)]
    assert check_mixer(build, meshes=meshes).passed


def test_layers_have_bounds_of_their_own():
    """A scan and a plain loop read the same; the first layer has none, and no gradient is NaN."""
    model = BUILD(key=jax.random.key(0))
    weight = jax.random.normal(jax.random.key(1), (3, 16))
    model = eqx.tree_at(lambda model: model.layer_inputs.weight, model, weight)
    tokens = jnp.arange(6).reshape(1, 6)
    bounds = model.embed(tokens, TokenInfo()).bounds
    shares = np.exp(weight) / np.exp(weight).sum(0)
    np.testing.assert_allclose(bounds, [0 * shares[0], shares[1], shares[1] + shares[2]], atol=1e-6)
    loss = eqx.filter_jit(eqx.filter_value_and_grad(lambda model: (model(tokens) ** 2).sum()))
    (plain, grads), (scanned, _) = (loss(zoo.configure(model, loop=loop)) for loop in ("plain", "scan"))
    np.testing.assert_allclose(plain, scanned, rtol=1e-5)
    gradient = grads.layer_inputs.weight
    assert jnp.isfinite(gradient).all() and (jnp.abs(gradient).max(1) > 0).all()


def test_a_layer_by_itself_names_what_it_lacks():
    block = next(iter(BUILD(key=jax.random.key(0)).stack.iter_blocks()))
    with pytest.raises(TypeError, match="Hidden has no lower bounds of the layers"):
        block(Hidden(jnp.zeros((1, 2, 16))), TokenInfo())
