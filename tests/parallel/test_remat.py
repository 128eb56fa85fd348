"""Rematerialization by name: known names, no offload on CPUs, host memory where there is some."""

import re

import equinox as eqx
import jax
import pytest

import zoo
from tests.aot import compile_for, imagine
from zoo.parallel import SaveNames
from zoo.parallel.remat import RESIDUAL_NAMES


def test_unknown_and_repeated_names_raise():
    with pytest.raises(ValueError, match="no activation is named 'scores': take some of query, key, .* ffn_output"):
        SaveNames(("query", "scores"))
    with pytest.raises(ValueError, match="on the device or on the host, once"):
        SaveNames(("query",), offload=("query",))


def test_offload_is_refused_where_the_host_computes():
    model = zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=1, mlp=8, key=jax.random.key(0))
    model = zoo.configure(model, remat=SaveNames(("attention",), offload=("mlp_hidden",)))
    tokens = jax.numpy.zeros((1, 4), int)
    gradient = jax.grad(lambda weight: eqx.tree_at(lambda m: m.norm.weight, model, weight)(tokens).sum())
    with pytest.raises(NotImplementedError, match="mlp_hidden: a CPU computes in the memory of the host"):
        gradient(model.norm.weight)


def test_layers_tag_all_names():
    """In the jaxpr of a Transformer, once per layer."""
    model = zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=1, mlp=8, key=jax.random.key(0))
    text = str(eqx.filter_make_jaxpr(model)(jax.numpy.zeros((1, 4), int))[0])
    assert set(re.findall(r"name\[name=(\w+)\]", text)) == set(RESIDUAL_NAMES)


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:4"])
def test_offloaded_activations_lie_in_host_memory(topology):
    mesh = zoo.make_mesh(data=-1, fsdp=2, devices=imagine(topology))
    batch = {name: jax.ShapeDtypeStruct((16, 512), "int32") for name in ("tokens", "targets")}
    peaks = []
    for remat in (SaveNames(("attention", "mlp_hidden")), SaveNames(("attention",), offload=("mlp_hidden",))):
        make = lambda key: zoo.models.Transformer(
            vocab=512, embed=256, layers=4, heads=4, mlp=1024, loop="scan", key=key
        )
        model = zoo.place(zoo.configure(eqx.filter_eval_shape(make, jax.random.key(0)), remat=remat), mesh)
        loss = lambda model, batch: zoo.cross_entropy(zoo.cast(model, "bfloat16"), batch)
        step = lambda model, batch, loss=loss: zoo.value_and_grad(loss, mesh)(model, batch)
        program = compile_for(topology, eqx.filter_jit(step), model, zoo.place_batch(batch, mesh))
        peaks.append(program.memory.peak)
        assert ("S(5)" in program.text) == bool(remat.offload)  # XLA's name of the host's memory
    saved = 4 * 16 * 512 * 1024 * 2 // 4  # layers, tokens of a device, mlp, bytes
    assert peaks[0] - peaks[1] > 0.5 * saved
